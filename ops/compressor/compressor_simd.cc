// Pooling with lanes over channels. Every channel is independent, so the order of operations is that of the reference whatever
// the width.

#include "ops/compressor/compressor_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/compressor/compressor_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fixed_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

constexpr int64_t kLanes = static_cast<int64_t>(kF32Lanes);

// One slot of the current entry: its half of a token's projection, and where its gradient goes.
struct Slot {
  const float* kv;
  const float* ape;
  float* dkv;
};

// Masked memory access for the last channels; `n` is how many there are, kLanes or fewer.
struct Lanes {
  explicit Lanes(int64_t n) : whole(n >= kLanes), mask(hn::FirstN(F32Tag(), static_cast<size_t>(std::min(n, kLanes)))) {}
  HWY_INLINE hn::Vec<F32Tag> Load(const float* p) const {
    return whole ? hn::LoadU(F32Tag(), p) : hn::MaskedLoad(mask, F32Tag(), p);
  }
  HWY_INLINE void Store(hn::Vec<F32Tag> v, float* p) const {
    if (whole) hn::StoreU(v, F32Tag(), p);
    else hn::BlendedStore(v, mask, F32Tag(), p);
  }
  bool whole;
  hn::Mask<F32Tag> mask;
};

struct VectorPool {
  hn::Vec<F32Tag> highest, denominator, pooled;
};

// Channels [i, i + lanes) of an entry with slots [0, n).
HWY_INLINE VectorPool Pool(const Slot* slots, int64_t n, int64_t gate_column, int64_t i, const Lanes& lanes) {
  const F32Tag d;
  VectorPool p;
  p.highest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; ++j)
    p.highest = hn::Max(p.highest, hn::Add(lanes.Load(slots[j].kv + gate_column + i), lanes.Load(slots[j].ape + i)));
  p.denominator = hn::Zero(d);
  auto numerator = hn::Zero(d);
  for (int64_t j = 0; j < n; ++j) {
    const auto gate = hn::Add(lanes.Load(slots[j].kv + gate_column + i), lanes.Load(slots[j].ape + i));
    const auto e = ExpF32(d, hn::Sub(gate, p.highest));
    p.denominator = hn::Add(p.denominator, e);
    numerator = hn::MulAdd(e, lanes.Load(slots[j].kv + i), numerator);
  }
  p.pooled = hn::Div(numerator, p.denominator);
  return p;
}

// Slot pointers of the selected entry, absent slots left out. Returns how many.
int64_t ListSlots(const EntrySlots& entry, const float* ape, const CompressorShape& shape, TensorView dproj, Slot* slots) {
  const int64_t columns = shape.halves() * shape.width;
  int64_t n = 0;
  for (int64_t j = entry.first_slot(); j < entry.num_slots(); ++j) {
    const int64_t half = entry.half(j) * shape.width;
    slots[n++] = {entry.row(j) + half, ape + (j - entry.half(j) * shape.ratio) * columns + half,
                  dproj.data == nullptr ? nullptr : dproj.row<float>(entry.call_row(j)) + half};
  }
  return n;
}

Slot* MakeSlots(Context& c, const CompressorShape& shape) {
  return static_cast<Slot*>(
      c.workspace->allocate(sizeof(Slot) * static_cast<size_t>(c.num_threads() * shape.ring_rows()), "compressor slots"));
}

template <typename T>
void Forward(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
             const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  const EntrySlots call(proj, ring, entries, seq, shape);
  const int64_t width = shape.width, gate_column = shape.halves() * width;
  ArenaScope scope(*c.workspace);
  Slot* all_slots = MakeSlots(c, shape);
  parallel_for(c, entries.num_entries, shape.ring_rows() * width * 2, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
    const F32Tag d;
    EntrySlots entry = call;
    Slot* slots = all_slots + worker * shape.ring_rows();
    for (int64_t e = begin; e < end; ++e) {
      entry.select(e);
      const int64_t n = ListSlots(entry, ape.ptr<float>(), shape, {}, slots);
      T* to = pooled.row<T>(e);
      for (int64_t i = 0; i < width; i += kLanes) {
        const auto v = Pool(slots, n, gate_column, i, Lanes(width - i)).pooled;
        if (i + kLanes <= width) {
          StoreF32(d, v, to + i);
        } else {
          HWY_ALIGN float tail[kTreeLanes];
          hn::Store(v, d, tail);
          for (int64_t k = i; k < width; ++k) to[k] = from_f32<T>(tail[k - i]);
        }
      }
    }
  });
}

