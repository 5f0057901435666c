// Scores on the matrix units: which there are, their values, and that a query has the same bits in every call that brings it. CDNA4's kernel also under the executor's waves
// of 64, which follow the CPU's order.

#include <gtest/gtest.h>

#include <cmath>

#include "ops/fixed_math.h"
#include "ops/indexer/indexer_gpu.h"
#include "ops/sequence/sequence_gpu_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::count_bit_differences;
using testing::random_tensor;
using testing::SequencePart;
using testing::SequenceSet;
using testing::Tensor;

constexpr int32_t kNone = 0x40490fdb;
constexpr int64_t kPerPage = 5, kPad = 8;

struct Problem {
  Problem(const std::vector<int64_t>& length, int64_t heads, int64_t width, int64_t ratio, int k) : heads(heads), width(width), ratio(ratio), k(k) {
    set = testing::make_sequence_set(1, length, kPerPage * ratio);
    q = random_tensor(2, DType::bf16, {set.num_rows, heads, width});
    weight = random_tensor(3, DType::f32, {set.num_rows, heads});
    keys = random_tensor(4, DType::bf16, {set.num_pages * kPerPage, width + kPad});
    gkeys = gpu.put(keys);
  }

  // Ranks [queries, longest] of a call, kNone where nothing was written. `range`: as many queries at a time.
  Tensor ranks(const Call& call, int64_t range) {
    const SequenceView view = call.view(), seq = testing::put_sequences(gpu, view);
    const int64_t longest = view.longest / ratio, rows = view.num_tokens;
    const TensorView gq = gpu.put(call.take(q)), gweight = gpu.put(call.take(weight)), entries = gkeys.cols(kPad, width);
    EXPECT_TRUE(gpu::index_scores_on_matrix_units_take(gq, gweight, entries));
    Tensor out(DType::i32, {rows, longest});
    for (int64_t i = 0; i < out.elements(); ++i) out.ptr<int32_t>()[i] = kNone;
    const TensorView ranks = gpu.put(out);
    gpu::IndexScores<bf16> p = {};
    p.seq = gpu::arrays(seq);
    p.q = gq.ptr<bf16>(), p.q_stride = gq.row_stride, p.weight = gweight.ptr<float>(), p.weight_stride = gweight.row_stride;
    p.keys = entries.ptr<bf16>(), p.key_stride = entries.row_stride;
    p.heads = static_cast<int>(heads), p.width = static_cast<int>(width), p.ratio = static_cast<int>(ratio), p.per_page = static_cast<int>(kPerPage), p.k = k;
    p.rank_stride = longest, p.longest = static_cast<int>(longest);
    for (p.begin = 0; p.begin < rows; p.begin += range) {
      p.queries = std::min(range, rows - p.begin);
      p.ranks = ranks.ptr<int32_t>() + p.begin * longest;
      gpu::index_scores_on_matrix_units(gpu, p);
    }
    return gpu.get(ranks);
  }

  testing::Gpu gpu;
  int64_t heads, width, ratio;
  int k;
  SequenceSet set;
  Tensor q, weight, keys;
  TensorView gkeys;
};

struct Scores {
  float in_order;  // a chain a dot, the tree over heads
  double exact, size;
};
Scores score_of(const Problem& p, const SequenceView& view, int64_t token, int64_t row, int64_t entry) {
  const bf16* const query = p.q.ptr<bf16>() + row * p.heads * p.width;
  const float* const weight = p.weight.ptr<float>() + row * p.heads;
  const bf16* const key = p.keys.ptr<bf16>() + entry_row(view, kPerPage, view.token_seq.ptr<int32_t>()[token], entry) * (p.width + kPad) + kPad;
  Scores s = {0, 0, 0};
  std::vector<float> relu(static_cast<size_t>(p.heads));
  for (int64_t h = 0; h < p.heads; ++h) {
    float dot = 0;
    double exact = 0, size = 0;
    for (int64_t i = 0; i < p.width; ++i) {
      const float a = to_f32(query[h * p.width + i]), b = to_f32(key[i]);
      dot = std::fmaf(a, b, dot);
      exact += static_cast<double>(a) * static_cast<double>(b);
      size += std::fabs(static_cast<double>(a) * static_cast<double>(b));
    }
    relu[static_cast<size_t>(h)] = dot > 0 ? dot : 0;
    s.exact += static_cast<double>(weight[h]) * std::max(exact, 0.0);
    s.size += std::fabs(static_cast<double>(weight[h])) * size;
  }
  s.in_order = tree_dot(
      p.heads, [&](int64_t h) { return weight[h]; }, [&](int64_t h) { return relu[static_cast<size_t>(h)]; });
  return s;
}
float score_of_rank(int32_t rank) { return std::bit_cast<float>(rank ^ (rank >> 31 & 0x7fffffff)); }

