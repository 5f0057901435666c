#pragma once
// A whole run small enough for a test: a model with one layer of every kind, a task of single digit sums, settings, and the
// comparison of two runs.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/run_dir.h"
#include "model/testing.h"
#include "rl/arithmetic.h"
#include "rl/loop.h"

namespace lockstep {

inline std::string contents(const std::string& path) {
  Result<std::string> text = read_file(path);
  EXPECT_TRUE(text.is_ok()) << (text ? "" : text.message());
  return text ? text.take() : "";
}

// config.json, the tokenizer and data files, in `root`.
inline void make_tiny_task(const std::filesystem::path& root) {
  const auto path = [&](const std::string& name) -> std::string { return root / name; };
  ModelConfig m = testing::tiny_config();
  m.vocab_size = ByteTokenizer::kFirstByte + static_cast<int64_t>(kArithmeticAlphabet.size());
  ASSERT_TRUE(atomic_write(path("config.json"), model_config_json(m)).is_ok());
  ASSERT_TRUE(ByteTokenizer(std::string(kArithmeticAlphabet)).save(root).is_ok());
  const ArithmeticOptions options{.seed = 5, .difficulty_min = 1, .difficulty_max = 1, .families = {ArithmeticFamily::add}};
  Result<std::vector<ArithmeticItem>> items = make_arithmetic_set(options, ArithmeticSplit::train, 25);
  ASSERT_TRUE(items.is_ok());
  ASSERT_TRUE(write_arithmetic_prompts(path("train.jsonl"), std::span(items.value()).first(15)).is_ok());
  ASSERT_TRUE(write_arithmetic_prompts(path("eval.jsonl"), std::span(items.value()).subspan(15)).is_ok());
  ASSERT_TRUE(write_arithmetic_examples(path("sft.jsonl"), items.value()).is_ok());
}

inline LoopConfig tiny_loop_config(const std::filesystem::path& root, const std::string& run, int64_t steps) {
  const auto path = [&](const std::string& name) -> std::string { return root / name; };
  LoopConfig c;
  c.run = {.dir = path(run),
           .seed = 7,
           .threads = 1,
           .steps = steps,
           .checkpoint_every = 30,
           .keep_checkpoints = 10,
           .eval_every = 20,
           .save_rollouts = true};
  c.model = {.config = path("config.json"), .init = "random", .tokenizer = path(""), .numerics = Numerics::bf16};
  c.task = {
      .train_file = path("train.jsonl"), .eval_file = path("eval.jsonl"), .reward = {.grader = GraderKind::math}, .max_prompt_tokens = 16};
  c.rollout.prompts_per_step = 2;
  c.rollout.samples_per_prompt = 4;
  c.rollout.max_new_tokens = 6;
  c.train.loss.entropy_coef = 0.01f;  // random weights earn no reward; this gives every step a gradient
  c.optimizer.freeze_router = false;
  c.eval = {.samples = 2, .problems = 4, .temperature = 1, .top_k = 0, .top_p = 1, .max_new_tokens = 6, .seed = 0};
  return c;
}

// Every file that does not measure time or speak of the way there.
inline std::vector<std::string> compared_files(const std::string& run, int64_t last_step) {
  std::vector<std::string> files = {"metrics.jsonl"};
  for (const char* folder : {"rollouts", "evals"}) {
    if (!std::filesystem::exists(run + "/" + folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(run + "/" + folder))
      files.push_back(std::string(folder) + "/" + entry.path().filename().string());
  }
  const std::string checkpoint = "checkpoints/" + step_name(last_step);
  for (const char* name : {"state.json", "config.json"}) files.push_back(checkpoint + "/" + name);
  int tensors = 0;  // files of masters and optimizer, by rank
  for (const auto& entry : std::filesystem::directory_iterator(run + "/" + checkpoint)) {
    if (entry.path().extension() != ".safetensors") continue;
    files.push_back(checkpoint + "/" + entry.path().filename().string());
    ++tensors;
  }
  EXPECT_GE(tensors, 2);
  std::sort(files.begin(), files.end());
  return files;
}

inline void expect_same_runs(const std::string& a, const std::string& b, int64_t last_step) {
  const std::vector<std::string> files = compared_files(a, last_step);
  EXPECT_EQ(files, compared_files(b, last_step));
  for (const std::string& f : files) EXPECT_TRUE(contents(a + "/" + f) == contents(b + "/" + f)) << f << " differs";
}

}  // namespace lockstep
