// Experts spread over ranks against one rank with all of them, in the same process: every rank has its own batch, and beside its shard the
// whole model. Run by any number of ranks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "model/expert_exchange.h"
#include "model/experts.h"
#include "model/moe_layer.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/swiglu/swiglu.h"
#include "ops/testing.h"
#include "parallel/groups.h"
#include "parallel/testing.h"

namespace lockstep {
namespace {

RankWorld* world = nullptr;

constexpr auto everything = [](const TensorSpec&) { return true; };

// Layers of every kind of attention and of routing.
ModelConfig small_config(int64_t experts) {
  const int64_t per_token = std::min<int64_t>(3, experts);
  return parse_model_config(fmt::format(R"({{"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16,
      "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 4, "compress_ratios": [0, 4, 8],
      "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "n_routed_experts": {}, "num_experts_per_tok": {}, "num_hash_layers": 1,
      "swiglu_limit": 0.5, "moe_intermediate_size": 20, "max_position_embeddings": 256, "initializer_range": 0.25}})", experts, per_token), "test").value();
}

enum class Routing { drawn, to_one_rank };

// Random weights; with to_one_rank, all tokens of every layer visit experts of the group's last rank.
ReadBox weights_of(const ModelConfig& config, uint64_t seed, Routing routing, const Range& favoured) {
  return [=, random = random_boxes(config, seed)](const TensorSpec& spec, const Box& box, TensorView out) {
    LOCKSTEP_RETURN_IF_ERROR(random(spec, box, out));
    for (int64_t r = 0; routing == Routing::to_one_rank && r < out.rows(); ++r) {
      if (spec.role == TensorRole::router_bias) *out.row<float>(r) = favoured.contains(box.rows.begin + r) ? 100.0f : 0.0f;
      for (int64_t k = 0; spec.role == TensorRole::hash_table && k < out.dim(1); ++k) {
        out.row<int32_t>(r)[k] = static_cast<int32_t>(favoured.begin + (box.rows.begin + r + k) % favoured.size());
      }
    }
    return Status::ok();
  };
}

// One shard of the model and what it computes. The whole of it when `ep` is null.
struct Stack {
  Arena arena{"stack", size_t{1} << 30}, step{"step", size_t{1} << 30};
  CpuContext c{1, size_t{1} << 30};
  std::unique_ptr<Weights> weights;
  Model model;
  std::unique_ptr<StatePool> state;
  std::unique_ptr<BatchBuilder> builder;
  Gradients gradients;
  Saved saved;
  std::vector<int32_t> pages;

