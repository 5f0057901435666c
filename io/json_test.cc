#include "io/json.h"

#include <bit>
#include <cmath>
#include <limits>

#include "core/rng.h"
#include "io/testing.h"
#include "io/utf8.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::succeeds;
using Kind = JsonValue::Kind;

TEST(Json, KeepsOrderKindsAndNumbersAsWritten) {
  Result<JsonValue> r = parse_json(R"({"z":1,"a":[true,null,"t\u00e9x"],"m":{"n":-2.50e3},"big":123456789012345678901234})");
  ASSERT_TRUE(succeeds(r));
  const JsonValue& v = r.value();
  ASSERT_EQ(v.members.size(), 4u);
  EXPECT_EQ(v.members[0].name, "z");
  EXPECT_EQ(v.members[1].name, "a");
  EXPECT_EQ(v.members[0].value.text, "1");
  const JsonValue& a = v.members[1].value;
  ASSERT_EQ(a.items.size(), 3u);
  EXPECT_TRUE(a.items[0].is(Kind::boolean) && a.items[0].boolean);
  EXPECT_TRUE(a.items[1].is(Kind::null));
  EXPECT_EQ(a.items[2].text, "t\u00E9x");
  EXPECT_EQ(v.find("m")->find("n")->text, "-2.50e3");
  EXPECT_EQ(v.find("big")->text, "123456789012345678901234");
  EXPECT_EQ(v.find("none"), nullptr);
}

