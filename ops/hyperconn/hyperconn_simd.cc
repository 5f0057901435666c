// Coefficients: one lane is one token, so the order of every sum within a token is that of the plain loops whatever the width.
// Mixing of streams: lanes run over channels, all streams of a channel are in registers at once.
// Kernels are compiled for four streams (kN = 4), with every small loop unrolled, and once for any number (kN = 0).

#include <algorithm>
#include <type_traits>

#include "ops/hyperconn/hyperconn_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/hyperconn/hyperconn_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lockstep::HWY_NAMESPACE {
namespace {

template <int kN>
constexpr int kMaxStreams = kN > 0 ? kN : static_cast<int>(kHyperMaxStreams);
template <int kN>
constexpr int kMaxLogits = (2 + kMaxStreams<kN>)*kMaxStreams<kN>;

// dst[c][r] = src[r][c]; strides in floats.
HWY_INLINE void CopyTransposed(float* HWY_RESTRICT dst, int64_t dst_stride, const float* HWY_RESTRICT src, int64_t src_stride,
                               int64_t rows, int64_t cols) {
  const F32x4 d4;
  const int64_t quad_rows = rows / 4 * 4, quad_cols = cols / 4 * 4;
  for (int64_t r = 0; r < quad_rows; r += 4)
    for (int64_t c = 0; c < quad_cols; c += 4) {
      const float* from = src + r * src_stride + c;
      float* to = dst + c * dst_stride + r;
      auto v0 = hn::LoadU(d4, from), v1 = hn::LoadU(d4, from + src_stride);
      auto v2 = hn::LoadU(d4, from + 2 * src_stride), v3 = hn::LoadU(d4, from + 3 * src_stride);
      Transpose4(v0, v1, v2, v3);
      hn::StoreU(v0, d4, to);
      hn::StoreU(v1, d4, to + dst_stride);
      hn::StoreU(v2, d4, to + 2 * dst_stride);
      hn::StoreU(v3, d4, to + 3 * dst_stride);
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < quad_rows ? quad_cols : 0; c < cols; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
}

// One division of c by its row sums (or column sums) + eps, as products with the n reciprocals left in `inverse`.
template <int kN, bool kRows>
HWY_INLINE void Divide(F32Vec* c, int n, F32Vec eps, F32Vec* inverse) {
  const int outer = kRows ? n : 1, inner = kRows ? 1 : n;
  const F32Vec one = hn::Set(F32Tag(), 1.0f);
  for (int a = 0; a < n; ++a) {
    F32Vec sum = c[a * outer];
    for (int b = 1; b < n; ++b) sum = hn::Add(sum, c[a * outer + b * inner]);
    inverse[a] = hn::Div(one, hn::Add(sum, eps));
    for (int b = 0; b < n; ++b) c[a * outer + b * inner] = hn::Mul(c[a * outer + b * inner], inverse[a]);
  }
}

template <int kN, bool kRows>
HWY_INLINE void DivideBackward(F32Vec* g, const float* y, int n, const float* inverse) {
  const F32Tag d;
  const int outer = kRows ? n : 1, inner = kRows ? 1 : n;
  for (int a = 0; a < n; ++a) {
    F32Vec dot = hn::Mul(g[a * outer], hn::Load(d, y + a * outer * kRowStep));
    for (int b = 1; b < n; ++b) {
      const int i = a * outer + b * inner;
      dot = hn::MulAdd(g[i], hn::Load(d, y + i * kRowStep), dot);
    }
    const F32Vec r = hn::Load(d, inverse + a * kRowStep);
    for (int b = 0; b < n; ++b) g[a * outer + b * inner] = hn::Mul(hn::Sub(g[a * outer + b * inner], dot), r);
  }
}

HWY_INLINE float* StoreAll(const F32Vec* v, int count, float* to) {
  for (int i = 0; i < count; ++i) hn::Store(v[i], F32Tag(), to + i * kRowStep);
  return to + count * kRowStep;
}

// c [n, n] in place; `record` as hyper_record_floats describes, kRowStep tokens interleaved.
template <int kN, bool kRecord>
HWY_INLINE void Sinkhorn(F32Vec* c, int n, int iters, F32Vec eps, float* record) {
  const F32Tag d;
  for (int j = 0; j < n; ++j) {
    F32Vec* row = c + j * n;
    F32Vec most = row[0];
    for (int k = 1; k < n; ++k) most = hn::IfThenElse(hn::Gt(row[k], most), row[k], most);
    for (int k = 0; k < n; ++k) row[k] = ExpF32(d, hn::Sub(row[k], most));
    F32Vec sum = row[0];
    for (int k = 1; k < n; ++k) sum = hn::Add(sum, row[k]);
    const F32Vec inverse = hn::Div(hn::Set(d, 1.0f), sum);
    for (int k = 0; k < n; ++k) row[k] = hn::Mul(row[k], inverse);
  }
  if constexpr (kRecord) record = StoreAll(c, n * n, record);
  for (int i = 0; i < n * n; ++i) c[i] = hn::Add(c[i], eps);

  F32Vec inverse[kMaxStreams<kN>];
  const auto keep = [&]() HWY_ATTR {
    if constexpr (kRecord) record = StoreAll(inverse, n, StoreAll(c, n * n, record));
  };
  Divide<kN, false>(c, n, eps, inverse);
  keep();
  for (int s = 1; s < iters; ++s) {
    Divide<kN, true>(c, n, eps, inverse);
    keep();
    Divide<kN, false>(c, n, eps, inverse);
    keep();
  }
}

template <int kN>
HWY_INLINE void SinkhornBackward(F32Vec* g, int n, int iters, const float* record) {
  const F32Tag d;
  const int64_t step = (n * n + n) * kRowStep;
  const float* y = record + n * n * kRowStep + (2 * iters - 2) * step;
  const auto walk = [&](auto rows) HWY_ATTR {
    DivideBackward<kN, decltype(rows)::value>(g, y, n, y + n * n * kRowStep);
    y -= step;
  };
  for (int s = iters; s > 1; --s) {
    walk(std::false_type());
    walk(std::true_type());
  }
  walk(std::false_type());
  for (int j = 0; j < n; ++j) {
    const float* p = record + j * n * kRowStep;
    F32Vec dot = hn::Mul(g[j * n], hn::Load(d, p));
    for (int k = 1; k < n; ++k) dot = hn::MulAdd(g[j * n + k], hn::Load(d, p + k * kRowStep), dot);
    for (int k = 0; k < n; ++k) g[j * n + k] = hn::Mul(hn::Load(d, p + k * kRowStep), hn::Sub(g[j * n + k], dot));
  }
}

// The logits of up to kRowStep tokens, one a lane, and what they are made of.
template <int kN>
struct LogitLanes {
  F32Vec inv;
  HWY_ALIGN float raw[kMaxLogits<kN> * kF32Lanes];  // [logit][token]; lanes without a token hold zeros

  HWY_INLINE void Load(const float* raw_rows, int64_t raw_stride, const float* inv_rows, int64_t count, int64_t logits) {
    const F32Tag d;
    if (count < kRowStep)
      for (int64_t i = 0; i < logits; ++i) hn::Store(hn::Zero(d), d, raw + i * kRowStep);
    CopyTransposed(raw, kRowStep, raw_rows, raw_stride, count, logits);
    HWY_ALIGN float scratch[kF32Lanes] = {};
    for (int64_t k = 0; k < count; ++k) scratch[k] = inv_rows[k];
    inv = hn::Load(d, scratch);
  }
  HWY_INLINE F32Vec Raw(int i) const { return hn::Load(F32Tag(), raw + i * kRowStep); }
  HWY_INLINE F32Vec Logit(int i, float scale, const float* base) const {
    return hn::MulAdd(hn::Mul(Raw(i), inv), hn::Set(F32Tag(), scale), hn::Set(F32Tag(), base[i]));
  }
};

template <typename T>
void InverseRms(TensorView inv_rms, ConstTensorView x, float eps) {
  const F32Tag d;
  const int64_t n = x.dim(1) * x.dim(2);
  float* out = inv_rms.ptr<float>();
  const T* from = x.ptr<T>();
  for (int64_t t0 = 0; t0 < x.rows(); t0 += kRowStep) {
    const int64_t count = std::min(kRowStep, x.rows() - t0);
    HWY_ALIGN float sum[kF32Lanes] = {};
    for (int64_t k = 0; k < count; ++k)
      for (int64_t begin = 0; begin < n; begin += kHyperSegment)
        sum[k] += TreeSumSquares(from + (t0 + k) * x.row_stride + begin, std::min(kHyperSegment, n - begin));
    const F32Vec mean = hn::Div(hn::Load(d, sum), hn::Set(d, static_cast<float>(n)));
    hn::Store(hn::Div(hn::Set(d, 1.0f), hn::Sqrt(hn::Add(mean, hn::Set(d, eps)))), d, sum);
    for (int64_t k = 0; k < count; ++k) out[t0 + k] = sum[k];
  }
}

template <int kN>
void CoefficientRows(TensorView pre, TensorView post, TensorView comb, ConstTensorView inv_rms, ConstTensorView raw,
                     const HyperWeights& w, const HyperShape& shape) {
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(shape.streams);
  const bool head = comb.empty();
  const int64_t rows = raw.rows(), logits = raw.dim(1);
  const float* base = w.base.ptr<float>();
  const float* scale = w.scale.ptr<float>();
  const F32Vec eps = hn::Set(d, shape.hc_eps);
  for (int64_t t0 = 0; t0 < rows; t0 += kRowStep) {
    const int64_t count = std::min(kRowStep, rows - t0);
    LogitLanes<kN> lanes;
    lanes.Load(raw.ptr<float>() + t0 * raw.row_stride, raw.row_stride, inv_rms.ptr<float>() + t0, count, logits);
    HWY_ALIGN float out[kMaxStreams<kN> * kMaxStreams<kN> * kF32Lanes];

    for (int j = 0; j < n; ++j)
      hn::Store(hn::Add(SigmoidF32(d, lanes.Logit(j, scale[0], base)), eps), d, out + j * kRowStep);
    CopyTransposed(pre.ptr<float>() + t0 * pre.row_stride, pre.row_stride, out, kRowStep, n, count);
    if (head) continue;

    for (int j = 0; j < n; ++j)
      hn::Store(hn::Mul(hn::Set(d, 2.0f), SigmoidF32(d, lanes.Logit(n + j, scale[1], base))), d, out + j * kRowStep);
    CopyTransposed(post.ptr<float>() + t0 * post.row_stride, post.row_stride, out, kRowStep, n, count);

    F32Vec c[kMaxStreams<kN> * kMaxStreams<kN>];
    for (int i = 0; i < n * n; ++i) c[i] = lanes.Logit(2 * n + i, scale[2], base);
    Sinkhorn<kN, false>(c, n, shape.sinkhorn_iters, eps, nullptr);
    StoreAll(c, n * n, out);
    CopyTransposed(comb.ptr<float>() + t0 * comb.row_stride, comb.row_stride, out, kRowStep, n * n, count);
  }
}

// dx[k, :] += factor[k] * x[k, :] for the rows of a lane block.
template <typename T>
HWY_INLINE void AddScaledRows(TensorView dx_accum, ConstTensorView x, int64_t t0, int64_t count, const float* factor) {
  for (int64_t k = 0; k < count; ++k) {
    const T* from = x.ptr<T>() + (t0 + k) * x.row_stride;
    float* to = dx_accum.ptr<float>() + (t0 + k) * dx_accum.row_stride;
    const F32Vec f = hn::Set(F32Tag(), factor[k]);
    ForRow(x.dim(1) * x.dim(2),
           [&](auto io, int64_t i) HWY_ATTR { io.Store(hn::MulAdd(f, io.Load(from + i), io.Load(to + i)), to + i); });
  }
}

template <int kN>
void CoefficientBackwardRows(TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                             ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                             const HyperWeights& w, const HyperShape& shape, float* record) {
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(shape.streams);
  const bool head = dcomb.empty();
  const int64_t rows = raw.rows(), logits = raw.dim(1);
  const float* base = w.base.ptr<float>();
  const float* scale = w.scale.ptr<float>();
  const F32Vec one = hn::Set(d, 1.0f), two = hn::Set(d, 2.0f);
  HWY_ALIGN float g_lanes[kMaxLogits<kN> * kF32Lanes] = {};  // [logit][token]: gradients of the outputs, then of the logits
  for (int64_t t0 = 0; t0 < rows; t0 += kRowStep) {
    const int64_t count = std::min(kRowStep, rows - t0);
    LogitLanes<kN> lanes;
    lanes.Load(raw.ptr<float>() + t0 * raw.row_stride, raw.row_stride, inv_rms.ptr<float>() + t0, count, logits);
    const auto load = [&](ConstTensorView g, int64_t first, int64_t columns) HWY_ATTR {
      CopyTransposed(g_lanes + first * kRowStep, kRowStep, g.ptr<float>() + t0 * g.row_stride, g.row_stride, count, columns);
    };

    // Sigmoids.
    load(dpre, 0, n);
    if (!head) load(dpost, n, n);
    for (int i = 0; i < (head ? n : 2 * n); ++i) {
      const F32Vec s = SigmoidF32(d, lanes.Logit(i, scale[i < n ? 0 : 1], base));
      F32Vec g = hn::Load(d, g_lanes + i * kRowStep);
      if (i >= n) g = hn::Mul(two, g);
      hn::Store(hn::Mul(g, hn::Mul(s, hn::Sub(one, s))), d, g_lanes + i * kRowStep);
    }

    // Sinkhorn, forward once more and then back.
    if (!head) {
      load(dcomb, 2 * n, n * n);
      F32Vec c[kMaxStreams<kN> * kMaxStreams<kN>];
      for (int i = 0; i < n * n; ++i) c[i] = lanes.Logit(2 * n + i, scale[2], base);
      Sinkhorn<kN, true>(c, n, shape.sinkhorn_iters, hn::Set(d, shape.hc_eps), record);
      for (int i = 0; i < n * n; ++i) c[i] = hn::Load(d, g_lanes + (2 * n + i) * kRowStep);
      SinkhornBackward<kN>(c, n, shape.sinkhorn_iters, record);
      StoreAll(c, n * n, g_lanes + 2 * n * kRowStep);
    }
    CopyTransposed(dlogits.ptr<float>() + t0 * dlogits.row_stride, dlogits.row_stride, g_lanes, kRowStep, logits, count);

    // mu = inv * raw, and inv depends on x: dx -= x * (inv^3 / N) * (dmu . raw).
    F32Vec dot = hn::Zero(d);
    for (int64_t i = 0; i < logits; ++i) {
      const F32Vec s = hn::Set(d, scale[i < n ? 0 : i < 2 * n ? 1 : 2]);
      dot = hn::MulAdd(hn::Mul(hn::Load(d, g_lanes + i * kRowStep), s), lanes.Raw(static_cast<int>(i)), dot);
    }
    const F32Vec elements = hn::Set(d, static_cast<float>(x.dim(1) * x.dim(2)));
    const F32Vec cubed = hn::Mul(hn::Mul(lanes.inv, lanes.inv), lanes.inv);
    HWY_ALIGN float factor[kF32Lanes];
    hn::Store(hn::Neg(hn::Mul(dot, hn::Div(cubed, elements))), d, factor);
    x.dtype == DType::f32 ? AddScaledRows<float>(dx_accum, x, t0, count, factor)
                          : AddScaledRows<bf16>(dx_accum, x, t0, count, factor);
  }
}

template <int kN, typename T>
void PreRows(TensorView h, ConstTensorView x, ConstTensorView pre) {
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(x.dim(1));
  const int64_t width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* stream = x.ptr<T>() + t * x.row_stride;
    T* out = h.ptr<T>() + t * h.row_stride;
    F32Vec p[kMaxStreams<kN>];
    for (int j = 0; j < n; ++j) p[j] = hn::Set(d, pre.ptr<float>()[t * pre.row_stride + j]);
    ForRow(width, [&](auto io, int64_t i) HWY_ATTR {
      F32Vec sum = hn::Mul(p[0], io.Load(stream + i));
      for (int j = 1; j < n; ++j) sum = hn::MulAdd(p[j], io.Load(stream + j * width + i), sum);
      io.Store(sum, out + i);
    });
  }
}

template <int kN, typename T>
void PostRows(TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(x.dim(1));
  const int64_t width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* stream = x.ptr<T>() + t * x.row_stride;
    const T* branch = y.ptr<T>() + t * y.row_stride;
    T* out = xout.ptr<T>() + t * xout.row_stride;
    F32Vec p[kMaxStreams<kN>], m[kMaxStreams<kN> * kMaxStreams<kN>];
    for (int k = 0; k < n; ++k) p[k] = hn::Set(d, post.ptr<float>()[t * post.row_stride + k]);
    for (int i = 0; i < n * n; ++i) m[i] = hn::Set(d, comb.ptr<float>()[t * comb.row_stride + i]);
    ForRow(width, [&](auto io, int64_t i) HWY_ATTR {
      F32Vec s[kMaxStreams<kN>];
      for (int j = 0; j < n; ++j) s[j] = io.Load(stream + j * width + i);
      const F32Vec b = io.Load(branch + i);
      for (int k = 0; k < n; ++k) {
        F32Vec sum = hn::Mul(p[k], b);
        for (int j = 0; j < n; ++j) sum = hn::MulAdd(m[j * n + k], s[j], sum);
        io.Store(sum, out + k * width + i);
      }
    });
  }
}

