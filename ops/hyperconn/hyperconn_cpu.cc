#include "ops/hyperconn/hyperconn_cpu.h"

#include <cmath>

#include "ops/fixed_math.h"

namespace lockstep::reference {

namespace {

constexpr int64_t kMaxLogits = (2 + kHyperMaxStreams) * kHyperMaxStreams;

// Which of the three scales logit i uses.
int64_t scale_index(int64_t i, int64_t n) { return i < n ? 0 : i < 2 * n ? 1 : 2; }

// One division of c by its row sums (or column sums) + eps, as products with the n reciprocals left in `inverse`.
void divide(float* c, int64_t n, bool rows, float eps, float* inverse) {
  const int64_t outer = rows ? n : 1, inner = rows ? 1 : n;
  for (int64_t a = 0; a < n; ++a) {
    float* line = c + a * outer;
    float sum = line[0];
    for (int64_t b = 1; b < n; ++b) sum += line[b * inner];
    inverse[a] = 1.0f / (sum + eps);
    for (int64_t b = 0; b < n; ++b) line[b * inner] *= inverse[a];
  }
}

// g becomes the gradient of the division's input: y is its result.
void divide_backward(float* g, const float* y, int64_t n, bool rows, const float* inverse) {
  const int64_t outer = rows ? n : 1, inner = rows ? 1 : n;
  for (int64_t a = 0; a < n; ++a) {
    float* line = g + a * outer;
    const float* result = y + a * outer;
    float dot = line[0] * result[0];
    for (int64_t b = 1; b < n; ++b) dot = std::fmaf(line[b * inner], result[b * inner], dot);
    for (int64_t b = 0; b < n; ++b) line[b * inner] = (line[b * inner] - dot) * inverse[a];
  }
}

// c [n, n] in place. `record` (may be null) receives what hyper_record_floats describes.
void sinkhorn(float* c, int64_t n, int iters, float eps, float* record) {
  for (int64_t j = 0; j < n; ++j) {
    float* row = c + j * n;
    float most = row[0];
    for (int64_t k = 1; k < n; ++k) most = row[k] > most ? row[k] : most;
    for (int64_t k = 0; k < n; ++k) row[k] = exp_f32(row[k] - most);
    float sum = row[0];
    for (int64_t k = 1; k < n; ++k) sum += row[k];
    const float inverse = 1.0f / sum;
    for (int64_t k = 0; k < n; ++k) {
      const float p = row[k] * inverse;
      if (record != nullptr) record[j * n + k] = p;
      row[k] = p + eps;
    }
  }
  float unused[kHyperMaxStreams];
  float* step = record == nullptr ? nullptr : record + n * n;
  for (int s = 0; s < 2 * iters - 1; ++s) {  // columns, then rows and columns in turn
    divide(c, n, s % 2 == 1, eps, step == nullptr ? unused : step + n * n);
    if (step == nullptr) continue;
    for (int64_t i = 0; i < n * n; ++i) step[i] = c[i];
    step += n * n + n;
  }
}

void sinkhorn_backward(float* g, int64_t n, int iters, const float* record) {
  for (int s = 2 * iters - 2; s >= 0; --s) {
    const float* step = record + n * n + s * (n * n + n);
    divide_backward(g, step, n, s % 2 == 1, step + n * n);
  }
  for (int64_t j = 0; j < n; ++j) {
    const float* p = record + j * n;
    float* row = g + j * n;
    float dot = row[0] * p[0];
    for (int64_t k = 1; k < n; ++k) dot = std::fmaf(row[k], p[k], dot);
    for (int64_t k = 0; k < n; ++k) row[k] = p[k] * (row[k] - dot);
  }
}

// logits of row t: mu * scale + base.
void compute_logits(float* z, int64_t n, int64_t t, ConstTensorView raw, float inv, const HyperWeights& w) {
  const float* scale = w.scale.ptr<float>();
  for (int64_t i = 0; i < raw.dim(1); ++i)
    z[i] = std::fmaf(raw.row<float>(t)[i] * inv, scale[scale_index(i, n)], w.base.ptr<float>()[i]);
}

template <typename T>
float inverse_rms(const T* x, int64_t n, float eps) {
  float squares = 0;
  for (int64_t begin = 0; begin < n; begin += kHyperSegment) {
    const auto element = [&](int64_t i) { return to_f32(x[begin + i]); };
    squares = squares + tree_dot(std::min(kHyperSegment, n - begin), element, element);
  }
  return 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
}

template <typename T>
void pre_rows(TensorView h, ConstTensorView x, ConstTensorView pre) {
  const int64_t n = x.dim(1), width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t)
    for (int64_t i = 0; i < width; ++i) {
      const T* stream = x.row<T>(t) + i;
      const float* p = pre.row<float>(t);
      float sum = p[0] * to_f32(stream[0]);
      for (int64_t j = 1; j < n; ++j) sum = std::fmaf(p[j], to_f32(stream[j * width]), sum);
      h.row<T>(t)[i] = from_f32<T>(sum);
    }
}

// sum_k weight[k] * g[k, i], g [n, width].
float mixed(const float* weight, const float* g, int64_t n, int64_t width, int64_t i) {
  float sum = weight[0] * g[i];
  for (int64_t k = 1; k < n; ++k) sum = std::fmaf(weight[k], g[k * width + i], sum);
  return sum;
}

template <typename T>
void pre_backward_rows(TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb, ConstTensorView x,
                       ConstTensorView pre) {
  const int64_t n = x.dim(1), width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t)
    for (int64_t j = 0; j < n; ++j) {
      const T* stream = x.row<T>(t) + j * width;
      const float* g = dh.row<float>(t);
      dpre.row<float>(t)[j] = tree_dot(width, [&](int64_t i) { return to_f32(stream[i]); }, [&](int64_t i) { return g[i]; });
      for (int64_t i = 0; i < width; ++i) {
        const float through_post = comb.empty() ? 0.0f : mixed(comb.row<float>(t) + j * n, dxout.row<float>(t), n, width, i);
        dx.row<float>(t)[j * width + i] = std::fmaf(pre.row<float>(t)[j], g[i], through_post);
      }
    }
}

