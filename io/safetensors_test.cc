#include "io/safetensors.h"

#include <cstring>

#include "core/rng.h"
#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;
using testing::TemporaryDirectory;

std::string with_length(uint64_t length, std::string_view rest) {
  std::string s(8, '\0');
  std::memcpy(s.data(), &length, 8);
  return s + std::string(rest);
}

// A file from its header and as many bytes of data as are asked for.
std::string file_of(std::string_view header, size_t data_bytes) {
  std::string data(data_bytes, '\0');
  for (size_t i = 0; i < data_bytes; ++i) data[i] = static_cast<char>(i + 1);
  return with_length(header.size(), std::string(header) + data);
}

class SafetensorsTest : public ::testing::Test {
 protected:
  // Opens a file of these bytes and expects a refusal that names the file and says `part`.
  void refuses_bytes(std::string_view bytes, const std::string& part) {
    put(path_, bytes);
    const Result<SafetensorsFile> f = SafetensorsFile::open(path_);
    EXPECT_TRUE(fails_with(f, part));
    EXPECT_TRUE(fails_with(f, path_ + ": "));
  }
  void refuses(std::string_view header, size_t data_bytes, const std::string& part) {
    refuses_bytes(file_of(header, data_bytes), part);
  }
  // One tensor "t" with these fields, over 8 bytes of data.
  void refuses_fields(const std::string& fields, const std::string& part) {
    refuses("{\"t\":{" + fields + "}}", 8, "tensor \"t\"" + part);
  }
  SafetensorsFile opens(std::string_view header, size_t data_bytes) {
    put(path_, file_of(header, data_bytes));
    Result<SafetensorsFile> f = SafetensorsFile::open(path_);
    CHECK(f.is_ok(), "{}", f.message());
    return f.take();
  }

  TemporaryDirectory d_;
  std::string path_ = d_.file("m.safetensors");
};

TEST_F(SafetensorsTest, ListsInTheOrderOfTheHeader) {
  const SafetensorsFile f = opens(
      R"({"__metadata__":{"format":"pt","step":"12"},"z":{"dtype":"F32","shape":[1,2],"data_offsets":[2,10]},)"
      R"("a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"e":{"dtype":"F64","shape":[0,3],"data_offsets":[10,10]}} )",
      10);
  ASSERT_EQ(f.tensors().size(), 3u);
  EXPECT_EQ(f.tensors()[0].name, "z");
  EXPECT_EQ(f.tensors()[0].dtype, "F32");
  EXPECT_EQ(f.tensors()[0].shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(f.tensors()[0].begin, 2u);
  EXPECT_EQ(f.tensors()[0].end, 10u);
  EXPECT_EQ(f.tensors()[1].name, "a");
  EXPECT_EQ(f.find("a"), &f.tensors()[1]);
  EXPECT_EQ(f.find("b"), nullptr);
  EXPECT_EQ(f.metadata().at("format"), "pt");
  EXPECT_EQ(f.metadata().at("step"), "12");
  EXPECT_EQ(f.bytes(f.tensors()[1])[0], 1);
  EXPECT_EQ(f.bytes(f.tensors()[0])[0], 3);
  EXPECT_TRUE(f.view("e").value().empty());
}

TEST_F(SafetensorsTest, ViewsReadTheMappedNumbers) {
  // Header of 64 bytes, so the data begins at 72.
  std::string header = R"({"t":{"dtype":"I32","shape":[2,1],"data_offsets":[0,8]}})";
  header.resize(64, ' ');
  const SafetensorsFile f = opens(header, 8);
  Result<ConstTensorView> v = f.view("t");
  ASSERT_TRUE(succeeds(v));
  EXPECT_EQ(v.value().dtype, DType::i32);
  EXPECT_EQ(v.value().shape, (Shape{2, 1}));
  EXPECT_EQ(v.value().ptr<int32_t>()[0], 0x04030201);
  EXPECT_EQ(v.value().ptr<int32_t>()[1], 0x08070605);
}