// out[a * n + k] = row_a . column_k for kRows rows of T and n rows of f32, both `width` apart, each by the tree.
template <int kN, int kRows, typename T>
HWY_INLINE void Dots(const T* rows, const float* columns, int n, int64_t width, float* out) {
  const F32Tag d;
  F32Vec acc[kRows * kMaxStreams<kN> * kLaneVectors];
  for (size_t i = 0; i < static_cast<size_t>(kRows * n) * kLaneVectors; ++i) acc[i] = hn::Zero(d);
  ForRowLanes(width, [&](auto io, int64_t i, size_t v) HWY_ATTR {
    F32Vec column[kMaxStreams<kN>];
    for (int k = 0; k < n; ++k) column[k] = io.Load(columns + k * width + i);
    for (int a = 0; a < kRows; ++a) {
      const F32Vec row = io.Load(rows + a * width + i);
      for (int k = 0; k < n; ++k) {
        const size_t at = static_cast<size_t>(a * n + k) * kLaneVectors + v;
        acc[at] = io.MulAdd(row, column[k], acc[at]);
      }
    }
  });
  if constexpr (kN == 4) {
    for (int a = 0; a < kRows; ++a) FoldLanesOfFour(acc + static_cast<size_t>(a) * 4 * kLaneVectors, out + a * 4);
  } else {
    for (int i = 0; i < kRows * n; ++i) out[i] = FoldLanes(d, acc + static_cast<size_t>(i) * kLaneVectors);
  }
}

