#pragma once
// The list of rows that a query reads, as kernels find it: attention_cpu.h's KeyReader and QueryList over device memory.

#include "core/gpu_check.h"
#include "ops/attention/attention.h"
#include "ops/sequence/sequence_gpu.h"

namespace lockstep::gpu {

// Row j of the list: window positions first, first + 1, ..., then entries, those in `chosen` or 0, 1, ...
template <typename T>
struct List {
  const T *call, *ring;   // where position 0 would be among this call's rows; the sequence's slot
  const int32_t *pages, *chosen;
  int call_begin;         // positions before it are in the ring
  int first, num_window, num_entries;
  GPU_INLINE int size() const { return num_window + num_entries; }
};

// Strides count elements.
template <typename T>
struct KeyRows {
  const T *kv, *ring, *entries;
  const int32_t* selected;
  int kv_stride, slot_stride, entry_stride, selected_stride;
  SequenceArrays seq;
  int width, window, ratio, per_page, num_selected;

  GPU_INLINE List<T> list(int64_t t) const {
    List<T> l;
    const int s = seq.token_seq[t], position = seq.token_pos[t];
    l.call_begin = seq.seq_pos[s];
    l.call = kv + (static_cast<int64_t>(seq.seq_row[s]) - l.call_begin) * kv_stride;
    l.ring = ring + static_cast<int64_t>(seq.seq_slot[s]) * slot_stride;
    l.pages = seq.page_table + s * seq.page_stride;
    l.first = position < window ? 0 : position - window + 1;
    l.num_window = position - l.first + 1;
    l.num_entries = ratio == 0 ? 0 : (position + 1) / ratio;
    l.chosen = nullptr;
    if (selected == nullptr || l.num_entries == 0) return l;
    l.chosen = selected + t * selected_stride;
    int low = 0, high = l.num_entries < num_selected ? l.num_entries : num_selected;
    if (high > 0 && l.chosen[high - 1] >= 0) low = high;
    while (low < high) {
      const int mid = (low + high) / 2;
      if (l.chosen[mid] >= 0) low = mid + 1;
      else high = mid;
    }
    l.num_entries = low;
    return l;
  }
  GPU_INLINE const T* row(const List<T>& l, int j) const {
    if (j < l.num_window) {
      const int at = l.first + j;
      return at >= l.call_begin ? l.call + static_cast<int64_t>(at) * kv_stride : l.ring + at % window * width;
    }
    const int i = j - l.num_window, entry = l.chosen == nullptr ? i : l.chosen[i];
    return entries + (static_cast<int64_t>(l.pages[entry / per_page]) * per_page + entry % per_page) * entry_stride;
  }
};

template <typename T>
KeyRows<T> key_rows(const AttentionKeys& k, const SequenceView& seq, const AttentionShape& shape) {
  KeyRows<T> r = {};
  const auto stride = [](ConstTensorView v) {
    GPU_CHECK(v.row_stride >= 0 && v.row_stride <= INT32_MAX, "attention: rows %ld elements apart", static_cast<long>(v.row_stride));
    return static_cast<int>(v.row_stride);
  };
  r.kv = k.kv.ptr<T>(), r.kv_stride = stride(k.kv);
  if (k.ring.data != nullptr) r.ring = k.ring.ptr<T>(), r.slot_stride = stride(k.ring);
  if (k.entries.data != nullptr) r.entries = k.entries.ptr<T>(), r.entry_stride = stride(k.entries);
  if (k.selected.data != nullptr) r.selected = k.selected.ptr<int32_t>(), r.selected_stride = stride(k.selected), r.num_selected = static_cast<int>(k.selected.dim(1));
  r.seq = arrays(seq);
  r.width = static_cast<int>(k.kv.dim(1));
  r.window = static_cast<int>(shape.window);
  r.ratio = static_cast<int>(shape.ratio);
  r.per_page = static_cast<int>(shape.per_page);
  return r;
}

// Whether all rows begin at multiples of n elements.
template <typename T>
bool rows_at_multiples(const KeyRows<T>& r, int n) {
  const auto bytes = reinterpret_cast<uintptr_t>(r.kv) | reinterpret_cast<uintptr_t>(r.ring) | reinterpret_cast<uintptr_t>(r.entries) |
                     static_cast<uintptr_t>(static_cast<unsigned>(r.kv_stride | r.slot_stride | r.entry_stride | r.width)) * sizeof(T);
  return bytes % (static_cast<size_t>(n) * sizeof(T)) == 0;
}

// What attention_backward reads and writes beside the keys.
struct AttentionBackward {
  TensorView dq, dkv, dentries, dsink;
  ConstTensorView d_o, o, lse, q;
};
// What one query and head give to the sink's gradient: -p * delta.
struct alignas(8) AttentionSinkTerm {
  float p, delta;  // exp(sink - lse), o . d_o
};

}  // namespace lockstep::gpu