TEST_F(SafetensorsTest, UnalignedDataIsLegalButCopied) {
  std::string header = R"({"t":{"dtype":"I32","shape":[2],"data_offsets":[1,9]},)"
                       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.resize(128, ' ');
  const SafetensorsFile f = opens(header, 9);
  EXPECT_TRUE(fails_with(f.view("t"),
                         "tensor \"t\" stands at byte 137 of the file, a view of I32 needs a multiple of 4; copy it"));
  EXPECT_TRUE(succeeds(f.view("b")));
  int32_t out[2] = {};
  ASSERT_TRUE(succeeds(f.copy_to("t", TensorView(out, DType::i32, {2}))));
  EXPECT_EQ(out[0], 0x05040302);
  EXPECT_EQ(out[1], 0x09080706);
}

TEST_F(SafetensorsTest, CopyGoesIntoStridedRowsAndChecksTheTarget) {
  const SafetensorsFile f = opens(R"({"t":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]}})", 6);
  uint8_t out[10] = {};
  ASSERT_TRUE(succeeds(f.copy_to("t", TensorView(out, DType::u8, {2, 3}, 5))));
  EXPECT_EQ(std::string(reinterpret_cast<char*>(out), 10), std::string("\1\2\3\0\0\4\5\6\0\0", 10));
  EXPECT_TRUE(fails_with(f.copy_to("t", TensorView(out, DType::u8, {3, 2})), "tensor \"t\" is U8 [2, 3], U8 [3, 2] is wanted"));
  EXPECT_TRUE(fails_with(f.copy_to("t", TensorView(out, DType::bf16, {2, 3})), "is U8 [2, 3], BF16 [2, 3] is wanted"));
  EXPECT_TRUE(fails_with(f.copy_to("u", TensorView(out, DType::u8, {1})), path_ + ": there is no tensor \"u\""));
}

// A header may claim a thousand dimensions; what is said of them stays short.
TEST(SafetensorsEntry, LongShapesAreShownShort) {
  SafetensorsEntry e;
  e.shape = {2, 3};
  EXPECT_EQ(e.shape_str(), "[2, 3]");
  e.shape.assign(1000, 7);
  EXPECT_EQ(e.shape_str(), "[7, 7, 7, 7, 7, 7, 7, 7, ... 1000 dimensions]");
}

TEST_F(SafetensorsTest, ScalarsAndManyDimensions) {
  const SafetensorsFile f = opens(
      R"({"s":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"m":{"dtype":"U8","shape":[1,1,2,1,1],"data_offsets":[1,3]}})", 3);
  EXPECT_EQ(f.view("s").value().shape, (Shape{1}));
  EXPECT_TRUE(fails_with(f.view("m"), "tensor \"m\" has 5 dimensions [1, 1, 2, 1, 1], views have up to 4"));
  EXPECT_EQ(f.bytes(*f.find("m")).size(), 2u);
}

TEST_F(SafetensorsTest, DtypesWithoutViewsAreListed) {
  const SafetensorsFile f = opens(
      R"({"a":{"dtype":"U16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"F6_XYZ","shape":[3],"data_offsets":[4,6]},)"
      R"("c":{"dtype":"BOOL","shape":[1],"data_offsets":[6,7]},"d":{"dtype":"F16","shape":[1],"data_offsets":[7,9]}})",
      9);
  EXPECT_EQ(f.tensors()[1].dtype, "F6_XYZ");
  EXPECT_TRUE(fails_with(f.view("a"), "tensor \"a\" has dtype \"U16\", views are F64, F32, BF16, I64, I32, U8, F8_E4M3, F8_E5M2, "
                                         "F8_E8M0 or I8"));
  EXPECT_TRUE(fails_with(f.view("b"), "has dtype \"F6_XYZ\""));
  EXPECT_TRUE(fails_with(f.view("d"), "has dtype \"F16\""));
  EXPECT_EQ(f.bytes(*f.find("a"))[3], 4);
}

TEST_F(SafetensorsTest, HeaderLengths) {
  refuses_bytes("", "0 bytes, a safetensors file has at least 10");
  refuses_bytes("1234567", "7 bytes, a safetensors file has at least 10");
  refuses_bytes(with_length(3, "{}"), "the header's length is given as 3 bytes, but 2 follow");
  refuses_bytes(with_length(1, ""), "the header's length is given as 1 bytes, but 0 follow");
  refuses_bytes(with_length(uint64_t{1} << 63, "{}"),
                "the header's length is given as 9223372036854775808 bytes, over the limit");
  refuses_bytes(with_length(~uint64_t{0}, "{}"), "18446744073709551615 bytes, over the limit");
  refuses_bytes(with_length(0, ""), "the header begins with \"\"");
  EXPECT_TRUE(fails_with(SafetensorsFile::open(d_.file("none")), "cannot open " + d_.file("none")));
}

