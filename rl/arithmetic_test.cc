#include "rl/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "io/jsonl.h"
#include "io/testing.h"
#include "io/tokenizer.h"
#include "rl/grader/grader.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::succeeds;

// The numbers in a text, in order.
std::vector<int> numbers(std::string_view s) {
  std::vector<int> out;
  for (size_t i = 0; i < s.size();) {
    if (!isdigit(static_cast<unsigned char>(s[i]))) {
      ++i;
      continue;
    }
    int n = 0;
    for (; i < s.size() && isdigit(static_cast<unsigned char>(s[i])); ++i) n = n * 10 + (s[i] - '0');
    out.push_back(n);
  }
  return out;
}

// The answer, worked out from the prompt's text alone.
int solve(const ArithmeticItem& item) {
  const std::vector<int> n = numbers(item.prompt);
  switch (item.family) {
    case ArithmeticFamily::add: return n[0] + n[1];
    case ArithmeticFamily::subtract: return n[0] - n[1];
    case ArithmeticFamily::multiply: return n[0] * n[1];
    case ArithmeticFamily::remainder: return n[0] % n[1];
    case ArithmeticFamily::gcd: {
      int g = std::min(n[0], n[1]);
      while (n[0] % g || n[1] % g) --g;
      return g;
    }
    case ArithmeticFamily::linear: {
      const bool minus = item.prompt.find('-') != std::string::npos;
      for (int x = 0; x <= 999; ++x)
        if (n[0] * x + (minus ? -n[1] : n[1]) == n[2]) return x;
      return -1;
    }
    case ArithmeticFamily::max: return std::max({n[0], n[1], n[2]});
    case ArithmeticFamily::mixed: return n[0] + n[1] * n[2];
  }
  return -1;
}

// The first solution of a prompt that a family makes.
std::string solution_of(ArithmeticFamily family, std::string_view prompt) {
  for (int difficulty = 1; difficulty <= kMaxDifficulty; ++difficulty) {
    ArithmeticOptions options{.difficulty_min = difficulty, .difficulty_max = difficulty, .families = {family}};
    for (uint64_t i = 0; i < 200000; ++i) {
      const ArithmeticItem item = make_arithmetic_item(options, i);
      if (item.prompt == prompt) return item.solution;
    }
  }
  return "no such prompt";
}

TEST(Arithmetic, EveryItemIsShortCorrectAndInTheAlphabet) {
  const ByteTokenizer tokenizer{std::string(kArithmeticAlphabet)};
  std::vector<int> count(kArithmeticFamilies);
  std::string used;
  for (uint64_t i = 0; i < 20000; ++i) {
    const ArithmeticItem item = make_arithmetic_item({.seed = 5}, i);
    ++count[static_cast<size_t>(item.family)];
    ASSERT_LE(item.prompt.size(), kMaxArithmeticPrompt) << item.prompt;
    ASSERT_LE(item.solution.size(), kMaxArithmeticSolution) << item.solution;
    ASSERT_EQ(item.label, std::to_string(solve(item))) << item.prompt;
    ASSERT_LE(std::stoi(item.label), 999);
    ASSERT_TRUE(grade(GraderKind::math, item.solution, item.label).correct) << item.solution;
    ASSERT_EQ(item.id, std::string(arithmetic_family_name(item.family)) + "-" + std::to_string(i));
    ASSERT_TRUE(succeeds(tokenizer.encode(item.prompt + item.solution)));
    ASSERT_EQ(item.prompt.find(':'), item.prompt.size() - 1);
    used += item.prompt + item.solution;
  }
  for (int n : count) EXPECT_GT(n, 20000 / kArithmeticFamilies * 9 / 10);
  for (const char c : kArithmeticAlphabet) EXPECT_NE(used.find(c), std::string::npos) << c;  // none to spare
}