// sum_k weight[k] * grad[k]
HWY_INLINE F32Vec Mixed(const F32Vec* weight, const F32Vec* grad, int n) {
  F32Vec sum = hn::Mul(weight[0], grad[0]);
  for (int k = 1; k < n; ++k) sum = hn::MulAdd(weight[k], grad[k], sum);
  return sum;
}

template <int kN, bool kHead, typename T>
void PreBackwardRows(TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb, ConstTensorView x,
                     ConstTensorView pre) {
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(x.dim(1));
  const int64_t width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* stream = x.ptr<T>() + t * x.row_stride;
    const float* g = dh.ptr<float>() + t * dh.row_stride;
    float* dx_out = dx.ptr<float>() + t * dx.row_stride;
    F32Vec p[kMaxStreams<kN>], acc[kMaxStreams<kN> * kLaneVectors], m[kMaxStreams<kN> * kMaxStreams<kN>];
    for (int j = 0; j < n; ++j) p[j] = hn::Set(d, pre.ptr<float>()[t * pre.row_stride + j]);
    for (F32Vec& v : acc) v = hn::Zero(d);
    if constexpr (!kHead)
      for (int i = 0; i < n * n; ++i) m[i] = hn::Set(d, comb.ptr<float>()[t * comb.row_stride + i]);
    ForRowLanes(width, [&](auto io, int64_t i, size_t v) HWY_ATTR {
      const F32Vec grad = io.Load(g + i);
      F32Vec out[kMaxStreams<kN>];
      if constexpr (!kHead)
        for (int k = 0; k < n; ++k) out[k] = io.Load(dxout.ptr<float>() + t * dxout.row_stride + k * width + i);
      for (int j = 0; j < n; ++j) {
        const size_t at = static_cast<size_t>(j) * kLaneVectors + v;
        acc[at] = io.MulAdd(io.Load(stream + j * width + i), grad, acc[at]);
        F32Vec through_post = hn::Zero(d);
        if constexpr (!kHead) through_post = Mixed(m + j * n, out, n);
        io.Store(hn::MulAdd(p[j], grad, through_post), dx_out + j * width + i);
      }
    });
    float* out = dpre.ptr<float>() + t * dpre.row_stride;
    if constexpr (kN == 4) {
      FoldLanesOfFour(acc, out);
    } else {
      for (int j = 0; j < n; ++j) out[j] = FoldLanes(d, acc + static_cast<size_t>(j) * kLaneVectors);
    }
  }
}

