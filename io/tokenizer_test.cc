#include "io/tokenizer.h"

#include <limits>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;
using testing::TemporaryDirectory;

TEST(ByteTokenizer, EveryByteHasItsId) {
  const ByteTokenizer t;
  EXPECT_EQ(t.vocab_size(), 259);
  EXPECT_EQ(t.bos_id(), 0);
  EXPECT_EQ(t.eos_id(), 1);
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  Result<std::vector<int32_t>> ids = t.encode(all);
  ASSERT_TRUE(succeeds(ids));
  for (int b = 0; b < 256; ++b) EXPECT_EQ(ids.value()[static_cast<size_t>(b)], 3 + b);
  EXPECT_TRUE(t.encode("").value().empty());
}

TEST(ByteTokenizer, DecodeUndoesEncode) {
  const ByteTokenizer t;
  for (const char* s : {"", "37+58=", "gr\u00FC\u00DFe \u4F60\u597D \U0001F600", "a\u2028b\n"})
    EXPECT_EQ(t.decode(t.encode(s).value()), s);
}

TEST(ByteTokenizer, DecodeIsTotal) {
  const ByteTokenizer t;
  const int32_t special[] = {0, 3 + 'h', 2, 3 + 'i', 1};
  EXPECT_EQ(t.decode(special), "hi");
  const int32_t cut[] = {3 + 'a', 3 + 0xE2, 3 + 0x82};  // a sequence of three bytes without its third
  EXPECT_EQ(t.decode(cut), "a\uFFFD");
  const int32_t outside[] = {-1, 259, 3 + 'x', std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  EXPECT_EQ(t.decode(outside), "\uFFFD\uFFFDx\uFFFD\uFFFD");
}

TEST(ByteTokenizer, AnAlphabetNamesWhatItLacks) {
  const ByteTokenizer t("0123456789+=");
  EXPECT_EQ(t.vocab_size(), 15);
  EXPECT_EQ(t.encode("1+9=").value(), (std::vector<int32_t>{4, 13, 12, 14}));
  EXPECT_EQ(t.decode(t.encode("1+9=").value()), "1+9=");
  EXPECT_TRUE(fails_with(t.encode("1-9"), "byte 0x2d (\"-\") at offset 1 of \"1-9\" is not in the tokenizer's alphabet"));
  EXPECT_TRUE(fails_with(t.encode("\u00E9"), "byte 0xc3 (\"\\xc3\") at offset 0"));
}

TEST(ByteTokenizer, BadAlphabets) {
  EXPECT_TRUE(fails_with(ByteTokenizer::check_alphabet(""), "the alphabet is empty"));
  EXPECT_TRUE(fails_with(ByteTokenizer::check_alphabet("abca"), "the alphabet has \"a\" twice, again at offset 3"));
  EXPECT_TRUE(fails_with(ByteTokenizer::check_alphabet("ab\u00E9"), "the byte 0xc3 at offset 2"));
}

TEST(ByteTokenizerDeath, BadAlphabetInCode) { EXPECT_DEATH(ByteTokenizer("aa"), "the alphabet has \"a\" twice"); }

TEST(Tokenizer, SavesAndLoads) {
  TemporaryDirectory d;
  const std::string awkward = "0\"\\\n\t a\x01";
  for (const ByteTokenizer& t : {ByteTokenizer(), ByteTokenizer(awkward)}) {
    ASSERT_TRUE(succeeds(t.save(d.path())));
    for (const std::string& path : {d.path(), d.file(kTokenizerFile)}) {
      Result<std::unique_ptr<Tokenizer>> loaded = load_tokenizer(path);
      ASSERT_TRUE(succeeds(loaded));
      EXPECT_EQ(loaded.value()->vocab_size(), t.vocab_size());
      EXPECT_EQ(loaded.value()->encode(awkward).value(), t.encode(awkward).value());
    }
  }
  ASSERT_TRUE(succeeds(ByteTokenizer("ab").save(d.path())));
  EXPECT_EQ(get(d.file(kTokenizerFile)), "{\"type\":\"byte\",\"alphabet\":\"ab\",\"vocab_size\":5}\n");
}

TEST(Tokenizer, BadFilesAreNamed) {
  TemporaryDirectory d;
  const std::string file = d.file(kTokenizerFile);
  EXPECT_TRUE(fails_with(load_tokenizer(d.path()), "cannot open " + file));
  const auto refuses = [&](const char* text, const std::string& part) {
    put(file, text);
    EXPECT_TRUE(fails_with(load_tokenizer(d.path()), file + ": " + part)) << text;
  };
  refuses("{", "invalid JSON, line 1, column 1: ");
  refuses("[]", "an array, an object is wanted");
  refuses("{}", "\"type\" is missing, \"byte\" is wanted");
  refuses(R"({"type":"bpe"})", "\"type\" is \"bpe\", \"byte\" is wanted");
  refuses(R"({"type":"byte","alfabet":"ab"})", "\"alfabet\" is not a known key");
  refuses(R"({"type":"byte","alphabet":5})", "\"alphabet\" is a number, a string is wanted");
  refuses(R"({"type":"byte","alphabet":"aba"})", "the alphabet has \"a\" twice");
  refuses(R"({"type":"byte","alphabet":"ab","vocab_size":6})", "\"vocab_size\" is 6, the alphabet gives 5");
  refuses(R"({"type":"byte","vocab_size":"259"})", "\"vocab_size\" is a string, the alphabet gives 259");
}

}  // namespace
}  // namespace lockstep
