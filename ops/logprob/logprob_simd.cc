#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logprob/logprob_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "ops/fixed_math-inl.h"
#include "ops/logprob/logprob_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {

using F32Vec = hn::Vec<F32Tag>;
constexpr int64_t kStep = static_cast<int64_t>(kF32Lanes);

// Chunks shorter than the tree's 16 lanes would leave most of a vector idle. Such rows are short enough to keep whole:
// exponentials run across the vocabulary and only the folds go chunk by chunk.
constexpr int64_t kShortChunk = kTreeLanes - 1;
constexpr int64_t kShortVocab = kShortChunk * kVocabChunks;
constexpr int64_t kShortBuffer = kShortVocab + kTreeLanes;  // whole vectors past the last id

// The tree over n <= 16 terms, one a lane: lanes past n hold zero and adding them changes nothing.
HWY_INLINE float FoldShort(float* x, int64_t n) {
  for (int64_t width = kTreeLanes / 2; width >= 1; width /= 2)
    for (int64_t i = 0; i + width < std::min(n, 2 * width); ++i) x[i] = x[i] + x[i + width];
  return x[0];
}

// Lanes [i, i + kStep) of n elements as y = logits / temperature; lanes past n are `pad`.
HWY_INLINE F32Vec LoadY(F32Tag d, const float* logits, int64_t i, int64_t n, F32Vec temperature, F32Vec pad) {
  if (i + kStep <= n) return hn::Div(hn::LoadU(d, logits + i), temperature);
  if (i >= n) return pad;
  const auto valid = hn::FirstN(d, static_cast<size_t>(n - i));
  return hn::IfThenElse(valid, hn::Div(hn::MaskedLoad(valid, d, logits + i), temperature), pad);
}

// Merges the (max, sum) of `chunks` chunks, held in arrays of kVocabChunks. Running maxima come first, so that all exponentials
// are taken at once and only a multiply and an add per chunk stay in sequence.
HWY_INLINE RowStats MergeChunks(float* max, float* sum, int64_t chunks) {
  const F32Tag d;
  HWY_ALIGN float keep[kVocabChunks] = {};  // exp(M_old - M)
  float running = -std::numeric_limits<float>::infinity();
  for (int64_t k = 0; k < chunks; ++k) {
    const float merged = std::max(running, max[k]);
    keep[k] = running - merged;
    max[k] = max[k] - merged;
    running = merged;
  }
  for (int64_t k = 0; k < chunks; k += kStep) {
    hn::Store(ExpF32(d, hn::Load(d, keep + k)), d, keep + k);
    hn::Store(hn::Mul(hn::Load(d, sum + k), ExpF32(d, hn::Load(d, max + k))), d, sum + k);
  }
  float total = 0.0f;
  for (int64_t k = 0; k < chunks; ++k) total = total * keep[k] + sum[k];
  return {.max = running, .lse = running + log_f32(total)};
}

// (max, sum) of each of the chunks of `count` logits, in arrays of kVocabChunks.
HWY_INLINE void ChunkStats(float* HWY_RESTRICT max, float* HWY_RESTRICT sum, const float* HWY_RESTRICT logits, int64_t count,
                           int64_t chunk, float temperature) {
  const F32Tag d;
  const F32Vec t = hn::Set(d, temperature), low = hn::Set(d, -std::numeric_limits<float>::infinity());
  const int64_t chunks = (count + chunk - 1) / chunk;
  if (chunk <= kShortChunk) {
    HWY_ALIGN float e[kShortBuffer];
    for (int64_t i = 0; i < count; i += kStep) hn::Store(LoadY(d, logits, i, count, t, low), d, e + i);
    for (int64_t k = 0; k < chunks; ++k) {
      float* y = e + k * chunk;
      const int64_t n = std::min(chunk, count - k * chunk);
      float m = y[0];
      for (int64_t i = 1; i < n; ++i) m = std::max(m, y[i]);
      for (int64_t i = 0; i < n; ++i) y[i] = y[i] - m;
      max[k] = m;
    }
    for (int64_t i = 0; i < count; i += kStep) hn::Store(ExpF32(d, hn::Load(d, e + i)), d, e + i);
    for (int64_t k = 0; k < chunks; ++k) sum[k] = FoldShort(e + k * chunk, std::min(chunk, count - k * chunk));
    return;
  }
  for (int64_t k = 0; k < chunks; ++k) {
    const float* x = logits + k * chunk;
    const int64_t n = std::min(chunk, count - k * chunk);
    F32Vec top = low;
    for (int64_t i = 0; i < n; i += kStep) top = hn::Max(top, LoadY(d, x, i, n, t, low));
    max[k] = hn::GetLane(hn::MaxOfLanes(d, top));
    const F32Vec m = hn::Set(d, max[k]);
    F32Vec acc[kLaneVectors];
    for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = hn::Zero(d);
    for (int64_t i = 0; i < n; i += kTreeLanes)
      for (size_t v = 0; v < kLaneVectors; ++v)  // a lane past n is exp(-inf) = 0
        acc[v] = hn::Add(acc[v], ExpF32(d, hn::Sub(LoadY(d, x, i + static_cast<int64_t>(v) * kStep, n, t, low), m)));
    sum[k] = FoldLanes(d, acc);
  }
}

