// Ranks that share heads and vocabulary against the whole model, which every rank also runs alone: random small models, whole sequences with
// gradients, and prefill in chunks with decoding. Run by any number of ranks.

#include "model/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/rng.h"
#include "model/head.h"
#include "model/saved.h"
#include "ops/logprob/logprob.h"
#include "ops/testing.h"
#include "parallel/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

RankWorld* world = nullptr;

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed, RngPurpose::test) {}
  int64_t range(int64_t low, int64_t high) { return low + rng_.below(static_cast<uint32_t>(high - low + 1)); }
  int64_t one_of(std::initializer_list<int64_t> values) { return values.begin()[rng_.below(static_cast<uint32_t>(values.size()))]; }
  float normal() { return rng_.normal(); }

 private:
  Philox rng_;
};

// All three kinds of attention, in any order. `size` ranks hold `groups_each` output groups each.
ModelConfig random_config(Draw& d, int64_t size, int64_t groups_each, int64_t vocab) {
  ModelConfig m;
  m.vocab_size = vocab;
  m.hidden_size = d.one_of({16, 24, 40});
  m.o_groups = size * groups_each;
  m.num_heads = m.o_groups * d.range(1, 2);
  m.head_dim = d.one_of({8, 16, 24});
  m.rope_dim = d.one_of({4, 8});
  m.q_rank = d.one_of({8, 20});
  m.o_rank = d.one_of({5, 8});
  m.window = d.one_of({1, 3, 8});
  m.index_heads = d.one_of({3, 8});
  m.index_head_dim = d.one_of({8, 16});
  m.index_topk = d.one_of({1, 2, 4});
  m.num_experts = d.range(4, 6);
  m.experts_per_token = d.range(1, 3);
  m.expert_dim = d.one_of({8, 24});
  m.routed_scale = 1.5f;
  m.swiglu_limit = 10.0f;
  m.hc_mult = d.one_of({1, 2, 4});
  m.max_positions = 64;
  AttentionKind kinds[] = {AttentionKind::swa, AttentionKind::csa, AttentionKind::hca};
  for (int64_t i = 2; i > 0; --i) std::swap(kinds[i], kinds[d.range(0, i)]);
  for (const AttentionKind kind : kinds)
    m.layers.push_back({kind, kind == AttentionKind::swa ? 0 : kind == AttentionKind::csa ? 4 : 8, d.range(0, 2) == 0});
  const Status legal = check_model_config(m, "random");
  CHECK(legal.is_ok(), "{}", legal.message());
  return m;
}

// One rank's model, or the whole.
struct Instance {
  Arena arena{"model", size_t{1} << 28}, step{"step", size_t{1} << 28};
  CpuContext c;
  Weights weights;
  Model model;
  Gradients gradients;
  Saved saved;
  BatchBuilder builder;

  Instance(const ModelConfig& m, Numerics numerics, const Shard& shard, const TensorSet& masters, RankGroup* tp, int threads)
      : c(threads, size_t{1} << 28), weights(m, numerics, shard, arena),
        gradients(make_gradients(m, shard, arena, [](const TensorSpec&) { return true; })), builder(m, default_page_tokens(m)) {
    const Status read = weights.load(c, [&](const TensorSpec& spec, const Box& box, TensorView out) {
      const TensorView from = matrix_view(masters.views[static_cast<size_t>(spec.id)]).slice(box.rows.begin, box.rows.size());
      for (int64_t r = 0; r < out.rows(); ++r)
        std::memcpy(out.slice(r, 1).data, from.slice(r, 1).cols(box.columns.begin, box.columns.size()).data,
                    static_cast<size_t>(out.dim(1)) * dtype_bytes(out.dtype));
      return Status::ok();
    }, 0);
    CHECK(read.is_ok(), "{}", read.message());
    model.weights = &weights;
    model.rope = make_rope_tables(m, m.max_positions, arena);
    model.tp = tp;
    saved.arena = &step;
  }
};

Tensor copy_of(ConstTensorView v) { return v.rows() == 0 ? Tensor(v.dtype, v.shape) : testing::to_dtype(v, v.dtype); }

