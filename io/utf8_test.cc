#include "io/utf8.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Utf8, ValidTextOfEveryLength) {
  for (const char* s : {"", "plain", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
                        "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "a\u2028b"}) {
    EXPECT_EQ(find_invalid_utf8(s), std::string::npos) << s;
    EXPECT_EQ(replace_invalid_utf8(s), s);
  }
}

TEST(Utf8, BrokenTextIsFoundWhereItBreaks) {
  const struct {
    const char* text;
    size_t at;
  } cases[] = {
      {"a\x80", 1},              // a continuation byte alone
      {"\xC0\x80", 0},           // overlong
      {"\xC1\xBF", 0},           //
      {"ab\xE0\x9F\xBF", 2},     // overlong, three bytes
      {"\xED\xA0\x80", 0},       // a surrogate
      {"\xF0\x8F\xBF\xBF", 0},   // overlong, four bytes
      {"\xF4\x90\x80\x80", 0},   // above U+10FFFF
      {"\xF5\x80\x80\x80", 0},   //
      {"xyz\xE2\x82", 3},        // cut off
      {"\xFF", 0},
  };
  for (const auto& c : cases) EXPECT_EQ(find_invalid_utf8(c.text), c.at) << c.text;
}

TEST(Utf8, EveryBrokenPieceBecomesOneReplacement) {
  EXPECT_EQ(replace_invalid_utf8("a\x80z"), "a\uFFFDz");
  EXPECT_EQ(replace_invalid_utf8("\xE2\x82"), "\uFFFD");                          // one cut-off sequence
  EXPECT_EQ(replace_invalid_utf8("\xE2\x82g"), "\uFFFDg");                        //
  EXPECT_EQ(replace_invalid_utf8("\xF0\x90\x80" "\xE4\xBD\xA0"), "\uFFFD\u4F60");  // cut off before a whole one
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");           // no byte of a surrogate fits
  EXPECT_EQ(replace_invalid_utf8("\xFF\xFE"), "\uFFFD\uFFFD");
}

TEST(Utf8, RepairedTextIsAlwaysValid) {
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) {
      const std::string s = {static_cast<char>(a), static_cast<char>(b), 'x'};
      const std::string r = replace_invalid_utf8(s);
      ASSERT_EQ(find_invalid_utf8(r), std::string::npos);
      ASSERT_EQ(r == s, find_invalid_utf8(s) == std::string::npos);
      ASSERT_EQ(r.back(), 'x');
    }
}

TEST(Utf8, IncompleteTail) {
  const std::string text = "a\u00E9\u4F60\U0001F600";
  // Of a text cut anywhere: the bytes of the character that the cut is in.
  const size_t tails[] = {0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0};
  for (size_t n = 0; n <= text.size(); ++n) EXPECT_EQ(incomplete_utf8_tail(std::string_view(text).substr(0, n)), tails[n]) << n;
  for (const char* broken : {"\xFF", "\xC0", "\x80", "\xE0\x80", "\xF5\x80", "\xED\xA0", "\xE4\xBD\xA0\x80", "\xE4z"})
    EXPECT_EQ(incomplete_utf8_tail(broken), 0u);  // no byte can complete these
}

TEST(Utf8, QuotedShowsControlBytesAndCuts) {
  EXPECT_EQ(in_quotes("a\nb"), "\"a\\x0ab\"");
  EXPECT_EQ(in_quotes("\xFFz"), "\"\\xffz\"");
  EXPECT_EQ(in_quotes("\u00E9"), "\"\u00E9\"");
  EXPECT_EQ(in_quotes("abcdef", 3), "\"abc\"...");
}

TEST(Utf8, ControlBytesAreShownToTerminals) {
  EXPECT_EQ(without_controls(std::string_view("a\0b\x1b[2J\x7f", 8)), "a\\x00b\\x1b[2J\\x7f");
  EXPECT_EQ(without_controls("a\n\tb\u00E9\xFF"), "a\n\tb\u00E9\xFF");
}

}  // namespace
}  // namespace lockstep
