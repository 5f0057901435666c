#include "rl/eval_report.h"

#include <algorithm>
#include <cmath>

#include "io/json.h"
#include "rl/passk.h"

namespace lockstep {

namespace {

Estimate estimate(std::span<const double> x) {
  const auto n = static_cast<double>(x.size());
  double mean = 0, squares = 0;
  for (const double v : x) mean += v;
  mean /= n;
  for (const double v : x) squares += (v - mean) * (v - mean);
  Estimate e{.value = mean, .error = {}};
  if (x.size() > 1) e.error = std::sqrt(squares / (n * (n - 1)));
  return e;
}

// Text for a table's cell. Answers are the model's words.
std::string cell(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out;
  for (const char c : text.substr(0, kLongest)) {
    if (c == '|' || c == '\\' || c == '`' || c == '*' || c == '_' || c == '<' || c == '$') out += '\\';
    out += c == '\n' || c == '\r' ? ' ' : c;
  }
  if (text.size() > kLongest) {
    while (!out.empty() && (static_cast<uint8_t>(out.back()) & 0xC0) == 0x80) out.pop_back();  // no half of a character
    if (!out.empty() && static_cast<uint8_t>(out.back()) >= 0xC0) out.pop_back();
    out += "...";
  }
  return out;
}

std::string error_text(const Estimate& e) { return e.error ? fmt::format("{:.4f}", *e.error) : "-"; }

JsonLine estimate_json(const Estimate& e) {
  JsonLine line;
  line.add("value", e.value);
  if (e.error) line.add("standard_error", *e.error);
  return line;
}

std::string problem_json(const ProblemResult& p) {
  JsonLine line;
  line.add("row", p.row);
  if (!p.id.empty()) line.add("id", p.id);
  line.add("label", p.label)
      .add("samples", p.num_samples)
      .add("correct", p.num_correct)
      .add("majority", p.majority)
      .add("votes", p.votes)
      .add("majority_correct", p.majority_correct)
      .add("truncated", p.num_truncated)
      .add("unanswered", p.num_unanswered);
  if (p.mean_length) line.add("mean_length", *p.mean_length);
  return line.str();
}

}  // namespace

double EvalReport::pass(int64_t k) const {
  for (const PassAtK& p : pass_at_k) {
    if (p.k == k) return p.estimate.value;
  }
  CHECK(false, "pass@{} of {} samples was not computed", k, num_samples);
  return 0;
}

std::vector<std::pair<std::string, double>> EvalReport::values(const std::string& set) const {
  std::vector<std::pair<std::string, double>> v = {{"eval/" + set, pass(1)}};
  for (const PassAtK& p : pass_at_k) v.emplace_back(fmt::format("eval/{}-pass@{}", set, p.k), p.estimate.value);
  v.emplace_back(fmt::format("eval/{}-maj@{}", set, num_samples), majority.value);
  v.emplace_back(fmt::format("eval/{}-standard_error", set), standard_error);
  if (pass_at_k[0].estimate.error) v.emplace_back(fmt::format("eval/{}-standard_error_over_problems", set), *pass_at_k[0].estimate.error);
  if (truncated_ratio) v.emplace_back(fmt::format("eval/{}-truncated_ratio", set), *truncated_ratio);
  v.emplace_back(fmt::format("eval/{}-unanswered_ratio", set), unanswered_ratio);
  if (mean_length) v.emplace_back(fmt::format("eval/{}/response_len/mean", set), *mean_length);
  return v;
}

std::string EvalReport::str() const {
  std::string text;
  for (const PassAtK& p : pass_at_k) text += fmt::format("pass@{} {:.3f}  ", p.k, p.estimate.value);
  text += fmt::format("(se {:.3f})", standard_error);
  if (truncated_ratio) text += fmt::format("  truncated {:.1f}%", 100 * *truncated_ratio);
  text += fmt::format("  unanswered {:.1f}%", 100 * unanswered_ratio);
  if (mean_length) text += fmt::format("  length {:.1f}", *mean_length);
  return text + fmt::format("  {} problems x {}", num_problems, num_samples);
}

EvalReport make_eval_report(std::span<const Prompt> problems, std::span<const EvalSample> samples, std::span<const RewardResult> verdicts) {
  CHECK(samples.size() == verdicts.size() && !problems.empty(), "{} samples, {} verdicts, {} problems", samples.size(), verdicts.size(), problems.size());
  EvalReport report;
  report.num_problems = static_cast<int64_t>(problems.size());
  int64_t truncated = 0, ended = 0, unanswered = 0, with_length = 0;
  size_t at = 0;
  for (size_t q = 0; q < problems.size(); ++q) {
    ProblemResult p;
    p.row = problems[q].row;
    p.id = problems[q].row_id;
    p.label = problems[q].label;
    std::vector<std::string> answers;
    const size_t first = at;
    int64_t tokens = 0, counted = 0;
    for (; at < samples.size() && samples[at].problem == static_cast<int64_t>(q); ++at) {
      const EvalSample& s = samples[at];
      CHECK(verdicts[at].scored(), "sample {} of problem {} was not judged", s.sample, q);
      ++p.num_samples;
      p.num_correct += verdicts[at].correct ? 1 : 0;
      p.num_unanswered += verdicts[at].pred.empty() ? 1 : 0;
      p.num_truncated += s.status == AnswerStatus::truncated ? 1 : 0;
      ended += s.status != AnswerStatus::unknown ? 1 : 0;
      if (s.num_tokens >= 0) {
        tokens += s.num_tokens;
        ++counted;
      }
      answers.push_back(verdicts[at].pred);
    }
    CHECK(p.num_samples > 0, "problem {} has no samples", q);
    if (const int64_t vote = majority_vote(answers); vote >= 0) {
      p.majority = answers[static_cast<size_t>(vote)];
      p.votes = std::count(answers.begin(), answers.end(), p.majority);
      p.majority_correct = verdicts[first + static_cast<size_t>(vote)].correct;
    }
    if (counted == p.num_samples) p.mean_length = static_cast<double>(tokens) / static_cast<double>(counted);
    report.num_tokens += tokens;
    with_length += counted;
    truncated += p.num_truncated;
    unanswered += p.num_unanswered;
    report.problems.push_back(std::move(p));
  }
  CHECK(at == samples.size(), "sample {} belongs to no problem or is out of order", at);

  const auto fewest = std::min_element(report.problems.begin(), report.problems.end(),
                                       [](const ProblemResult& a, const ProblemResult& b) { return a.num_samples < b.num_samples; });
  report.num_samples = fewest->num_samples;
  std::vector<double> values(problems.size());
  for (int64_t k = 1; k <= report.num_samples; k *= 2) {
    for (size_t q = 0; q < values.size(); ++q) values[q] = pass_at_k(report.problems[q].num_samples, report.problems[q].num_correct, k);
    report.pass_at_k.push_back({k, estimate(values)});
  }
  for (size_t q = 0; q < values.size(); ++q) values[q] = report.problems[q].majority_correct ? 1 : 0;
  report.majority = estimate(values);
  double variance = 0;
  for (const ProblemResult& p : report.problems) {
    const auto n = static_cast<double>(p.num_samples);
    const double share = static_cast<double>(p.num_correct) / n;
    variance += share * (1 - share) / n;
  }
  report.standard_error = std::sqrt(variance) / static_cast<double>(problems.size());
  const auto n = static_cast<double>(samples.size());
  if (ended > 0) report.truncated_ratio = static_cast<double>(truncated) / static_cast<double>(ended);
  report.unanswered_ratio = static_cast<double>(unanswered) / n;
  if (with_length == static_cast<int64_t>(samples.size())) report.mean_length = static_cast<double>(report.num_tokens) / n;
  return report;
}

std::string eval_records(std::span<const Prompt> problems, std::span<const EvalSample> samples, std::span<const RewardResult> verdicts) {
  std::string records;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Prompt& problem = problems[static_cast<size_t>(samples[i].problem)];
    JsonLine line;
    line.add("row", problem.row);
    if (!problem.row_id.empty()) line.add("id", problem.row_id);
    line.add("sample", samples[i].sample)
        .add("prompt", problem.text)
        .add("response", samples[i].response)
        .add("label", problem.label)
        .add("answer", verdicts[i].pred)
        .add("correct", verdicts[i].correct)
        .add("reason", reward_reason_name(verdicts[i].reason))
        .add("status", answer_status_name(samples[i].status));
    if (samples[i].num_tokens >= 0) line.add("num_tokens", samples[i].num_tokens);
    records += line.str() + "\n";
  }
  return records;
}