// What training computes from whole sequences.
struct Trained {
  Tensor output, logits, logprob, lse, entropy, dhidden, dinput;
  std::vector<Tensor> gradients;  // by id; empty where there is none
};
Trained train(Instance& i, std::span<const SequenceRows> rows, StatePool& state, ConstTensorView input, const Tensor& target,
              const Tensor& temperature, const Tensor& dlogprob, const Tensor& dentropy) {
  ArenaScope workspace(i.c.workspace()), step(i.step);
  const ModelConfig& m = i.weights.config();
  zero_gradients(i.c, i.gradients);
  const SequenceBatch& batch = i.builder.build(i.c.workspace(), rows, WantedRows::all);
  const TensorView hidden = forward(i.c, i.model, batch, state, &i.saved, input);
  const int64_t R = hidden.rows();
  Trained t;
  t.output = copy_of(hidden);
  t.logits = Tensor(DType::f32, {R, m.vocab_size});
  t.logprob = Tensor(DType::f32, {R});
  t.lse = Tensor(DType::f32, {R});
  t.entropy = Tensor(DType::f32, {R});
  t.dhidden = Tensor(DType::f32, hidden.shape);
  if (!i.weights.shard().embedding) t.dinput = Tensor(DType::f32, input.shape);
  head_logits(i.c, i.model, t.logits, hidden);
  head_logprob(i.c, i.model, t.logprob, t.lse, t.entropy, hidden, target, temperature);
  head_logprob_backward(i.c, i.model, t.dhidden, i.gradients.tensors.head, dlogprob, dentropy, hidden, target, temperature, t.lse, t.entropy);
  backward(i.c, i.model, batch, state, i.saved, t.dhidden, i.gradients, t.dinput);
  for (const TensorView& g : i.gradients.set.views) t.gradients.push_back(g.empty() ? Tensor() : copy_of(matrix_view(g)));
  return t;
}

// Whether rank 0's numbers are here too.
bool same_on_all_ranks(Context& c, RankGroup& tp, ConstTensorView mine) {
  if (mine.empty()) return true;
  Tensor first = copy_of(mine);
  tp.broadcast(c, first, 0, "test");
  return testing::count_bit_differences(first, mine) == 0;
}

// Sums of squares.
struct Norms {
  double difference = 0, size = 0;
  void add(ConstTensorView got, ConstTensorView want) {
    for (int64_t r = 0; r < got.rows(); ++r)
      for (int64_t k = 0; k < got.shape.row_elements(); ++k) {
        const double a = got.row<float>(r)[k], b = want.row<float>(r)[k];
        difference += (a - b) * (a - b);
        size += b * b;
      }
  }
};

// Forward values are equal; backward sums over heads and over the vocabulary are formed in another order, in f32, once a layer and once in the
// head: relative L2 of all gradients together. A tensor alone may be nothing but what cancelled (a router that chooses one expert, mixing with one
// stream): it may also be off by half an ulp of the whole gradient.
constexpr double kGradientBound = 1e-5, kHalfUlp = 0x1p-24;

class TensorParallel : public ::testing::Test {
 protected:
  RankGroup& tp_ = world->all();
  int size() const { return world->size(); }
  int rank() const { return world->rank(); }

  Shard shard(const ModelConfig& m) const {
    return shard_of(m, Grid(Layout{size(), 1, 1, 1}), {{0, m.num_layers()}}, rank());
  }

  void compare(uint64_t seed, Numerics numerics, int64_t groups_each, int64_t vocab) {
    SCOPED_TRACE(fmt::format("seed {} {} vocabulary {}", seed, numerics_name(numerics), vocab));
    Draw d(seed);
    const ModelConfig m = random_config(d, size(), groups_each, vocab);
    const std::vector<TensorSpec> table = tensor_table(m);
    Arena arena("masters", size_t{1} << 28);
    TensorSet masters = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
    initialize_masters(m, table, masters, seed);
    for (const TensorSpec& spec : table) {
      if (spec.role == TensorRole::hash_table) continue;
      float* p = masters.views[static_cast<size_t>(spec.id)].ptr<float>();
      for (int64_t i = 0; i < spec.shape.elements(); ++i) p[i] = (spec.role == TensorRole::norm ? 1.0f : 0.0f) + 0.25f * d.normal();
    }
    for (int64_t i = 0; i < m.hidden_size; i += 2) masters.views[0].ptr<float>()[i] = -0.0f;  // of token 0

    Shard part = shard(m), all = whole_shard(m);
    part.embedding = all.embedding = d.range(0, 2) != 0;  // otherwise a later stage, which takes streams
    Instance whole(m, numerics, all, masters, nullptr, 1);
    Instance mine(m, numerics, part, masters, &tp_, static_cast<int>(d.range(1, 2)));
    mine.saved.recompute = d.range(0, 1) == 0 ? Recompute::none : Recompute::layer;
    compare_training(d, whole, mine);
    if (part.embedding) compare_decoding(d, whole, mine);
  }