template <typename T>
void post_rows(TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  const int64_t n = x.dim(1), width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t)
    for (int64_t k = 0; k < n; ++k)
      for (int64_t i = 0; i < width; ++i) {
        float sum = post.row<float>(t)[k] * to_f32(y.row<T>(t)[i]);
        for (int64_t j = 0; j < n; ++j) sum = std::fmaf(comb.row<float>(t)[j * n + k], to_f32(x.row<T>(t)[j * width + i]), sum);
        xout.row<T>(t)[k * width + i] = from_f32<T>(sum);
      }
}

template <typename T>
void post_backward_rows(TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x, ConstTensorView y,
                        ConstTensorView post) {
  const int64_t n = x.dim(1), width = x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float* g = dxout.row<float>(t);
    const auto dot = [&](const T* a, int64_t k) {
      return tree_dot(width, [&](int64_t i) { return to_f32(a[i]); }, [&](int64_t i) { return g[k * width + i]; });
    };
    for (int64_t j = 0; j < n; ++j)
      for (int64_t k = 0; k < n; ++k) dcomb.row<float>(t)[j * n + k] = dot(x.row<T>(t) + j * width, k);
    for (int64_t i = 0; i < width; ++i) dy.row<float>(t)[i] = mixed(post.row<float>(t), g, n, width, i);
    for (int64_t k = 0; k < n; ++k) dpost.row<float>(t)[k] = dot(y.row<T>(t), k);
  }
}

}  // namespace

void hyper_coefficients(Context& c, TensorView pre, TensorView post, TensorView comb, TensorView inv_rms, ConstTensorView raw,
                        ConstTensorView x, const HyperWeights& w, const HyperShape& shape) {
  const int64_t n = shape.streams, elements = n * x.dim(2);
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float inv = x.dtype == DType::f32 ? inverse_rms(x.row<float>(t), elements, shape.norm_eps)
                                            : inverse_rms(x.row<bf16>(t), elements, shape.norm_eps);
    inv_rms.ptr<float>()[t] = inv;
    float z[kMaxLogits];
    compute_logits(z, n, t, raw, inv, w);
    for (int64_t j = 0; j < n; ++j) pre.row<float>(t)[j] = sigmoid_f32(z[j]) + shape.hc_eps;
    if (comb.empty()) continue;
    for (int64_t j = 0; j < n; ++j) post.row<float>(t)[j] = 2.0f * sigmoid_f32(z[n + j]);
    sinkhorn(z + 2 * n, n, shape.sinkhorn_iters, shape.hc_eps, nullptr);
    for (int64_t i = 0; i < n * n; ++i) comb.row<float>(t)[i] = z[2 * n + i];
  }
}