void expect_values(Problem& p, const Call& call, int64_t range) {
  const SequenceView view = call.view();
  const Tensor got = p.ranks(call, range);
  const int64_t longest = view.longest / p.ratio;
  int64_t misplaced = 0, other_bits = 0;
  double worst = 0;
  for (int64_t t = 0; t < view.num_tokens; ++t) {
    const int64_t visible = (view.token_pos.ptr<int32_t>()[t] + 1) / p.ratio;
    for (int64_t e = 0; e < longest; ++e) {
      const int32_t rank = got.ptr<int32_t>()[t * longest + e];
      if (visible <= p.k || e >= visible) {
        misplaced += rank != kNone;
        continue;
      }
      const Scores s = score_of(p, view, t, call.global_row(t), e);
      other_bits += rank != gpu::rank_of_score(s.in_order);
      // A rounding of 2^-24 for each addition and product that a term goes through.
      const double bound = s.size * static_cast<double>(p.width + p.heads / 16 + 5) * 0x1p-24, difference = std::fabs(static_cast<double>(score_of_rank(rank)) - s.exact);
      worst = std::isnan(difference) ? INFINITY : std::max(worst, difference / bound);
    }
  }
  EXPECT_EQ(misplaced, 0);
  EXPECT_LE(worst, 1) << p.heads << "x" << p.width;
  if (device_info().emulated) {
    EXPECT_EQ(other_bits, 0) << p.heads << "x" << p.width;
  }
}

TEST(IndexScores, ValuesOfEveryShape) {
  for (const int64_t heads : {16, 32, 64})
    for (const int64_t width : {64, 128}) {
      Problem p({7, 30, 1, 45}, heads, width, 2, 3);
      expect_values(p, Call(p.set, testing::packed_parts(p.set)), heads == 32 ? 19 : 1000);
    }
}

// Entries of more than a block, in few queries, of sequences that meet in a step.
TEST(IndexScores, LongLists) {
  for (const int64_t heads : {16, 64}) {
    Problem p({600, 270, 90}, heads, 64, 1, 50);
    expect_values(p, Call(p.set, {{.id = 1, .pos = 268, .rows = 2}, {.id = 0, .pos = 599, .rows = 1}, {.id = 2, .pos = 20, .rows = 65}}), 1000);
  }
}

TEST(IndexScores, QueriesScoreAlikeInEveryCall) {
  for (const int64_t heads : {16, 64}) {
    Problem p({40, 3, 77}, heads, 128, 1, 2);
    const Call whole(p.set, testing::packed_parts(p.set));
    const Tensor all = p.ranks(whole, 1000);
    std::vector<int64_t> row_of(static_cast<size_t>(p.set.num_rows));
    for (int64_t t = 0; t < p.set.num_rows; ++t) row_of[static_cast<size_t>(whole.global_row(t))] = t;
    Philox rng(5, RngPurpose::test);
    for (const auto& parts : testing::random_schedule(rng, p.set, 9)) {
      const Call call(p.set, parts);
      const Tensor part = p.ranks(call, 1000);
      const int64_t longest = call.view().longest, all_longest = whole.view().longest;
      for (int64_t t = 0; t < call.view().num_tokens; ++t)
        for (int64_t e = 0; e < longest; ++e)
          ASSERT_EQ(part.ptr<int32_t>()[t * longest + e], all.ptr<int32_t>()[row_of[static_cast<size_t>(call.global_row(t))] * all_longest + e]);
    }
  }
}

}  // namespace
}  // namespace lockstep
