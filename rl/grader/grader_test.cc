// The named graders: rl spec 5.6 row by row, and what each does besides.

#include "rl/grader/grader.h"

#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <vector>

#include "core/rng.h"
#include "io/json.h"
#include "rl/grader/judge.h"
#include "rl/grader/standard.h"
#include "rl/grader/text.h"

namespace lockstep {
namespace {

RewardResult math(std::string_view response, std::string_view label, GradeOptions options = {}) {
  return grade(GraderKind::math, response, label, options);
}

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
    EXPECT_EQ(last_nonempty_boxed(c.text, &reason), c.content) << c.text;
  }
  RewardReason reason;
  EXPECT_EQ(last_nonempty_boxed("\\boxed{1} \\boxed{2} \\boxed{ } \\boxed{}", &reason), "2");
  EXPECT_EQ(last_nonempty_boxed("\\boxed{1} \\boxed{2", &reason), "");  // cut off: the earlier one was not the answer
  EXPECT_EQ(reason, RewardReason::unbalanced_box);
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
      {"\\boxed{  }", RewardReason::empty_box},
  };
  for (const auto& c : cases) {
    for (const GraderKind kind : {GraderKind::math, GraderKind::standard, GraderKind::deepscaler}) {
      const RewardResult r = grade(kind, c.text, "34");
      EXPECT_EQ(r.reason, c.reason) << c.text;
      EXPECT_EQ(r.score, 0.0f);
      EXPECT_FALSE(r.correct);
      EXPECT_EQ(r.pred, "");
    }
  }
  EXPECT_EQ(math("\\boxed{12} \\boxed{  }", "12").reason, RewardReason::empty_box);
  EXPECT_TRUE(grade(GraderKind::standard, "\\boxed{12} \\boxed{  }", "12").correct);
}