  Stack(const ModelConfig& config, Numerics numerics, const ReadBox& boxes, RankGroup* ep, int64_t exchange_rows) {
    Shard shard = whole_shard(config);
    shard.embedding = false;  // a stage that hands the gradient of its input on
    if (ep != nullptr) shard.experts = part_of(config.num_experts, ep->size(), ep->rank());
    weights = std::make_unique<Weights>(config, numerics, shard, arena);
    CHECK(weights->load(c, boxes, 0).is_ok(), "weights");
    model.weights = weights.get();
    model.rope = make_rope_tables(config, config.max_positions, arena);
    model.ep = ep;
    model.exchange_rows = exchange_rows;
    const int64_t page_tokens = default_page_tokens(config);
    state = std::make_unique<StatePool>(config, numerics, 0, 4, page_tokens, arena);
    builder = std::make_unique<BatchBuilder>(config, page_tokens);
    gradients = make_gradients(config, shard, arena, everything);
    saved.arena = &step;
    pages = {0, 1, 2, 3};
  }
  int64_t width() const { return weights->config().hidden_size; }
  int64_t streams() const { return weights->config().hc_mult; }
};

// A rank's batch: T tokens of one sequence, none if T is 0.
struct Batch {
  std::vector<int32_t> tokens;
  testing::Tensor input, doutput;  // [T, n, D] storage dtype, [T, D] f32
};
Batch make_batch(const Stack& s, int64_t T, uint64_t seed) {
  Batch b;
  Philox rng(seed, RngPurpose::test);
  for (int64_t t = 0; t < T; ++t) b.tokens.push_back(static_cast<int32_t>(rng.below(40)));
  b.input = testing::random_tensor(seed + 1, s.weights->dtype(), {T, s.streams(), s.width()});
  b.doutput = testing::random_tensor(seed + 2, DType::f32, {T, s.width()});
  return b;
}

struct Outcome {
  testing::Tensor hidden, dinput;
};

// Forward and backward, adding to the stack's gradients.
Outcome run(Stack& s, const Batch& b, Recompute recompute = Recompute::none) {
  const ArenaScope workspace_scope(s.c.workspace()), step_scope(s.step);
  const int64_t T = static_cast<int64_t>(b.tokens.size());
  s.saved.recompute = recompute;
  std::vector<SequenceRows> rows;
  if (T > 0) rows.push_back({b.tokens, 0, -1, s.pages});
  const SequenceBatch& batch = s.builder->build(s.step, rows, WantedRows::all);
  Outcome r{testing::Tensor(s.weights->dtype(), {T, s.width()}), testing::Tensor(DType::f32, {T, s.streams(), s.width()})};
  const TensorView hidden = forward(s.c, s.model, batch, *s.state, &s.saved, b.input);
  std::memcpy(r.hidden.view().data, hidden.data, hidden.bytes());
  // The same without keeping, as the sampler runs it.
  const TensorView again = forward(s.c, s.model, batch, *s.state, nullptr, b.input);
  EXPECT_EQ(testing::count_bit_differences(again, r.hidden), 0);
  backward(s.c, s.model, batch, *s.state, s.saved, b.doutput, s.gradients, r.dinput);
  return r;
}

struct Case {
  int64_t experts;
  int64_t exchange_rows;
  Routing routing;
  Recompute recompute;
  std::vector<int64_t> tokens;  // by rank of the world, taken in turn
  int64_t of(int rank) const { return tokens[static_cast<size_t>(rank) % tokens.size()]; }
};

class ExpertParallel : public ::testing::TestWithParam<Numerics> {
 protected:
  // Groups of `size` neighbours; the one of this rank.
  static Groups groups_of(int size) { return make_groups(*world, Grid({.tp = 1, .pp = 1, .ep = size, .dp = world->size()}), fmt::format("ep {}", size)); }
  static std::vector<int> sizes() {
    std::vector<int> sizes;
    for (int n = 1; n <= world->size(); ++n)
      if (world->size() % n == 0) sizes.push_back(n);
    return sizes;
  }
};

int64_t gradient_differences(const Gradients& a, const Gradients& b, const Shard& shard, bool experts) {
  int64_t differences = 0;
  for (const TensorSpec& spec : a.table) {
    const size_t i = static_cast<size_t>(spec.id);
    if ((spec.cut == Cut::experts) != experts || a.set.views[i].empty()) continue;
    const TensorView whole = experts ? b.set.views[i].slice(shard.experts.begin, shard.experts.size()) : b.set.views[i];
    differences += testing::count_bit_differences(a.set.views[i], whole);
  }
  return differences;
}

TEST_P(ExpertParallel, StackHasTheBitsOfOneRank) {
  const Numerics numerics = GetParam();
  for (const int size : sizes()) {
    Groups groups = groups_of(size);
    RankGroup& ep = groups.ep;
    const Case cases[] = {
        {2 * size + 1, 1024, Routing::drawn, Recompute::none, {13, 30, 1, 22}},  // parts that differ by one
        {size, 3, Routing::drawn, Recompute::layer, {17, 0, 29, 8}},             // one expert a rank; rounds
        {3 * size, 3, Routing::to_one_rank, Recompute::none, {25, 40, 0, 33}},
        {3 * size, 1024, Routing::to_one_rank, Recompute::layer, {25, 40, 0, 33}},
        {size + 1, 5, Routing::drawn, Recompute::none, {0, 12}},
        {size + 1, 1024, Routing::drawn, Recompute::layer, {0}},
    };
    uint64_t seed = 10;
    for (const Case& k : cases) {
      SCOPED_TRACE(fmt::format("ep {} of {}, {} experts, {} rows a round, case {}", size, world->size(), k.experts, k.exchange_rows, seed - 10));
      const ModelConfig config = small_config(k.experts);
      const ReadBox boxes = weights_of(config, ++seed, k.routing, part_of(k.experts, size, size - 1));
      Stack spread(config, numerics, boxes, &ep, k.exchange_rows), alone(config, numerics, boxes, nullptr, 1);

      const auto batch_of = [&](int rank) { return make_batch(alone, k.of(rank), 100 * seed + static_cast<uint64_t>(rank)); };
      const Batch batch = batch_of(world->rank());
      const Outcome got = run(spread, batch, k.recompute), want = run(alone, batch);
      EXPECT_EQ(testing::count_bit_differences(got.hidden, want.hidden), 0);
      EXPECT_EQ(testing::count_bit_differences(got.dinput, want.dinput), 0);
      EXPECT_EQ(gradient_differences(spread.gradients, alone.gradients, spread.weights->shard(), false), 0);
      if (k.of(world->rank()) > 0) {
        EXPECT_GT(testing::max_abs_difference(got.dinput, testing::Tensor(DType::f32, got.dinput.view().shape)), 0.0);
      }

      // Experts' gradients are those of the group's batches one behind the other: to the bit in one round, otherwise in another order of additions.
      zero_gradients(alone.c, alone.gradients);
      for (const int member : ep.members()) run(alone, batch_of(member));
      if (k.exchange_rows == 1024) {
        EXPECT_EQ(gradient_differences(spread.gradients, alone.gradients, spread.weights->shard(), true), 0);
      }
      const std::vector<float> first(spread.gradients.experts.ptr<float>(), spread.gradients.experts.ptr<float>() + spread.gradients.experts.rows());
      for (const TensorSpec& spec : spread.gradients.table) {
        if (spec.cut != Cut::experts) continue;
        const TensorView mine = spread.gradients.set.views[static_cast<size_t>(spec.id)];
        const Range& own = spread.weights->shard().experts;
        EXPECT_LE(testing::relative_l2(mine, alone.gradients.set.views[static_cast<size_t>(spec.id)].slice(own.begin, own.size())), 1e-5) << spec.name;
      }
      zero_gradients(spread.c, spread.gradients);
      const Outcome again = run(spread, batch, k.recompute);
      EXPECT_EQ(testing::count_bit_differences(again.hidden, got.hidden), 0);
      EXPECT_EQ(testing::count_bit_differences(again.dinput, got.dinput), 0);
      EXPECT_EQ(std::memcmp(first.data(), spread.gradients.experts.data, spread.gradients.experts.bytes()), 0);
    }
  }
}

// One expert layer alone, under routings of the test's choice.
struct LayerRun {
  SavedMoe saved;
  testing::Tensor u, rho, rows, dy, drows, drho;
  testing::Tensor offsets, row_token, slot_row;