template <int kN, typename T>
void PostBackwardRows(TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x, ConstTensorView y,
                      ConstTensorView post) {
  // With 32 registers all sixteen sums of dcomb fit beside their operands; with 16 of half the width, one row's do.
  constexpr int kDotRows = kN == 4 && kLaneVectors == 1 ? 4 : 1;
  const F32Tag d;
  const int n = kN > 0 ? kN : static_cast<int>(x.dim(1));
  const int64_t width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* stream = x.ptr<T>() + t * x.row_stride;
    const T* branch = y.ptr<T>() + t * y.row_stride;
    const float* g = dxout.ptr<float>() + t * dxout.row_stride;
    float* dy_out = dy.ptr<float>() + t * dy.row_stride;
    F32Vec p[kMaxStreams<kN>];
    for (int k = 0; k < n; ++k) p[k] = hn::Set(d, post.ptr<float>()[t * post.row_stride + k]);
    ForRow(width, [&](auto io, int64_t i) HWY_ATTR {
      F32Vec grad[kMaxStreams<kN>];
      for (int k = 0; k < n; ++k) grad[k] = io.Load(g + k * width + i);
      io.Store(Mixed(p, grad, n), dy_out + i);
    });
    float* dcomb_out = dcomb.ptr<float>() + t * dcomb.row_stride;
    for (int j = 0; j < n; j += kDotRows) Dots<kN, kDotRows>(stream + j * width, g, n, width, dcomb_out + j * n);
    Dots<kN, 1>(branch, g, n, width, dpost.ptr<float>() + t * dpost.row_stride);
  }
}

