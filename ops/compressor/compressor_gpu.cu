// One channel of one entry a thread; neighbouring threads read neighbouring channels of the same slots. Every channel is a chain over at most c*m slots, whose
// loads are kAhead at a time on their way; they are read twice, the second time from the cache: floor E * c*m * dc * 8 bytes / 4 TB/s.

#include <limits>

#include "ops/compressor/compressor_cpu.h"
#include "ops/fixed_math.h"
#include "ops/sequence/sequence_gpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kThreads = 128;

struct Problem {
  SequenceArrays seq;
  EntryArrays entries;
  const float *proj, *ape, *ring;
  int64_t proj_stride, slot_stride;
  int ratio, ring_rows, width, columns;  // columns of kv, which the gate follows: halves * width
};

// Where the slots of an entry are, as EntrySlots; `at` counts from the row's first element.
struct Slots {
  const float *proj, *ring;
  int64_t proj_stride;
  int first, num_in_ring, ring_at, ring_rows, ratio, width, columns;
  int64_t call_row;

  GPU_INLINE Slots(const Problem& p, int64_t e)
      : proj(p.proj), proj_stride(p.proj_stride), ring_rows(p.ring_rows), ratio(p.ratio), width(p.width), columns(p.columns) {
    const int s = p.entries.seq[e], slot = p.seq.seq_slot[s];
    const int first_pos = (p.entries.idx[e] + 1) * ratio - ring_rows, ahead = first_pos - p.seq.seq_pos[s];
    first = first_pos < 0 ? -first_pos : 0;
    num_in_ring = ahead >= 0 ? 0 : (-ahead < ring_rows ? -ahead : ring_rows);
    call_row = static_cast<int64_t>(p.seq.seq_row[s]) + ahead;
    ring = p.ring == nullptr || slot < 0 ? nullptr : p.ring + slot * p.slot_stride;
    ring_at = (first_pos + ring_rows) % ring_rows;
  }
  GPU_INLINE const float* row(int j) const {
    const int at = ring_at + j >= ring_rows ? ring_at + j - ring_rows : ring_at + j;
    const bool in_call = j >= num_in_ring;
    return (in_call ? proj : ring) + (in_call ? (call_row + j) * proj_stride : static_cast<int64_t>(at) * (2 * columns));
  }
  GPU_INLINE int column(int j, int i) const { return j >= ratio ? width + i : i; }  // two halves at most
  // Where in ape what is added to the gate of slot j lies.
  GPU_INLINE int64_t bias_at(int j, int i) const { return static_cast<int64_t>(j >= ratio ? j - ratio : j) * columns + column(j, i); }
};

