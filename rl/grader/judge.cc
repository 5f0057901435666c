#include "rl/grader/judge.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <exception>
#include <iterator>
#include <thread>

#include "io/utf8.h"

namespace lockstep {

namespace {

class NamedJudge : public Judge {
 public:
  explicit NamedJudge(const RewardOptions& options) : options_(options) {}
  std::vector<RewardResult> grade(std::span<const GradeRow> rows) override {
    std::vector<RewardResult> verdicts(rows.size());
    for_each_row(rows.size(), options_.workers, [&](size_t i) {
      try {
        verdicts[i] = lockstep::grade(options_.grader, rows[i].response, rows[i].label, {.thinking = options_.thinking});
      } catch (const std::exception& e) {  // memory, say
        verdicts[i] = reward_error(e.what());
      }
    });
    return verdicts;
  }
  bool is_pure() const override { return true; }

 private:
  RewardOptions options_;
};

bool as_float(const JsonValue& v, float* out) {
  if (!v.is(JsonValue::Kind::number)) return false;
  const auto [end, error] = std::from_chars(v.text.data(), v.text.data() + v.text.size(), *out);
  return error == std::errc() && end == v.text.data() + v.text.size() && std::isfinite(*out);
}

RewardReason reason_from_name(std::string_view name, bool correct) {
  for (int r = 0; r <= static_cast<int>(RewardReason::timeout); ++r)
    if (name == reward_reason_name(static_cast<RewardReason>(r))) return static_cast<RewardReason>(r);
  return correct ? RewardReason::correct : RewardReason::wrong;
}

}  // namespace

Result<std::unique_ptr<Judge>> Judge::make(const RewardOptions& options) {
  if (options.grader == GraderKind::command) return make_command_judge(options);
  if (options.grader == GraderKind::http) return make_http_judge(options);
  return std::unique_ptr<Judge>(std::make_unique<NamedJudge>(options));
}

void for_each_row(size_t count, int64_t workers, const std::function<void(size_t)>& work) {
  if (workers == 0) workers = static_cast<int64_t>(std::thread::hardware_concurrency());
  const size_t num_threads = std::min(count, static_cast<size_t>(std::max<int64_t>(workers, 1)));
  std::atomic<size_t> next = 0;
  const auto drain = [&] {
    for (size_t i; (i = next.fetch_add(1)) < count;) work(i);
  };
  std::vector<std::thread> threads;
  for (size_t t = 1; t < num_threads; ++t) threads.emplace_back(drain);
  drain();
  for (std::thread& t : threads) t.join();
}

std::string grade_row_json(size_t id, const GradeRow& row) {
  JsonLine line;
  line.add("id", id);
  if (!row.prompt.empty()) line.add("prompt", row.prompt);
  return line.add("response", row.response).add("label", row.label).str();
}

RewardResult verdict_from_json(const JsonValue& answer, size_t id, bool* answers) {
  *answers = false;
  if (!answer.is(JsonValue::Kind::object)) return reward_error(fmt::format("the grader answered {}, an object is wanted", json_kind_name(answer.kind)));
  int64_t own = -1;
  const JsonValue* v = answer.find("id");
  if (v == nullptr || !v->as_int64(&own) || own != static_cast<int64_t>(id))
    return reward_error(fmt::format("the grader's answer has not the id it was asked for, {}", id));
  *answers = true;
  v = answer.find("error");
  if (v != nullptr && !v->is(JsonValue::Kind::null)) return reward_error(fmt::format("the grader says: {}", in_quotes(v->text)));
  RewardResult r;
  v = answer.find("score");
  if (v == nullptr || !as_float(*v, &r.score)) return reward_error("the grader's answer has no \"score\" that is a finite number");
  r.correct = r.score > 0;
  if (v = answer.find("correct"); v != nullptr) {
    if (!v->is(JsonValue::Kind::boolean)) return reward_error(fmt::format("the grader's \"correct\" is {}, true or false is wanted", json_kind_name(v->kind)));
    r.correct = v->boolean;
  }
  if (v = answer.find("pred"); v != nullptr && (v->is(JsonValue::Kind::string) || v->is(JsonValue::Kind::number)))
    r.pred = v->text.substr(0, kMaxPredBytes);
  v = answer.find("reason");
  r.reason = reason_from_name(v != nullptr ? std::string_view(v->text) : std::string_view(), r.correct);
  return r;
}

std::string verdicts_text(std::span<const RewardResult> verdicts) {
  std::string out;
  for (const RewardResult& r : verdicts) {
    out += JsonLine().add("s", r.score).add("c", r.correct).add("p", r.pred).add("r", static_cast<int>(r.reason)).add("e", r.error).str() + "\n";
  }
  return out;
}

Result<std::vector<RewardResult>> verdicts_from_text(std::string_view text) {
  std::vector<RewardResult> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const Result<JsonValue> line = parse_json(text.substr(at, end - at));
    if (!line) return errorf("verdict {}: {}", out.size(), line.message());
    const JsonValue& v = line.value();
    RewardResult r;
    int64_t reason = -1;
    for (const char* key : {"s", "c", "p", "r", "e"})
      if (v.find(key) == nullptr) return errorf("verdict {}: no \"{}\"", out.size(), key);
    if (!as_float(*v.find("s"), &r.score) || !v.find("r")->as_int64(&reason) || reason < 0 || reason > static_cast<int>(RewardReason::error))
      return errorf("verdict {}: not a verdict", out.size());
    r.correct = v.find("c")->boolean;
    r.pred = v.find("p")->text;
    r.reason = static_cast<RewardReason>(reason);
    r.error = v.find("e")->text;
    out.push_back(std::move(r));
    at = end + 1;
  }
  return out;
}

}  // namespace lockstep