  void compare_training(Draw& d, Instance& whole, Instance& mine) {
    const ModelConfig& m = whole.weights.config();
    const DType dtype = whole.weights.dtype();
    const int64_t page_tokens = default_page_tokens(m), S = d.range(1, 3);
    std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(S)), pages(static_cast<size_t>(S));
    std::vector<SequenceRows> rows;
    int64_t T = 0, num_pages = 0;
    for (size_t s = 0; s < tokens.size(); ++s) {
      for (int64_t i = d.range(1, 40); i > 0; --i) tokens[s].push_back(static_cast<int32_t>(d.range(0, m.vocab_size - 1)));
      if (s == 0) tokens[s][0] = 0;
      for (int64_t p = 0; p * page_tokens < static_cast<int64_t>(tokens[s].size()); ++p) pages[s].push_back(static_cast<int32_t>(num_pages++));
      rows.push_back({tokens[s], 0, -1, pages[s]});
      T += static_cast<int64_t>(tokens[s].size());
    }
    const Tensor input = testing::random_tensor(static_cast<uint64_t>(d.range(0, 1000)), dtype, {T, m.hc_mult, m.hidden_size});
    const Tensor target = testing::random_ints(static_cast<uint64_t>(d.range(0, 1000)), {T}, static_cast<int32_t>(m.vocab_size));
    const Tensor dlogprob = testing::random_tensor(1, DType::f32, {T}), dentropy = testing::random_tensor(2, DType::f32, {T}, 0.1f);
    Tensor temperature(DType::f32, {T});
    for (int64_t r = 0; r < T; ++r) temperature.set(r, r % 2 == 0 ? 1.0 : 0.8);
    const ConstTensorView streams = whole.weights.shard().embedding ? ConstTensorView() : ConstTensorView(input);
    StatePool whole_state(m, whole.weights.numerics(), 0, num_pages, page_tokens, whole.arena);
    StatePool state(m, whole.weights.numerics(), 0, num_pages, page_tokens, mine.arena);

    const Trained want = train(whole, rows, whole_state, streams, target, temperature, dlogprob, dentropy);
    world->reset_traffic();
    const Trained got = train(mine, rows, state, streams, target, temperature, dlogprob, dentropy);
    if (size() > 1) expect_traffic(mine, tokens, T, dtype);
    const Trained again = train(mine, rows, state, streams, target, temperature, dlogprob, dentropy);

    EXPECT_EQ(testing::count_bit_differences(got.output, want.output), 0);
    EXPECT_EQ(testing::count_bit_differences(got.logits, want.logits), 0);
    EXPECT_EQ(testing::count_bit_differences(got.logprob, want.logprob), 0);
    EXPECT_EQ(testing::count_bit_differences(got.lse, want.lse), 0);
    EXPECT_EQ(testing::count_bit_differences(got.entropy, want.entropy), 0);
    EXPECT_TRUE(same_on_all_ranks(mine.c, tp_, got.dhidden));
    EXPECT_TRUE(same_on_all_ranks(mine.c, tp_, got.dinput));
    EXPECT_EQ(testing::count_bit_differences(again.dhidden, got.dhidden), 0);