TEST(Arithmetic, WorkedSolutions) {
  EXPECT_EQ(solution_of(ArithmeticFamily::add, "58+67:"), "8+7=15,5+6+1=12;\\boxed{125}");
  EXPECT_EQ(solution_of(ArithmeticFamily::add, "5+12:"), "5+2=7,0+1=1;\\boxed{17}");
  EXPECT_EQ(solution_of(ArithmeticFamily::add, "0+0:"), "0+0=0;\\boxed{0}");
  EXPECT_EQ(solution_of(ArithmeticFamily::subtract, "20-3:"), "0-3=-3,2-0-1=1;\\boxed{17}");
  EXPECT_EQ(solution_of(ArithmeticFamily::multiply, "47*6:"), "7*6=42,4*6+4=28;\\boxed{282}");
  EXPECT_EQ(solution_of(ArithmeticFamily::multiply, "7*6:"), "7*6=42;\\boxed{42}");
  EXPECT_EQ(solution_of(ArithmeticFamily::remainder, "175%6:"), "1%6=1,17%6=5,55%6=1;\\boxed{1}");
  EXPECT_EQ(solution_of(ArithmeticFamily::gcd, "gcd(20,12):"), "20%12=8,12%8=4,8%4=0;\\boxed{4}");
  EXPECT_EQ(solution_of(ArithmeticFamily::gcd, "gcd(6,6):"), "6%6=0;\\boxed{6}");
  EXPECT_EQ(solution_of(ArithmeticFamily::linear, "3x+7=22:"), "22-7=15,15=3*5;\\boxed{5}");
  EXPECT_EQ(solution_of(ArithmeticFamily::max, "max(3,7,5):"), "3,7,7;\\boxed{7}");
  EXPECT_EQ(solution_of(ArithmeticFamily::mixed, "2+3*4:"), "3*4=12,2+12=14;\\boxed{14}");
}

TEST(Arithmetic, DigitStepsSpellTheAnswer) {
  // The last digits of the steps (taken modulo 10), from the last step to the first, are the answer's digits; the last sum
  // keeps its own tens.
  for (ArithmeticFamily family : {ArithmeticFamily::add, ArithmeticFamily::subtract})
    for (uint64_t i = 0; i < 3000; ++i) {
      const ArithmeticItem item = make_arithmetic_item({.families = {family}}, i);
      int value = 0, place = 1;
      std::string_view steps = std::string_view(item.solution).substr(0, item.solution.find(';'));
      while (!steps.empty()) {
        const size_t comma = steps.find(',');
        const int step = std::stoi(std::string(steps.substr(steps.find('=') + 1, comma)));
        steps = comma == std::string_view::npos ? "" : steps.substr(comma + 1);
        value += (steps.empty() ? step : (step % 10 + 10) % 10) * place;
        place *= 10;
      }
      ASSERT_EQ(std::to_string(value), item.label) << item.prompt << item.solution;
    }
}

TEST(Arithmetic, ItemsDependOnSeedAndIndexAlone) {
  const ArithmeticOptions a{.seed = 1}, b{.seed = 2};
  int same = 0;
  for (uint64_t i = 0; i < 500; ++i) {
    const ArithmeticItem x = make_arithmetic_item(a, i), y = make_arithmetic_item(a, i);
    EXPECT_EQ(x.prompt, y.prompt);
    EXPECT_EQ(x.solution, y.solution);
    same += x.prompt == make_arithmetic_item(b, i).prompt;
  }
  EXPECT_LT(same, 20);
}

TEST(Arithmetic, TheseItemsNeverChange) {  // a stored data set must be reproducible by a later build
  const char* expected[] = {"91+36*3:36*3=108,91+108=199;\\boxed{199}", "gcd(104,195):104%195=104,195%104=91,104%91=13,91%13=0;\\boxed{13}",
                            "38*2:8*2=16,3*2+1=7;\\boxed{76}",          "2x+5=15:15-5=10,10=2*5;\\boxed{5}",
                            "max(87,14,20):87,87,87;\\boxed{87}",       "9+3*2:3*2=6,9+6=15;\\boxed{15}",
                            "46+93:6+3=9,4+9=13;\\boxed{139}"};
  for (uint64_t i = 0; i < std::size(expected); ++i) {
    const ArithmeticItem item = make_arithmetic_item({.seed = 7}, i);
    EXPECT_EQ(item.prompt + item.solution, expected[i]);
  }
}

TEST(Arithmetic, UnboxedSolutionsLeaveTheProblemsAlone) {
  int unboxed = 0;
  for (uint64_t i = 0; i < 2000; ++i) {
    const ArithmeticItem worked = make_arithmetic_item({.seed = 3}, i), some = make_arithmetic_item({.seed = 3, .unboxed_share = 0.25f}, i);
    ASSERT_EQ(some.prompt, worked.prompt);
    if (some.solution == worked.solution) continue;
    ASSERT_EQ(some.solution + ";\\boxed{" + worked.label + "}", worked.solution);
    ++unboxed;
  }
  EXPECT_NEAR(unboxed, 500, 5 * 19.4);  // five standard deviations, sqrt(2000 * 0.25 * 0.75)
}

TEST(Arithmetic, DifficultyAndFamiliesAreKept) {
  const ArithmeticOptions options{
      .difficulty_min = 2, .difficulty_max = 2, .families = {ArithmeticFamily::max, ArithmeticFamily::gcd}};
  std::set<ArithmeticFamily> seen;
  for (uint64_t i = 0; i < 200; ++i) {
    const ArithmeticItem item = make_arithmetic_item(options, i);
    EXPECT_EQ(item.difficulty, 2);
    seen.insert(item.family);
  }
  EXPECT_EQ(seen, (std::set<ArithmeticFamily>{ArithmeticFamily::max, ArithmeticFamily::gcd}));
}