// E[y] of each of the chunks.
HWY_INLINE void ChunkMeans(float* HWY_RESTRICT mean, const float* HWY_RESTRICT logits, int64_t count, int64_t chunk,
                           float temperature, float lse) {
  const F32Tag d;
  const F32Vec t = hn::Set(d, temperature), l = hn::Set(d, lse), zero = hn::Zero(d);
  const int64_t chunks = (count + chunk - 1) / chunk;
  if (chunk <= kShortChunk) {
    HWY_ALIGN float py[kShortBuffer];
    for (int64_t i = 0; i < count; i += kStep) {
      const F32Vec y = LoadY(d, logits, i, count, t, zero);
      hn::Store(hn::Mul(ExpF32(d, hn::Sub(y, l)), y), d, py + i);
    }
    for (int64_t k = 0; k < chunks; ++k) mean[k] = FoldShort(py + k * chunk, std::min(chunk, count - k * chunk));
    return;
  }
  for (int64_t k = 0; k < chunks; ++k) {
    const float* x = logits + k * chunk;
    const int64_t n = std::min(chunk, count - k * chunk);
    F32Vec acc[kLaneVectors];
    for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = zero;
    for (int64_t i = 0; i < n; i += kTreeLanes)
      for (size_t v = 0; v < kLaneVectors; ++v) {
        const int64_t at = i + static_cast<int64_t>(v) * kStep;
        const F32Vec y = LoadY(d, x, at, n, t, zero);
        F32Vec p = ExpF32(d, hn::Sub(y, l));
        if (at + kStep > n) p = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(std::max<int64_t>(n - at, 0))), p);
        acc[v] = hn::MulAdd(p, y, acc[v]);
      }
    mean[k] = FoldLanes(d, acc);
  }
}

RowStats RowStatsKernel(const float* HWY_RESTRICT logits, int64_t vocab, float temperature) {
  HWY_ALIGN float max[kVocabChunks] = {}, sum[kVocabChunks] = {};
  ChunkStats(max, sum, logits, vocab, vocab_chunk(vocab), temperature);
  return MergeChunks(max, sum, vocab_chunks(vocab));
}

float RowEntropyKernel(const float* HWY_RESTRICT logits, int64_t vocab, float temperature, float lse) {
  float mean[kVocabChunks];
  ChunkMeans(mean, logits, vocab, vocab_chunk(vocab), temperature, lse);
  return merge_means(mean, vocab_chunks(vocab), lse);
}

// The same pieces, of a part of the vocabulary.
void ChunkStatsKernel(float* max, float* sum, const float* logits, int64_t count, int64_t chunk, float temperature) {
  ChunkStats(max, sum, logits, count, chunk, temperature);
}
void ChunkMeansKernel(float* mean, const float* logits, int64_t count, int64_t chunk, float temperature, float lse) {
  ChunkMeans(mean, logits, count, chunk, temperature, lse);
}
RowStats MergeStatsKernel(const float* max, const float* sum, int64_t chunks) {
  HWY_ALIGN float m[kVocabChunks] = {}, s[kVocabChunks] = {};
  std::copy_n(max, chunks, m);
  std::copy_n(sum, chunks, s);
  return MergeChunks(m, s, chunks);
}

void RowBackwardKernel(float* HWY_RESTRICT logits, int64_t count, const reference::RowGradient& g) {
  const F32Tag d;
  const F32Vec t = hn::Set(d, g.temperature), lse = hn::Set(d, g.lse), entropy = hn::Set(d, g.entropy);
  const F32Vec dlogprob = hn::Set(d, g.dlogprob), dentropy = hn::Set(d, g.dentropy), zero = hn::Zero(d);
  const bool has_target = g.target >= 0 && g.target < count;
  const float at_target = has_target ? reference::dlogit(logits[g.target], true, g) : 0.0f;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const F32Vec y = hn::Div(hn::LoadU(d, logits + i), t);
    const F32Vec shifted = hn::Sub(y, lse), p = ExpF32(d, shifted);
    const F32Vec dy = hn::Sub(hn::Mul(dlogprob, hn::Sub(zero, p)), hn::Mul(hn::Mul(dentropy, p), hn::Add(shifted, entropy)));
    hn::StoreU(hn::Div(dy, t), d, logits + i);
  }
  for (; i < count; ++i) logits[i] = reference::dlogit(logits[i], false, g);
  if (has_target) logits[g.target] = at_target;
}

}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {
HWY_EXPORT(RowStatsKernel);
HWY_EXPORT(RowEntropyKernel);
HWY_EXPORT(ChunkStatsKernel);
HWY_EXPORT(ChunkMeansKernel);
HWY_EXPORT(MergeStatsKernel);
HWY_EXPORT(RowBackwardKernel);

namespace simd {
RowStats row_stats(const float* logits, int64_t vocab, float temperature) {
  return HWY_DYNAMIC_DISPATCH(RowStatsKernel)(logits, vocab, temperature);
}
float row_entropy(const float* logits, int64_t vocab, float temperature, float lse) {
  return HWY_DYNAMIC_DISPATCH(RowEntropyKernel)(logits, vocab, temperature, lse);
}
void chunk_stats(float* max, float* sum, const float* logits, int64_t count, int64_t chunk, float temperature) {
  HWY_DYNAMIC_DISPATCH(ChunkStatsKernel)(max, sum, logits, count, chunk, temperature);
}
RowStats merge_stats(const float* max, const float* sum, int64_t chunks) {
  return HWY_DYNAMIC_DISPATCH(MergeStatsKernel)(max, sum, chunks);
}
void chunk_means(float* mean, const float* logits, int64_t count, int64_t chunk, float temperature, float lse) {
  HWY_DYNAMIC_DISPATCH(ChunkMeansKernel)(mean, logits, count, chunk, temperature, lse);
}
void row_backward(float* logits, int64_t count, const reference::RowGradient& g) {
  HWY_DYNAMIC_DISPATCH(RowBackwardKernel)(logits, count, g);
}
}  // namespace simd

}  // namespace lockstep
#endif  // HWY_ONCE
