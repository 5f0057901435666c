// A wave a token reads its row of z, each lane keeping the keys of every kWave-th expert as ordered integers, and takes the largest K times over; the chosen
// ids then sort themselves across 16 lanes. Bound by z: T E f32 / 4 TB/s, and at many tokens by the scores, E x about 40 operations a token.

#include "core/gpu.h"
#include "ops/fixed_math.h"
#include "ops/gate/gate.h"
#include "ops/gate/gate_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr float kSumFloor = 1e-20f;
constexpr int kThreads = 256, kSlotsMax = static_cast<int>(kMaxExpertsPerToken), kTokensABlock = kThreads / kWave;
constexpr int kHashTokens = kThreads / kSlotsMax;

// Integers in the order of the numbers, zeros equal, all above 1; NaN is 1, less than any number; 0 is nothing.
GPU_INLINE uint32_t ordered(float v) {
  if (!(v == v)) return 1;
  const uint32_t u = v == 0.0f ? 0 : std::bit_cast<uint32_t>(v);
  return u >> 31 != 0 ? ~u : u | 0x80000000u;
}

// Slot `slot` of k of a token has expert `id`, in any order; slots are lanes base + 0, 1, ... Writes ids ascending and the weights. Lanes of slots that
// are not (slot >= k, or no token) go along.
GPU_INLINE void finish_route(int32_t* ids, float* weight, const float* z, int32_t id, int slot, int base, int k, bool mine, float factor) {
  int rank = 0;  // equal ids keep their order
  for (int i = 0; i < k; ++i) {
    const int32_t other = shuffle(id, base + i);
    if (other < id || (other == id && i < slot)) ++rank;
  }
  int32_t sorted = 0;
  for (int i = 0; i < k; ++i) {
    const int32_t other = shuffle(id, base + i);
    if (shuffle(rank, base + i) == slot) sorted = other;
  }
  const bool has_slot = mine && slot < k;
  const float s = has_slot ? sqrtsoftplus_f32(z[sorted]) : 0.0f;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = sum + shuffle(s, base + i);
  if (!has_slot) return;
  ids[slot] = sorted;
  weight[slot] = s / (sum + kSumFloor) * factor;
}

// Experts up to Most.
template <int Most>
GPU_KERNEL GPU_BOUNDS(kThreads) scored_kernel(int32_t* ids, int64_t ids_stride, float* weight, int64_t weight_stride, const float* z, int64_t z_stride,
                                              const float* bias, float factor, int64_t tokens, int experts, int k) {
  constexpr int kEach = Most / kWave;
  const int64_t t = static_cast<int64_t>(block_x()) * kTokensABlock + wave();
  const bool mine = t < tokens;
  const float* const row = z + t * z_stride;
  uint32_t key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * kWave + lane();
    key[i] = 0;
    if (!mine || e >= experts) continue;
    const float s = sqrtsoftplus_f32(row[e]);
    key[i] = ordered(bias == nullptr ? s : s + bias[e]);
  }
  int32_t chosen = 0;  // by slot `lane()`, in the order of choice
  for (int slot = 0; slot < k; ++slot) {
    // The key above, below it what makes the lower id the larger.
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint64_t candidate = static_cast<uint64_t>(key[i]) << 32 | static_cast<uint32_t>(Most - (i * kWave + lane()));
      if (candidate > best) best = candidate;
    }
    for (int mask = kWave / 2; mask >= 1; mask /= 2) {
      const uint64_t other = shuffle_xor(best, mask);
      if (other > best) best = other;
    }
    const int e = Most - static_cast<int>(best & 0xffffffffu);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * kWave + lane() == e) key[i] = 0;
    if (lane() == slot) chosen = e;
  }
  finish_route(ids + t * ids_stride, weight + t * weight_stride, row, chosen, lane(), 0, k, mine, factor);
}