    Norms everything;
    std::map<std::string, Norms> each;
    const auto measure = [&](const std::string& name, ConstTensorView mine_view, ConstTensorView whole_view) {
      each[name].add(mine_view, whole_view);
      everything.add(mine_view, whole_view);
    };
    measure("dhidden", got.dhidden, want.dhidden);
    if (!want.dinput.view().empty()) measure("dinput", matrix_view(got.dinput.view()), matrix_view(want.dinput.view()));
    for (const TensorSpec& spec : mine.weights.table()) {
      const size_t id = static_cast<size_t>(spec.id);
      const ConstTensorView mine_view = got.gradients[id], whole_view = want.gradients[id];
      ASSERT_EQ(mine_view.empty(), whole_view.empty() || !spec.held()) << spec.name;
      if (mine_view.empty()) continue;
      measure(spec.name, mine_view, whole_view.slice(spec.box.rows.begin, spec.box.rows.size()).cols(spec.box.columns.begin, spec.box.columns.size()));
      EXPECT_EQ(testing::count_bit_differences(again.gradients[id], mine_view), 0) << spec.name;
      const bool replicated = spec.cut == Cut::none || spec.cut == Cut::experts;
      if (replicated) {
        EXPECT_TRUE(same_on_all_ranks(mine.c, tp_, mine_view)) << spec.name;
      }
    }
    const double whole_norm = std::sqrt(everything.size);
    EXPECT_GT(whole_norm, 0.1);
    EXPECT_LE(std::sqrt(everything.difference), kGradientBound * whole_norm);
    for (const auto& [name, norms] : each)
      EXPECT_LE(std::sqrt(norms.difference), size() == 1 ? 0.0 : kGradientBound * std::sqrt(norms.size) + kHalfUlp * whole_norm) << name;
  }

  // One step of training: embedding, three layers forward (twice under recomputation) and backward, head.
  void expect_traffic(const Instance& i, const std::vector<std::vector<int32_t>>& tokens, int64_t T, DType dtype) const {
    const ModelConfig& m = i.weights.config();
    std::map<std::string, CommBytes> want;
    const auto add = [&](const char* name, const CommBytes& b) {
      want[name].sent += b.sent;
      want[name].received += b.received;
    };
    if (i.weights.shard().embedding) {
      std::vector<int64_t> held(static_cast<size_t>(size()), 0);
      for (const std::vector<int32_t>& sequence : tokens)
        for (const int32_t id : sequence)
          for (int r = 0; r < size(); ++r) held[static_cast<size_t>(r)] += tp_vocabulary(m, size(), r).contains(id);
      add(kTpEmbedding, tp_embedding_bytes(m, dtype, held, rank()));
    }
    for (const LayerConfig& l : m.layers) {
      int64_t entries = 0;
      for (const std::vector<int32_t>& sequence : tokens) entries += l.compressed() ? static_cast<int64_t>(sequence.size()) / l.ratio : 0;
      for (int times = i.saved.recompute == Recompute::layer ? 2 : 1; times > 0; --times) {
        add(kTpAttentionOutput, tp_attention_output_bytes(m, dtype, T, size(), rank()));
        if (l.attention == AttentionKind::csa) add(kTpEntries, tp_entries_bytes(m, l.ratio, T, size(), rank()));
      }
      add(kTpAttentionGradient, tp_attention_gradient_bytes(m, T, entries, size(), rank()));
    }
    add(kTpLogits, tp_logits_bytes(m, T, size(), rank()));
    add(kTpLogprob, tp_logprob_bytes(m, T, true, size(), rank()));
    add(kTpLogprobGradient, tp_logprob_gradient_bytes(m, T, size(), rank()));
    EXPECT_EQ(world->traffic().size(), want.size());
    for (const auto& [name, bytes] : want) {
      const auto counted = world->traffic().find(name);
      ASSERT_NE(counted, world->traffic().end()) << name;
      EXPECT_EQ(counted->second.bytes.sent, bytes.sent) << name;
      EXPECT_EQ(counted->second.bytes.received, bytes.received) << name;
    }
  }

  // Two sequences with slots: prompts in chunks, then token by token, at times one of them alone, and calls without any.
  void compare_decoding(Draw& d, Instance& whole, Instance& mine) {
    const ModelConfig& m = whole.weights.config();
    const int64_t page_tokens = default_page_tokens(m), length = 30, per_sequence = (length + page_tokens - 1) / page_tokens;
    StatePool whole_state(m, whole.weights.numerics(), 2, 2 * per_sequence, page_tokens, whole.arena);
    StatePool state(m, whole.weights.numerics(), 2, 2 * per_sequence, page_tokens, mine.arena);
    std::vector<int32_t> tokens[2], pages[2];
    for (int s = 0; s < 2; ++s) {
      for (int64_t i = 0; i < length; ++i) tokens[s].push_back(static_cast<int32_t>(d.range(0, m.vocab_size - 1)));
      for (int64_t p = 0; p < per_sequence; ++p) pages[s].push_back(static_cast<int32_t>(s * per_sequence + p));
    }
    int64_t done[2] = {0, 0};
    while (done[0] < length || done[1] < length) {
      std::vector<SequenceRows> rows;
      for (int s = 0; s < 2; ++s) {
        const int64_t n = std::min(length - done[s], d.range(0, 2) == 0 ? 0 : done[s] < 15 ? d.range(2, 7) : 1);
        if (n == 0) continue;
        rows.push_back({std::span<const int32_t>(tokens[s]).subspan(static_cast<size_t>(done[s]), static_cast<size_t>(n)), done[s], s, pages[s]});
        done[s] += n;
      }
      const WantedRows wanted = d.range(0, 1) == 0 ? WantedRows::all : WantedRows::last_of_each;
      const auto run = [&](Instance& i, StatePool& pool) {
        ArenaScope scope(i.c.workspace());
        const TensorView hidden = forward(i.c, i.model, i.builder.build(i.c.workspace(), rows, wanted), pool, nullptr);
        Tensor logits(DType::f32, {hidden.rows(), m.vocab_size});
        head_logits(i.c, i.model, logits, hidden);
        return std::pair(copy_of(hidden), std::move(logits));
      };
      const auto [want, want_logits] = run(whole, whole_state);
      const auto [got, got_logits] = run(mine, state);
      ASSERT_EQ(testing::count_bit_differences(got, want), 0) << "at " << done[0] << " and " << done[1];
      ASSERT_EQ(testing::count_bit_differences(got_logits, want_logits), 0) << "at " << done[0] << " and " << done[1];
    }
  }
};