// f(std::integral_constant<int, kN>, T) for the number of streams and the storage type of x.
template <class F>
HWY_INLINE void ForStreamsAndType(ConstTensorView x, const F& f) {
  using Four = std::integral_constant<int, 4>;
  using Any = std::integral_constant<int, 0>;
  if (x.dim(1) == 4) x.dtype == DType::f32 ? f(Four(), float()) : f(Four(), bf16());
  else x.dtype == DType::f32 ? f(Any(), float()) : f(Any(), bf16());
}

void Coefficients(TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw, ConstTensorView x,
                  const HyperWeights& w, const HyperShape& shape) {
  x.dtype == DType::f32 ? InverseRms<float>(inv_rms, x, shape.norm_eps) : InverseRms<bf16>(inv_rms, x, shape.norm_eps);
  shape.streams == 4 ? CoefficientRows<4>(pre, post, comb, inv_rms, raw, w, shape)
                     : CoefficientRows<0>(pre, post, comb, inv_rms, raw, w, shape);
}
void CoefficientsBackward(TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                          ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                          const HyperWeights& w, const HyperShape& shape, float* record) {
  shape.streams == 4 ? CoefficientBackwardRows<4>(dx_accum, dlogits, dpre, dpost, dcomb, raw, inv_rms, x, w, shape, record)
                     : CoefficientBackwardRows<0>(dx_accum, dlogits, dpre, dpost, dcomb, raw, inv_rms, x, w, shape, record);
}
void Pre(TensorView h, ConstTensorView x, ConstTensorView pre) {
  ForStreamsAndType(x, [&](auto n, auto t) HWY_ATTR { PreRows<n, decltype(t)>(h, x, pre); });
}
void PreBackward(TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb, ConstTensorView x,
                 ConstTensorView pre) {
  ForStreamsAndType(x, [&](auto n, auto t) HWY_ATTR {
    comb.empty() ? PreBackwardRows<n, true, decltype(t)>(dx, dpre, dh, dxout, comb, x, pre)
                 : PreBackwardRows<n, false, decltype(t)>(dx, dpre, dh, dxout, comb, x, pre);
  });
}
void Post(TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  ForStreamsAndType(x, [&](auto n, auto t) HWY_ATTR { PostRows<n, decltype(t)>(xout, x, y, post, comb); });
}
void PostBackward(TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x, ConstTensorView y,
                  ConstTensorView post) {
  ForStreamsAndType(x, [&](auto n, auto t) HWY_ATTR { PostBackwardRows<n, decltype(t)>(dy, dpost, dcomb, dxout, x, y, post); });
}

}  // namespace
}  // namespace lockstep::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep {

