#include "rl/sampling.h"

#include <algorithm>

#include "rl/policy.h"

namespace lockstep {

Status submit_requests(Engine& engine, std::span<const Request> requests) {
  CHECK(engine.idle(), "the engine still works on earlier requests");
  for (const Request& r : requests) {
    if (Status status = engine.submit(r); !status) {
      engine.abort_all();
      (void)engine.take_finished();
      return errorf("prompt {}: {}", r.prompt_id, status.message());
    }
  }
  return Status::ok();
}

Result<std::vector<Completion>> finish_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks, const std::string& label,
                                                const OnFinished& on_finished) {
  int64_t expected = 0;
  for (const Request& r : requests) expected += r.num_samples;
  std::vector<Completion> done;
  done.reserve(static_cast<size_t>(expected));
  const int64_t tokens_before = engine.stats().decode_tokens;
  Status kept;
  const auto collect = [&] {
    std::vector<Completion> finished = engine.take_finished();
    if (on_finished && kept && !finished.empty()) kept = on_finished(finished);
    for (Completion& c : finished) done.push_back(std::move(c));
  };
  while (engine.step()) {
    collect();
    hooks.report(label, static_cast<int64_t>(done.size()), expected,
                 static_cast<double>(engine.stats().decode_tokens - tokens_before), "tokens");
  }
  collect();
  if (!kept) return kept;
  CHECK(static_cast<int64_t>(done.size()) == expected, "{} completions of {} samples", done.size(), expected);
  std::sort(done.begin(), done.end(), by_prompt_and_sample);
  return done;
}

std::vector<Completion> finish_until(Engine& engine, std::span<const Request> requests, const Hooks& hooks, const std::string& label,
                                     const std::function<bool(std::span<const Completion>)>& enough) {
  int64_t expected = 0;
  for (const Request& r : requests) expected += r.num_samples;
  std::vector<Completion> done, finished;
  const int64_t tokens_before = engine.stats().decode_tokens;
  const auto collect = [&] {
    finished = engine.take_finished();
    done.insert(done.end(), finished.begin(), finished.end());
  };
  while (!enough(finished)) {
    engine.step();
    collect();
    hooks.report(label, static_cast<int64_t>(done.size()), expected, static_cast<double>(engine.stats().decode_tokens - tokens_before), "tokens");
  }
  engine.abort_all();
  collect();
  CHECK(static_cast<int64_t>(done.size()) == expected, "{} completions of {} samples", done.size(), expected);
  std::sort(done.begin(), done.end(), by_prompt_and_sample);
  return done;
}

Result<std::vector<Completion>> run_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks,
                                             const std::string& label, const OnFinished& on_finished) {
  LOCKSTEP_RETURN_IF_ERROR(submit_requests(engine, requests));
  return finish_requests(engine, requests, hooks, label, on_finished);
}

Trajectory make_trajectory(const Prompt& prompt, const Completion& completion, int64_t samples_per_prompt,
                           const Tokenizer& tokenizer, int64_t vocab_size) {
  Trajectory t;
  t.group_index = prompt.id;
  t.index = prompt.id * samples_per_prompt + completion.sample_idx;
  t.tokens = prompt.tokens;
  t.tokens.insert(t.tokens.end(), completion.tokens.begin(), completion.tokens.end());
  t.prompt_length = static_cast<int64_t>(prompt.tokens.size());
  t.mask.assign(completion.tokens.size(), 1);
  t.logprobs = completion.logprobs;
  t.versions = completion.versions;
  t.choices = completion.choices;
  t.text = response_text(tokenizer, completion.tokens);
  switch (completion.reason) {
    case FinishReason::stop: t.status = TrajectoryStatus::completed; break;
    case FinishReason::length: t.status = TrajectoryStatus::truncated; break;
    case FinishReason::abort: t.status = TrajectoryStatus::aborted; break;
  }
  if (t.usable()) {
    if (const Status valid = check_trajectory(t, vocab_size); !valid) {
      t.status = TrajectoryStatus::failed;
      t.failure = valid.message();
    }
  }
  return t;
}

}  // namespace lockstep
