// Counts against the published totals of V4-Flash and V4-Pro, and kept bytes against what a real forward keeps.

#include "model/cost.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/context.h"
#include "model/saved.h"
#include "model/stack.h"

namespace lockstep {
namespace {

ModelConfig load(const std::string& name) {
  Result<ModelConfig> config = load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/" + name);
  CHECK(config.is_ok(), "{}", config.message());
  return config.take();
}

// V4 spec 9.1: 284.332 B and 290.942 B with the draft block, 13.270 B active.
TEST(Cost, FlashHasItsPublishedSizes) {
  const ModelConfig m = load("flash.config.json");
  const int64_t total = count_parameters(tensor_table(m));
  EXPECT_NEAR(static_cast<double>(total), 284.332e9, 0.0005e9);
  EXPECT_NEAR(static_cast<double>(total + draft_block_parameters(m)), 290.942e9, 0.0005e9);
  EXPECT_NEAR(static_cast<double>(active_parameters(m)), 13.270e9, 0.0005e9);
}

TEST(Cost, ProHasItsPublishedSizes) {
  const ModelConfig m = load("pro.config.json");
  const int64_t total = count_parameters(tensor_table(m));
  EXPECT_NEAR(static_cast<double>(total), 1572.997e9, 0.0005e9);
  EXPECT_NEAR(static_cast<double>(draft_block_parameters(m)), 25.840e9, 0.0005e9);
  EXPECT_NEAR(static_cast<double>(active_parameters(m)), 48.852e9, 0.0005e9);
}

// V4 spec 9.2.
TEST(Cost, DecodingFlashCostsWhatIsPublished) {
  const ModelConfig m = load("flash.config.json");
  const std::pair<int64_t, double> published[] = {{1 << 10, 28.1e9}, {1 << 13, 29.5e9}, {1 << 16, 35.7e9}, {1 << 18, 56.8e9}, {1 << 20, 141e9}};
  for (const auto& [n, flops] : published) EXPECT_NEAR(decode_flops(m, n), flops, 0.005 * flops) << n;
}

TEST(Cost, AWholeSequenceCostsItsTokens) {
  const ModelConfig m = load("demo.config.json");
  double sum = 0;
  for (int64_t n = 1; n <= 100; ++n) sum += decode_flops(m, n);
  EXPECT_DOUBLE_EQ(layers_forward_flops(m, {0, m.num_layers()}, 100) + 100 * head_forward_flops(m), sum);
}

// What the ranks of a layout do together is what one alone does, but for what tp replicates.
TEST(Cost, ShardsAddUpToTheModel) {
  const ModelConfig m = load("flash.config.json");
  const int64_t length = 512;
  const double whole = layers_forward_flops(m, {0, m.num_layers()}, length) + static_cast<double>(length) * head_forward_flops(m);
  const Layout layout{.tp = 1, .pp = 4, .ep = 4, .dp = 4};
  const Grid grid(layout);
  const StageLayers stages = balance_layers(stage_costs(m, length), layout.pp);
  double sum = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank)  // a sequence each dp index; balanced experts
    sum += shard_forward_flops(m, shard_of(m, grid, stages, rank), length, length, length, static_cast<double>(length * m.experts_per_token));
  EXPECT_NEAR(sum, 4 * whole, 1e-9 * sum);

  const Shard half = shard_of(m, Grid({.tp = 2, .pp = 1, .ep = 1, .dp = 1}), {{0, m.num_layers()}}, 0);
  const double rows = static_cast<double>(length * m.experts_per_token), own = shard_forward_flops(m, half, length, length, length, rows);
  EXPECT_GT(own, 0.5 * whole);
  EXPECT_LT(own, whole);
}

class KeptActivations : public ::testing::TestWithParam<std::tuple<Numerics, bool>> {};

TEST_P(KeptActivations, AreWhatForwardKeeps) {
  const auto [numerics, recompute] = GetParam();
  const ModelConfig m = load("demo.config.json");
  CpuContext c(1);
  Arena arena("model", size_t{1} << 30), step("step", size_t{1} << 30);
  Weights weights(m, numerics, arena);
  ASSERT_TRUE(weights.load(c, random_boxes(m, 1), 0));
  Model model;
  model.weights = &weights;
  model.rope = make_rope_tables(m, m.max_positions, arena);
  const int64_t page_tokens = default_page_tokens(m), T = 150;
  StatePool state(m, numerics, 0, 2 * ((T + page_tokens - 1) / page_tokens), page_tokens, arena);
  std::vector<int32_t> pages(static_cast<size_t>(state.num_pages())), tokens(static_cast<size_t>(T / 2), 3);
  std::iota(pages.begin(), pages.end(), 0);
  const size_t half = pages.size() / 2;
  const SequenceRows rows[] = {{tokens, 0, -1, std::span(pages).first(half)}, {tokens, 0, -1, std::span(pages).last(half)}};
  BatchBuilder builder(m, page_tokens);
  const SequenceBatch& batch = builder.build(arena, rows, WantedRows::all);
  Saved saved;
  saved.arena = &step;
  saved.recompute = recompute ? Recompute::layer : Recompute::none;
  Gradients gradients = make_gradients(m, arena, [](const TensorSpec&) { return true; });
  const TensorView hidden = forward(c, model, batch, state, &saved);
  backward(c, model, batch, state, saved, arena.zeros(DType::f32, hidden.shape, "dhidden"), gradients);
  EXPECT_EQ(static_cast<int64_t>(step.high_bytes()), kept_activation_bytes(m, numerics, whole_shard(m), {.sequences = {T / 2, T / 2}, .expert_rows = {}, .recompute = recompute}));
}

INSTANTIATE_TEST_SUITE_P(Modes, KeptActivations, ::testing::Combine(::testing::ValuesIn(kAllNumerics), ::testing::Bool()));

}  // namespace
}  // namespace lockstep
