#include "io/pretokenize.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "io/unicode.h"

namespace lockstep {
namespace {

using Pieces = std::vector<std::string>;

Pieces split(std::string_view text, const std::vector<SplitPattern>& patterns) {
  std::vector<std::string_view> pieces;
  split_text(text, patterns, &pieces);
  return {pieces.begin(), pieces.end()};
}
const std::vector<SplitPattern> kDeepSeek = {SplitPattern::numbers, SplitPattern::cjk, SplitPattern::words};
const std::vector<SplitPattern> kGpt2 = {SplitPattern::gpt2};

TEST(Pretokenize, DeepSeek) {
  const auto v4 = [](std::string_view text) { return split(text, kDeepSeek); };
  EXPECT_EQ(v4(""), Pieces());
  EXPECT_EQ(v4("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(v4("12345 6"), (Pieces{"123", "45", " ", "6"}));
  EXPECT_EQ(v4("a漢字b"), (Pieces{"a", "漢字", "b"}));
  EXPECT_EQ(v4("ア・イ"), (Pieces{"ア", "・", "イ"}));        // one run of the second pattern, cut by the third
  EXPECT_EQ(v4("(foo) ((bar"), (Pieces{"(foo", ")", " ((", "bar"}));
  EXPECT_EQ(v4("x\n\n  y"), (Pieces{"x", "\n\n", " ", " y"}));
  EXPECT_EQ(v4("x \n \n  1"), (Pieces{"x", " \n \n", "  ", "1"}));  // spaces end their own piece, before the number
  EXPECT_EQ(v4("a.\r\nb"), (Pieces{"a", ".\r\n", "b"}));
  EXPECT_EQ(v4("!\u00E9a"), (Pieces{"!", "\u00E9a"}));       // the first alternative wants ASCII letters
  EXPECT_EQ(v4("\tfoo"), (Pieces{"\tfoo"}));
  EXPECT_EQ(v4("e\u0301\u0301"), (Pieces{"e\u0301\u0301"}));
  EXPECT_EQ(v4(std::string_view("\x01\x02", 2)), (Pieces{"\x01\x02"}));  // no alternative matches: one piece
  EXPECT_EQ(v4("\u180E\u0085 "), (Pieces{"\u180E", "\u0085 "}));         // U+180E is no space, U+0085 is one
}

TEST(Pretokenize, Gpt2) {
  const auto gpt2 = [](std::string_view text) { return split(text, kGpt2); };
  EXPECT_EQ(gpt2("I'll we've 'Tis"), (Pieces{"I", "'ll", " we", "'ve", " '", "Tis"}));
  EXPECT_EQ(gpt2("a  12 b!!  "), (Pieces{"a", " ", " 12", " b", "!!", "  "}));
  EXPECT_EQ(gpt2("\n\nx"), (Pieces{"\n", "\n", "x"}));
  EXPECT_EQ(gpt2(" \u0301x"), (Pieces{" \u0301", "x"}));
}

TEST(Pretokenize, PiecesAreTheText) {
  std::mt19937 random(7);
  const std::string_view parts[] = {"a", "Z", "\u00E9", "漢", "・", "1", "\u0663", " ", "\n", "\r", "\t", "\u3000", "\u0085", "!", "'s", "+", "\U0001F600", "\u0301", "\u0378", "\x01"};
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (size_t n = random() % 12; n > 0; --n) text += parts[random() % std::size(parts)];
    for (const auto* patterns : {&kDeepSeek, &kGpt2}) {
      std::string joined;
      for (const std::string& piece : split(text, *patterns)) {
        ASSERT_FALSE(piece.empty());
        joined += piece;
      }
      ASSERT_EQ(joined, text);
    }
  }
}

TEST(Pretokenize, PatternsAreKnownByTheirText) {
  EXPECT_EQ(find_split_pattern(R"(\p{N}{1,3})"), SplitPattern::numbers);
  EXPECT_EQ(find_split_pattern("[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"), SplitPattern::cjk);
  EXPECT_EQ(find_split_pattern(R"(\p{N}{1,2})"), std::nullopt);
}

TEST(CharTable, Classes) {
  const CharTable& t = CharTable::get();
  EXPECT_EQ(t.flags('a'), kLetter | kAsciiLetter);
  EXPECT_EQ(t.flags('\n'), kSpace | kNewline);
  EXPECT_EQ(t.flags(0x1C), 0);
  EXPECT_EQ(t.flags(0xBD), kNumber);                  // one half
  EXPECT_EQ(t.flags('$'), kPunctuation);
  EXPECT_EQ(t.flags(0x3042), kLetter | kCjk);
  EXPECT_EQ(t.flags(0x3099), kMark | kCjk);
  EXPECT_EQ(t.flags(0x20AC), kPunctuation);
  EXPECT_EQ(t.flags(0x1FAE8), kPunctuation);          // since Unicode 15
  EXPECT_EQ(t.flags(0x10FFFF), 0);
}

}  // namespace
}  // namespace lockstep