TEST_F(SafetensorsTest, EmptyFilesAreFine) {
  EXPECT_TRUE(opens("{}", 0).tensors().empty());
  EXPECT_TRUE(opens("{}      ", 0).tensors().empty());
}

TEST_F(SafetensorsTest, HeadersThatAreNotJson) {
  refuses("[]", 0, "the header begins with \"[\", \"{\" is wanted");
  refuses(" {}", 0, "the header begins with \" \"");
  refuses("{", 0, "the header is not valid JSON: line 1, column ");
  refuses("{} x", 0, "the header is not valid JSON: line 1, column 4");
  refuses(std::string_view("{}\0\0", 4), 0, "the header is not valid JSON: line 1, column 3: a NUL byte");
  refuses("{\"a\xff\":{}}", 0, "ill-formed UTF-8");
}

TEST_F(SafetensorsTest, RepeatedKeys) {
  refuses(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
          "the key \"t\" stands twice");
  refuses(R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "the key \"dtype\" stands twice");
  refuses(R"({"__metadata__":{"a":"1","a":"2"}})", 0, "the key \"a\" stands twice");
}

TEST_F(SafetensorsTest, Metadata) {
  refuses(R"({"__metadata__":[]})", 0, "__metadata__ is an array, an object of strings is wanted");
  refuses(R"({"__metadata__":{"a":1}})", 0, "__metadata__: \"a\" is a number, a string is wanted");
}

TEST_F(SafetensorsTest, MissingAndUnknownFields) {
  refuses(R"({"t":5})", 8, "tensor \"t\" is a number, an object with dtype, shape and data_offsets is wanted");
  refuses_fields(R"("shape":[8],"data_offsets":[0,8])", " has no \"dtype\"");
  refuses_fields(R"("dtype":"U8","data_offsets":[0,8])", " has no \"shape\"");
  refuses_fields(R"("dtype":"U8","shape":[8])", " has no \"data_offsets\"");
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":[0,8],"strides":[1])", ": \"strides\" is not a known field");
  refuses_fields(R"("dtype":7,"shape":[8],"data_offsets":[0,8])", ": \"dtype\" is a number, a string is wanted");
}

TEST_F(SafetensorsTest, Shapes) {
  refuses_fields(R"("dtype":"U8","shape":8,"data_offsets":[0,8])", ": \"shape\" is a number, a list of integers is wanted");
  refuses_fields(R"("dtype":"U8","shape":[-8],"data_offsets":[0,8])", ": shape[0] is -8, an integer from 0");
  refuses_fields(R"("dtype":"U8","shape":[1,8.0],"data_offsets":[0,8])", ": shape[1] is 8.0, an integer from 0");
  refuses_fields(R"("dtype":"U8","shape":["8"],"data_offsets":[0,8])", ": shape[0] is a string, an integer from 0");
  refuses_fields(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,8])", ": shape[0] is 9223372036854775808");
  refuses_fields(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,8])",
                 ": the size of U8 [4294967296, 4294967296] does not fit 64 bits");
  refuses_fields(R"("dtype":"F64","shape":[9223372036854775807],"data_offsets":[0,8])",
                 ": the size of F64 [9223372036854775807]");
  refuses_fields(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])",
                 ": F32 [3] takes 12 bytes, but data_offsets [0, 8] hold 8");
  refuses_fields(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", ": F32 [1] takes 4 bytes");
  refuses_fields(R"("dtype":"F32","shape":[0],"data_offsets":[0,8])", ": F32 [0] takes 0 bytes");
}

TEST_F(SafetensorsTest, Offsets) {
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":[0])", ": \"data_offsets\" has 1 numbers, [begin, end] is wanted");
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":{})", ": \"data_offsets\" is an object, a list of integers");
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":[0,8.5])", ": data_offsets[1] is 8.5, an integer");
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":[-1,7])", ": data_offsets[0] is -1, an integer");
  refuses_fields(R"("dtype":"U8","shape":[8],"data_offsets":[8,0])", ": data_offsets [8, 0] end before they begin");
  refuses_fields(R"("dtype":"U8","shape":[9],"data_offsets":[0,9])", ": data_offsets [0, 9] reach beyond the 8 bytes of data");
  refuses_fields(R"("dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,9223372036854775807])",
                 ": data_offsets [9223372036854775806, 9223372036854775807] reach beyond the 8 bytes");
}

