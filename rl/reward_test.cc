#include "rl/reward.h"

#include <gtest/gtest.h>

#include "core/rng.h"

namespace lockstep {
namespace {

TEST(LastBoxed, FindsTheLastOne) {
  const struct {
    const char *text, *content;
  } cases[] = {
      {"\\boxed{34}", "34"},
      {"first \\boxed{3} then \\boxed{5}.", "5"},
      {"\\boxed {34}", "34"},
      {"\\boxed \n {34}", "34"},
      {"$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"},
      {"\\boxed{ 7 }", "7"},
      {"\\fbox{9}", "9"},
      {"\\boxed{3} and \\fbox{9}", "3"},
      {"\\boxed{{5}}}", "{5}"},
  };
  for (const auto& c : cases) {
    RewardReason reason;
    EXPECT_EQ(last_boxed(c.text, &reason), c.content) << c.text;
  }
}

TEST(LastBoxed, SaysWhyThereIsNone) {
  const struct {
    const char* text;
    RewardReason reason;
  } cases[] = {
      {"", RewardReason::no_answer},
      {"the answer is 34", RewardReason::no_answer},
      {"\\boxed 34, as {said}", RewardReason::no_answer},
      {"\\boxed", RewardReason::unbalanced_box},
      {"\\boxed{34", RewardReason::unbalanced_box},
      {"\\boxed{12} and \\boxed{3{4}", RewardReason::unbalanced_box},
      {"\\boxed{}", RewardReason::empty_box},
      {"\\boxed{12} \\boxed{  }", RewardReason::empty_box},
  };
  for (const auto& c : cases) {
    RewardReason reason;
    EXPECT_EQ(last_boxed(c.text, &reason), "") << c.text;
    EXPECT_EQ(reason, c.reason) << c.text;
    const RewardResult r = math_reward(c.text, "34");
    EXPECT_EQ(r.reason, c.reason) << c.text;
    EXPECT_EQ(r.score, 0.0f);
    EXPECT_FALSE(r.correct);
    EXPECT_EQ(r.pred, "");
  }
}

TEST(MathReward, EdgeCaseTable) {
  const struct {
    const char *response, *label;
    bool correct;
  } cases[] = {
      {"\\boxed{34}", "34", true},
      {"Answer: \\boxed{34}", "34", true},
      {"Answer: $34$", "34", false},
      {"Answer: \\boxed{034}", "34", true},
      {"Answer: \\boxed{34.0}", "34", true},
      {"Answer: \\boxed{1,234}", "1234", true},
      {"Answer: \\boxed{1{,}234}", "1234", true},
      {"Answer: \\boxed{(1,234)}", "1234", false},
      {"Answer: \\boxed{\\frac{2}{4}}", "1/2", false},
      {"Answer: \\boxed{\\dfrac12}", "\\frac{1}{2}", true},
      {"Answer: \\boxed{0.5}", "\\frac{1}{2}", true},
      {"Answer: \\boxed{50\\%}", "50", true},
      {"Answer: \\boxed{12\\text{ cm}}", "12", true},
      {"Answer: \\boxed{x=5}", "5", true},
      {"\\boxed{34^\\circ}", "34", true},
      {"Answer: \\boxed{- 5}", "-5", true},
      {"Answer: \\boxed{10^3}", "1000", false},
      {"Answer: \\boxed{(1, 2)}", "(1,2)", true},
      {"\\boxed{3} then \\boxed{5}", "3", false},
      {"Answer: \\boxed{34", "34", false},
      {"Answer: \\boxed{}", "34", false},
      {"\\boxed {34}", "34", true},
      {"Answer: the value is 34", "34", false},
      {"\\boxed{\\frac{3}{7}}", "3/7", true},
      {"\\boxed{3/7}", "3/7", true},
      {"\\boxed{-3/7}", "-\\frac{3}{7}", true},
  };
  for (const auto& c : cases) EXPECT_EQ(math_reward(c.response, c.label).correct, c.correct) << c.response << " for " << c.label;
}

TEST(MathReward, Integers) {
  const struct {
    const char *answer, *label;
    bool correct;
  } cases[] = {
      {"$34$", "34", true},       {"\\$34", "34", true},         {" 34 ", "34", true},       {"+34", "34", true},
      {"34.", "34", true},        {"34.00", "34", true},         {"34.01", "34", false},     {"00034", "34", true},
      {"-34", "34", false},       {"-0", "0", true},             {"000", "0", true},         {"1,000,000", "1000000", true},
      {"12,34", "1234", false},   {"1,2345", "12345", false},    {",123", "123", false},     {"1 234", "1234", true},
      {"34", "034", true},        {"34", "34.0", true},          {"340", "34", false},       {"3", "34", false},
      {"", "", false},            {"\\text{34}", "34", true},    {"{34}", "34", true},       {"34\\!", "34", true},
      {"\\left(34\\right)", "(34)", true}, {"x = 34", "34", true}, {"x+y=34", "34", false},  {"n=-7", "-7", true},
      {"34 \\text{ apples}", "34", true},  {"34%", "34", true},  {"1e3", "1000", false},     {"0x22", "34", false},
      {"--5", "5", false},        {"5-", "5", false},            {".5", "0.5", true},
      {"12345678901234567890123", "12345678901234567890123", true},
      {"34", "\\boxed{34}", true}, {"34", "so \\boxed{35}", false},
  };
  for (const auto& c : cases) {
    const RewardResult r = math_reward(std::string("so \\boxed{") + c.answer + "}.", c.label);
    EXPECT_EQ(r.correct, c.correct) << c.answer << " for " << c.label << ": " << r.pred;
    EXPECT_EQ(r.score, c.correct ? 1.0f : 0.0f);
  }
}

TEST(MathReward, EqualAnswersHaveEqualPredictions) {
  for (const char* answer : {"1,234", "1234.0", "01234", "$1234$", "+1234", "1{,}234"})
    EXPECT_EQ(math_reward(std::string("\\boxed{") + answer + "}", "1").pred, "1234") << answer;
}

TEST(MathReward, LatexForms) {
  const auto same = [](const char* a, const char* b) {
    EXPECT_EQ(normalize_math_answer(a), normalize_math_answer(b)) << a << " and " << b;
  };
  same("\\sqrt3", "\\sqrt{3}");
  same("\\sqrt 3", "\\sqrt{3}");
  same("\\frac ab", "\\frac{a}{b}");
  same("\\tfrac{1}{2}", "\\frac12");
  same("\\frac1{72}", "\\frac{1}{72}");
  same("\\left[0,1\\right)", "[0, 1)");
  same("\\textbf{(C)}", "(C)");
  same("\\text{yes}", "yes");
  same("-.5", "-0.5");
  same("0.50", "\\frac12");
  same("\\$3.50", "3.5");
  same("1,234.5", "1234.50");
  same("\u22125", "-5");
  same("\\displaystyle 42", "42");
  same("x=1\\text{ or }x=2", "x=1,x=2");
  EXPECT_NE(normalize_math_answer("1 \\text{ or } 2"), normalize_math_answer("1"));
  EXPECT_NE(normalize_math_answer("1 & 2 \\\\ 3"), normalize_math_answer("1 & 23"));
  EXPECT_NE(normalize_math_answer("1.2.3"), normalize_math_answer("1.23"));
  EXPECT_NE(normalize_math_answer("\\leftarrow"), normalize_math_answer("arrow"));
  EXPECT_NE(normalize_math_answer("[0,1)"), normalize_math_answer("[0,1]"));
}

TEST(MathReward, ThinkingGradesOnlyWhatFollows) {
  const MathRewardOptions thinking{.thinking = true};
  EXPECT_TRUE(math_reward("<think>\\boxed{3}</think>\\boxed{4}", "4", thinking).correct);
  EXPECT_EQ(math_reward("<think>\\boxed{4}</think> done", "4", thinking).reason, RewardReason::no_answer);
  EXPECT_EQ(math_reward("<think>\\boxed{4}", "4", thinking).reason, RewardReason::unfinished_thinking);
  EXPECT_TRUE(math_reward("a</think>b</think>\\boxed{4}", "4", thinking).correct);
  EXPECT_TRUE(math_reward("<think>\\boxed{4}", "4").correct);
}

TEST(MathReward, HugeAndHostileInputIsQuick) {
  const std::string deep = "\\boxed{" + std::string(1 << 20, '{') + std::string(1 << 20, '}') + "}";
  EXPECT_EQ(math_reward(deep, "1").reason, RewardReason::wrong);
  EXPECT_EQ(math_reward("\\boxed{" + std::string(1 << 22, '{'), "1").reason, RewardReason::unbalanced_box);
  const std::string digits(5000, '1');
  EXPECT_FALSE(math_reward("\\boxed{" + digits + "}", digits).correct);  // an answer that is cut equals nothing
  std::string boxes;
  for (int i = 0; i < 200000; ++i) boxes += "\\boxed";
  EXPECT_EQ(math_reward(boxes, "1").reason, RewardReason::unbalanced_box);
  std::string fractions = "\\boxed{";
  for (int i = 0; i < 200; ++i) fractions += "\\frac";
  EXPECT_EQ(math_reward(fractions + "}", "1").reason, RewardReason::wrong);
}

TEST(MathReward, AnyBytesGiveAVerdict) {
  Philox rng(9, RngPurpose::test);
  const char* pieces[] = {"\\boxed{", "}", "{", "\\frac", "\\sqrt", "1", "2", ",", ".", "/", "-", "=", "x", "\\text{ ", "$",
                          "\\left",
                          "\xff", " ", "\\", "%", "\\\\", "^\\circ", "{,}"};
  for (int i = 0; i < 100000; ++i) {
    std::string s, label;
    for (uint32_t k = rng.below(12); k > 0; --k) s += pieces[rng.below(std::size(pieces))];
    for (uint32_t k = rng.below(4); k > 0; --k) label += pieces[rng.below(std::size(pieces))];
    const RewardResult r = math_reward("\\boxed{" + s, label);
    ASSERT_EQ(r.correct, r.reason == RewardReason::correct);
    ASSERT_EQ(r.score, r.correct ? 1.0f : 0.0f);
    ASSERT_LE(normalize_math_answer(s).size(), 4 * kMaxAnswerBytes);
    ASSERT_EQ(normalize_math_answer(s), normalize_math_answer(s));
  }
}

TEST(ExactMatch, TrimsAndCompares) {
  EXPECT_TRUE(exact_match_reward(" 42\n", "42").correct);
  EXPECT_TRUE(exact_match_reward("a b", " a b ").correct);
  EXPECT_FALSE(exact_match_reward("42.0", "42").correct);
  EXPECT_EQ(exact_match_reward("42.0", "42").reason, RewardReason::wrong);
  EXPECT_EQ(exact_match_reward("42.0", "42").pred, "42.0");
  EXPECT_EQ(exact_match_reward("  ", "42").reason, RewardReason::no_answer);
  EXPECT_EQ(exact_match_reward("", "").reason, RewardReason::no_answer);
  EXPECT_EQ(exact_match_reward("7", "7").score, 1.0f);
}

TEST(RewardReason, Names) {
  EXPECT_STREQ(reward_reason_name(RewardReason::correct), "correct");
  EXPECT_STREQ(reward_reason_name(RewardReason::unfinished_thinking), "unfinished_thinking");
}

}  // namespace
}  // namespace lockstep