// visit(slot, its gate and kv) for the slots in order.
struct GateAndValue {
  float gate, kv;
};
template <typename Visit>
GPU_INLINE void each_slot(const Slots& slots, const float* ape, int i, const Visit& visit) {
  constexpr int kAhead = 8;
  for (int begin = slots.first; begin < slots.ring_rows; begin += kAhead) {
    float gate[kAhead], bias[kAhead], kv[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int j = begin + k < slots.ring_rows ? begin + k : slots.ring_rows - 1;  // without a branch, in which a load would be waited for
      const float* const row = slots.row(j) + slots.column(j, i);
      gate[k] = row[slots.columns], bias[k] = ape[slots.bias_at(j, i)], kv[k] = row[0];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (begin + k < slots.ring_rows) visit(begin + k, GateAndValue{gate[k] + bias[k], kv[k]});
  }
}

struct Pool {
  float highest, denominator, pooled;
};
GPU_INLINE Pool pool(const Slots& slots, const float* ape, int i) {
  Pool p = {-std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
  each_slot(slots, ape, i, [&](int, const GateAndValue& v) { p.highest = v.gate > p.highest ? v.gate : p.highest; });
  float numerator = 0.0f;
  each_slot(slots, ape, i, [&](int, const GateAndValue& v) {
    const float e = exp_f32(v.gate - p.highest);
    p.denominator = p.denominator + e;
    numerator = fma(e, v.kv, numerator);
  });
  p.pooled = numerator / p.denominator;
  return p;
}

template <typename T>
GPU_KERNEL compress_kernel(T* pooled, int64_t stride, Problem p) {
  const int64_t e = block_x();
  const int i = block_y() * kThreads + thread_x();
  if (i >= p.width) return;
  pooled[e * stride + i] = from_f32<T>(p.entries.seq[e] < 0 ? 0.0f : pool(Slots(p, e), p.ape, i).pooled);
}

GPU_KERNEL compress_backward_kernel(float* dproj, int64_t dproj_stride, const float* dpooled, int64_t dpooled_stride, Problem p) {
  const int64_t e = block_x();
  const int i = block_y() * kThreads + thread_x();
  if (i >= p.width) return;
  const Slots slots(p, e);
  const Pool pooled = pool(slots, p.ape, i);
  const float g = dpooled[e * dpooled_stride + i];
  each_slot(slots, p.ape, i, [&](int j, const GateAndValue& v) {
    const float a = exp_f32(v.gate - pooled.highest) / pooled.denominator, dkv = a * g;
    float* const to = dproj + (slots.call_row + j) * dproj_stride + slots.column(j, i);
    to[0] = dkv;
    to[p.columns] = dkv * (v.kv - pooled.pooled);
  });
}

// Groups of tokens of sequence s whose half `half` is in an entry: with overlap the last group's first half waits for an entry to come.
GPU_INLINE int num_groups(const Problem& p, int s, int half) {
  return p.entries.seq_first[s + 1] - p.entries.seq_first[s] - (p.columns / p.width - 1 - half);
}

// Zero for what belongs to no entry.
GPU_KERNEL compress_zero_kernel(float* dproj, int64_t stride, Problem p) {
  const int64_t t = block_x();
  const int at = block_y() * kThreads + thread_x();
  if (at >= p.columns || p.seq.token_pos[t] / p.ratio < num_groups(p, p.seq.token_seq[t], at / p.width)) return;
  dproj[t * stride + at] = 0.0f;
  dproj[t * stride + p.columns + at] = 0.0f;
}

// dape[place, at] += the gate gradients of that place in every group, in order.
GPU_KERNEL compress_ape_kernel(float* dape, int64_t dape_stride, const float* dproj, int64_t stride, int num_sequences, Problem p) {
  const int place = block_x(), at = block_y() * kThreads + thread_x();
  if (at >= p.columns) return;
  float sum = dape[place * dape_stride + at];
  for (int s = 0; s < num_sequences; ++s) {
    const float* from = dproj + (static_cast<int64_t>(p.seq.seq_row[s]) + place) * stride + p.columns + at;
    const int groups = num_groups(p, s, at / p.width);
#pragma unroll 8
    for (int g = 0; g < groups; ++g, from += p.ratio * stride) sum = sum + *from;
  }
  dape[place * dape_stride + at] = sum;
}

Problem problem(ConstTensorView proj, ConstTensorView ape, ConstTensorView ring, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  return {arrays(seq), arrays(entries), proj.ptr<float>(), ape.ptr<float>(), ring.data == nullptr ? nullptr : ring.ptr<float>(), proj.row_stride, ring.row_stride,
          static_cast<int>(shape.ratio), static_cast<int>(shape.ring_rows()), static_cast<int>(shape.width), static_cast<int>(shape.halves() * shape.width)};
}
Grid grid(int64_t rows, int64_t columns) { return {.blocks = rows, .threads = kThreads, .blocks_y = blocks_for(columns, kThreads)}; }

}  // namespace

void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring, const EntryView& entries, const SequenceView& seq,
              const CompressorShape& shape) {
  const Problem p = problem(proj, ape, ring, entries, seq, shape);
  const Grid g = grid(entries.num_entries, shape.width);
  if (pooled.dtype == DType::f32) launch(c, "compress", g, compress_kernel<float>, pooled.ptr<float>(), pooled.row_stride, p);
  else launch(c, "compress", g, compress_kernel<bf16>, pooled.ptr<bf16>(), pooled.row_stride, p);
}

void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj, ConstTensorView ape,
                       const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  const Problem p = problem(proj, ape, {}, entries, seq, shape);
  launch(c, "compress_zero", grid(seq.num_tokens, p.columns), compress_zero_kernel, dproj.ptr<float>(), dproj.row_stride, p);
  launch(c, "compress_backward", grid(entries.num_entries, shape.width), compress_backward_kernel, dproj.ptr<float>(), dproj.row_stride, dpooled.ptr<float>(),
         dpooled.row_stride, p);
  launch(c, "compress_ape", grid(shape.ratio, p.columns), compress_ape_kernel, dape_accum.ptr<float>(), dape_accum.row_stride, dproj.ptr<float>(), dproj.row_stride,
         static_cast<int>(seq.num_sequences), p);
}

}  // namespace lockstep::device