TEST_F(SafetensorsTest, OverlapsGapsAndRests) {
  const std::string a = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  refuses("{" + a + R"(,"b":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})", 8,
          "tensor \"b\" begins at 3 and overlaps tensor \"a\", which ends at 4");
  refuses("{" + a + R"(,"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}})", 8,
          "tensor \"b\" begins at 5 and leaves a gap behind tensor \"a\", which ends at 4");
  refuses("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4,
          "tensor \"b\" begins at 0 and overlaps tensor \"a\"");
  refuses(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8, "leaves a gap behind the start of the data at 0");
  refuses("{" + a + "}", 8, "the tensors end at 4, but 8 bytes of data follow the header");
  refuses("{}", 3, "the tensors end at 0, but 3 bytes of data follow");
  // An empty tensor inside another one's bytes.
  refuses("{" + a + R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4,
          "tensor \"b\" begins at 2 and overlaps tensor \"a\"");
  // Unknown dtypes count too.
  refuses("{" + a + R"(,"b":{"dtype":"F4","shape":[4],"data_offsets":[3,5]}})", 5, "overlaps tensor \"a\"");
}

TEST_F(SafetensorsTest, EveryCutIsRefused) {
  std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string whole = file_of(header, 8);
  for (size_t n = 0; n < whole.size(); ++n) {
    put(path_, whole.substr(0, n));
    EXPECT_FALSE(SafetensorsFile::open(path_).is_ok()) << n;
  }
  put(path_, whole + "x");
  EXPECT_FALSE(SafetensorsFile::open(path_).is_ok());
}

TEST_F(SafetensorsTest, AnyFlippedByteIsRefusedOrHarmless) {
  const std::string whole = file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  for (size_t i = 0; i < whole.size() - 8; ++i)
    for (int flip = 1; flip < 256; ++flip) {
      std::string bytes = whole;
      bytes[i] = static_cast<char>(bytes[i] ^ flip);
      uint64_t length = 0;
      std::memcpy(&length, bytes.data(), 8);
      std::map<std::string, std::string> metadata;
      if (length > bytes.size() - 8) continue;
      auto r = SafetensorsFile::parse_header(std::string_view(bytes).substr(8, length), bytes.size() - 8 - length, &metadata);
      if (!r) continue;
      for (const SafetensorsEntry& e : r.value()) ASSERT_LE(e.end, bytes.size() - 8 - length);
    }
}

TEST_F(SafetensorsTest, WriterRoundTripsEveryDtype) {
  float f32[6];
  bf16 b16[4];
  double f64[1] = {2.5};
  int32_t i32[2] = {-1, 7};
  int64_t i64[1] = {int64_t{1} << 40};
  uint8_t u8[3] = {1, 2, 255};
  Philox rng(3, RngPurpose::test);
  for (float& x : f32) x = rng.normal();
  for (bf16& x : b16) x = to_bf16(rng.normal());
  SafetensorsWriter w;
  w.add_metadata("step", "12");
  w.add_metadata("note", "a \"quoted\" line\n");
  w.add("u8", ConstTensorView(u8, DType::u8, {3}));
  w.add("layers.0.w", ConstTensorView(f32, DType::f32, {2, 3}));
  w.add("b", ConstTensorView(b16, DType::bf16, {2, 1, 2}));
  w.add("d", ConstTensorView(f64, DType::f64, {1}));
  w.add("i", ConstTensorView(i32, DType::i32, {2}));
  w.add("l", ConstTensorView(i64, DType::i64, {1, 1, 1, 1}));
  w.add("none", ConstTensorView(nullptr, DType::f32, {0, 4}));
  for (const DType t : {DType::e4m3, DType::e5m2, DType::ue8m0, DType::e2m1x2}) w.add(dtype_name(t), ConstTensorView(u8, t, {1, 3}));
  ASSERT_TRUE(succeeds(w.write(path_)));

  Result<SafetensorsFile> opened = SafetensorsFile::open(path_);
  ASSERT_TRUE(succeeds(opened));
  const SafetensorsFile f = opened.take();
  EXPECT_EQ(f.metadata().at("step"), "12");
  EXPECT_EQ(f.metadata().at("note"), "a \"quoted\" line\n");
  EXPECT_EQ(f.tensors().size(), 11u);
  EXPECT_EQ(f.find("ue8m0")->dtype, "F8_E8M0");
  EXPECT_EQ(f.find("e2m1x2")->dtype, "I8");
  const auto same = [&](const char* name, const void* data, ConstTensorView expected) {
    Result<ConstTensorView> v = f.view(name);
    ASSERT_TRUE(succeeds(v));
    EXPECT_EQ(v.value().dtype, expected.dtype);
    EXPECT_EQ(v.value().shape, expected.shape);
    if (expected.bytes()) {
      EXPECT_EQ(std::memcmp(v.value().data, data, expected.bytes()), 0);
    }
  };
  same("u8", u8, ConstTensorView(u8, DType::u8, {3}));
  same("layers.0.w", f32, ConstTensorView(f32, DType::f32, {2, 3}));
  same("b", b16, ConstTensorView(b16, DType::bf16, {2, 1, 2}));
  same("d", f64, ConstTensorView(f64, DType::f64, {1}));
  same("i", i32, ConstTensorView(i32, DType::i32, {2}));
  same("l", i64, ConstTensorView(i64, DType::i64, {1, 1, 1, 1}));
  same("none", nullptr, ConstTensorView(nullptr, DType::f32, {0, 4}));
  for (const DType t : {DType::e4m3, DType::e5m2, DType::ue8m0, DType::e2m1x2}) same(dtype_name(t), u8, ConstTensorView(u8, t, {1, 3}));
  EXPECT_EQ(d_.count(), 1u);
}

