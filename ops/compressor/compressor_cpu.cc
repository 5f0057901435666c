#include "ops/compressor/compressor_cpu.h"

#include <cmath>
#include <limits>

#include "ops/fixed_math.h"

namespace lockstep::reference {
namespace {

// Softmax of one channel over an entry's slots.
struct ChannelPool {
  float highest, denominator, pooled;
};

struct ChannelReader {
  const EntrySlots& slots;
  const float* ape;
  int64_t width, halves, ratio;
  int64_t column(int64_t j, int64_t i) const { return slots.half(j) * width + i; }
  float kv(int64_t j, int64_t i) const { return slots.row(j)[column(j, i)]; }
  float gate(int64_t j, int64_t i) const {
    return slots.row(j)[halves * width + column(j, i)] + ape[j % ratio * halves * width + column(j, i)];
  }
  ChannelPool pool(int64_t i) const {
    ChannelPool p = {-std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
    for (int64_t j = slots.first_slot(); j < slots.num_slots(); ++j) p.highest = std::max(p.highest, gate(j, i));
    float numerator = 0.0f;
    for (int64_t j = slots.first_slot(); j < slots.num_slots(); ++j) {
      const float e = exp_f32(gate(j, i) - p.highest);
      p.denominator = p.denominator + e;
      numerator = std::fmaf(e, kv(j, i), numerator);
    }
    p.pooled = numerator / p.denominator;
    return p;
  }
};

template <typename T>
void forward(TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring, const EntryView& entries,
             const SequenceView& seq, const CompressorShape& shape) {
  EntrySlots slots(proj, ring, entries, seq, shape);
  const ChannelReader reader = {slots, ape.ptr<float>(), shape.width, shape.halves(), shape.ratio};
  for (int64_t e = 0; e < entries.num_entries; ++e) {
    slots.select(e);
    for (int64_t i = 0; i < shape.width; ++i) pooled.row<T>(e)[i] = from_f32<T>(reader.pool(i).pooled);
  }
}

}  // namespace

void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  if (pooled.dtype == DType::f32) forward<float>(pooled, proj, ape, ring, entries, seq, shape);
  else forward<bf16>(pooled, proj, ape, ring, entries, seq, shape);
}

void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  EntrySlots slots(proj, {}, entries, seq, shape);
  const ChannelReader reader = {slots, ape.ptr<float>(), shape.width, shape.halves(), shape.ratio};
  const int64_t gate_column = shape.halves() * shape.width;
  for (int64_t t = 0; t < seq.num_tokens; ++t) std::fill_n(dproj.row<float>(t), shape.proj_width(), 0.0f);
  for (int64_t e = 0; e < entries.num_entries; ++e) {
    slots.select(e);
    for (int64_t i = 0; i < shape.width; ++i) {
      const ChannelPool p = reader.pool(i);
      for (int64_t j = slots.first_slot(); j < slots.num_slots(); ++j) {
        const float a = exp_f32(reader.gate(j, i) - p.highest) / p.denominator;
        const float dkv = a * dpooled.row<float>(e)[i];
        const float dgate = dkv * (reader.kv(j, i) - p.pooled);
        float* to = dproj.row<float>(slots.call_row(j)) + reader.column(j, i);
        to[0] = dkv;
        to[gate_column] = dgate;
        dape_accum.row<float>(j % shape.ratio)[reader.column(j, i)] += dgate;
      }
    }
  }
}

}  // namespace lockstep::reference