  LayerRun(Stack& s, int64_t T, uint64_t seed, const std::function<int32_t(int64_t)>& expert) {
    const ModelConfig& m = s.weights->config();
    const int64_t K = m.experts_per_token, R = T * K, D = m.hidden_size;
    testing::Tensor ids(DType::i32, {T, K});
    for (int64_t i = 0; i < R; ++i) ids.ptr<int32_t>()[i] = expert(i);
    u = testing::random_tensor(seed, s.weights->dtype(), {T, D});
    rho = testing::random_tensor(seed + 1, DType::f32, {R});
    dy = testing::random_tensor(seed + 2, DType::f32, {T, D});
    rows = testing::Tensor(s.weights->dtype(), {R, D});
    drows = testing::Tensor(DType::f32, {R, D});
    drho = testing::Tensor(DType::f32, {R});
    offsets = testing::Tensor(DType::i32, {m.num_experts + 1});
    row_token = testing::Tensor(DType::i32, {R});
    slot_row = testing::Tensor(DType::i32, {T, K});
    moe_plan(s.c, offsets, row_token, slot_row, ids);
    saved.offsets = offsets;
    saved.row_token = row_token;
  }

  void spread(Stack& s, int layer = 0) {
    exchange_forward(s.c, s.model, layer, rows, u, rho, saved, s.step);
    exchange_backward(s.c, s.model, layer, drows, drho, dy, saved, s.gradients.tensors.layers[static_cast<size_t>(layer)]);
  }