HWY_EXPORT(Coefficients);
HWY_EXPORT(CoefficientsBackward);
HWY_EXPORT(Pre);
HWY_EXPORT(PreBackward);
HWY_EXPORT(Post);
HWY_EXPORT(PostBackward);

namespace simd {

namespace {

// Coefficients are handed out in whole lane blocks: a part of one costs as much as all of it.
constexpr int64_t kBlock = 16;

// f(begin, end, worker) over rows [0, rows), cut between blocks.
template <typename F>
void for_blocks(Context& c, int64_t rows, int64_t row_cost, const F& f) {
  parallel_for(c, (rows + kBlock - 1) / kBlock, kBlock * row_cost, [&](int64_t begin, int64_t end, int worker) {
    f(begin * kBlock, std::min(end * kBlock, rows), worker);
  });
}

}  // namespace

void hyper_coefficients(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw,
                        ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  const int64_t row_cost = x.dim(1) * x.dim(2) / 8 + raw.dim(1) * shape.sinkhorn_iters / 4;
  for_blocks(c, x.rows(), row_cost, [&](int64_t begin, int64_t end, int) {
    const auto part = [&](auto v) { return v.empty() ? v : v.slice(begin, end - begin); };
    HWY_DYNAMIC_DISPATCH(Coefficients)(part(pre), part(post), part(comb), part(inv_rms), part(raw), part(x), w, shape);
  });
}

void hyper_coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                                 ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                                 const HyperWeights& w, const HyperShape& shape) {
  const ArenaScope scope(*c.workspace);
  const int64_t record_floats = kBlock * hyper_record_floats(shape.streams, shape.sinkhorn_iters);
  const TensorView records = c.workspace->tensor(DType::f32, {c.num_threads(), record_floats}, "sinkhorn records");
  const int64_t row_cost = x.dim(1) * x.dim(2) / 4 + raw.dim(1) * shape.sinkhorn_iters;
  for_blocks(c, x.rows(), row_cost, [&](int64_t begin, int64_t end, int worker) {
    const auto part = [&](auto v) { return v.empty() ? v : v.slice(begin, end - begin); };
    HWY_DYNAMIC_DISPATCH(CoefficientsBackward)(part(dx_accum), part(dlogits), part(dpre), part(dpost), part(dcomb), part(raw),
                                               part(inv_rms), part(x), w, shape, records.row<float>(worker));
  });
}

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre) {
  parallel_for(c, x.rows(), 10 + x.dim(1) * x.dim(2) / 8, [&](int64_t begin, int64_t end, int) {
    const int64_t count = end - begin;
    HWY_DYNAMIC_DISPATCH(Pre)(h.slice(begin, count), x.slice(begin, count), pre.slice(begin, count));
  });
}