// rl spec 5.6. 'x' stands for the public grader's exception, which is an error here.
TEST(Graders, EdgeCaseTable) {
  const struct {
    const char *response, *label;
    char math_miles, dapo_miles, dapo_verl, math, dapo;  // + - x
  } cases[] = {
      {"\\boxed{34}", "34", '+', '-', '+', '+', '+'},
      {"Answer: \\boxed{34}", "34", '+', '+', '+', '+', '+'},
      {"Answer: $34$", "34", '-', '+', '+', '-', '+'},
      {"Answer: 34", "34", '-', '+', '+', '-', '+'},
      {"Answer: \\boxed{034}", "34", '+', '-', '-', '+', '+'},
      {"Answer: \\boxed{34.0}", "34", '+', '-', '-', '+', '+'},
      {"Answer: \\boxed{1,234}", "1234", '+', '+', '+', '+', '+'},
      {"\\boxed{1,234}", "1234", '+', '-', '-', '+', '+'},
      {"Answer: \\boxed{1{,}234}", "1234", '+', '+', '+', '+', '+'},
      {"Answer: \\boxed{(1,234)}", "1234", '+', '-', '-', '-', '-'},
      {"Answer: \\boxed{\\frac{2}{4}}", "1/2", '-', 'x', '-', '-', '-'},
      {"Answer: \\boxed{\\dfrac12}", "\\frac{1}{2}", '+', 'x', '-', '+', '+'},
      {"Answer: \\boxed{0.5}", "\\frac{1}{2}", '+', 'x', '-', '+', '+'},
      {"Answer: \\boxed{50\\%}", "50", '+', '-', '-', '+', '+'},
      {"Answer: \\boxed{12\\text{ cm}}", "12", '+', '+', '+', '+', '+'},
      {"Answer: 34 cm", "34", '-', '+', '+', '-', '+'},
      {"Answer: \\boxed{x=5}", "5", '+', '-', '-', '+', '+'},
      {"\\boxed{34^\\circ}", "34", '+', '-', '-', '+', '+'},
      {"Answer: \\boxed{- 5}", "-5", '+', '+', '+', '+', '+'},
      {"Answer: \\boxed{10^3}", "1000", '-', '-', '-', '-', '-'},
      {"Answer: \\boxed{(1, 2)}", "(1,2)", '+', 'x', '+', '+', '+'},
      {"\\boxed{3} then \\boxed{5}", "3", '-', '-', '-', '-', '-'},
      {"Answer: 34\nAnswer: 35", "34", '-', '-', '-', '-', '-'},
      {"Answer: \\boxed{34", "34", '-', '-', '-', '-', '-'},
      {"Answer: \\boxed{}", "34", '-', '-', '-', '-', '-'},
      {"\\boxed {34}", "34", '-', '-', '-', '+', '+'},
      {"**Answer:** 34", "34", '-', '-', '-', '-', '+'},
      {"**Answer: 34**", "34", '-', '-', '-', '-', '+'},
      {"Answer: 34.", "34", '-', '-', '-', '-', '+'},
      {"Answer: the value is 34", "34", '-', '-', '-', '-', '-'},
      {"Answer: \\boxed{\\frac{3}{7}}", "3/7", '+', 'x', '-', '+', '+'},
      {"Answer: 3/7", "3/7", '-', 'x', '+', '-', '+'},
      {"no answer", "3/7", '-', 'x', '-', '-', '-'},
  };
  for (const auto& c : cases) {
    for (const auto& [kind, wanted] : {std::pair{GraderKind::math_miles, c.math_miles}, {GraderKind::dapo_miles, c.dapo_miles},
                                       {GraderKind::dapo_verl, c.dapo_verl}, {GraderKind::math, c.math}, {GraderKind::dapo, c.dapo},
                                       {GraderKind::deepscaler, c.math}}) {
      const RewardResult r = grade(kind, c.response, c.label);
      const std::string what = fmt::format("{} on {} for {}: {}", kGraderNames[static_cast<size_t>(kind)], c.response, c.label, r.pred);
      EXPECT_EQ(r.scored(), wanted != 'x') << what;
      if (!r.scored()) continue;
      EXPECT_EQ(r.correct, wanted == '+') << what;
      const bool dapo = kind == GraderKind::dapo || kind == GraderKind::dapo_miles || kind == GraderKind::dapo_verl;
      EXPECT_EQ(r.score, wanted == '+' ? 1.0f : dapo ? -1.0f : 0.0f) << what;
    }
  }
}

TEST(Math, Integers) {
  const struct {
    const char *answer, *label;
    bool correct;
  } cases[] = {
      {"$34$", "34", true},       {"\\$34", "34", true},         {" 34 ", "34", true},       {"+34", "34", true},
      {"34.", "34", true},        {"34.00", "34", true},         {"34.01", "34", false},     {"00034", "34", true},
      {"-34", "34", false},       {"-0", "0", true},             {"000", "0", true},         {"1,000,000", "1000000", true},
      {"12,34", "1234", false},   {"1,2345", "12345", false},    {",123", "123", false},     {"1 234", "1234", true},
      {"34", "034", true},        {"34", "34.0", true},          {"340", "34", false},       {"3", "34", false},
      {"", "1", false},           {"\\text{34}", "34", true},    {"{34}", "34", true},       {"34\\!", "34", true},
      {"\\left(34\\right)", "(34)", true}, {"x = 34", "34", true}, {"x+y=34", "34", false},  {"n=-7", "-7", true},
      {"34 \\text{ apples}", "34", true},  {"34%", "34", true},  {"1e3", "1000", false},     {"0x22", "34", false},
      {"--5", "5", false},        {"5-", "5", false},            {".5", "0.5", true},
      {"12345678901234567890123", "12345678901234567890123", true},
      {"34", "\\boxed{34}", true}, {"34", "so \\boxed{35}", false},
      {"2^{10}", "1024", false},  {"\\sqrt{16}", "4", false},
  };
  for (const auto& c : cases) {
    const RewardResult r = math(std::string("so \\boxed{") + c.answer + "}.", c.label);
    EXPECT_EQ(r.correct, c.correct) << c.answer << " for " << c.label << ": " << r.pred;
    EXPECT_EQ(r.score, c.correct ? 1.0f : 0.0f);
  }
}