TEST_F(SafetensorsTest, WriterBytesAreTheseExactly) {
  const uint8_t u8[1] = {9};
  const int32_t i32[1] = {7};
  SafetensorsWriter w;
  w.add("b", ConstTensorView(u8, DType::u8, {1}));
  w.add("a", ConstTensorView(i32, DType::i32, {1}));
  w.add_metadata("k", "v");
  ASSERT_TRUE(succeeds(w.write(path_)));
  std::string header =
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},)"
      R"("b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
  while (header.size() % 8) header += ' ';
  EXPECT_EQ(get(path_), with_length(header.size(), header + std::string("\7\0\0\0\x09", 5)));
  const std::string first = get(path_);
  ASSERT_TRUE(succeeds(w.write(path_)));
  EXPECT_EQ(get(path_), first);
}

TEST_F(SafetensorsTest, WriterTakesStridedViewsAndLargeOnes) {
  std::vector<float> x(300 * 500);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const ConstTensorView all(x.data(), DType::f32, {300, 500});
  SafetensorsWriter w;
  w.add("all", all);
  w.add("block", all.cols(100, 7));
  ASSERT_TRUE(succeeds(w.write(path_)));
  Result<SafetensorsFile> f = SafetensorsFile::open(path_);
  ASSERT_TRUE(succeeds(f));
  EXPECT_EQ(std::memcmp(f.value().view("all").value().data, x.data(), x.size() * 4), 0);
  const ConstTensorView block = f.value().view("block").value();
  EXPECT_EQ(block.shape, (Shape{300, 7}));
  EXPECT_EQ(block.row<float>(299)[6], static_cast<float>(299 * 500 + 106));
}

TEST_F(SafetensorsTest, WriterWithoutTensors) {
  ASSERT_TRUE(succeeds(SafetensorsWriter().write(path_)));
  EXPECT_EQ(get(path_), with_length(8, "{}      "));
}

TEST_F(SafetensorsTest, WriterFailuresNameThePath) {
  EXPECT_TRUE(fails_with(SafetensorsWriter().write(d_.file("no/such/f")), "cannot write " + d_.file("no/such/f")));
}

TEST(SafetensorsDeath, WriterRefusesOurMistakes) {
  const float x[1] = {};
  SafetensorsWriter w;
  w.add("a", ConstTensorView(x, DType::f32, {1}));
  EXPECT_DEATH(w.add("a", ConstTensorView(x, DType::f32, {1})), "tensor a was added twice");
  EXPECT_DEATH(w.add("__metadata__", ConstTensorView(x, DType::f32, {1})), "__metadata__ is reserved");
  EXPECT_DEATH(w.add("b", ConstTensorView(nullptr, DType::f32, {2, 2})), "tensor b \\[2, 2\\] has no data");
}

}  // namespace
}  // namespace lockstep
