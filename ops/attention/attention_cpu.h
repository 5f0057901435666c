#pragma once
// Internal to ops/attention: the implementations and what those on the CPU share, the list of rows of one query. device: on the GPU, attention_gpu.cu with the
// same bits, attention_gpu_sm90.cu in bf16 on Hopper's tensor cores.

#include <algorithm>

#include "ops/attention/attention.h"

namespace lockstep {

// Finds key rows in the call, the ring and the pages.
template <typename T>
class KeyReader {
 public:
  KeyReader(const AttentionKeys& keys, const SequenceView& seq, const AttentionShape& shape, int64_t width)
      : seq_(seq), window_(shape.window), per_page_(shape.per_page), width_(width), kv_(keys.kv.ptr<T>()),
        kv_stride_(keys.kv.row_stride) {
    seq_row_ = seq.seq_row.ptr<int32_t>();
    seq_pos_ = seq.seq_pos.ptr<int32_t>();
    seq_slot_ = seq.seq_slot.ptr<int32_t>();
    if (keys.ring.data != nullptr) ring_ = keys.ring.ptr<T>(), slot_stride_ = keys.ring.row_stride;
    if (keys.entries.data != nullptr) entries_ = keys.entries.ptr<T>(), entry_stride_ = keys.entries.row_stride;
  }
  const T* window(int64_t s, int64_t pos) const {
    const int64_t ahead = pos - seq_pos_[s];
    return ahead >= 0 ? kv_ + (seq_row_[s] + ahead) * kv_stride_ : ring_ + seq_slot_[s] * slot_stride_ + pos % window_ * width_;
  }
  const T* entry(int64_t s, int64_t idx) const { return entries_ + entry_row(seq_, per_page_, s, idx) * entry_stride_; }

 private:
  const SequenceView& seq_;
  int64_t window_, per_page_, width_;
  const T* kv_;
  int64_t kv_stride_;
  const T* ring_ = nullptr;
  const T* entries_ = nullptr;
  int64_t slot_stride_ = 0, entry_stride_ = 0;
  const int32_t *seq_row_, *seq_pos_, *seq_slot_;
};

// What one query reads: window positions [first, position], then num_entries entries, those in `chosen` or the first num_entries.
struct QueryList {
  int64_t position = 0, first = 0, num_entries = 0;
  const int32_t* chosen = nullptr;
  int64_t num_window() const { return position - first + 1; }
  int64_t size() const { return num_window() + num_entries; }
  int64_t entry(int64_t i) const { return chosen == nullptr ? i : chosen[i]; }
};

inline QueryList query_list(const AttentionKeys& keys, const AttentionShape& shape, int64_t t, int64_t position) {
  QueryList list;
  list.position = position;
  list.first = std::max<int64_t>(0, position - shape.window + 1);
  if (shape.ratio == 0) return list;
  const int64_t visible = (position + 1) / shape.ratio;
  list.num_entries = visible;
  if (keys.selected.data == nullptr) return list;
  const int32_t* chosen = keys.selected.row<int32_t>(t);
  const int64_t k = keys.selected.dim(1);
  int64_t n = 0;
  for (; n < k && chosen[n] >= 0; ++n)
    CHECK((n == 0 || chosen[n] > chosen[n - 1]) && chosen[n] < visible, "selected[{}, {}] is {} after {}; {} entries are visible",
          t, n, chosen[n], n == 0 ? -1 : chosen[n - 1], visible);
  list.num_entries = n;
  if (n > 0 && chosen[n - 1] != n - 1) list.chosen = chosen;  // otherwise it is the prefix 0 .. n - 1
  return list;
}

// Rows of the longest list of the call.
inline int64_t longest_entry_list(const AttentionKeys& keys, const SequenceView& seq, const AttentionShape& shape) {
  if (shape.ratio == 0) return 0;
  int64_t visible = 0;
  for (int64_t s = 0; s < seq.num_sequences; ++s) visible = std::max(visible, (last_position(seq, s) + 1) / shape.ratio);
  return keys.selected.data == nullptr ? visible : std::min(visible, keys.selected.dim(1));
}
inline int64_t longest_window(const SequenceView& seq, const AttentionShape& shape) {
  int64_t rows = 0;
  for (int64_t s = 0; s < seq.num_sequences; ++s) rows = std::max(rows, last_position(seq, s) + 1);
  return std::min(rows, shape.window);
}

namespace reference {
void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
               const SequenceView& seq, const AttentionShape& shape);
void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                        ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape);
}  // namespace reference

namespace simd {
void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
               const SequenceView& seq, const AttentionShape& shape);
void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                        ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape);
}  // namespace simd

namespace device {
// The tensor cores' kernel where it takes the tensors, by their dtypes, widths and strides alone; otherwise the portable one.
void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
               const AttentionShape& shape);
bool attention_on_tensor_cores(ConstTensorView o, ConstTensorView q, const AttentionKeys& keys);
void portable_attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape);
// Scratch of backward, for what is kept of as many queries as fit. The bits do not depend on it.
inline constexpr int64_t kAttentionScratchBytes = int64_t{1} << 30;
void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o, ConstTensorView o,
                        ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape, int64_t scratch_bytes = kAttentionScratchBytes);
void portable_attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o, ConstTensorView o,
                        ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                        const AttentionShape& shape, int64_t scratch_bytes = kAttentionScratchBytes);
}  // namespace device

}  // namespace lockstep
