// The forward and backward of one layer of every kind in steady state: nothing is allocated, arenas do not grow, and a second call on the same input gives
// the same bits as the first.

#include "model/stack.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "model/head.h"
#include "ops/adamw/adamw.h"
#include "ops/testing.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

// Every allocation of this program counts itself. Not inlined: the compiler would see free() meet a new-expression and warn.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace lockstep {
namespace {

ModelConfig every_kind() {
  return parse_model_config(R"({"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
      "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 4, "compress_ratios": [0, 4, 8],
      "index_n_heads": 4, "index_head_dim": 8, "index_topk": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 1,
      "moe_intermediate_size": 16, "max_position_embeddings": 64})", "test").value();
}

class SteadyState : public ::testing::TestWithParam<std::tuple<Numerics, int, Recompute>> {};

TEST_P(SteadyState, AStepAllocatesNothing) {
  const auto [numerics, threads, recompute] = GetParam();
  const ModelConfig config = every_kind();
  CpuContext c(threads, size_t{1} << 30);
  Arena arena("model", size_t{1} << 30), step_arena("step", size_t{1} << 30);
  Weights weights(config, numerics, arena);
  TensorSet masters = make_tensor_set(weights.table(), arena, [](const TensorSpec&) { return true; });
  initialize_masters(config, weights.table(), masters, 1);
  weights.load(c, masters, 0);
  Gradients gradients = make_gradients(config, arena, [](const TensorSpec&) { return true; });
  Model model;
  model.weights = &weights;
  model.rope = make_rope_tables(config, 64, arena);
  const int64_t page_tokens = default_page_tokens(config);
  StatePool state(config, numerics, 0, 2, page_tokens, arena);
  BatchBuilder builder(config, page_tokens);
  const std::vector<int32_t> tokens[2] = {{1, 5, 9, 2, 8, 7, 3, 30, 11, 12, 4}, {2, 2, 7, 39, 0, 1, 16, 20, 21}}, pages = {0, 1};
  const SequenceRows rows[2] = {{tokens[0], 0, -1, std::span(pages).subspan(0, 1)}, {tokens[1], 0, -1, std::span(pages).subspan(1, 1)}};
  Saved saved;
  saved.arena = &step_arena;
  saved.recompute = recompute;
  const testing::Tensor dhidden = testing::random_tensor(3, DType::f32, {20, config.hidden_size});
  testing::Tensor hidden(weights.dtype(), {20, config.hidden_size}), first_hidden(weights.dtype(), {20, config.hidden_size});
  testing::Tensor first_gradient(DType::f32, gradients.tensors.layers[1].w1.shape);

  // One training step without what the actor adds: batch, forward, backward, the optimizer's arithmetic, weights rounded and repacked.
  const auto step = [&](float lr) {
    const ArenaScope workspace_scope(c.workspace()), step_scope(step_arena);
    zero_gradients(c, gradients);
    const SequenceBatch& batch = builder.build(c.workspace(), rows, WantedRows::all);
    const TensorView out = forward(c, model, batch, state, &saved);
    std::memcpy(hidden.view().data, out.data, out.bytes());
    backward(c, model, batch, state, saved, dhidden, gradients);
    const TensorView m = c.workspace().zeros(DType::f32, gradients.tensors.head.shape, "m"), v = c.workspace().zeros(DType::f32, m.shape, "v");
    adamw(c, masters.views.back(), m, v, gradients.tensors.head, {.lr = lr});
    weights.load(c, masters, weights.version() + 1);
  };
  step(0.0f);
  std::memcpy(first_hidden.view().data, hidden.view().data, hidden.view().bytes());
  std::memcpy(first_gradient.view().data, gradients.tensors.layers[1].w1.data, first_gradient.view().bytes());
  c.workspace().seal();
  step_arena.seal();
  const int64_t before = allocations;
  step(0.0f);
  step(0.0f);
  EXPECT_EQ(allocations - before, 0);
  EXPECT_EQ(testing::count_bit_differences(hidden, first_hidden), 0);
  EXPECT_EQ(testing::count_bit_differences(gradients.tensors.layers[1].w1, first_gradient), 0);
  EXPECT_GT(testing::max_abs_difference(first_gradient, testing::Tensor(DType::f32, first_gradient.view().shape)), 0.0);
}

INSTANTIATE_TEST_SUITE_P(Modes, SteadyState,
                         ::testing::Combine(::testing::ValuesIn(kAllNumerics), ::testing::Values(1, 2),
                                            ::testing::Values(Recompute::none, Recompute::layer)));

// A rank without work takes part all the same: no row, no gradient, and nothing on the way minds.
TEST_P(SteadyState, ABatchWithoutTokensIsLegal) {
  const auto [numerics, threads, recompute] = GetParam();
  const ModelConfig config = every_kind();
  CpuContext c(threads, size_t{1} << 30);
  Arena arena("model", size_t{1} << 30), step_arena("step", size_t{1} << 30);
  Weights weights(config, numerics, arena);
  ASSERT_TRUE(weights.load(c, random_boxes(config, 1), 0).is_ok());
  Gradients gradients = make_gradients(config, arena, [](const TensorSpec&) { return true; });
  Model model;
  model.weights = &weights;
  model.rope = make_rope_tables(config, 64, arena);
  const int64_t page_tokens = default_page_tokens(config);
  StatePool state(config, numerics, 2, 2, page_tokens, arena);
  BatchBuilder builder(config, page_tokens);
  Saved saved;
  saved.arena = &step_arena;
  saved.recompute = recompute;
  for (const WantedRows wanted : {WantedRows::all, WantedRows::last_of_each}) {
    const SequenceBatch& batch = builder.build(c.workspace(), {}, wanted);
    EXPECT_EQ(forward(c, model, batch, state, nullptr).rows(), 0);
    const TensorView hidden = forward(c, model, batch, state, &saved);
    EXPECT_EQ(hidden.shape, (Shape{0, config.hidden_size}));
    const testing::Tensor none(DType::f32, {0}), targets(DType::i32, {0}), dhidden(DType::f32, hidden.shape);
    head_logits(c, model, testing::Tensor(DType::f32, {0, config.vocab_size}), hidden);
    head_logprob(c, model, none, none, none, hidden, targets, none);
    head_logprob_backward(c, model, dhidden, gradients.tensors.head, none, none, hidden, targets, none, none, none);
    backward(c, model, batch, state, saved, dhidden, gradients);
    for (const TensorView& run : {gradients.dense, gradients.experts})
      EXPECT_EQ(testing::count_bit_differences(run, testing::Tensor(DType::f32, run.shape)), 0);
  }
}

// The counter counts: the test above would see one allocation.
TEST(SteadyStateControl, AnAllocationIsCounted) {
  const int64_t before = allocations;
  const std::string text(100, 'x');
  EXPECT_EQ(allocations - before, 1) << text.size();
}

}  // namespace
}  // namespace lockstep