TEST(Math, SymbolicStep) {
  const struct {
    const char *answer, *label;
    bool correct;
  } cases[] = {
      {"\\sqrt{12}", "2\\sqrt{3}", true},  {"(x+1)^2", "x^2+2x+1", true},       {"(1,\\sqrt{12})", "(1,2\\sqrt{3})", true},
      {"(1,2]", "(1,2)", false},           {"7 3/4", "31/4", true},             {"7\\frac{3}{4}", "\\frac{31}{4}", true},
      {"a+b+c", "c+b+a", false},           {"2^{3^2}", "2^{9}", false},         {"3 million", "3000000", false},
      {"3\\pi", "\\pi\\cdot3", true},      {"12 meters", "12", true},           {"12 \\text{or} 13", "12,13", true},
      {"\\frac{x}{2}", "0.5x", true},      {"\\frac{4}{6}", "\\frac{2}{3}", false},
  };
  for (const auto& c : cases)
    EXPECT_EQ(math(std::string("\\boxed{") + c.answer + "}", c.label).correct, c.correct) << c.answer << " for " << c.label;
  EXPECT_TRUE(grade(GraderKind::math_miles, "\\boxed{1e3}", "1000").correct);
}

TEST(Math, EqualAnswersHaveEqualPredictions) {
  for (const char* answer : {"1,234", "1234.0", "01234", "$1234$", "+1234", "1{,}234"}) {
    EXPECT_EQ(math(std::string("\\boxed{") + answer + "}", "1").pred, "1234") << answer;
    EXPECT_EQ(grade(GraderKind::standard, std::string("\\boxed{") + answer + "}", "1").pred, "1234") << answer;
  }
}

