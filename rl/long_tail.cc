#include "rl/long_tail.h"

#include <algorithm>
#include <cmath>

#include "io/checked_line.h"
#include "rl/rollout_log.h"

namespace lockstep {

namespace {

bool read_number(const JsonValue& object, const char* name, int64_t* out) {
  const JsonValue* v = object.find(name);
  return v != nullptr && v->as_int64(out);
}

}  // namespace

int64_t submitted_prompts(int64_t prompts_per_step, float over_sample) {
  // 1.1 as a float is a little more than 1.1, and 1.1 x 10 are 11.
  const double wanted = static_cast<double>(prompts_per_step) * static_cast<double>(over_sample) * (1 - 1e-6);
  return std::max(prompts_per_step, static_cast<int64_t>(std::ceil(wanted)));
}

std::vector<Request> continued_requests(const Request& request, std::span<const Completion> samples) {
  std::vector<Completion> said;  // without those that have said nothing
  std::copy_if(samples.begin(), samples.end(), std::back_inserter(said), [](const Completion& c) { return !c.tokens.empty(); });
  std::vector<Request> requests = missing_requests(std::span(&request, 1), said);
  for (const Completion& c : said) {
    if (c.reason != FinishReason::abort) continue;
    Request one = request;
    one.first_sample = c.sample_idx;
    one.num_samples = 1;
    one.log = {.tokens = c.tokens, .logprobs = c.logprobs, .versions = c.versions};
    requests.push_back(std::move(one));
  }
  std::sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) { return a.first_sample < b.first_sample; });
  return requests;
}

std::string long_tail_text(const LongTail& tail, std::span<const Request> requests, uint64_t numerics) {
  std::string text;
  for (const LongTail::Waiting& w : tail.waiting) text += checked_line(JsonLine().add("prompt_id", w.prompt.id).add("row", w.prompt.row)) + "\n";
  for (const auto& [row, longest] : tail.longest) text += checked_line(JsonLine().add("row", row).add("longest", longest)) + "\n";
  const RolloutLog log("", 0, numerics, requests, 0);
  for (const LongTail::Waiting& w : tail.waiting) text += log.text(w.samples, true);
  return text;
}

Result<LongTailRows> read_long_tail_rows(const std::string& text) {
  LongTailRows rows;
  int64_t damaged = 0;
  for_each_checked_line(text, [&](const JsonValue* line) {
    int64_t id = 0, row = 0, longest = 0;
    if (line != nullptr && line->find("key") != nullptr) return;
    if (line == nullptr || !read_number(*line, "row", &row)) {
      ++damaged;
    } else if (read_number(*line, "prompt_id", &id)) {
      rows.waiting.emplace_back(id, row);
    } else if (read_number(*line, "longest", &longest)) {
      rows.longest[row] = longest;
    } else {
      ++damaged;
    }
  });
  if (damaged > 0) return errorf("{} damaged lines; resume from an earlier checkpoint", damaged);
  return rows;
}

std::vector<Completion> read_long_tail_samples(const std::string& text, std::span<const Request> requests, uint64_t numerics) {
  return RolloutLog("", 0, numerics, requests, 0).read_text(text, true).completions;
}

}  // namespace lockstep
