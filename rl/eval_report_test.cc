// What judged answers say, against values worked out by hand.

#include "rl/eval_report.h"

#include <gtest/gtest.h>

#include <cmath>

#include "io/json.h"

namespace lockstep {
namespace {

struct Answers {
  std::vector<Prompt> problems;
  std::vector<EvalSample> samples;
  std::vector<RewardResult> verdicts;
  void problem(const std::string& label, std::initializer_list<const char*> preds) {
    const auto q = static_cast<int64_t>(problems.size());
    problems.push_back({.row = q, .text = "p", .tokens = {}, .label = label, .row_id = fmt::format("id{}", q)});
    int64_t s = 0;
    for (const char* pred : preds) {
      samples.push_back({.problem = q, .sample = s++, .response = "r", .status = AnswerStatus::completed, .num_tokens = 10});
      RewardResult v;
      v.pred = pred;
      v.correct = label == pred;
      v.reason = v.correct ? RewardReason::correct : v.pred.empty() ? RewardReason::no_answer : RewardReason::wrong;
      verdicts.push_back(v);
    }
  }
  EvalReport report() const { return make_eval_report(problems, samples, verdicts); }
};

Answers three_problems() {
  Answers a;
  a.problem("7", {"7", "7", "3", ""});  // 2 of 4, majority right
  a.problem("1", {"2", "2", "1", "1"});  // 2 of 4, a tie that goes to the wrong one
  a.problem("5", {"", "", "", ""});      // 0 of 4
  a.samples[1].status = AnswerStatus::truncated;
  a.samples[4].num_tokens = 34;
  return a;
}

TEST(EvalReport, ByHand) {
  const EvalReport r = three_problems().report();
  EXPECT_EQ(r.num_problems, 3);
  EXPECT_EQ(r.num_samples, 4);
  // c = 2, 2, 0 of n = 4: pass@1 (1/2 + 1/2 + 0) / 3, pass@2 1 - C(2,2)/C(4,2) = 5/6, pass@4 1.
  ASSERT_EQ(r.pass_at_k.size(), 3u);
  EXPECT_NEAR(r.pass(1), 1.0 / 3, 1e-15);
  EXPECT_NEAR(r.pass(2), 5.0 / 9, 1e-15);
  EXPECT_NEAR(r.pass(4), 2.0 / 3, 1e-15);
  // Values 1/2, 1/2, 0 about 1/3: squares 1/36 + 1/36 + 4/36 = 1/6; sqrt(1/6 / 6) = 1/6.
  EXPECT_NEAR(*r.pass_at_k[0].estimate.error, 1.0 / 6, 1e-15);
  EXPECT_NEAR(*r.pass_at_k[1].estimate.error, 5.0 / 18, 1e-15);
  // Sampling alone: sqrt(1/16 + 1/16 + 0) / 3.
  EXPECT_NEAR(r.standard_error, std::sqrt(1.0 / 8) / 3, 1e-15);
  EXPECT_NEAR(r.majority.value, 1.0 / 3, 1e-15);
  EXPECT_NEAR(*r.majority.error, 1.0 / 3, 1e-15);
  EXPECT_EQ(r.problems[1].majority, "2");
  EXPECT_EQ(r.problems[1].votes, 2);
  EXPECT_FALSE(r.problems[1].majority_correct);
  EXPECT_NEAR(*r.truncated_ratio, 1.0 / 12, 1e-15);
  EXPECT_NEAR(r.unanswered_ratio, 5.0 / 12, 1e-15);
  EXPECT_NEAR(*r.mean_length, 12, 1e-12);
  EXPECT_NEAR(*r.problems[1].mean_length, 16, 1e-12);
}

TEST(EvalReport, UnevenSamples) {
  Answers a;
  a.problem("1", {"1", "1", "0"});
  a.problem("1", {"0", "0"});
  const EvalReport r = a.report();
  EXPECT_EQ(r.num_samples, 2);
  ASSERT_EQ(r.pass_at_k.size(), 2u);
  EXPECT_NEAR(r.pass(1), 1.0 / 3, 1e-15) << "a mean over problems, not samples";
  EXPECT_NEAR(r.pass(2), 0.5, 1e-15);
  EXPECT_NE(eval_report_markdown(r, {}).find("2 problems, at least 2 samples of each."), std::string::npos);
}

TEST(EvalReport, WhatIsUnknownIsAbsent) {
  Answers a;
  a.problem("1", {"1"});
  a.samples[0].status = AnswerStatus::unknown;
  a.samples[0].num_tokens = -1;
  const EvalReport r = a.report();
  EXPECT_FALSE(r.truncated_ratio || r.mean_length || r.pass_at_k[0].estimate.error);
  for (const auto& [name, value] : r.values("s")) {
    EXPECT_EQ(name.find("truncated"), std::string::npos);
    EXPECT_EQ(name.find("response_len"), std::string::npos);
    EXPECT_EQ(name.find("over_problems"), std::string::npos);
    EXPECT_TRUE(std::isfinite(value)) << name;
  }
}

TEST(EvalReport, Files) {
  Answers a = three_problems();
  a.verdicts[0].pred = "a|b\n*c*" + std::string(100, 'x');
  const EvalReport r = a.report();
  const EvalProtocol p{.subject = "model", .set = "set", .settings = {{"samples", "4"}}, .seconds = {{"sampling", 1.5}}};
  const std::string md = eval_report_markdown(r, p);
  EXPECT_NE(md.find("| pass@1 | 0.3333 | 0.1667 |\n"), std::string::npos) << md;
  EXPECT_NE(md.find("| 1 | id1 | 1 | 2/4 | 2 (wrong) | 2 | 0 | 0 | 16.0 |\n"), std::string::npos) << md;
  EXPECT_NE(md.find("a\\|b \\*c\\*xxx"), std::string::npos) << md;
  const Result<JsonValue> json = parse_json(eval_report_json(r, p));
  ASSERT_TRUE(json.is_ok()) << json.message();
  EXPECT_EQ(json.value().find("problem_results")->items.size(), 3u);
  EXPECT_EQ(json.value().find("metrics")->find("eval/set-pass@4")->text.substr(0, 6), "0.6666");
  EXPECT_EQ(json.value().find("seconds")->find("sampling")->text, "1.5");
  const std::string records = eval_records(a.problems, a.samples, a.verdicts);
  EXPECT_NE(records.find(R"({"row":0,"id":"id0","sample":1,"prompt":"p","response":"r","label":"7","answer":"7","correct":true,"reason":"correct","status":"truncated","num_tokens":10})"),
            std::string::npos)
      << records;
}

}  // namespace
}  // namespace lockstep