TEST(Arithmetic, SplitsAreDisjointByPromptForEverySeed) {
  std::set<std::string> held_out;
  for (uint64_t seed : {1, 2, 3}) {
    Result<std::vector<ArithmeticItem>> r = make_arithmetic_set({.seed = seed}, ArithmeticSplit::held_out, 500);
    ASSERT_TRUE(succeeds(r));
    std::set<std::string> own;
    for (const ArithmeticItem& item : r.value()) {
      EXPECT_TRUE(own.insert(item.prompt).second) << item.prompt;
      held_out.insert(item.prompt);
    }
  }
  for (uint64_t seed : {1, 9}) {
    Result<std::vector<ArithmeticItem>> r = make_arithmetic_set({.seed = seed}, ArithmeticSplit::train, 20000);
    ASSERT_TRUE(succeeds(r));
    ASSERT_EQ(r.value().size(), 20000u);
    for (const ArithmeticItem& item : r.value()) ASSERT_FALSE(held_out.contains(item.prompt)) << item.prompt;
  }
}

TEST(Arithmetic, AboutOnePromptInEightIsHeldOut) {
  int held_out = 0;
  const int n = 10000;
  for (int i = 0; i < n; ++i)
    held_out += arithmetic_split(std::to_string(i) + "+1:") == ArithmeticSplit::held_out;
  EXPECT_NEAR(held_out, n / 8.0, 5 * std::sqrt(n * (1.0 / 8) * (7.0 / 8)));  // five standard deviations
}

TEST(Arithmetic, AskingForMoreThanThereIs) {
  const ArithmeticOptions tiny{.difficulty_max = 1, .families = {ArithmeticFamily::multiply}};  // 100 prompts in all
  EXPECT_TRUE(fails_with(make_arithmetic_set(tiny, ArithmeticSplit::held_out, 90),
                         "90 distinct held-out problems were asked for, there are about "));
  EXPECT_TRUE(succeeds(make_arithmetic_set(tiny, ArithmeticSplit::train, 1000)));
  EXPECT_TRUE(make_arithmetic_set(tiny, ArithmeticSplit::held_out, 0).value().empty());
}

TEST(Arithmetic, WrongOptionsAreNamed) {
  EXPECT_TRUE(fails_with(make_arithmetic_set({.difficulty_min = 0}, ArithmeticSplit::train, 1),
                         "difficulties from 0 to 3; they go from 1 to 3"));
  EXPECT_TRUE(fails_with(check_arithmetic_options({.difficulty_min = 3, .difficulty_max = 2}), "difficulties from 3 to 2"));
  EXPECT_TRUE(fails_with(parse_arithmetic_family("sum"),
                         "\"sum\" is not a family of problems; there are add, subtract, multiply"));
  for (int i = 0; i < kArithmeticFamilies; ++i) {
    const ArithmeticFamily family = static_cast<ArithmeticFamily>(i);
    EXPECT_EQ(parse_arithmetic_family(arithmetic_family_name(family)).value(), family);
  }
}

TEST(Arithmetic, WritesFilesThatThePromptReaderTakes) {
  testing::TemporaryDirectory d;
  const std::vector<ArithmeticItem> items = make_arithmetic_set({.seed = 4}, ArithmeticSplit::held_out, 50).value();
  ASSERT_TRUE(succeeds(write_arithmetic_prompts(d.file("eval.jsonl"), items)));
  ASSERT_TRUE(succeeds(write_arithmetic_examples(d.file("sft.jsonl"), items)));
  Result<PromptFile> prompts = read_prompts(d.file("eval.jsonl"));
  Result<PromptFile> examples = read_prompts(d.file("sft.jsonl"), {.label_required = false, .completion_required = true});
  ASSERT_TRUE(succeeds(prompts));
  ASSERT_TRUE(succeeds(examples));
  ASSERT_EQ(prompts.value().rows.size(), 50u);
  ASSERT_EQ(examples.value().rows.size(), 50u);
  EXPECT_EQ(prompts.value().duplicate_prompts, 0);
  for (size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(prompts.value().rows[i].id, items[i].id);
    EXPECT_EQ(prompts.value().rows[i].prompt, items[i].prompt);
    EXPECT_EQ(prompts.value().rows[i].label, items[i].label);
    EXPECT_EQ(examples.value().rows[i].prompt, items[i].prompt);
    EXPECT_EQ(examples.value().rows[i].completion, items[i].solution);
  }
}

}  // namespace
}  // namespace lockstep