// 16 lanes a token.
GPU_KERNEL hashed_kernel(int32_t* ids, int64_t ids_stride, float* weight, int64_t weight_stride, const float* z, int64_t z_stride, const int32_t* tokens,
                         int64_t tokens_stride, const int32_t* table, int64_t table_stride, float factor, int64_t num_tokens, int k) {
  const int64_t t = static_cast<int64_t>(block_x()) * kHashTokens + thread_x() / kSlotsMax;
  const int slot = thread_x() % kSlotsMax;
  const bool mine = t < num_tokens;
  const int32_t id = mine && slot < k ? table[tokens[t * tokens_stride] * table_stride + slot] : 0;
  finish_route(ids + t * ids_stride, weight + t * weight_stride, z + t * z_stride, id, slot, lane() - slot, k, mine, factor);
}

// A wave a token.
GPU_KERNEL backward_kernel(float* dz, int64_t dz_stride, const float* dweight, int64_t dweight_stride, const int32_t* ids, int64_t ids_stride, const float* z,
                           int64_t z_stride, float factor, int64_t tokens, int experts, int k) {
  const int64_t t = static_cast<int64_t>(block_x()) * kTokensABlock + wave();
  const bool mine = t < tokens, has_slot = mine && lane() < k;
  const int32_t id = has_slot ? ids[t * ids_stride + lane()] : -1;
  const float own_z = has_slot ? z[t * z_stride + id] : 0.0f, s = has_slot ? sqrtsoftplus_f32(own_z) : 0.0f, dw = has_slot ? dweight[t * dweight_stride + lane()] : 0.0f;
  float sum = 0, dot = 0;
  for (int i = 0; i < k; ++i) {
    const float other = shuffle(s, i);
    sum = sum + other;
    dot = dot + shuffle(dw, i) * other;
  }
  sum = sum + kSumFloor;
  const float ds = factor / sum * (dw - dot / sum);
  const float gradient = s == 0.0f ? 0.0f : ds * sigmoid_f32(own_z) / (2.0f * s);  // adding zero to a sum that began at +0 changes no bit
  for (int begin = 0; begin < experts; begin += kWave) {
    const int e = begin + lane();
    float v = 0;
    for (int i = 0; i < k; ++i) {
      const float other = shuffle(gradient, i);
      if (shuffle(id, i) == e) v = v + other;
    }
    if (mine && e < experts) dz[t * dz_stride + e] = v;
  }
}

}  // namespace

void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor) {
  const int experts = static_cast<int>(z.dim(1));
  constexpr int kCommon = 384;  // V4's experts
  launch(c, "route_scored", {.blocks = blocks_for(z.rows(), kTokensABlock), .threads = kThreads},
         experts <= kCommon ? scored_kernel<kCommon> : scored_kernel<static_cast<int>(kMaxExperts)>, ids.ptr<int32_t>(), ids.row_stride, weight.ptr<float>(),
         weight.row_stride, z.ptr<float>(), z.row_stride, bias.empty() ? nullptr : bias.ptr<float>(), factor, z.rows(), experts, static_cast<int>(ids.dim(1)));
}

void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens, ConstTensorView table, float factor) {
  launch(c, "route_hashed", {.blocks = blocks_for(z.rows(), kHashTokens), .threads = kThreads}, hashed_kernel, ids.ptr<int32_t>(), ids.row_stride,
         weight.ptr<float>(), weight.row_stride, z.ptr<float>(), z.row_stride, tokens.ptr<int32_t>(), tokens.row_stride, table.ptr<int32_t>(), table.row_stride, factor,
         z.rows(), static_cast<int>(ids.dim(1)));
}

void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z, float factor) {
  launch(c, "route_backward", {.blocks = blocks_for(z.rows(), kTokensABlock), .threads = kThreads}, backward_kernel, dz.ptr<float>(), dz.row_stride,
         dweight.ptr<float>(), dweight.row_stride, ids.ptr<int32_t>(), ids.row_stride, z.ptr<float>(), z.row_stride, factor, z.rows(), static_cast<int>(z.dim(1)),
         static_cast<int>(ids.dim(1)));
}

}  // namespace lockstep::device