std::string eval_report_markdown(const EvalReport& report, const EvalProtocol& protocol) {
  std::string out = fmt::format("# {} on {}\n\n| setting | value |\n| --- | --- |\n", cell(protocol.subject), cell(protocol.set));
  for (const auto& [name, value] : protocol.settings) out += fmt::format("| {} | {} |\n", cell(name), cell(value));
  const bool even = std::all_of(report.problems.begin(), report.problems.end(), [&](const ProblemResult& p) { return p.num_samples == report.num_samples; });
  out += fmt::format("\n## Result\n\n{} problems, {}{} samples of each.\n\n| metric | value | standard error |\n| --- | ---: | ---: |\n", report.num_problems,
                     even ? "" : "at least ", report.num_samples);
  for (const PassAtK& p : report.pass_at_k) out += fmt::format("| pass@{} | {:.4f} | {} |\n", p.k, p.estimate.value, error_text(p.estimate));
  out += fmt::format("| maj@{} | {:.4f} | {} |\n", report.num_samples, report.majority.value, error_text(report.majority));
  if (report.truncated_ratio) out += fmt::format("| truncated | {:.4f} | |\n", *report.truncated_ratio);
  out += fmt::format("| no answer | {:.4f} | |\n", report.unanswered_ratio);
  if (report.mean_length) out += fmt::format("| mean length, tokens | {:.1f} | |\n", *report.mean_length);
  out += fmt::format(
      "\nStandard errors are over problems, sqrt(sum (x - mean)^2 / (Q (Q - 1))) with x the {} problems' values: what other problems of the kind would move. "
      "With these problems kept, sampling alone moves pass@1 by sqrt(sum p (1 - p) / n) / Q = {:.4f}. pass@k is the mean of 1 - C(n - c, k) / C(n, k); "
      "maj@n counts a problem whose most frequent normalised answer is right, ties going to the first.\n",
      report.num_problems, report.standard_error);
  out += "\n## Problems\n\n| row | id | label | correct | most frequent answer | votes | truncated | no answer | mean length |\n"
         "| ---: | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |\n";
  for (const ProblemResult& p : report.problems) {
    out += fmt::format("| {} | {} | {} | {}/{} | {}{} | {} | {} | {} | {} |\n", p.row, cell(p.id), cell(p.label), p.num_correct, p.num_samples, cell(p.majority),
                       p.majority.empty() ? "" : p.majority_correct ? " (right)" : " (wrong)", p.votes, p.num_truncated, p.num_unanswered,
                       p.mean_length ? fmt::format("{:.1f}", *p.mean_length) : "-");
  }
  if (!protocol.seconds.empty()) out += "\n## Time\n\n| phase | seconds |\n| --- | ---: |\n";
  for (const auto& [phase, seconds] : protocol.seconds) out += fmt::format("| {} | {:.2f} |\n", cell(phase), seconds);
  return out;
}

std::string eval_report_json(const EvalReport& report, const EvalProtocol& protocol) {
  JsonLine settings, metrics, pass, seconds;
  for (const auto& [name, value] : protocol.settings) settings.add(name, value);
  for (const auto& [name, value] : report.values(protocol.set)) metrics.add(name, value);
  for (const PassAtK& p : report.pass_at_k) pass.add(std::to_string(p.k), estimate_json(p.estimate));
  for (const auto& [phase, value] : protocol.seconds) seconds.add(phase, value);
  JsonLine line;
  line.add("subject", protocol.subject)
      .add("set", protocol.set)
      .add("settings", settings)
      .add("problems", report.num_problems)
      .add("samples", report.num_samples)
      .add("pass_at_k", pass)
      .add("majority", estimate_json(report.majority))
      .add("metrics", metrics)
      .add("seconds", seconds);
  std::string out = line.str();
  out.pop_back();
  out += ",\"problem_results\":[";
  for (size_t i = 0; i < report.problems.size(); ++i) out += (i > 0 ? ",\n" : "\n") + problem_json(report.problems[i]);
  return out + "]}\n";
}

}  // namespace lockstep
