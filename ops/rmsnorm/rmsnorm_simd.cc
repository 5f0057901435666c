#include <algorithm>

#include "ops/rmsnorm/rmsnorm_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rmsnorm/rmsnorm_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

// Rows are taken in blocks, for the short ones of the per-head norm: four trees fold together, one vector square root and
// division serves all, and a block is still in the first-level cache (16 KiB of f32) when it is scaled.
constexpr int64_t kBlockRows = kTreeLanes;
constexpr int64_t kBlockElements = 4096;

// sums[k], k < count: the reduction whose lanes lanes(k, acc) leaves in acc[kLaneVectors]. Writes up to a multiple of 4 sums.
template <class Lanes>
HWY_INLINE void FoldRows(int64_t count, float* sums, const Lanes& lanes) {
  F32Vec acc[4 * kLaneVectors];
  for (F32Vec& v : acc) v = hn::Zero(F32Tag());
  for (int64_t k0 = 0; k0 < count; k0 += 4) {
    for (int64_t k = 0; k < 4; ++k)
      if (k0 + k < count) lanes(k0 + k, acc + static_cast<size_t>(k) * kLaneVectors);
    FoldLanesOfFour(acc, sums + k0);
  }
}

int64_t BlockRows(int64_t n) { return std::clamp<int64_t>(kBlockElements / n, 1, kBlockRows); }

template <typename T>
void Forward(TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  const F32Tag d;
  const int64_t n = x.dim(1), rows = x.rows();
  const float* gain = w.empty() ? nullptr : w.ptr<float>();
  float* inv_out = inv.empty() ? nullptr : inv.ptr<float>();
  const T* from = x.ptr<T>();
  T* to = y.ptr<T>();
  const int64_t block = BlockRows(n);
  HWY_ALIGN float scale[kBlockRows] = {};
  for (int64_t t0 = 0; t0 < rows; t0 += block) {
    const int64_t count = std::min(block, rows - t0);
    FoldRows(count, scale, [&](int64_t k, F32Vec* acc) HWY_ATTR {
      const T* row = from + (t0 + k) * x.row_stride;
      F32Vec sum[kLaneVectors];
      for (size_t v = 0; v < kLaneVectors; ++v) sum[v] = hn::Zero(d);
      ForRowLanes(n, [&](auto io, int64_t i, size_t v) HWY_ATTR {
        const F32Vec e = io.Load(row + i);
        sum[v] = io.MulAdd(e, e, sum[v]);
      });
      for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = sum[v];
    });
    for (int64_t k = 0; k < count; k += kRowStep) {
      const F32Vec mean = hn::Div(hn::Load(d, scale + k), hn::Set(d, static_cast<float>(n)));
      hn::Store(hn::Div(hn::Set(d, 1.0f), hn::Sqrt(hn::Add(mean, hn::Set(d, eps)))), d, scale + k);
    }
    for (int64_t k = 0; k < count; ++k) {
      const T* row = from + (t0 + k) * x.row_stride;
      T* out = to + (t0 + k) * y.row_stride;
      if (inv_out != nullptr) inv_out[t0 + k] = scale[k];
      const F32Vec s = hn::Set(d, scale[k]);
      if (gain == nullptr) {
        ForRow(n, [&](auto io, int64_t i) HWY_ATTR { io.Store(hn::Mul(io.Load(row + i), s), out + i); });
      } else {
        ForRow(n, [&](auto io, int64_t i) HWY_ATTR {
          io.Store(hn::Mul(hn::Mul(io.Load(row + i), s), io.Load(gain + i)), out + i);
        });
      }
    }
  }
}

template <bool kGain, bool kAccumulate, typename T>
void BackwardInputRows(TensorView dx, ConstTensorView dy, ConstTensorView x, const float* gain, const float* inv) {
  const F32Tag d;
  const int64_t n = x.dim(1);
  const T* from = x.ptr<T>();
  const float* grad = dy.ptr<float>();
  float* to = dx.ptr<float>();
  const auto gained = [&](auto io, const float* g, int64_t i) HWY_ATTR {
    if constexpr (kGain) return hn::Mul(io.Load(gain + i), io.Load(g + i));
    else return io.Load(g + i);
  };
  const int64_t block = BlockRows(n);
  HWY_ALIGN float sums[kBlockRows] = {};
  for (int64_t t0 = 0; t0 < x.rows(); t0 += block) {
    const int64_t count = std::min(block, x.rows() - t0);
    FoldRows(count, sums, [&](int64_t k, F32Vec* acc) HWY_ATTR {
      const T* row = from + (t0 + k) * x.row_stride;
      const float* g = grad + (t0 + k) * dy.row_stride;
      const F32Vec s = hn::Set(d, inv[t0 + k]);
      F32Vec sum[kLaneVectors];
      for (size_t v = 0; v < kLaneVectors; ++v) sum[v] = hn::Zero(d);
      ForRowLanes(n, [&](auto io, int64_t i, size_t v) HWY_ATTR {
        sum[v] = io.MulAdd(hn::Mul(io.Load(row + i), s), gained(io, g, i), sum[v]);
      });
      for (size_t v = 0; v < kLaneVectors; ++v) acc[v] = sum[v];
    });
    for (int64_t k = 0; k < count; ++k) {
      const T* row = from + (t0 + k) * x.row_stride;
      const float* g = grad + (t0 + k) * dy.row_stride;
      float* out = to + (t0 + k) * dx.row_stride;
      const F32Vec s = hn::Set(d, inv[t0 + k]);
      const F32Vec mean = hn::Set(d, sums[k] / static_cast<float>(n));
      ForRow(n, [&](auto io, int64_t i) HWY_ATTR {
        F32Vec v = hn::Mul(s, hn::NegMulAdd(hn::Mul(io.Load(row + i), s), mean, gained(io, g, i)));
        if constexpr (kAccumulate) v = hn::Add(io.Load(out + i), v);
        io.Store(v, out + i);
      });
    }
  }
}