  // By the whole model. `sizes` gets for every element of a gradient the sum of the absolute values of its terms.
  void alone(Stack& s, Gradients& sizes, int layer = 0) {
    const ModelConfig& m = s.weights->config();
    const ArenaScope scope(s.step);
    const DType dtype = s.weights->dtype();
    const int64_t R = rows.view().rows(), D = m.hidden_size, I = m.expert_dim;
    const TensorView x = s.step.tensor(dtype, {R, D}, "x"), g = s.step.tensor(dtype, {R, I}, "g"), up = s.step.tensor(dtype, {R, I}, "u");
    const TensorView a = s.step.tensor(dtype, {R, I}, "a"), dg = s.step.tensor(DType::f32, {R, I}, "dg"), du = s.step.tensor(DType::f32, {R, I}, "du");
    const size_t at = static_cast<size_t>(layer);
    moe_gather(s.c, x, u, row_token);
    experts_forward(s.c, s.model, layer, rows, g, up, x, rho, offsets);
    moe_gather(s.c, drows, dy, row_token);
    const testing::Tensor dy_rows = absolute(drows);
    experts_backward(s.c, s.model, layer, drows, drho, {x, rho, g, up, offsets}, {a, dg, du}, s.gradients.tensors.layers[at]);
    grouped_matmul_backward_weight(s.c, sizes.tensors.layers[at].w2, dy_rows, absolute(a), offsets);
    grouped_matmul_backward_weight(s.c, sizes.tensors.layers[at].w1, absolute(dg), absolute(x), offsets);
    grouped_matmul_backward_weight(s.c, sizes.tensors.layers[at].w3, absolute(du), absolute(x), offsets);
  }