TEST(Math, LatexForms) {
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

TEST(Thinking, OnlyWhatFollowsCounts) {
  const GradeOptions thinking{.thinking = true};
  for (const GraderKind kind : {GraderKind::math, GraderKind::standard, GraderKind::dapo}) {
    EXPECT_TRUE(grade(kind, "<think>\\boxed{3}</think>\\boxed{4}", "4", thinking).correct);
    EXPECT_EQ(grade(kind, "<think>\\boxed{4}</think> done", "4", thinking).reason, RewardReason::no_answer);
    EXPECT_EQ(grade(kind, "<think>\\boxed{4}", "4", thinking).reason, RewardReason::unfinished_thinking);
    EXPECT_TRUE(grade(kind, "a</think>b</think>\\boxed{4}", "4", thinking).correct);
    EXPECT_TRUE(grade(kind, "<think>\\boxed{4}", "4").correct);
  }
  EXPECT_TRUE(grade(GraderKind::math_miles, "<think>\\boxed{4}", "4", thinking).correct);
}

TEST(Deepscaler, WantsAMarkerOnlyWhereThereIsThinking) {
  const GradeOptions thinking{.thinking = true};
  EXPECT_EQ(grade(GraderKind::deepscaler, "\\boxed{4}", "4", thinking).reason, RewardReason::no_think_marker);
  EXPECT_EQ(grade(GraderKind::deepscaler, "\\boxed{4}", "4", thinking).score, 0.0f);
  EXPECT_TRUE(grade(GraderKind::deepscaler, "\\boxed{4}", "4").correct);
  EXPECT_TRUE(grade(GraderKind::deepscaler, "hm</think>\\boxed{4}", "4", thinking).correct);
  EXPECT_TRUE(grade(GraderKind::deepscaler, "hm ###Response \\boxed{4}", "4", thinking).correct);
  EXPECT_FALSE(grade(GraderKind::deepscaler, "\\boxed{4}</think> so 4", "4").correct);
}

TEST(Dapo, LooksAtTheLast300Characters) {
  const std::string far = "Answer: 34\n" + std::string(289, 'x'), farther = far + "x";
  EXPECT_TRUE(grade(GraderKind::dapo, far, "34").correct);
  EXPECT_FALSE(grade(GraderKind::dapo, farther, "34").correct);
  std::string accents = "Answer: 34\n";
  for (int i = 0; i < 289; ++i) accents += "\u00e9";  // two bytes each
  EXPECT_TRUE(grade(GraderKind::dapo_verl, accents, "34").correct);
  EXPECT_TRUE(grade(GraderKind::dapo, "ANSWER : 34", "34").correct);
  EXPECT_EQ(grade(GraderKind::dapo, "34", "34").reason, RewardReason::no_answer);
  EXPECT_EQ(grade(GraderKind::dapo, "34", "34").score, -1.0f);
  EXPECT_NE(grade(GraderKind::dapo_miles, "Answer: 1", "1/2").error.find("is not an integer"), std::string::npos);
}

TEST(Exact, TrimsAndCompares) {
  const auto exact = [](const char* response, const char* label) { return grade(GraderKind::exact, response, label); };
  EXPECT_TRUE(exact(" 42\n", "42").correct);
  EXPECT_TRUE(exact("a b", " a b ").correct);
  EXPECT_FALSE(exact("42.0", "42").correct);
  EXPECT_EQ(exact("42.0", "42").reason, RewardReason::wrong);
  EXPECT_EQ(exact("42.0", "42").pred, "42.0");
  EXPECT_EQ(exact("  ", "42").reason, RewardReason::no_answer);
  EXPECT_EQ(exact("", "").reason, RewardReason::no_answer);
  EXPECT_EQ(exact("7", "7").score, 1.0f);
}

TEST(Graders, ABlankLabelIsAnErrorAndNotAZero) {
  for (const GraderKind kind : {GraderKind::standard, GraderKind::math, GraderKind::dapo, GraderKind::deepscaler, GraderKind::dapo_verl}) {
    const RewardResult r = grade(kind, "\\boxed{1}", " \n");
    EXPECT_FALSE(r.scored());
    EXPECT_EQ(r.error, "the label is blank");
  }
}

struct Row {
  std::string response, label;
  bool correct;
};

std::vector<Row> math_verify_rows() {
  std::vector<Row> rows;
  std::ifstream in(LOCKSTEP_SOURCE_DIR "/tests/data/math_verify.jsonl");
  for (std::string line; std::getline(in, line);) {
    const Result<JsonValue> v = parse_json(line);
    if (!v) continue;
    rows.push_back({v.value().find("response")->text, v.value().find("label")->text, v.value().find("correct")->boolean});
  }
  return rows;
}

TEST(Standard, MathVerifyRows) {
  const std::vector<Row> rows = math_verify_rows();
  ASSERT_EQ(rows.size(), 168u);
  for (const Row& r : rows) {
    const RewardResult verdict = grade(GraderKind::standard, r.response, r.label);
    EXPECT_EQ(verdict.correct, r.correct) << r.response.substr(0, 200) << " for " << r.label << ": " << verdict.pred;
  }
}

TEST(Judge, AThousandRowsAtOnceAreAsOneByOne) {
  const std::vector<Row> source = math_verify_rows();
  std::vector<GradeRow> rows;
  for (size_t i = 0; i < 1000; ++i) rows.push_back({"", source[i % source.size()].response, source[(i * 7 / source.size() + i) % source.size()].label});
  for (const GraderKind kind : {GraderKind::standard, GraderKind::math, GraderKind::dapo}) {
    RewardOptions options;
    options.grader = kind;
    options.workers = 2;
    const std::vector<RewardResult> together = Judge::make(options).value()->grade(rows);
    ASSERT_EQ(together.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const RewardResult alone = grade(kind, rows[i].response, rows[i].label);
      ASSERT_EQ(together[i].score, alone.score) << i;
      ASSERT_EQ(together[i].correct, alone.correct) << i;
      ASSERT_EQ(together[i].pred, alone.pred) << i;
      ASSERT_EQ(together[i].reason, alone.reason) << i;
    }
  }
}

TEST(Judge, VerdictsSurviveTheirText) {
  std::vector<RewardResult> verdicts = {grade(GraderKind::standard, "\\boxed{1}", "1"), reward_error("no\nway \"x\""), grade(GraderKind::dapo, "", "1")};
  verdicts[0].score = 0.1f;
  const Result<std::vector<RewardResult>> back = verdicts_from_text(verdicts_text(verdicts));
  ASSERT_TRUE(back.is_ok());
  ASSERT_EQ(back.value().size(), verdicts.size());
  for (size_t i = 0; i < verdicts.size(); ++i) {
    EXPECT_EQ(back.value()[i].score, verdicts[i].score);
    EXPECT_EQ(back.value()[i].correct, verdicts[i].correct);
    EXPECT_EQ(back.value()[i].pred, verdicts[i].pred);
    EXPECT_EQ(back.value()[i].reason, verdicts[i].reason);
    EXPECT_EQ(back.value()[i].error, verdicts[i].error);
  }
  EXPECT_FALSE(verdicts_from_text("{}").is_ok());
}

std::string repeated(std::string_view piece, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += piece;
  return out;
}

double cpu_ms() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

// Inputs made to be slow. The worst time (of the processor) is printed; that they end at all, with a verdict, is what is checked.
TEST(Graders, HostileRows) {
  const std::string big = repeated("7", 8000);
  std::vector<std::string> answers = {
      repeated("{", 100000) + "5" + repeated("}", 100000), repeated("\\frac", 3000), repeated("\\frac{1}{", 500) + "1" + repeated("}", 500),
      repeated("\\sqrt{", 500) + "2" + repeated("}", 500), repeated("(", 3000), repeated("(", 30) + "1" + repeated(")", 30), big, big + "^{" + big + "}",
      "\\sqrt{" + big + "}", big + "!", "1000!", "1000!!", "9^{9^{9^{9}}}", "2^{100000}", "(x+1)^{1000}", "(a+b+c+d+e+f+g+h)^{50}", "(x+y+z)^{20}",
      "\\frac{1}{(x+y+z+w)^{30}}+\\frac{1}{(x-y)^{30}}", repeated("(x+1)(x-1)", 200), repeated("1+", 1400) + "1", repeated("\\pm 1", 400),
      repeated("\\{", 40) + "1\\pm2" + repeated("\\}", 40), repeated("1\\pm2,", 60) + "1", repeated("1,", 1000), repeated("\\{1,2\\},", 60) + "1",
      repeated("\\sin", 1000) + "x", "\\sqrt{" + repeated("x+", 1000) + "1}", repeated("2^", 1000) + "2", repeated("\\text{a", 1000) + repeated("}", 1000),
      repeated("\\mathrm{", 1000) + "1" + repeated("}", 1000), "1e999999", "1.5e-999999", "0." + repeated("3", 8000), repeated("|", 3000),
      repeated("|x", 200) + repeated("|", 200), "\\ln(" + big + ")", "\\binom{1000}{500}^{20}", repeated("\\sqrt{2}+\\sqrt{3}", 1) + repeated("+\\sqrt{5}", 300),
      repeated("(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7}+\\sqrt{11})", 40), "\\begin{matrix}" + repeated("1&", 1000) + "\\end{matrix}", repeated("\\boxed{", 2000),
      "(1+\\sqrt[3]{2})^{1000}", "\\sqrt[9999]{2}^{9998}", repeated("1/", 1400) + "3", repeated("\\frac{a}{b+1}+", 100) + "1", repeated("=", 2000), repeated("x=", 1000) + "1",
      "\\gcd(" + repeated("1,", 60) + "1)", std::string("\0\xff\xfe", 3), repeated("\\\\", 3000), repeated("1{,}234", 1000), repeated("1\\,000", 1000)};
  for (int k = 1; k <= 16; ++k) answers.push_back(fmt::format("({}c_{{1}}+d_{{2}}+2)^{{{}}}", repeated("a+b+", static_cast<size_t>(k)), 3 * k));
  double worst_ms = 0;
  std::string worst;
  int64_t timeouts = 0;
  for (const std::string& answer : answers) {
    for (const std::string& label : {std::string("1"), std::string("(x+y)^{12}"), fmt::format("{}1", answer.substr(0, 20)), fmt::format("1+{}", answer)}) {
      for (const GraderKind kind : {GraderKind::standard, GraderKind::math, GraderKind::math_miles, GraderKind::deepscaler, GraderKind::dapo,
                                    GraderKind::dapo_miles, GraderKind::dapo_verl, GraderKind::exact}) {
        for (const std::string& response : {fmt::format("\\boxed{{{}}}", answer), answer, fmt::format("Answer: {}", answer)}) {
          const double start_ms = cpu_ms();
          const RewardResult r = grade(kind, response, label);
          const double ms = cpu_ms() - start_ms;
          ASSERT_EQ(r.correct, r.reason == RewardReason::correct);
          ASSERT_LE(r.pred.size(), kMaxPredBytes);
          timeouts += r.reason == RewardReason::timeout ? 1 : 0;
          if (ms > worst_ms) {
            worst_ms = ms;
            worst = fmt::format("{} on {} for {}", kGraderNames[static_cast<size_t>(kind)], response.substr(0, 60), label.substr(0, 60));
          }
        }
      }
    }
  }
  EXPECT_GT(timeouts, 0);  // some of these are beyond the budget, and say so
  std::printf("worst row %.2f ms (%s), %lld time-outs\n", worst_ms, worst.c_str(), static_cast<long long>(timeouts));
  const std::string digits(5000, '1');
  EXPECT_FALSE(math("\\boxed{" + digits + "}", digits).correct);  // an answer that is cut equals nothing
  EXPECT_TRUE(grade(GraderKind::standard, "\\boxed{" + digits + "}", digits).correct);
}

TEST(Graders, AnyBytesGiveAVerdict) {
  Philox rng(9, RngPurpose::test);
  const char* pieces[] = {"\\boxed{", "}",  "{", "\\frac", "\\sqrt", "1", "2", ",", ".", "/", "-", "=", "x", "\\text{ ", "$", "\\left", "\xff", " ",
                          "\\",       "%",  "\\\\", "^\\circ", "{,}", "(", ")", "^", "_", "\\pm", "\\{", "\\}", "|", "!", "\\sin", "Answer:"};
  for (int i = 0; i < 40000; ++i) {
    std::string s, label;
    for (uint32_t k = rng.below(12); k > 0; --k) s += pieces[rng.below(std::size(pieces))];
    for (uint32_t k = rng.below(4); k > 0; --k) label += pieces[rng.below(std::size(pieces))];
    for (int kind = 0; kind < static_cast<int>(GraderKind::command); ++kind) {
      const RewardResult r = grade(static_cast<GraderKind>(kind), "\\boxed{" + s, label);
      ASSERT_EQ(r.correct, r.reason == RewardReason::correct);
      ASSERT_EQ(r.scored(), r.error.empty());
    }
    ASSERT_LE(normalize_math_answer(s).size(), 4 * kMaxAnswerBytes);
  }
}

TEST(RewardReason, Names) {
  EXPECT_STREQ(reward_reason_name(RewardReason::correct), "correct");
  EXPECT_STREQ(reward_reason_name(RewardReason::unfinished_thinking), "unfinished_thinking");
  EXPECT_STREQ(reward_reason_name(RewardReason::error), "error");
}

}  // namespace
}  // namespace lockstep