TEST(Json, IntegersAreTakenWholeOrNotAtAll) {
  const auto as_int = [](const char* text) {
    int64_t value = -77;
    return parse_json(text).value().as_int64(&value) ? value : -77;
  };
  EXPECT_EQ(as_int("12"), 12);
  EXPECT_EQ(as_int("-9223372036854775808"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(as_int("9223372036854775807"), std::numeric_limits<int64_t>::max());
  for (const char* text : {"9223372036854775808", "1.0", "1e2", "\"5\"", "null", "true"}) EXPECT_EQ(as_int(text), -77) << text;
}

TEST(Json, ErrorsSayWhere) {
  EXPECT_TRUE(fails_with(parse_json(""), "line 1, column 1: "));
  EXPECT_TRUE(fails_with(parse_json("{\"a\": tru}"), "line 1, column 10: "));
  EXPECT_TRUE(fails_with(parse_json("{\"a\": 1,\n \"b\" 2}"), "line 2, column 7: "));
  EXPECT_TRUE(fails_with(parse_json("{\"a\": 1} x"), "line 1, column 10: "));
  EXPECT_TRUE(fails_with(parse_json("[1, 2"), "line 1, column "));
  EXPECT_TRUE(fails_with(parse_json("[1e999]"), "number overflow"));
  EXPECT_TRUE(fails_with(parse_json("[NaN]"), "line 1, column 2: "));
  EXPECT_TRUE(fails_with(parse_json("\"\\ud800\""), "surrogate"));
  EXPECT_TRUE(fails_with(parse_json("\"\xff\""), "invalid string: ill-formed UTF-8"));
}

TEST(Json, ARepeatedKeyIsAnErrorAtAnyDepth) {
  EXPECT_TRUE(fails_with(parse_json(R"({"a":1,"b":2,"a":3})"), "the key \"a\" stands twice in one object"));
  EXPECT_TRUE(fails_with(parse_json(R"([{"x":{"k":1,"k":1}}])"), "the key \"k\" stands twice"));
  EXPECT_TRUE(succeeds(parse_json(R"({"a":{"a":1},"b":{"a":1}})")));
}

TEST(Json, NulAndByteOrderMarkAreNotJson) {
  EXPECT_TRUE(fails_with(parse_json(std::string_view("{}\0 trailing", 12)), "line 1, column 3: a NUL byte"));
  EXPECT_TRUE(fails_with(parse_json("\xEF\xBB\xBF{}"), "a byte order mark"));
}

TEST(Json, DepthIsBounded) {
  EXPECT_TRUE(succeeds(parse_json(std::string(64, '[') + std::string(64, ']'))));
  EXPECT_TRUE(fails_with(parse_json(std::string(100000, '[')), "column 65: more than 64 levels"));
}

TEST(Json, LongTokensDoNotFloodTheMessage) {
  Result<JsonValue> r = parse_json("{\"a\": \"" + std::string(1 << 20, 'x'));
  ASSERT_FALSE(r.is_ok());
  EXPECT_LT(r.message().size(), 300u);
}

TEST(Json, CanonicalDecimals) {
  const struct {
    const char *in, *out;
  } cases[] = {{"34", "34"},     {"34.0", "34"},   {"1e3", "1000"},     {"1E+3", "1000"},  {"0.50", "0.5"},  {"-0", "0"},
               {"-0.0", "0"},    {"0e5", "0"},     {"12.5e1", "125"},   {"125e-1", "12.5"}, {"1e-3", "0.001"}, {"-7.10", "-7.1"},
               {"100", "100"},   {"1e0", "1"},     {"0.1e1", "1"},      {"-1.5e-2", "-0.015"},
               {"123456789012345678901234.0", "123456789012345678901234"}};
  for (const auto& c : cases) {
    Result<std::string> r = canonical_decimal(c.in);
    ASSERT_TRUE(succeeds(r));
    EXPECT_EQ(r.value(), c.out) << c.in;
  }
  EXPECT_TRUE(fails_with(canonical_decimal("1e500"), "the number \"1e500\" is out of range"));
  EXPECT_TRUE(fails_with(canonical_decimal("1e-500"), "out of range"));
  EXPECT_TRUE(fails_with(canonical_decimal("1e99999999999999999999"), "out of range"));
}

TEST(JsonLine, WritesEveryKindInOrder) {
  JsonLine inner;
  inner.add("k", "v");
  const std::vector<float> floats = {0.5f, std::nanf(""), 1.0f};
  const std::vector<int32_t> ints = {-1, 2};
  const std::vector<std::string> strings = {"a", "b\"c"};
  const std::string s = JsonLine()
                            .add("s", "x\ty\n\"\\\x01")
                            .add("b", true)
                            .add("i", -5)
                            .add("u", std::numeric_limits<uint64_t>::max())
                            .add("size", size_t{7})
                            .add("f", 0.1f)
                            .add("d", 0.1)
                            .add("fs", floats)
                            .add("is", ints)
                            .add("ss", std::span<const std::string>(strings))
                            .add("none", std::span<const int64_t>())
                            .add("o", inner)
                            .str();
  EXPECT_EQ(s,
            "{\"s\":\"x\\ty\\n\\\"\\\\\\u0001\",\"b\":true,\"i\":-5,\"u\":18446744073709551615,\"size\":7,\"f\":0.1,\"d\":0.1,"
            "\"fs\":[0.5,\"nan\",1],\"is\":[-1,2],\"ss\":[\"a\",\"b\\\"c\"],\"none\":[],\"o\":{\"k\":\"v\"}}");
  EXPECT_TRUE(succeeds(parse_json(s)));
  EXPECT_EQ(JsonLine().str(), "{}");
}

TEST(JsonLine, NonFiniteFloatsAreNamed) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(JsonLine().add("a", inf).add("b", -inf).add("c", std::nan("")).str(), R"({"a":"inf","b":"-inf","c":"nan"})");
}

TEST(JsonLine, FloatsReadBackExactly) {
  Philox rng(7, RngPurpose::test);
  const auto check_f = [](float x) {
    const std::string text = parse_json(JsonLine().add("x", x).str()).value().find("x")->text;
    EXPECT_EQ(std::bit_cast<uint32_t>(std::strtof(text.c_str(), nullptr)), std::bit_cast<uint32_t>(x)) << text;
  };
  const auto check_d = [](double x) {
    const std::string text = parse_json(JsonLine().add("x", x).str()).value().find("x")->text;
    EXPECT_EQ(std::bit_cast<uint64_t>(std::strtod(text.c_str(), nullptr)), std::bit_cast<uint64_t>(x)) << text;
  };
  for (float x : {0.0f, -0.0f, 1e-45f, 3.4028235e38f, 16777216.0f, 1e10f, 0.3f}) check_f(x);
  for (double x : {0.0, -0.0, 5e-324, 1.7976931348623157e308, 9007199254740993.0, 1e22, 0.1}) check_d(x);
  for (int i = 0; i < 20000; ++i) {
    const float f = std::bit_cast<float>(rng.next());
    const double d = std::bit_cast<double>(uint64_t{rng.next()} << 32 | rng.next());
    if (std::isfinite(f)) check_f(f);
    if (std::isfinite(d)) check_d(d);
  }
}

TEST(JsonLine, AnyBytesGiveAReadableLine) {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  const std::string line = JsonLine().add(all, all).str();
  EXPECT_EQ(line.find('\n'), std::string::npos);
  Result<JsonValue> r = parse_json(line);
  ASSERT_TRUE(succeeds(r));
  EXPECT_EQ(r.value().members[0].value.text, replace_invalid_utf8(all));
}

TEST(Json, WritesTreesCompactOrAsPythonDoes) {
  const Result<JsonValue> r = parse_json(R"( {"b": [1, 2.50, -0.0, 1e2], "a": {"é\b\f\u0001": null, "t": [true, false]}, "e": {}, "n": []} )");
  ASSERT_TRUE(succeeds(r));
  std::string compact, python;
  append_json(&compact, r.value());
  append_json(&python, r.value(), JsonStyle::python);
  EXPECT_EQ(compact, R"({"b":[1,2.50,-0.0,1e2],"a":{"é\b\f\u0001":null,"t":[true,false]},"e":{},"n":[]})");
  EXPECT_EQ(python, R"({"b": [1, 2.5, -0.0, 100.0], "a": {"é\b\f\u0001": null, "t": [true, false]}, "e": {}, "n": []})");
}

TEST(Json, FloatsAsPythonWritesThem) {
  // Right side: json.dumps(json.loads(left)) of Python 3.11.
  for (const auto& [text, python] : {std::pair("0.1", "0.1"), {"1e5", "100000.0"}, {"1e15", "1000000000000000.0"}, {"1e16", "1e+16"},
                                     {"0.0001", "0.0001"}, {"0.00001", "1e-05"}, {"1.5e300", "1.5e+300"}, {"5e-324", "5e-324"},
                                     {"123456789012345678.0", "1.2345678901234568e+17"}, {"-12.340", "-12.34"}, {"0.0", "0.0"},
                                     {"1234567890123456.7", "1234567890123456.8"}, {"-0.00012e0", "-0.00012"}, {"1E2", "100.0"},
                                     {"123456789012345678901234567890", "123456789012345678901234567890"}}) {
    std::string out;
    append_json(&out, parse_json(text).value(), JsonStyle::python);
    EXPECT_EQ(out, python) << text;
  }
}

}  // namespace
}  // namespace lockstep