void hyper_pre_backward(Context& c, TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb,
                        ConstTensorView x, ConstTensorView pre) {
  parallel_for(c, x.rows(), 20 + x.dim(1) * x.dim(2) / 4, [&](int64_t begin, int64_t end, int) {
    const auto part = [&](auto v) { return v.empty() ? v : v.slice(begin, end - begin); };
    HWY_DYNAMIC_DISPATCH(PreBackward)(part(dx), part(dpre), part(dh), part(dxout), part(comb), part(x), part(pre));
  });
}

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  parallel_for(c, x.rows(), 20 + x.dim(1) * x.dim(2) / 4, [&](int64_t begin, int64_t end, int) {
    const int64_t count = end - begin;
    HWY_DYNAMIC_DISPATCH(Post)(xout.slice(begin, count), x.slice(begin, count), y.slice(begin, count), post.slice(begin, count),
                               comb.slice(begin, count));
  });
}

void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post) {
  parallel_for(c, x.rows(), 100 + x.dim(1) * x.dim(2) / 2, [&](int64_t begin, int64_t end, int) {
    const auto part = [&](auto v) { return v.slice(begin, end - begin); };
    HWY_DYNAMIC_DISPATCH(PostBackward)(part(dy), part(dpost), part(dcomb), part(dxout), part(x), part(y), part(post));
  });
}

}  // namespace simd
}  // namespace lockstep
#endif  // HWY_ONCE