template <typename T>
void BackwardInput(TensorView dx, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv,
                   bool accumulate) {
  const float* gain = w.empty() ? nullptr : w.ptr<float>();
  const float* scale = inv.ptr<float>();
  if (gain != nullptr) {
    accumulate ? BackwardInputRows<true, true, T>(dx, dy, x, gain, scale)
               : BackwardInputRows<true, false, T>(dx, dy, x, gain, scale);
  } else {
    accumulate ? BackwardInputRows<false, true, T>(dx, dy, x, gain, scale)
               : BackwardInputRows<false, false, T>(dx, dy, x, gain, scale);
  }
}

// Columns [begin, end) of the gain's gradient, all rows in order. Four vectors of columns hide the latency of the chains.
template <typename T>
void BackwardGain(TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView inv, int64_t begin, int64_t end) {
  constexpr int kVectors = 4;
  const F32Tag d;
  const T* from = x.ptr<T>();
  const float* g = dy.ptr<float>();
  const float* scale = inv.ptr<float>();
  float* dw = dw_accum.ptr<float>();
  const int64_t rows = x.rows();
  int64_t i0 = begin;
  for (; i0 + kVectors * kRowStep <= end; i0 += kVectors * kRowStep) {
    F32Vec acc[kVectors];
    for (int v = 0; v < kVectors; ++v) acc[v] = hn::LoadU(d, dw + i0 + v * kRowStep);
    for (int64_t t = 0; t < rows; ++t) {
      const F32Vec s = hn::Set(d, scale[t]);
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = i0 + v * kRowStep;
        acc[v] = hn::MulAdd(hn::LoadU(d, g + t * dy.row_stride + i), hn::Mul(LoadF32(d, from + t * x.row_stride + i), s), acc[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) hn::StoreU(acc[v], d, dw + i0 + v * kRowStep);
  }
  ForRow(end - i0, [&](auto io, int64_t k) HWY_ATTR {
    const int64_t i = i0 + k;
    F32Vec acc = io.Load(dw + i);
    for (int64_t t = 0; t < rows; ++t) {
      const F32Vec normed = hn::Mul(io.Load(from + t * x.row_stride + i), hn::Set(d, scale[t]));
      acc = hn::MulAdd(io.Load(g + t * dy.row_stride + i), normed, acc);
    }
    io.Store(acc, dw + i);
  });
}

void ForwardAny(TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  x.dtype == DType::f32 ? Forward<float>(y, inv, x, w, eps) : Forward<bf16>(y, inv, x, w, eps);
}
void BackwardInputAny(TensorView dx, ConstTensorView dy, ConstTensorView x, ConstTensorView w, ConstTensorView inv,
                      bool accumulate) {
  x.dtype == DType::f32 ? BackwardInput<float>(dx, dy, x, w, inv, accumulate)
                        : BackwardInput<bf16>(dx, dy, x, w, inv, accumulate);
}
void BackwardGainAny(TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView inv, int64_t begin,
                     int64_t end) {
  x.dtype == DType::f32 ? BackwardGain<float>(dw_accum, dy, x, inv, begin, end)
                        : BackwardGain<bf16>(dw_accum, dy, x, inv, begin, end);
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(ForwardAny);
HWY_EXPORT(BackwardInputAny);
HWY_EXPORT(BackwardGainAny);

namespace simd {

void rmsnorm(Context& c, TensorView y, TensorView inv, ConstTensorView x, ConstTensorView w, float eps) {
  parallel_for(c, x.rows(), 20 + x.dim(1) / 4, [&](int64_t begin, int64_t end, int) {
    const TensorView inv_part = inv.empty() ? inv : inv.slice(begin, end - begin);
    HWY_DYNAMIC_DISPATCH(ForwardAny)(y.slice(begin, end - begin), inv_part, x.slice(begin, end - begin), w, eps);
  });
}

void rmsnorm_backward(Context& c, TensorView dx, TensorView dw_accum, ConstTensorView dy, ConstTensorView x,
                      ConstTensorView w, ConstTensorView inv, bool accumulate) {
  const int64_t rows = x.rows(), n = x.dim(1);
  // The gain first: dx may overwrite dy.
  if (!dw_accum.empty()) {
    constexpr int64_t kColumns = 16;
    parallel_for(c, (n + kColumns - 1) / kColumns, rows * kColumns / 4, [&](int64_t begin, int64_t end, int) {
      HWY_DYNAMIC_DISPATCH(BackwardGainAny)(dw_accum, dy, x, inv, begin * kColumns, std::min(end * kColumns, n));
    });
  }
  parallel_for(c, rows, 20 + n / 3, [&](int64_t begin, int64_t end, int) {
    const int64_t count = end - begin;
    HWY_DYNAMIC_DISPATCH(BackwardInputAny)(dx.slice(begin, count), dy.slice(begin, count), x.slice(begin, count), w,
                                           inv.slice(begin, count), accumulate);
  });
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