void hyper_coefficients_backward(Context& c, TensorView dx_accum, TensorView dlogits, ConstTensorView dpre, ConstTensorView dpost,
                                 ConstTensorView dcomb, ConstTensorView raw, ConstTensorView inv_rms, ConstTensorView x,
                                 const HyperWeights& w, const HyperShape& shape) {
  const int64_t n = shape.streams, elements = n * x.dim(2);
  const ArenaScope scope(*c.workspace);
  float* record = c.workspace->tensor(DType::f32, {hyper_record_floats(n, shape.sinkhorn_iters)}, "sinkhorn record").ptr<float>();
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float inv = inv_rms.ptr<float>()[t];
    float z[kMaxLogits];
    compute_logits(z, n, t, raw, inv, w);
    float* g = dlogits.row<float>(t);
    for (int64_t j = 0; j < n; ++j) {
      const float s = sigmoid_f32(z[j]);
      g[j] = dpre.row<float>(t)[j] * (s * (1.0f - s));
    }
    if (!dcomb.empty()) {
      for (int64_t j = 0; j < n; ++j) {
        const float s = sigmoid_f32(z[n + j]);
        g[n + j] = 2.0f * dpost.row<float>(t)[j] * (s * (1.0f - s));
      }
      sinkhorn(z + 2 * n, n, shape.sinkhorn_iters, shape.hc_eps, record);
      for (int64_t i = 0; i < n * n; ++i) g[2 * n + i] = dcomb.row<float>(t)[i];
      sinkhorn_backward(g + 2 * n, n, shape.sinkhorn_iters, record);
    }
    // mu = inv * raw, and inv depends on x: dx -= x * (inv^3 / N) * (dmu . raw).
    float dot = 0;
    for (int64_t i = 0; i < raw.dim(1); ++i)
      dot = std::fmaf(g[i] * w.scale.ptr<float>()[scale_index(i, n)], raw.row<float>(t)[i], dot);
    const float factor = -(dot * (inv * inv * inv / static_cast<float>(elements)));
    for (int64_t i = 0; i < elements; ++i) {
      float& dx = dx_accum.row<float>(t)[i];
      dx = std::fmaf(factor, x.dtype == DType::f32 ? x.row<float>(t)[i] : to_f32(x.row<bf16>(t)[i]), dx);
    }
  }
}

// [T, R] is narrow, so one thread walks it, all columns of a row at a time; the sums over tokens run in ascending t.
void hyper_raw_gradient(TensorView dlogits, const HyperGradients& dw, ConstTensorView raw, ConstTensorView inv_rms,
                        const HyperWeights& w, int64_t streams) {
  const int64_t n = streams, logits = raw.dim(1);
  float scale[kMaxLogits], base_sum[kMaxLogits] = {}, scale_sum[kMaxLogits] = {};
  for (int64_t i = 0; i < logits; ++i) scale[i] = w.scale.ptr<float>()[scale_index(i, n)];
  for (int64_t t = 0; t < raw.rows(); ++t) {
    float* g = dlogits.row<float>(t);
    const float* r = raw.row<float>(t);
    const float inv = inv_rms.ptr<float>()[t];
    for (int64_t i = 0; i < logits; ++i) {
      base_sum[i] += g[i];
      scale_sum[i] = std::fmaf(g[i], r[i] * inv, scale_sum[i]);
      g[i] = g[i] * scale[i] * inv;
    }
  }
  if (dw.base.empty()) return;
  float total[3] = {};
  for (int64_t i = 0; i < logits; ++i) {
    dw.base.ptr<float>()[i] += base_sum[i];
    total[scale_index(i, n)] += scale_sum[i];
  }
  for (int64_t s = 0; s < dw.scale.rows(); ++s) dw.scale.ptr<float>()[s] += total[s];
}

void hyper_pre(Context& c, TensorView h, ConstTensorView x, ConstTensorView pre) {
  x.dtype == DType::f32 ? pre_rows<float>(h, x, pre) : pre_rows<bf16>(h, x, pre);
}

void hyper_pre_backward(Context& c, TensorView dx, TensorView dpre, ConstTensorView dh, ConstTensorView dxout, ConstTensorView comb,
                        ConstTensorView x, ConstTensorView pre) {
  x.dtype == DType::f32 ? pre_backward_rows<float>(dx, dpre, dh, dxout, comb, x, pre) : pre_backward_rows<bf16>(dx, dpre, dh, dxout, comb, x, pre);
}

void hyper_post(Context& c, TensorView xout, ConstTensorView x, ConstTensorView y, ConstTensorView post, ConstTensorView comb) {
  x.dtype == DType::f32 ? post_rows<float>(xout, x, y, post, comb) : post_rows<bf16>(xout, x, y, post, comb);
}

void hyper_post_backward(Context& c, TensorView dy, TensorView dpost, TensorView dcomb, ConstTensorView dxout, ConstTensorView x,
                         ConstTensorView y, ConstTensorView post) {
  x.dtype == DType::f32 ? post_backward_rows<float>(dy, dpost, dcomb, dxout, x, y, post) : post_backward_rows<bf16>(dy, dpost, dcomb, dxout, x, y, post);
}

}  // namespace lockstep::reference