void CompressForward(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
                     const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  if (pooled.dtype == DType::f32) Forward<float>(c, pooled, proj, ape, ring, entries, seq, shape);
  else Forward<bf16>(c, pooled, proj, ape, ring, entries, seq, shape);
}

void CompressBackward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                      ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  const EntrySlots call(proj, {}, entries, seq, shape);
  const int64_t width = shape.width, halves = shape.halves(), ratio = shape.ratio, gate_column = halves * width;
  const int32_t* seq_row = seq.seq_row.ptr<int32_t>();
  const int32_t* seq_first = entries.seq_first.ptr<int32_t>();

  // Every half of a token belongs to one entry at most; those that belong to none get zero here, all others are written below.
  for (int64_t s = 0; s < seq.num_sequences; ++s) {
    const int64_t num_entries = seq_first[s + 1] - seq_first[s];
    for (int64_t half = 0; half < halves; ++half) {
      const int64_t used = std::max<int64_t>(0, num_entries - (halves - 1 - half)) * ratio;
      for (int64_t t = seq_row[s] + used; t < seq_row[s + 1]; ++t) {
        std::fill_n(dproj.row<float>(t) + half * width, width, 0.0f);
        std::fill_n(dproj.row<float>(t) + gate_column + half * width, width, 0.0f);
      }
    }
  }

  ArenaScope scope(*c.workspace);
  Slot* all_slots = MakeSlots(c, shape);
  parallel_for(c, entries.num_entries, shape.ring_rows() * width * 4, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
    const F32Tag d;
    EntrySlots entry = call;
    Slot* slots = all_slots + worker * shape.ring_rows();
    for (int64_t e = begin; e < end; ++e) {
      entry.select(e);
      const int64_t n = ListSlots(entry, ape.ptr<float>(), shape, dproj, slots);
      const float* grad = dpooled.row<float>(e);
      for (int64_t i = 0; i < width; i += kLanes) {
        const Lanes lanes(width - i);
        const VectorPool p = Pool(slots, n, gate_column, i, lanes);
        const auto g = lanes.Load(grad + i);
        for (int64_t j = 0; j < n; ++j) {
          const auto gate = hn::Add(lanes.Load(slots[j].kv + gate_column + i), lanes.Load(slots[j].ape + i));
          const auto a = hn::Div(ExpF32(d, hn::Sub(gate, p.highest)), p.denominator);
          const auto dkv = hn::Mul(a, g);
          lanes.Store(dkv, slots[j].dkv + i);
          lanes.Store(hn::Mul(dkv, hn::Sub(lanes.Load(slots[j].kv + i), p.pooled)), slots[j].dkv + gate_column + i);
        }
      }
    }
  });

  // dape from the gate gradients just written: one (token place, half) a row, entries in order.
  const int64_t cost = entries.num_entries * (width / 4 + 8);
  parallel_for(c, ratio * halves, cost, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t place = r / halves, half = r % halves;
      float* to = dape_accum.row<float>(place) + half * width;
      for (int64_t s = 0; s < seq.num_sequences; ++s) {
        const int64_t num_groups = seq_first[s + 1] - seq_first[s] - (halves - 1 - half);
        for (int64_t group = 0; group < num_groups; ++group) {
          const float* from = dproj.row<float>(seq_row[s] + group * ratio + place) + gate_column + half * width;
          for (int64_t i = 0; i < width; i += kLanes) {
            const Lanes lanes(width - i);
            lanes.Store(hn::Add(lanes.Load(to + i), lanes.Load(from + i)), to + i);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::simd {
HWY_EXPORT(CompressForward);
HWY_EXPORT(CompressBackward);

void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  HWY_DYNAMIC_DISPATCH(CompressForward)(c, pooled, proj, ape, ring, entries, seq, shape);
}

void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  HWY_DYNAMIC_DISPATCH(CompressBackward)(c, dproj, dape_accum, dpooled, proj, ape, entries, seq, shape);
}

}  // namespace lockstep::simd
#endif  // HWY_ONCE
