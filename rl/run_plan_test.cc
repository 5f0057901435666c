// What a plan adds to traffic and memory, which tests/traffic_test.cc compares with real steps: what fits, what is moved away, what bounds a step.

#include "rl/run_plan.h"

#include <gtest/gtest.h>

#include "sync/transfer.h"

namespace lockstep {
namespace {

PlanInput flash() {
  Result<ModelConfig> config = load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/flash.config.json");
  CHECK(config.is_ok(), "{}", config.message());
  PlanInput p;
  p.model_name = "flash";
  p.model = config.take();
  p.device = device_specs().front();
  p.ranks = p.rollout_ranks = 16;
  p.train = {.tp = 1, .pp = 4, .ep = 4};
  p.rollout = {.tp = 1, .ep = 8};
  p.rollout_fp8 = true;
  p.microbatch_tokens = 5120;
  p.recompute = p.offload_optimizer = true;
  return p;
}

RunPlan plan_of(const PlanInput& p) {
  Result<RunPlan> plan = make_run_plan(p);
  CHECK(plan.is_ok(), "{}", plan.message());
  return plan.take();
}

int64_t bytes_of(const MemoryByOwner& memory, std::string_view owner) {
  for (const OwnerBytes& o : memory)
    if (o.owner == owner) return o.bytes;
  return 0;
}

const PlanPart& part_of(const RunPlan& plan, std::string_view name) {
  for (const PlanPart& p : plan.parts)
    if (p.name == name) return p;
  CHECK(false, "no part {}", name);
}

// rl spec 20.2: what is E4M3 and what is not.
TEST(Plan, Fp8IsTheListOfTheReleasedCheckpoint) {
  const ModelConfig m = flash().model;
  double fp8 = 0, all = 0;
  for (const TensorSpec& t : tensor_table(m)) {
    const int64_t n = t.shape.elements();
    const double bytes = sampler_bytes(t, n, Numerics::bf16, true), plain = sampler_bytes(t, n, Numerics::bf16, false);
    EXPECT_EQ(plain, static_cast<double>(n) * static_cast<double>(dtype_bytes(t.weight_dtype(Numerics::bf16)))) << t.name;
    all += static_cast<double>(n);
    if (bytes < plain) {
      EXPECT_EQ(bytes, static_cast<double>(n + n / (128 * 128))) << t.name;
      fp8 += static_cast<double>(n);
    }
    const bool kept = t.name.find("compressor") != std::string::npos || t.name.ends_with("wo_a.weight") || t.name.ends_with("gate.weight") ||
                      t.name.ends_with("weights_proj.weight") || t.name.ends_with("head.weight") || t.name.ends_with("embed.weight") || t.shape.rank < 2;
    if (kept) {
      EXPECT_EQ(bytes, plain) << t.name;
    }
  }
  EXPECT_GT(fp8 / all, 0.98);  // the experts alone are 97.4%
}

TEST(Plan, OffloadingTakesExactlyTheMastersAway) {
  PlanInput p = flash();
  const RunPlan away = plan_of(p);
  p.offload_optimizer = false;
  const RunPlan here = plan_of(p);
  EXPECT_TRUE(away.fits);
  EXPECT_FALSE(here.fits);
  EXPECT_EQ(away.trainer.rank, here.trainer.rank);
  EXPECT_EQ(total_bytes(here.trainer.memory), total_bytes(away.trainer.memory) + total_bytes(away.trainer.host_memory));
  EXPECT_EQ(bytes_of(here.trainer.memory, "masters and moments"), bytes_of(away.trainer.host_memory, "masters and moments"));
  EXPECT_NE(here.misfit.find("masters and moments"), std::string::npos) << here.misfit;
  EXPECT_EQ(part_of(away, "optimizer").bound(), std::string("host"));
  EXPECT_EQ(part_of(here, "optimizer").bound(), std::string("memory"));
}

TEST(Plan, RecomputingTradesMemoryForWork) {
  PlanInput p = flash();
  const RunPlan again = plan_of(p);
  p.recompute = false;
  const RunPlan kept = plan_of(p);
  EXPECT_LT(3 * bytes_of(again.trainer.memory, "activations"), bytes_of(kept.trainer.memory, "activations"));
  EXPECT_NEAR(part_of(again, "train").compute, 4.0 / 3 * part_of(kept, "train").compute, 1e-9);
  // All forward messages of the layers are sent twice.
  EXPECT_EQ(again.trainer.traffic.at("expert dispatch").bytes.sent, 2 * kept.trainer.traffic.at("expert dispatch").bytes.sent);
  EXPECT_EQ(again.trainer.traffic.at("streams").bytes.sent, kept.trainer.traffic.at("streams").bytes.sent);
}

// What the trainer quantises for the sampler lies on the trainer's ranks, and what lands on the sampler's.
TEST(Plan, RanksApartHaveSyncBuffersOfTheirOwn) {
  PlanInput p = flash();
  const RunPlan four = plan_of(p);
  const int64_t sent = bytes_of(four.trainer.memory, "sync buffers"), landed = bytes_of(four.sampler.memory, "sync buffers");
  EXPECT_GE(landed, bytes_of(four.sampler.memory, "weights"));
  EXPECT_LT(landed, bytes_of(four.sampler.memory, "weights") + (int64_t{64} << 20));
  p.train = {.tp = 1, .pp = 8, .ep = 2};
  p.rollout = {.tp = 1, .ep = 16};
  const RunPlan other = plan_of(p);
  EXPECT_NE(bytes_of(other.trainer.memory, "sync buffers"), sent);
  EXPECT_LT(bytes_of(other.sampler.memory, "sync buffers"), landed);
  p.rollout = {.tp = 1, .ep = 8};
  EXPECT_EQ(bytes_of(plan_of(p).sampler.memory, "sync buffers"), landed);
  p.rollout_fp8 = false;
  EXPECT_EQ(bytes_of(plan_of(p).trainer.memory, "sync buffers"), 2 * Transfer::kBucketBytes);
}

TEST(Plan, HotExpertsCostMemoryAndTimeOnly) {
  PlanInput p = flash();
  p.hot = 1;
  const RunPlan even = plan_of(p);
  p.hot = 2;
  const RunPlan hot = plan_of(p);
  EXPECT_EQ(bytes_of(even.trainer.memory, "expert rows, hot"), 0);
  EXPECT_EQ(bytes_of(hot.trainer.memory, "expert rows, hot"), bytes_of(hot.trainer.memory, "expert rows"));
  EXPECT_GT(part_of(hot, "train").compute, part_of(even, "train").compute);
  EXPECT_EQ(hot.train_flops, even.train_flops);
}

TEST(Plan, BubbleAndWorkOfAStep) {
  const PlanInput p = flash();
  const RunPlan plan = plan_of(p);
  EXPECT_EQ(plan.micro_batches, 64);  // 256 samples over 4, one each
  EXPECT_DOUBLE_EQ(plan.bubble, 3.0 / 67.0);
  // Six operations a parameter and token, of those that work on it, and attention; two more for recomputing.
  const double least = 8.0 * static_cast<double>(plan.active_parameters) * 256 * 5119;
  EXPECT_GT(plan.train_flops, least);
  EXPECT_LT(plan.train_flops, 1.15 * least);
  // Decoding is bound by reading the weights: one step a token.
  EXPECT_EQ(part_of(plan, "rollout").bound(), std::string("memory"));
  EXPECT_LT(part_of(plan, "rollout").memory, 4096.0 * static_cast<double>(total_bytes(plan.sampler.memory)) / p.device.memory_rate);
}

TEST(Plan, TheSameRanksShareWeightsUnlessTheirLayoutsDiffer) {
  PlanInput p = flash();
  p.rollout_ranks = 0;
  p.ranks = 4;
  Result<ModelConfig> demo = load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/demo.config.json");
  ASSERT_TRUE(demo.is_ok());
  p.model = demo.take();
  p.prompt_tokens = p.response_tokens = 20;
  p.rollout_fp8 = false;
  p.train = p.rollout = {.tp = 1, .pp = 1, .ep = 2};
  const RunPlan same = plan_of(p);
  EXPECT_EQ(bytes_of(same.sampler.memory, "weights"), 0);
  EXPECT_EQ(same.sync, CommBytes());
  EXPECT_EQ(part_of(same, "sync").bound(), std::string("nothing"));
  p.rollout.tp = 2;
  const RunPlan apart = plan_of(p);
  EXPECT_GT(bytes_of(apart.sampler.memory, "weights"), 0);
  EXPECT_GT(bytes_of(apart.sampler.memory, "sync buffers"), 0);
  p.train = {.tp = 3};
  const Result<RunPlan> wrong = make_run_plan(p);
  ASSERT_FALSE(wrong.is_ok());
  EXPECT_NE(wrong.message().find("nearest layouts for 4 ranks:"), std::string::npos) << wrong.message();
  EXPECT_NE(wrong.message().find("suggested trainer: "), std::string::npos) << wrong.message();
}

}  // namespace
}  // namespace lockstep
