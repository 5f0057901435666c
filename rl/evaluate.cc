#include "rl/evaluate.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <filesystem>

#include <xxhash.h>

#include "io/file.h"
#include "rl/sampling.h"

namespace lockstep {

namespace {

// Keeps the draws of evaluations apart from those of training prompts, whose ids count up from 0.
constexpr uint64_t kEvalPrompt = uint64_t{1} << 62;

std::vector<Request> make_requests(std::span<const Prompt> problems, const EvalOptions& options, const Policy& policy) {
  std::vector<Request> requests;
  for (const Prompt& p : problems) {
    Request r;
    r.prompt_id = kEvalPrompt + static_cast<uint64_t>(p.row);
    r.prompt = p.tokens;
    r.num_samples = static_cast<int32_t>(options.samples);
    r.seed = static_cast<uint64_t>(options.seed);
    r.sampling.temperature = options.temperature;
    r.sampling.top_p = options.top_p;
    r.sampling.top_k = static_cast<int32_t>(std::min<int64_t>(options.top_k, policy.config().vocab_size));
    r.sampling.max_new_tokens = options.max_new_tokens;
    r.sampling.stop_ids = {policy.tokenizer().eos_id()};
    requests.push_back(std::move(r));
  }
  return requests;
}

uint64_t request_key(uint64_t weights, const Request& r) {
  const SamplingOptions& s = r.sampling;
  std::string text = fmt::format("{:016x} {} {} {:08x} {:08x} {} {}", weights, r.seed, r.prompt_id, std::bit_cast<uint32_t>(s.temperature),
                                 std::bit_cast<uint32_t>(s.top_p), s.top_k, s.max_new_tokens);
  for (const int32_t id : s.stop_ids) text += fmt::format(" {}", id);
  return XXH64(r.prompt.data(), r.prompt.size() * sizeof(int32_t), checksum(text));
}

// Requests for what `have` lacks: in order, several for a problem whose samples are there in part.
std::vector<Request> requests_for_rest(std::span<const Request> requests, std::span<const EvalSample> have) {
  std::vector<Request> rest;
  size_t at = 0;
  for (size_t q = 0; q < requests.size(); ++q) {
    bool open = false;  // the last request of `rest` ends just before this sample
    for (int32_t s = 0; s < requests[q].num_samples; ++s) {
      if (at < have.size() && have[at].problem == static_cast<int64_t>(q) && have[at].sample == s) {
        ++at;
        open = false;
        continue;
      }
      if (!open) {
        rest.push_back(requests[q]);
        rest.back().first_sample = s;
        rest.back().num_samples = 0;
      }
      ++rest.back().num_samples;
      open = true;
    }
  }
  return rest;
}

}  // namespace

std::span<const Prompt> problems_asked(std::span<const Prompt> problems, const EvalOptions& options) {
  return options.problems > 0 ? problems.first(std::min(problems.size(), static_cast<size_t>(options.problems))) : problems;
}

Result<uint64_t> weights_key(const PolicyOptions& options, uint64_t seed) {
  namespace fs = std::filesystem;
  std::string text = fmt::format("{}\n", static_cast<int>(options.sampler_numerics()));
  std::error_code error;
  if (!options.config.empty()) {
    Result<std::string> config = read_file(fs::is_directory(options.config, error) ? options.config + "/config.json" : options.config);
    if (!config) return config.status();
    text += config.value();
  }
  if (!fs::exists(options.init, error)) return checksum(text + fmt::format("{} {}", options.init, seed));  // random
  if (const std::string sums = options.init + "/checksums.json"; fs::exists(sums, error)) {
    Result<std::string> read = read_file(sums);
    if (!read) return read.status();
    return checksum(text + read.value());
  }
  std::vector<std::string> files;
  const auto add = [&](const fs::path& path) {
    files.push_back(fmt::format("{} {} {}\n", path.filename().string(), fs::file_size(path, error), fs::last_write_time(path, error).time_since_epoch().count()));
  };
  if (fs::is_directory(options.init, error)) {
    for (fs::directory_iterator it(options.init, error); !error && it != fs::directory_iterator(); it.increment(error))
      if (it->is_regular_file(error)) add(it->path());
  } else {
    add(options.init);
  }
  if (error) return errorf("cannot look at {}: {}", options.init, error.message());
  std::sort(files.begin(), files.end());
  for (const std::string& f : files) text += f;
  return checksum(text);
}

Result<std::vector<EvalSample>> sample_answers(Policy& policy, std::span<const Prompt> problems, const EvalOptions& options, const Hooks& hooks,
                                               const std::string& label, const Peers& peers, SampleLog* log, uint64_t weights) {
  const std::vector<Request> requests = make_requests(problems, options, policy);
  std::vector<uint64_t> keys;
  for (const Request& r : requests) keys.push_back(request_key(weights, r));
  std::vector<EvalSample> samples;
  if (log != nullptr) {
    Result<std::string> text = peers.first() ? log->read() : Result<std::string>(std::string());
    LOCKSTEP_RETURN_IF_ERROR(peers.agree(text.status(), "samples"));
    peers.tell(&text.value(), "samples");
    LoggedSamples found = parse_sample_log(text.value(), keys, options.samples);
    const Result<std::string> said = describe_log(found, log->directory());
    if (!said) return said.status();
    if (!said.value().empty()) hooks.say(said.value());
    LOCKSTEP_RETURN_IF_ERROR(peers.agree(peers.leads_engine() ? log->open() : Status::ok(), "samples"));
    samples = std::move(found.samples);
    log->num_reused = static_cast<int64_t>(samples.size());
  }
  const auto to_sample = [&](const Completion& c) {
    const auto at = std::lower_bound(requests.begin(), requests.end(), c.prompt_id, [](const Request& r, uint64_t id) { return r.prompt_id < id; });
    return EvalSample{.problem = at - requests.begin(),
                      .sample = c.sample_idx,
                      .response = response_text(policy.tokenizer(), c.tokens),
                      .status = c.reason == FinishReason::length ? AnswerStatus::truncated : AnswerStatus::completed,
                      .num_tokens = static_cast<int64_t>(c.tokens.size())};
  };
  const OnFinished keep = [&](std::span<const Completion> finished) {
    std::vector<EvalSample> batch;
    for (const Completion& c : finished) batch.push_back(to_sample(c));
    return log->append(batch, problems, keys);
  };
  const std::vector<Request> rest = requests_for_rest(requests, samples);
  Result<std::vector<Completion>> completions =
      peers.run(policy.own_engine(), policy.context(), rest, hooks, label, log != nullptr && peers.leads_engine() ? keep : OnFinished());
  if (!completions) return completions.status();
  for (const Completion& c : completions.value()) samples.push_back(to_sample(c));
  std::sort(samples.begin(), samples.end(), by_problem_and_sample);
  return samples;
}

Result<std::vector<RewardResult>> judge_answers(std::span<const Prompt> problems, std::span<const EvalSample> samples, const RewardOptions& reward,
                                                const Peers& peers) {
  std::vector<GradeRow> rows;
  for (const EvalSample& s : samples) {
    const Prompt& problem = problems[static_cast<size_t>(s.problem)];
    rows.push_back({problem.text, s.response, problem.label});
  }
  Result<std::unique_ptr<Judge>> judge = Judge::make(reward);
  if (!judge) return judge.status();
  Result<std::vector<RewardResult>> verdicts = peers.grade(*judge.value(), rows);
  if (!verdicts) return verdicts;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!verdicts.value()[i].scored())
      return errorf("sample {} of row {} was not judged: {}", samples[i].sample, problems[static_cast<size_t>(samples[i].problem)].row,
                    verdicts.value()[i].error);
  }
  return verdicts;
}

Result<EvalReport> evaluate(Policy& policy, std::span<const Prompt> problems, const RewardOptions& reward, const EvalOptions& options,
                            const Hooks& hooks, const std::string& label, std::string* records, const Peers& peers) {
  const auto start = std::chrono::steady_clock::now();
  problems = problems_asked(problems, options);
  const Result<std::vector<EvalSample>> samples = sample_answers(policy, problems, options, hooks, label, peers);
  if (!samples) return samples.status();
  const Result<std::vector<RewardResult>> verdicts = judge_answers(problems, samples.value(), reward, peers);
  if (!verdicts) return verdicts.status();
  EvalReport report = make_eval_report(problems, samples.value(), verdicts.value());
  if (records != nullptr) *records += eval_records(problems, samples.value(), verdicts.value());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace lockstep
