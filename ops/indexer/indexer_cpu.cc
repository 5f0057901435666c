#include "ops/indexer/indexer_cpu.h"

#include <algorithm>

#include "ops/fixed_math.h"

namespace lockstep::reference {
namespace {

template <typename T>
void select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
            const SequenceView& seq, const IndexerShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2), k = selected.dim(1);
  int64_t longest = 0;
  for (int64_t s = 0; s < seq.num_sequences; ++s) longest = std::max(longest, (last_position(seq, s) + 1) / shape.ratio);
  ArenaScope scope(*c.workspace);
  float* score = static_cast<float*>(c.workspace->allocate(sizeof(float) * static_cast<size_t>(longest), "index scores"));
  for (int64_t t = 0; t < seq.num_tokens; ++t) {
    const int64_t s = seq.token_seq.ptr<int32_t>()[t];
    const int64_t visible = (seq.token_pos.ptr<int32_t>()[t] + 1) / shape.ratio;
    for (int64_t i = 0; i < visible && visible > k; ++i) {
      const T* key = keys.row<T>(entry_row(seq, shape.per_page, s, i));
      const auto relu_dot = [&](int64_t h) {
        float dot = 0.0f;
        for (int64_t x = 0; x < width; ++x) dot = std::fmaf(to_f32(q.row<T>(t)[h * width + x]), to_f32(key[x]), dot);
        return dot > 0.0f ? dot : 0.0f;
      };
      score[i] = tree_dot(
          heads, [&](int64_t h) { return weight.row<float>(t)[h]; }, relu_dot);
    }
    // An entry is in when fewer than k come before it in the order (score descending, index ascending).
    int32_t* out = selected.row<int32_t>(t);
    int64_t n = 0;
    for (int64_t i = 0; i < visible && n < k; ++i) {
      int64_t before = 0;
      for (int64_t j = 0; j < visible && visible > k; ++j) before += score[j] > score[i] || (score[j] == score[i] && j < i);
      if (before < k) out[n++] = static_cast<int32_t>(i);
    }
    std::fill(out + n, out + k, -1);
  }
}

}  // namespace

void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape) {
  if (q.dtype == DType::f32) select<float>(c, selected, q, weight, keys, seq, shape);
  else select<bf16>(c, selected, q, weight, keys, seq, shape);
}

}  // namespace lockstep::reference