TEST_F(TensorParallel, IsTheWholeModel) {
  for (const Numerics numerics : kAllNumerics)
    for (uint64_t seed = 0; seed < 6; ++seed) compare(seed, numerics, 1 + static_cast<int64_t>(seed % 3), 20 + static_cast<int64_t>(seed) * 23);
}

// Fewer chunks than ranks or than 64, a last chunk that is short, chunks that need the long kernel.
TEST_F(TensorParallel, OddVocabularies) {
  for (const int64_t vocab : {3, 63, 64, 65, 130, 1100}) compare(static_cast<uint64_t>(100 + vocab), Numerics::f32, 1, vocab);
}

// Rows in several blocks give what one block gives: here blocks of the projection are 64 rows.
TEST_F(TensorParallel, OutputProjectionInBlocks) {
  const int64_t o_rank = 3, groups = 2 * size(), D = kTpOutputScratchBytes / static_cast<int64_t>(sizeof(float)) / 2 / 64, T = 150;
  CpuContext c(2, size_t{1} << 28);
  ModelConfig m;
  m.hidden_size = D;
  m.o_groups = groups;
  for (const DType type : {DType::f32, DType::bf16}) {
    Tensor a = testing::random_tensor(1, type, {T, groups * o_rank}), w = testing::random_tensor(2, type, {D, groups * o_rank});
    for (int64_t k = 0; k < groups * o_rank; ++k) {  // products below the smallest number: every group's sum for y[0, 0] is -0, y is 0
      a.set(k, 1e-30);
      w.set(k, -1e-30);
    }
    Tensor want(type, {T, D}), got(type, {T, D});
    matmul(c, want, a, {w, {}}, o_rank);
    const int64_t width = 2 * o_rank, first = rank() * width;
    const Tensor own_a = copy_of(a.view().cols(first, width)), own_w = copy_of(w.view().cols(first, width));
    world->reset_traffic();
    tp_output_projection(c, tp_, got, own_a, {own_w, {}}, o_rank);
    EXPECT_EQ(testing::count_bit_differences(got, want), 0);
    EXPECT_FALSE(std::signbit(want.get(0)));
    if (size() == 1) continue;
    const Traffic& counted = world->traffic().find(kTpAttentionOutput)->second;
    EXPECT_EQ(counted.calls, 2 * ((T + 63) / 64));
    EXPECT_EQ(counted.bytes, tp_attention_output_bytes(m, type, T, size(), rank()));
  }
}

// A block of no tokens, which a micro-batch may be, through everything.
TEST_F(TensorParallel, NoTokens) {
  Draw d(7);
  const ModelConfig m = random_config(d, size(), 1, 50);
  const std::vector<TensorSpec> table = tensor_table(m);
  Arena arena("masters", size_t{1} << 28);
  TensorSet masters = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
  initialize_masters(m, table, masters, 7);
  Instance mine(m, Numerics::bf16, shard(m), masters, &tp_, 1);
  StatePool state(m, Numerics::bf16, 0, 1, default_page_tokens(m), mine.arena);
  const Tensor none(DType::f32, {0}), target(DType::i32, {0});
  const Trained t = train(mine, {}, state, ConstTensorView(), target, none, none, none);
  EXPECT_EQ(t.output.view().rows(), 0);
  for (const Tensor& g : t.gradients) EXPECT_EQ(testing::max_abs_difference(g, Tensor(DType::f32, g.view().shape)), 0);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