  static testing::Tensor absolute(ConstTensorView v) {
    testing::Tensor t(DType::f32, v.shape);
    const testing::Tensor f = testing::to_dtype(v, DType::f32);
    for (int64_t i = 0; i < t.elements(); ++i) t.set(i, std::abs(f.get(i)));
    return t;
  }
};

// Sums of n products in two orders: each is off by at most n u / (1 - n u) of the sum of the products' sizes, u = 2^-24, and so is the sum of sizes.
TEST_P(ExpertParallel, ExpertGradientsOfManyRoundsAreWithinTheirRounding) {
  for (const int size : sizes()) {
    SCOPED_TRACE(fmt::format("ep {} of {}", size, world->size()));
    Groups groups = groups_of(size);
    RankGroup& ep = groups.ep;
    const ModelConfig config = small_config(2 * size + 1);
    const ReadBox boxes = weights_of(config, 5, Routing::drawn, {});
    Stack spread(config, GetParam(), boxes, &ep, 3), alone(config, GetParam(), boxes, nullptr, 1);
    Gradients sizes = make_gradients(config, whole_shard(config), alone.arena, everything);
    const auto layer_run = [&](int rank) {
      Philox rng(static_cast<uint64_t>(rank), RngPurpose::test);
      return LayerRun(alone, 20 + 7 * (rank % 3), 50 + 3 * static_cast<uint64_t>(rank),
                      [&](int64_t) { return static_cast<int32_t>(rng.below(static_cast<uint32_t>(config.num_experts))); });
    };
    if (size == 1) continue;  // that is the layer's own path
    LayerRun mine = layer_run(world->rank());
    mine.spread(spread);
    int64_t terms = 0;
    for (const int member : ep.members()) {
      LayerRun run = layer_run(member);
      run.alone(alone, sizes);
      terms += run.rows.view().rows();
      if (member != world->rank()) continue;
      EXPECT_EQ(testing::count_bit_differences(mine.rows, run.rows), 0);
      EXPECT_EQ(testing::count_bit_differences(mine.drows, run.drows), 0);
      EXPECT_EQ(testing::count_bit_differences(mine.drho, run.drho), 0);
    }
    const double u = 0x1p-24, n = static_cast<double>(terms), bound = 2 * n * u / (1 - n * u) * (1 + 2 * n * u);
    const Range own = spread.weights->shard().experts;
    int64_t reordered = 0;
    const auto& mine_of = spread.gradients.tensors.layers[0];
    const auto& whole_of = alone.gradients.tensors.layers[0];
    const auto& size_of = sizes.tensors.layers[0];
    for (const auto& [mine_w, whole_w, size_w] : {std::tuple(mine_of.w1, whole_of.w1, size_of.w1), std::tuple(mine_of.w3, whole_of.w3, size_of.w3),
                                                  std::tuple(mine_of.w2, whole_of.w2, size_of.w2)}) {
      const TensorView want = whole_w.slice(own.begin, own.size()), scale = size_w.slice(own.begin, own.size());
      for (int64_t i = 0; i < mine_w.shape.elements(); ++i) {
        const double difference = std::abs(double{mine_w.ptr<float>()[i]} - want.ptr<float>()[i]);
        ASSERT_LE(difference, bound * scale.ptr<float>()[i]) << i;
        reordered += difference > 0;
      }
    }
    EXPECT_GT(reordered, 0);  // it is another order
  }
}

// Buffers depend neither on the number of tokens nor on where they go.
TEST_P(ExpertParallel, WorkspaceIsWhatTheHeaderSays) {
  for (const int size : sizes()) {
    if (size == 1) continue;
    SCOPED_TRACE(fmt::format("ep {} of {}", size, world->size()));
    Groups groups = groups_of(size);
    RankGroup& ep = groups.ep;
    const ModelConfig config = small_config(2 * size + 1);
    constexpr int64_t kRows = 64;
    const DType dtype = storage_dtype(GetParam());
    const ReadBox boxes = weights_of(config, 5, Routing::drawn, {});
    const int64_t tokens[] = {50, 2000};
    for (const int64_t T : tokens) {
      for (const Routing routing : {Routing::drawn, Routing::to_one_rank}) {
        Stack s(config, GetParam(), boxes, &ep, kRows), quiet(config, GetParam(), boxes, &ep, kRows);
        const int32_t last = static_cast<int32_t>(config.num_experts - 1);
        LayerRun run(quiet, T, 7, [&](int64_t i) { return routing == Routing::drawn ? static_cast<int32_t>(i % config.num_experts) : last; });
        // What the ops take for a full round, on a context of their own.
        CpuContext ops(1, size_t{1} << 30);
        const int64_t C = size * kRows, D = config.hidden_size, I = config.expert_dim;
        const int64_t own = s.weights->shard().experts.size();
        testing::Tensor x(dtype, {C, D}), rho(DType::f32, {C}), y(dtype, {C, D}), g(dtype, {C, I}), up(dtype, {C, I}), a(dtype, {C, I});
        testing::Tensor dg(DType::f32, {C, I}), du(DType::f32, {C, I}), drows(DType::f32, {C, D}), drho(DType::f32, {C}), offsets(DType::i32, {own + 1});
        for (int64_t e = 1; e <= own; ++e) offsets.ptr<int32_t>()[e] = static_cast<int32_t>(C);
        experts_forward(ops, s.model, 0, y, g, up, x, rho, offsets);
        experts_backward(ops, s.model, 0, drows, drho, {x, rho, g, up, offsets}, {a, dg, du}, quiet.gradients.tensors.layers[0]);
        const size_t scratch = ops.workspace().high_bytes();

        CpuContext keeps(1, size_t{1} << 30), passes(1, size_t{1} << 30), back(1, size_t{1} << 30);
        SavedMoe unkept = run.saved;
        exchange_forward(passes, s.model, 0, run.rows, run.u, run.rho, unkept, passes.workspace());
        const testing::Tensor rows = testing::to_dtype(run.rows, dtype);
        exchange_forward(keeps, s.model, 0, run.rows, run.u, run.rho, run.saved, s.step);
        exchange_backward(back, s.model, 0, run.drows, run.drho, run.dy, run.saved, s.gradients.tensors.layers[0]);
        EXPECT_EQ(testing::count_bit_differences(rows, run.rows), 0);

        const size_t forward = exchange_workspace(config, dtype, size, kRows, ExchangePass::forward);
        const size_t backward = exchange_workspace(config, dtype, size, kRows, ExchangePass::backward);
        // The part with one expert more is the first.
        const size_t fewer = Arena::footprint(static_cast<size_t>(part_of(config.num_experts, size, 0).size() + 1) * 4) -
                             Arena::footprint(static_cast<size_t>(own + 1) * 4);
        // What the last product reads has the rows of a round alone.
        const size_t of_full_round = Arena::footprint(static_cast<size_t>(C * I) * dtype_bytes(dtype));
        EXPECT_GE(passes.workspace().high_bytes(), forward - fewer - of_full_round);
        EXPECT_LE(passes.workspace().high_bytes(), forward + scratch);
        EXPECT_LE(keeps.workspace().high_bytes(), forward + scratch);
        EXPECT_GE(back.workspace().high_bytes(), backward - fewer);
        EXPECT_LE(back.workspace().high_bytes(), backward + scratch);
        // What is kept is what came.
        int64_t came = 0;
        for (int r = 0; r < size; ++r)
          for (int64_t e = s.weights->shard().experts.begin; e < s.weights->shard().experts.end; ++e) came += run.saved.counts.row<int64_t>(r)[e];
        EXPECT_EQ(run.saved.x.rows(), came);
        if (routing == Routing::to_one_rank) {
          EXPECT_EQ(came, ep.rank() == size - 1 ? size * T * config.experts_per_token : 0);
        }
      }
    }
  }
}

TEST_P(ExpertParallel, CountedBytesAreThePredictedOnes) {
  for (const int size : sizes()) {
    SCOPED_TRACE(fmt::format("ep {} of {}", size, world->size()));
    Groups groups = groups_of(size);
    RankGroup& ep = groups.ep;
    const ModelConfig config = small_config(2 * size + 1);
    const ReadBox boxes = weights_of(config, 5, Routing::drawn, {});
    Stack s(config, GetParam(), boxes, &ep, 4);
    const Batch batch = make_batch(s, 10 + 9 * (world->rank() % 3), 77 + static_cast<uint64_t>(world->rank()));
    std::vector<SequenceRows> rows = {{batch.tokens, 0, -1, s.pages}};
    const SequenceBatch& packed = s.builder->build(s.step, rows, WantedRows::all);
    testing::Tensor dinput(DType::f32, batch.input.view().shape);
    world->reset_traffic();
    forward(s.c, s.model, packed, *s.state, &s.saved, batch.input);
    backward(s.c, s.model, packed, *s.state, s.saved, batch.doutput, s.gradients, dinput);
    if (size == 1) {
      EXPECT_TRUE(world->traffic().empty());
      continue;
    }
    CommBytes want[5];
    int64_t rounds = 0;
    for (const SavedLayer& layer : s.saved.layers) {
      const std::span<const int64_t> counts(layer.moe.counts.ptr<int64_t>(), static_cast<size_t>(layer.moe.counts.shape.elements()));
      EXPECT_EQ(std::accumulate(counts.begin() + ep.rank() * config.num_experts, counts.begin() + (ep.rank() + 1) * config.num_experts, int64_t{0}),
                static_cast<int64_t>(batch.tokens.size()) * config.experts_per_token);
      const auto bytes = [&](ExchangePass pass) { return expert_exchange_bytes(counts, size, ep.rank(), config.hidden_size, s.weights->dtype(), pass); };
      const ExchangeBytes there = bytes(ExchangePass::forward), back = bytes(ExchangePass::backward);
      const CommBytes all[] = {there.counts, there.dispatch, there.combine, back.dispatch, back.combine};
      for (int i = 0; i < 5; ++i) want[i] = {want[i].sent + all[i].sent, want[i].received + all[i].received};
      EXPECT_EQ(back.counts, CommBytes{});
      rounds += expert_exchange_rounds(counts, size, 4);
    }
    const char* names[] = {"expert counts", "expert dispatch", "expert combine", "expert gradient dispatch", "expert gradient combine"};
    for (int i = 0; i < 5; ++i) {
      const Traffic& counted = world->traffic().at(names[i]);
      EXPECT_EQ(counted.bytes, want[i]) << names[i];
      EXPECT_EQ(counted.calls, i == 0 ? config.num_layers() : rounds) << names[i];
      EXPECT_GT(counted.bytes.sent, 0) << names[i];
    }
    EXPECT_EQ(world->traffic().size(), 5u);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, ExpertParallel, ::testing::ValuesIn(kAllNumerics),
                         [](const auto& info) { return std::string(numerics_name(info.param)); });

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
