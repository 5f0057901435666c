#include "rl/sft.h"

#include <algorithm>
#include <chrono>

#include "io/json.h"
#include "io/jsonl.h"
#include "rl/checkpoint.h"
#include "rl/fingerprint.h"
#include "rl/order.h"
#include "rl/task.h"

namespace lockstep {

namespace {

// One worked example: the prompt is given, the completion and the end token are learnt.
struct Example {
  std::vector<int32_t> tokens;
  int64_t prompt_length = 0;
  int64_t line = 0;  // in the file
};

Result<std::vector<Example>> load_examples(const std::string& path, const PromptStyle& style, const Tokenizer& tokenizer) {
  Result<PromptFile> read = read_prompts(path, {.label_required = false, .completion_required = true, .style = style});
  if (!read) return read.status();
  PromptFile& file = read.value();
  Result<std::vector<EncodedRow>> encoding = encode_rows(file, tokenizer);
  if (!encoding) return encoding.status();
  std::vector<EncodedRow>& encoded = encoding.value();
  LOCKSTEP_RETURN_IF_ERROR(bad_rows_status(file));
  std::vector<Example> examples;
  for (size_t i = 0; i < encoded.size(); ++i) {
    Example e{.tokens = std::move(encoded[i].prompt), .prompt_length = 0, .line = file.rows[i].line};
    e.prompt_length = static_cast<int64_t>(e.tokens.size());
    e.tokens.insert(e.tokens.end(), encoded[i].completion.begin(), encoded[i].completion.end());
    e.tokens.push_back(tokenizer.eos_id());
    examples.push_back(std::move(e));
  }
  if (examples.empty()) return errorf("{}: no examples", path);
  return examples;
}

}  // namespace

Result<SftReport> run_sft(const SftConfig& config, bool resume, const Hooks& hooks) {
  using Clock = std::chrono::steady_clock;
  const SftOptions& o = config.sft;
  Result<std::unique_ptr<Tokenizer>> tokenizer = find_tokenizer(config.model);
  if (!tokenizer) return tokenizer.status();
  Result<std::vector<Example>> loaded = load_examples(o.file, config.style, *tokenizer.value());
  if (!loaded) return errorf("sft.file: {}", loaded.message());
  const std::vector<Example>& examples = loaded.value();
  const Example& longest = *std::max_element(examples.begin(), examples.end(),
                                             [](const Example& a, const Example& b) { return a.tokens.size() < b.tokens.size(); });
  Result<ModelConfig> model = find_model_config(config.model);
  if (!model) return model.status();
  if (static_cast<int64_t>(longest.tokens.size()) > model.value().max_positions) {
    return errorf("{}:{}: the example has {} tokens, the model's max_position_embeddings is {}; shorten it or leave it out", o.file,
                  longest.line, longest.tokens.size(), model.value().max_positions);
  }

  PolicyUse use{.seed = static_cast<uint64_t>(config.run.seed),
                .threads = static_cast<int>(config.run.threads),
                .sample = false,
                .train = true};
  use.engine.max_context = static_cast<int64_t>(longest.tokens.size());
  use.optimizer = config.optimizer;
  use.optimizer.lr = o.lr;
  use.optimizer.schedule = o.schedule;
  use.optimizer.warmup_steps = o.warmup_steps;
  use.optimizer.total_steps = o.steps;
  use.actor = config.actor;
  Result<std::unique_ptr<Policy>> made = Policy::make(config.model, use);
  if (!made) return made.status();
  Policy& policy = *made.value();

  Fingerprint rows;
  for (const Example& e : examples) {
    rows.add(e.tokens);
    rows.add(std::to_string(e.prompt_length));
  }
  RunState state{.kind = "sft",
                 .step = 0,
                 .seed = config.run.seed,
                 .num_rows = static_cast<int64_t>(examples.size()),
                 .rows = rows.str(),
                 .cursor = {}};
  const Peers alone;
  Result<OpenedRun> opened = open_run(config.run.dir, resume, config.resolved, alone, policy, state, hooks);
  if (!opened) return opened.status();
  RunDir& dir = *opened.value().dir;
  const auto save = [&] {
    return save_run(
        &dir, alone, [&](const std::string& directory) { return policy.save(directory); }, state, config.resolved, config.run.keep_checkpoints);
  };
  LOCKSTEP_RETURN_IF_ERROR(policy.publish().status());
  EpochOrder order(state.num_rows, static_cast<uint64_t>(config.run.seed));
  order.restore(state.cursor);
  hooks.say(fmt::format("sft: {} examples, {} steps of {}; {}", examples.size(), o.steps, o.batch_size, policy.memory_report()));

  hooks.begin();

  const LossConfig loss{.kind = LossKind::sft, .aggregation = Aggregation::token_mean};
  SftReport report;
  const auto start = Clock::now();
  const int64_t first_step = state.step;
  std::vector<TrainSample> batch;
  while (state.step < o.steps) {
    batch.clear();
    for (int64_t i = 0; i < o.batch_size; ++i) {
      const int64_t index = order.cursor().issued;
      const Example& e = examples[static_cast<size_t>(order.next())];
      TrainSample s;
      s.index = index;
      s.tokens = e.tokens;
      s.prompt_length = e.prompt_length;
      s.mask.assign(static_cast<size_t>(s.response_length()), 1);
      s.advantage.assign(s.mask.size(), 0.0f);
      report.num_tokens += static_cast<int64_t>(s.tokens.size());
      batch.push_back(std::move(s));
    }
    Result<StepMetrics> metrics = policy.actor().step(batch, loss, nullptr);
    if (!metrics) return metrics.status();
    ++state.step;
    state.cursor = order.cursor();

    JsonLine line;
    line.add("step", state.step);
    double loss_value = 0;
    for (const auto& [name, value] : metrics.value().values) {
      line.add("train/" + name, value);
      if (name == "loss") loss_value = value;
    }
    LOCKSTEP_RETURN_IF_ERROR(dir.append_metrics(line.str()));
    if (state.step == first_step + 1) report.first_loss = loss_value;
    report.last_loss = loss_value;
    report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    hooks.report("sft", state.step - first_step, o.steps - first_step, static_cast<double>(report.num_tokens), "tokens");
    if (state.step % std::max<int64_t>(1, o.steps / 10) == 0) {
      hooks.say(fmt::format("sft step {}/{}  loss {:.4f}  {:.0f} tokens/s", state.step, o.steps, loss_value,
                            static_cast<double>(report.num_tokens) / report.seconds));
    }
    if (config.run.checkpoint_every > 0 && state.step % config.run.checkpoint_every == 0) {
      LOCKSTEP_RETURN_IF_ERROR(save());
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(save());
  report.steps = state.step - first_step;
  report.checkpoint = dir.checkpoint_path(state.step);
  return report;
}

}  // namespace lockstep
