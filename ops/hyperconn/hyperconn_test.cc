#include "ops/hyperconn/hyperconn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/hyperconn/hyperconn_cpu.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in f32

// ---- The formulas of V4 spec 2.2 and 2.9 in f64, one token at a time, with true divisions.

struct Parameters {
  std::vector<double> fn, base, scale;
  HyperShape shape;
  bool head = false;
  int64_t logits() const { return static_cast<int64_t>(base.size()); }
};
struct Coefficients {
  std::vector<double> pre, post, comb;
};

std::vector<double> doubles(const Tensor& t) {
  std::vector<double> out(t.elements());
  for (int64_t i = 0; i < t.elements(); ++i) out[i] = t.get(i);
  return out;
}

// Which scale logit r uses; the head has logits 0 to n alone.
int64_t scale_index(int64_t r, int64_t n) { return r < n ? 0 : r < 2 * n ? 1 : 2; }

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

std::vector<double> sinkhorn(std::vector<double> c, int64_t n, int iters, double eps) {
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += std::exp(c[j * n + k]);
    for (int64_t k = 0; k < n; ++k) c[j * n + k] = std::exp(c[j * n + k]) / sum + eps;
  }
  for (int i = 0; i < iters; ++i) {
    if (i > 0)
      for (int64_t j = 0; j < n; ++j) {
        double sum = eps;
        for (int64_t k = 0; k < n; ++k) sum += c[j * n + k];
        for (int64_t k = 0; k < n; ++k) c[j * n + k] /= sum;
      }
    for (int64_t k = 0; k < n; ++k) {
      double sum = eps;
      for (int64_t j = 0; j < n; ++j) sum += c[j * n + k];
      for (int64_t j = 0; j < n; ++j) c[j * n + k] /= sum;
    }
  }
  return c;
}

double inverse_rms(const double* x, int64_t elements, double eps) {
  double squares = 0;
  for (int64_t i = 0; i < elements; ++i) squares += x[i] * x[i];
  return 1 / std::sqrt(squares / static_cast<double>(elements) + eps);
}

std::vector<double> logits_of(const double* x, const Parameters& p) {
  const int64_t n = p.shape.streams, elements = static_cast<int64_t>(p.fn.size()) / p.logits();
  const double inv = inverse_rms(x, elements, p.shape.norm_eps);
  std::vector<double> z(p.logits());
  for (int64_t r = 0; r < p.logits(); ++r) {
    double dot = 0;
    for (int64_t i = 0; i < elements; ++i) dot += p.fn[r * elements + i] * x[i];
    z[r] = inv * dot * p.scale[scale_index(r, n)] + p.base[r];
  }
  return z;
}

Coefficients mix(const double* x, const Parameters& p) {
  const int64_t n = p.shape.streams;
  const std::vector<double> z = logits_of(x, p);
  Coefficients c;
  for (int64_t j = 0; j < n; ++j) c.pre.push_back(sigmoid(z[j]) + p.shape.hc_eps);
  if (p.head) return c;
  for (int64_t j = 0; j < n; ++j) c.post.push_back(2 * sigmoid(z[n + j]));
  c.comb = sinkhorn({z.begin() + 2 * n, z.end()}, n, p.shape.sinkhorn_iters, p.shape.hc_eps);
  return c;
}

// ---- Inputs.

struct Site {
  Tensor x, fn, base, scale;
  HyperShape shape;
  bool head = false;

  Site(uint64_t seed, DType dtype, int64_t rows, int64_t streams, int64_t width, bool head_form = false, int iters = 20)
      : head(head_form) {
    const int64_t logits = head ? streams : (2 + streams) * streams;
    x = testing::random_tensor(seed, dtype, {rows, streams, width}, 2.0f);
    fn = testing::random_tensor(seed + 1, DType::f32, {logits, streams * width},
                                1.0f / std::sqrt(static_cast<float>(streams * width)));
    base = testing::random_tensor(seed + 2, DType::f32, {logits}, 1.5f);
    scale = testing::random_tensor(seed + 3, DType::f32, {head ? 1 : 3}, 1.5f);
    shape = {.streams = streams, .sinkhorn_iters = iters, .norm_eps = 0.01f, .hc_eps = 0.01f};  // large enough to be missed
  }
  HyperWeights weights() const { return {.fn = {.rows = fn, .panels = {}}, .base = base, .scale = scale}; }
  Parameters parameters() const { return {doubles(fn), doubles(base), doubles(scale), shape, head}; }
  int64_t rows() const { return x.view().dim(0); }
  int64_t logits() const { return base.elements(); }
};

struct Mixed {
  Tensor pre, post, comb, raw, inv_rms, h, norm_inv, u, norm;

  Mixed(CpuContext& c, const Site& s) {
    const int64_t n = s.shape.streams, rows = s.rows(), width = s.x.view().dim(2);
    const DType dtype = s.x.view().dtype;
    pre = Tensor(DType::f32, {rows, n});
    raw = Tensor(DType::f32, {rows, s.logits()});
    inv_rms = Tensor(DType::f32, {rows});
    h = Tensor(dtype, {rows, width}), u = Tensor(dtype, {rows, width});
    norm_inv = Tensor(DType::f32, {rows});
    norm = testing::random_tensor(77, DType::f32, {width});
    if (!s.head) post = Tensor(DType::f32, {rows, n}), comb = Tensor(DType::f32, {rows, n * n});
    hyper_feed(c, feed(), s.x, s.weights(), s.shape, norm);
  }
  HyperFeed feed() const {
    const auto view = [](const Tensor& t) { return t.view(); };
    return {.pre = view(pre), .post = view(post), .comb = view(comb), .raw = view(raw), .inv_rms = view(inv_rms), .h = view(h), .norm_inv = view(norm_inv), .u = view(u)};
  }
};

// ---- Forward.

TEST(Hyperconn, SinkhornOfTheSpec) {
  CpuContext c;
  Site s(1, DType::f32, 1, 4, 8);
  const double logits[16] = {0.5, -1, 2, 0, 1.5, 0.25, -0.75, 1, -2, 3, 0.1, 0.4, 0, 0, 1, -1};
  const double want[16] = {0.2305377, 0.0252595, 0.5280441, 0.2161579, 0.4690040, 0.0659821, 0.0252645, 0.4397486,
                           0.0105180, 0.7663860, 0.0438910, 0.1792038, 0.2899394, 0.1423714, 0.4027995, 0.1648888};
  s.shape.hc_eps = 1e-6f;
  s.scale.set(2, 0);  // the logits are then the base alone
  for (int i = 0; i < 16; ++i) s.base.set(8 + i, logits[i]);
  const Mixed m(c, s);
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(m.comb.get(i), want[i], 0.5e-7 + 20 * kUnit * want[i]) << i;
  for (int k = 0; k < 4; ++k)
    EXPECT_NEAR(m.comb.get(k) + m.comb.get(4 + k) + m.comb.get(8 + k) + m.comb.get(12 + k), 0.9999990, 3e-7);
}

struct Sizes {
  int64_t rows, streams, width;
};
const Sizes kSizes[] = {{0, 4, 8},   {1, 4, 64},  {3, 1, 1},  {17, 2, 7},  {5, 3, 33},
                        {40, 4, 16}, {33, 4, 37}, {2, 5, 20}, {18, 8, 12}, {200, 4, 64}};

TEST(Hyperconn, MixMatchesTheFormula) {
  CpuContext c(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool head : {false, true})
      for (const Sizes& k : kSizes) {
        // Few iterations too: twenty have converged, so that one more or less would not show.
        const Site s(1, dtype, k.rows, k.streams, k.width, head, k.rows % 3 == 0 ? 20 : static_cast<int>(k.rows % 3));
        const Parameters p = s.parameters();
        const Mixed m(c, s);
        const int64_t n = k.streams, elements = n * k.width;
        const std::vector<double> x = doubles(s.x);
        for (int64_t t = 0; t < k.rows; ++t) {
          const Coefficients want = mix(x.data() + t * elements, p);
          const std::vector<double> z = logits_of(x.data() + t * elements, p);
          const double inv = inverse_rms(x.data() + t * elements, elements, s.shape.norm_eps);
          // Error of a logit: the chain of `elements` products, the mean square (halved by the root) and three products.
          std::vector<double> z_error(z.size());
          for (size_t r = 0; r < z.size(); ++r) {
            double size = 0;
            for (int64_t i = 0; i < elements; ++i) size += std::abs(p.fn[r * elements + i] * x[t * elements + i]);
            const double roundings = static_cast<double>(elements) + static_cast<double>(elements) / 32 + 8;
            const double scale = std::abs(p.scale[scale_index(static_cast<int64_t>(r), n)]);
            z_error[r] = kUnit * (roundings * inv * size * scale + std::abs(z[r]));
          }
          // The slope of the sigmoid is at most 1/4; exp within 2 ulp, a sum, a division, + eps: 7 units.
          for (int64_t j = 0; j < n; ++j) EXPECT_NEAR(m.pre.get(t * n + j), want.pre[j], z_error[j] / 4 + 7 * kUnit);
          if (head) continue;
          for (int64_t j = 0; j < n; ++j)
            EXPECT_NEAR(m.post.get(t * n + j), want.post[j], z_error[n + j] / 2 + 14 * kUnit);
          // A relative error e entering at any step of Sinkhorn shrinks by kappa = tanh(spread / 2) or better at each later one
          // (Birkhoff; projective diameter at most twice the spread of the logits). Softmax: 6 units and the logits' own error;
          // each division: n sums, a reciprocal, a product. Both potentials of c carry it, each at both ends of its oscillation.
          const auto [low, high] = std::minmax_element(z.begin() + 2 * n, z.end());
          const double kappa = std::tanh((*high - *low) / 2);
          const double entering = *std::max_element(z_error.begin() + 2 * n, z_error.end()) +
                                  (6 + (*high - *low) + static_cast<double>(n) + 2) * kUnit;
          const double relative = 4 * entering / (1 - kappa);
          for (int64_t i = 0; i < n * n; ++i)
            EXPECT_NEAR(m.comb.get(t * n * n + i), want.comb[i], relative * want.comb[i]) << n << " " << i;
        }
      }
}

TEST(Hyperconn, PreAndPostMatchTheFormula) {
  CpuContext c(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Sizes& k : kSizes) {
      const int64_t n = k.streams;
      const Tensor x = testing::random_tensor(1, dtype, {k.rows, n, k.width}),
                   y = testing::random_tensor(2, dtype, {k.rows, k.width});
      const Tensor pre = testing::random_tensor(3, DType::f32, {k.rows, n}),
                   post = testing::random_tensor(4, DType::f32, {k.rows, n});
      const Tensor comb = testing::random_tensor(5, DType::f32, {k.rows, n * n});
      Tensor h(dtype, {k.rows, k.width}), xout(dtype, {k.rows, n, k.width});
      simd::hyper_pre(c, h, x, pre);
      hyper_post(c, xout, x, y, post, comb);
      const double storage = dtype == DType::bf16 ? 0x1p-8 : 0;
      for (int64_t t = 0; t < k.rows; ++t)
        for (int64_t i = 0; i < k.width; ++i) {
          const auto stream = [&](int64_t j) { return static_cast<double>(x.get((t * n + j) * k.width + i)); };
          double want = 0, size = 0;
          for (int64_t j = 0; j < n; ++j) {
            want += pre.get(t * n + j) * stream(j);
            size += std::abs(pre.get(t * n + j) * stream(j));
          }
          EXPECT_NEAR(h.get(t * k.width + i), want, static_cast<double>(n) * kUnit * size + storage * std::abs(want));
          for (int64_t to = 0; to < n; ++to) {
            want = static_cast<double>(post.get(t * n + to)) * y.get(t * k.width + i);
            size = std::abs(want);
            for (int64_t j = 0; j < n; ++j) {
              const double term = comb.get(t * n * n + j * n + to) * stream(j);
              want += term;
              size += std::abs(term);
            }
            EXPECT_NEAR(xout.get((t * n + to) * k.width + i), want,
                        static_cast<double>(n + 1) * kUnit * size + storage * std::abs(want));
          }
        }
    }
}

// ---- Backward.

// Central difference of f, in f64.
template <typename F>
double slope(const F& f, double& at, double h) {
  const double kept = at;
  at = kept + h;
  const double up = f();
  at = kept - h;
  const double down = f();
  at = kept;
  return (up - down) / (2 * h);
}

TEST(Hyperconn, MixBackwardIsTheGradient) {
  CpuContext c(2);
  struct Case {
    int64_t rows, streams, width;
    bool head;
    int iters;
  };
  for (const Case& k : {Case{1, 1, 3, false, 20}, Case{3, 2, 5, false, 1}, Case{2, 3, 4, false, 3}, Case{3, 4, 9, false, 20},
                        Case{2, 4, 16, true, 20}, Case{3, 3, 7, true, 20}}) {
    const int64_t n = k.streams, elements = n * k.width;
    const Site s(1, DType::f32, k.rows, n, k.width, k.head, k.iters);
    const Mixed m(c, s);
    const Tensor dpre = testing::random_tensor(11, DType::f32, {k.rows, n}),
                 dpost = testing::random_tensor(12, DType::f32, {k.rows, n});
    const Tensor dcomb = testing::random_tensor(13, DType::f32, {k.rows, n * n});
    const Tensor dx_start = testing::random_tensor(14, DType::f32, s.x.view().shape);
    const Tensor dfn_start = testing::random_tensor(15, DType::f32, s.fn.view().shape);
    const Tensor dbase_start = testing::random_tensor(16, DType::f32, s.base.view().shape);
    const Tensor dscale_start = testing::random_tensor(17, DType::f32, s.scale.view().shape);
    const auto run = [&](Tensor& dx, const HyperGradients& dw) {
      const auto of_site = [&](ConstTensorView v) { return k.head ? ConstTensorView() : v; };
      simd::hyper_mix_backward(c, dx, dw, dpre, of_site(dpost), of_site(dcomb), m.raw, m.inv_rms, s.x, s.weights(), s.shape);
    };
    Tensor dx = testing::to_dtype(dx_start, DType::f32), dfn = testing::to_dtype(dfn_start, DType::f32);
    Tensor dbase = testing::to_dtype(dbase_start, DType::f32), dscale = testing::to_dtype(dscale_start, DType::f32);
    run(dx, {.fn = dfn, .base = dbase, .scale = dscale});
    Tensor dx_only = testing::to_dtype(dx_start, DType::f32);
    run(dx_only, {});
    EXPECT_EQ(testing::count_bit_differences(dx_only, dx), 0);

    Parameters p = s.parameters();
    std::vector<double> x = doubles(s.x);
    const auto loss = [&] {
      double sum = 0;
      for (int64_t t = 0; t < k.rows; ++t) {
        const Coefficients out = mix(x.data() + t * elements, p);
        for (int64_t j = 0; j < n; ++j) sum += out.pre[j] * dpre.get(t * n + j);
        for (size_t j = 0; j < out.post.size(); ++j) sum += out.post[j] * dpost.get(t * n + static_cast<int64_t>(j));
        for (size_t i = 0; i < out.comb.size(); ++i) sum += out.comb[i] * dcomb.get(t * n * n + static_cast<int64_t>(i));
      }
      return sum;
    };
    // Error of a logit's gradient: it passes (2 iters - 1) divisions, n + 3 roundings each, forward and back, of gradients below
    // 2; the softmax and sigmoids add 30; the logits' own error (elements + 8 units) moves a slope below 1.
    const double roundings = 2.0 * (2 * k.iters - 1) * static_cast<double>(n + 3) + 30 + static_cast<double>(elements) + 8;
    const double g_error = 2 * roundings * kUnit;
    const double differences = 1e-8;  // h = 1e-5: h^2 of a third derivative and 1e-15 / h of rounding
    const double h = 1e-5;
    for (int64_t t = 0; t < k.rows; ++t) {
      const double inv = inverse_rms(x.data() + t * elements, elements, s.shape.norm_eps);
      for (int64_t i = 0; i < elements; ++i) {
        // dx = inv fn' (scale g) - x (inv^3 / N) (scale g . raw): every term with the error of g and its own sums' roundings.
        double through_fn = 0, through_inv = 0;
        for (int64_t r = 0; r < p.logits(); ++r) {
          const double scale = std::abs(p.scale[scale_index(r, n)]);
          through_fn += scale * std::abs(p.fn[r * elements + i]) * inv;
          through_inv += scale * std::abs(m.raw.get(t * p.logits() + r) * x[t * elements + i]) * inv * inv * inv /
                         static_cast<double>(elements);
        }
        const double tolerance =
            (through_fn + through_inv) * (g_error + 2 * static_cast<double>(p.logits() + 10) * kUnit) + 2 * kUnit + differences;
        const int64_t at = t * elements + i;
        EXPECT_NEAR(dx.get(at) - dx_start.get(at), slope(loss, x[at], h), tolerance) << n << (k.head ? " head " : " ") << at;
      }
    }
    // |mu| is at most |fn row| sqrt(N) <= 1 * sqrt(N) here; products with x have |inv x| <= sqrt(N).
    const double rows = static_cast<double>(k.rows), root = std::sqrt(static_cast<double>(elements));
    const double sum_error = rows * (g_error + 2 * (rows + 10) * kUnit);
    for (int64_t i = 0; i < dfn.elements(); ++i)
      EXPECT_NEAR(dfn.get(i) - dfn_start.get(i), slope(loss, p.fn[i], h), 1.5 * root * sum_error + 2 * kUnit + differences) << i;
    for (int64_t i = 0; i < dbase.elements(); ++i)
      EXPECT_NEAR(dbase.get(i) - dbase_start.get(i), slope(loss, p.base[i], h), sum_error + 2 * kUnit + differences) << i;
    for (int64_t i = 0; i < dscale.elements(); ++i)
      EXPECT_NEAR(dscale.get(i) - dscale_start.get(i), slope(loss, p.scale[i], h),
                  static_cast<double>(n * n) * root * sum_error + 2 * kUnit + differences) << i;
  }
}

// Both ops are linear in each input, so a difference with step 1 is the gradient itself.
TEST(Hyperconn, PreAndPostBackwardAreTheGradients) {
  CpuContext c(2);
  for (const Sizes& k : {Sizes{1, 1, 1}, Sizes{3, 2, 7}, Sizes{2, 4, 37}, Sizes{2, 5, 16}}) {
    const int64_t n = k.streams, width = k.width, rows = k.rows;
    const Tensor x = testing::random_tensor(1, DType::f32, {rows, n, width}),
                 y = testing::random_tensor(2, DType::f32, {rows, width});
    const Tensor pre = testing::random_tensor(3, DType::f32, {rows, n}), post = testing::random_tensor(4, DType::f32, {rows, n});
    const Tensor comb = testing::random_tensor(5, DType::f32, {rows, n * n});
    const Tensor dh = testing::random_tensor(6, DType::f32, {rows, width}),
                 dxout = testing::random_tensor(7, DType::f32, {rows, n, width});
    Tensor dx = testing::random_tensor(8, DType::f32, {rows, n, width}), dx_pre = testing::random_tensor(9, DType::f32, {rows, n, width});  // overwritten
    Tensor dy(DType::f32, {rows, width}), dpost(DType::f32, {rows, n}), dcomb(DType::f32, {rows, n * n}), dpre(DType::f32, {rows, n});
    hyper_post_backward(c, dy, dpost, dcomb, dxout, x, y, post);
    simd::hyper_pre_backward(c, dx_pre, dpre, dh, {}, {}, x, pre);  // the head's form
    simd::hyper_pre_backward(c, dx, dpre, dh, dxout, comb, x, pre);

    std::vector<double> xd = doubles(x), yd = doubles(y), pred = doubles(pre), postd = doubles(post), combd = doubles(comb);
    const auto post_loss = [&] {
      double sum = 0;
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t to = 0; to < n; ++to)
          for (int64_t i = 0; i < width; ++i) {
            double out = postd[t * n + to] * yd[t * width + i];
            for (int64_t j = 0; j < n; ++j) out += combd[t * n * n + j * n + to] * xd[(t * n + j) * width + i];
            sum += out * dxout.get((t * n + to) * width + i);
          }
      return sum;
    };
    const auto pre_loss = [&] {
      double sum = 0;
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t j = 0; j < n; ++j)
          for (int64_t i = 0; i < width; ++i) sum += pred[t * n + j] * xd[(t * n + j) * width + i] * dh.get(t * width + i);
      return sum;
    };
    // Sums of n (mixing) or `width` (dots, by the tree) products of numbers below 1; one more sum where dx is added to.
    const double mixing = static_cast<double>(n * n) * kUnit,
                 dots = (static_cast<double>(width) / 16 + 6) * static_cast<double>(width) * kUnit;
    for (int64_t i = 0; i < x.elements(); ++i) {
      const double through_pre = slope(pre_loss, xd[i], 1);
      EXPECT_NEAR(dx_pre.get(i), through_pre, static_cast<double>(n + 1) * kUnit);
      EXPECT_NEAR(dx.get(i), slope(post_loss, xd[i], 1) + through_pre, mixing + static_cast<double>(n + 1) * kUnit);
    }
    for (int64_t i = 0; i < dy.elements(); ++i) EXPECT_NEAR(dy.get(i), slope(post_loss, yd[i], 1), mixing);
    for (int64_t i = 0; i < dpost.elements(); ++i) EXPECT_NEAR(dpost.get(i), slope(post_loss, postd[i], 1), dots);
    for (int64_t i = 0; i < dcomb.elements(); ++i) EXPECT_NEAR(dcomb.get(i), slope(post_loss, combd[i], 1), dots);
    for (int64_t i = 0; i < dpre.elements(); ++i) EXPECT_NEAR(dpre.get(i), slope(pre_loss, pred[i], 1), dots);
  }
}

// ---- Bits.

// A view of `shape` inside `wide`, whose rows are three elements longer.
TensorView inside(const Tensor& wide, Shape shape) {
  char* data = static_cast<char*>(wide.view().data) + dtype_bytes(wide.view().dtype);
  return TensorView(data, wide.view().dtype, shape, wide.view().row_stride);
}

// Runs every kernel of one implementation on strided views and returns the wide outputs whole, so that writes outside show too.
std::vector<Tensor> run_kernels(bool simd, Context& c, DType dtype, const Sizes& k, bool head) {
  const int64_t rows = k.rows, n = k.streams, logits = head ? n : (2 + n) * n;
  uint64_t seed = 100;
  const auto wide = [&](DType type, Shape shape) {
    return testing::random_tensor(seed++, type, {shape[0], shape.row_elements() + 3});
  };
  const Site s(1, dtype, rows, n, k.width, head, 5);
  const Shape x_shape = {rows, n, k.width}, n_shape = {rows, n}, nn_shape = {rows, n * n}, h_shape = {rows, k.width},
              z_shape = {rows, logits};
  const Tensor x_wide = wide(dtype, x_shape), raw_wide = wide(DType::f32, z_shape), dpre_wide = wide(DType::f32, n_shape);
  const Tensor dpost_wide = wide(DType::f32, n_shape), dcomb_wide = wide(DType::f32, nn_shape),
               dh_wide = wide(DType::f32, h_shape);
  const Tensor dxout_wide = wide(DType::f32, x_shape), y_wide = wide(dtype, h_shape);
  const ConstTensorView x = inside(x_wide, x_shape), raw = inside(raw_wide, z_shape), dpre = inside(dpre_wide, n_shape);
  const ConstTensorView dh = inside(dh_wide, h_shape), dxout = inside(dxout_wide, x_shape), y = inside(y_wide, h_shape);
  const ConstTensorView dpost = head ? ConstTensorView() : inside(dpost_wide, n_shape);
  const ConstTensorView dcomb = head ? ConstTensorView() : inside(dcomb_wide, nn_shape);

  Tensor pre = wide(DType::f32, n_shape), post = wide(DType::f32, n_shape), comb = wide(DType::f32, nn_shape),
         inv(DType::f32, {rows});
  Tensor dlogits = wide(DType::f32, z_shape), dx = wide(DType::f32, x_shape), h = wide(dtype, h_shape),
         xout = wide(dtype, x_shape);
  Tensor dx_pre = wide(DType::f32, x_shape), dpre_out = wide(DType::f32, n_shape);
  Tensor dy = wide(DType::f32, h_shape), dpost_out = wide(DType::f32, n_shape), dcomb_out = wide(DType::f32, nn_shape);
  const TensorView post_view = head ? TensorView() : inside(post, n_shape),
                   comb_view = head ? TensorView() : inside(comb, nn_shape);
  (simd ? simd::hyper_coefficients : reference::hyper_coefficients)(c, inside(pre, n_shape), post_view, comb_view, inv, raw, x,
                                                                    s.weights(), s.shape);
  (simd ? simd::hyper_coefficients_backward : reference::hyper_coefficients_backward)(
      c, inside(dx, x_shape), inside(dlogits, z_shape), dpre, dpost, dcomb, raw, inv, x, s.weights(), s.shape);
  const ConstTensorView p = inside(pre, n_shape), q = inside(post, n_shape), m = inside(comb, nn_shape);
  (simd ? simd::hyper_pre : reference::hyper_pre)(c, inside(h, h_shape), x, p);
  const ConstTensorView through = head ? ConstTensorView() : dxout, through_comb = head ? ConstTensorView() : m;
  (simd ? simd::hyper_pre_backward : reference::hyper_pre_backward)(c, inside(dx_pre, x_shape), inside(dpre_out, n_shape), dh, through, through_comb, x, p);
  (simd ? simd::hyper_post : reference::hyper_post)(c, inside(xout, x_shape), x, y, q, m);
  (simd ? simd::hyper_post_backward : reference::hyper_post_backward)(c, inside(dy, h_shape), inside(dpost_out, n_shape), inside(dcomb_out, nn_shape),
                                                                      dxout, x, y, q);
  std::vector<Tensor> out;
  for (Tensor* t :
       {&pre, &post, &comb, &inv, &dlogits, &dx, &h, &xout, &dx_pre, &dpre_out, &dy, &dpost_out, &dcomb_out})
    out.push_back(std::move(*t));
  return out;
}

TEST(Hyperconn, SimdGivesTheReferencesBits) {
  std::vector<std::unique_ptr<CpuContext>> contexts;
  for (int threads = 1; threads <= 4; ++threads) contexts.push_back(std::make_unique<CpuContext>(threads));
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool head : {false, true})
      for (const Sizes& k : kSizes) {
        if (k.rows == 0) continue;
        const std::vector<Tensor> want = run_kernels(false, *contexts[0], dtype, k, head);
        testing::for_each_simd_target([&](const std::string& target) {
          for (auto& c : contexts) {
            const std::vector<Tensor> got = run_kernels(true, *c, dtype, k, head);
            for (size_t i = 0; i < want.size(); ++i)
              EXPECT_EQ(testing::count_bit_differences(got[i], want[i]), 0)
                  << target << " output " << i << " rows " << k.rows << " streams " << k.streams << " width " << k.width;
          }
        });
      }
}

// The parts said plainly, one after the other: hyper_feed and its backward have these bits, also where a chain's last segment is a part of one.
TEST(Hyperconn, FeedIsItsParts) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool head : {false, true})
      for (const Sizes& k : {Sizes{5, 3, 33}, Sizes{3, 4, 128}, Sizes{2, 4, 129}, Sizes{4, 4, 300}}) {
        CpuContext c(2);
        const Site s(1, dtype, k.rows, k.streams, k.width, head, 5);
        const Mixed m(c, s);
        const int64_t rows = k.rows, n = k.streams, elements = n * k.width;
        const auto of_site = [&](const Tensor& t) { return head ? TensorView() : t.view(); };
        Tensor pre(DType::f32, {rows, n}), post(DType::f32, {rows, n}), comb(DType::f32, {rows, n * n}), raw(DType::f32, {rows, s.logits()}), inv(DType::f32, {rows});
        for (int64_t t = 0; t < rows; ++t)
          for (int64_t r = 0; r < s.logits(); ++r) {
            float sum = 0;
            for (int64_t begin = 0; begin < elements; begin += kHyperSegment) {
              float chain = 0;
              for (int64_t i = begin; i < std::min(elements, begin + kHyperSegment); ++i)
                chain = std::fmaf(static_cast<float>(s.x.get(t * elements + i)), static_cast<float>(s.fn.get(r * elements + i)), chain);
              sum += chain;
            }
            raw.set(t * s.logits() + r, sum);
          }
        reference::hyper_coefficients(c, pre, of_site(post), of_site(comb), inv, raw, s.x, s.weights(), s.shape);
        for (int64_t t = 0; t < rows; ++t) {  // squares of a segment: sixteen chains that fold by halves
          float squares = 0;
          for (int64_t begin = 0; begin < elements; begin += kHyperSegment) {
            float lane[16] = {};
            for (int64_t i = begin; i < std::min(elements, begin + kHyperSegment); ++i) {
              const float v = static_cast<float>(s.x.get(t * elements + i));
              lane[(i - begin) % 16] = std::fmaf(v, v, lane[(i - begin) % 16]);
            }
            for (int width = 8; width >= 1; width /= 2)
              for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
            squares += lane[0];
          }
          EXPECT_EQ(inv.get(t), 1.0f / std::sqrt(squares / static_cast<float>(elements) + s.shape.norm_eps));
        }
        Tensor h(dtype, {rows, k.width}), u(dtype, {rows, k.width}), norm_inv(DType::f32, {rows});
        reference::hyper_pre(c, h, s.x, pre);
        rmsnorm(c, u, norm_inv, h, m.norm, s.shape.norm_eps);
        int output = 0;
        for (const auto& [got, want] : {std::pair(&m.pre, &pre), {&m.raw, &raw}, {&m.inv_rms, &inv}, {&m.h, &h}, {&m.u, &u}, {&m.norm_inv, &norm_inv}})
          EXPECT_EQ(testing::count_bit_differences(*got, *want), 0) << "output " << output++;
        if (!head) {
          EXPECT_EQ(testing::count_bit_differences(m.post, post) + testing::count_bit_differences(m.comb, comb), 0);
        }

        const Tensor dh = testing::random_tensor(21, DType::f32, {rows, k.width}), dxout = testing::random_tensor(22, DType::f32, {rows, n, k.width});
        const Tensor dpost = testing::random_tensor(23, DType::f32, {rows, n}), dcomb = testing::random_tensor(24, DType::f32, {rows, n * n});
        Tensor dx(DType::f32, {rows, n, k.width}), dx_parts(DType::f32, {rows, n, k.width}), dpre(DType::f32, {rows, n});
        hyper_feed_backward(c, dx, {}, dh, of_site(dpost), of_site(dcomb), of_site(dxout), s.x, m.feed(), s.weights(), s.shape);
        reference::hyper_pre_backward(c, dx_parts, dpre, dh, of_site(dxout), of_site(comb), s.x, pre);
        simd::hyper_mix_backward(c, dx_parts, {}, dpre, of_site(dpost), of_site(dcomb), raw, inv, s.x, s.weights(), s.shape);
        EXPECT_EQ(testing::count_bit_differences(dx, dx_parts), 0);
      }
}

TEST(Hyperconn, RowContract) {
  CpuContext c(2);
  const int64_t rows = 70, n = 4, width = 24;
  const Site s(1, DType::bf16, rows, n, width);
  const Mixed all(c, s);
  const Tensor dh = testing::random_tensor(2, DType::f32, {rows, width}), dpost = testing::random_tensor(3, DType::f32, {rows, n});
  const Tensor dcomb = testing::random_tensor(4, DType::f32, {rows, n * n}), dxout = testing::random_tensor(5, DType::f32, {rows, n, width});
  Tensor dx(DType::f32, {rows, n, width});
  hyper_feed_backward(c, dx, {}, dh, dpost, dcomb, dxout, s.x, all.feed(), s.weights(), s.shape);
  Philox rng(9, RngPurpose::test);
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t begin = rng.below(rows), count = 1 + rng.below(static_cast<uint32_t>(rows - begin));
    const auto part = [&](const Tensor& v) { return ConstTensorView(v).slice(begin, count); };
    Site some(1, DType::bf16, count, n, width);  // the same weights
    for (int64_t i = 0; i < some.x.elements(); ++i) some.x.set(i, s.x.get(begin * n * width + i));
    const Mixed m(c, some);
    Tensor part_dx(DType::f32, {count, n, width});
    hyper_feed_backward(c, part_dx, {}, part(dh), part(dpost), part(dcomb), part(dxout), some.x, m.feed(), s.weights(), s.shape);
    for (const auto& [got, want] : {std::pair(&m.pre, &all.pre), {&m.post, &all.post}, {&m.comb, &all.comb}, {&m.u, &all.u}})
      EXPECT_EQ(testing::count_bit_differences(*got, part(*want)), 0);
    EXPECT_EQ(testing::count_bit_differences(part_dx, part(dx)), 0);
  }
}

TEST(Hyperconn, ParameterGradientsDoNotDependOnThreads) {
  const Site s(1, DType::bf16, 300, 4, 64);
  const Tensor dh = testing::random_tensor(2, DType::f32, {300, 64}), dpost = testing::random_tensor(3, DType::f32, {300, 4});
  const Tensor dcomb = testing::random_tensor(4, DType::f32, {300, 16}), dxout = testing::random_tensor(5, DType::f32, {300, 4, 64});
  std::vector<Tensor> first;
  for (int threads = 1; threads <= 4; ++threads) {
    CpuContext c(threads);
    const Mixed m(c, s);
    std::vector<Tensor> out;
    out.emplace_back(DType::f32, Shape{300, 4, 64});
    out.emplace_back(DType::f32, s.fn.view().shape);
    out.emplace_back(DType::f32, s.base.view().shape);
    out.emplace_back(DType::f32, s.scale.view().shape);
    hyper_feed_backward(c, out[0], {.fn = out[1], .base = out[2], .scale = out[3]}, dh, dpost, dcomb, dxout, s.x, m.feed(), s.weights(), s.shape);
    if (threads == 1) first = std::move(out);
    else
      for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(testing::count_bit_differences(out[i], first[i]), 0) << threads << i;
  }
}

TEST(HyperconnDeath, ChecksShapesAndTypes) {
  CpuContext c;
  const Site s(1, DType::f32, 2, 4, 8);
  const Mixed m(c, s);
  Tensor h(DType::f32, {2, 8}), half(DType::bf16, {2, 8}), x9(DType::f32, {2, 9, 8}), dx(DType::f32, {2, 4, 8}), dxout(DType::f32, {2, 4, 8});
  const auto with = [&](auto change) {
    HyperFeed f = m.feed();
    change(f);
    return f;
  };
  const auto feed = [&](const HyperFeed& f, const HyperShape& shape) { hyper_feed(c, f, s.x, s.weights(), shape, m.norm); };
  EXPECT_DEATH(feed(with([](HyperFeed& f) { f.comb = f.pre; }), s.shape), "comb is f32 \\[2, 4\\], wanted f32 \\[2, 16\\]");
  EXPECT_DEATH(feed(with([](HyperFeed& f) { f.raw = f.comb; }), s.shape), "raw is f32 \\[2, 16\\]");
  EXPECT_DEATH(feed(with([](HyperFeed& f) { f.comb = f.post = {}, f.raw = f.pre; }), s.shape), "base is f32 \\[24\\], wanted f32 \\[4\\]");
  EXPECT_DEATH(feed(with([&](HyperFeed& f) { f.h = half; }), s.shape), "h is bf16");
  EXPECT_DEATH(feed(m.feed(), {.streams = 3}), "3 streams");
  EXPECT_DEATH(hyper_feed(c, m.feed(), x9, s.weights(), s.shape, m.norm), "x is f32 \\[2, 9, 8\\]");
  const auto backward = [&](TensorView to, const HyperGradients& dw, ConstTensorView dh) {
    hyper_feed_backward(c, to, dw, dh, m.post, m.comb, dxout, s.x, m.feed(), s.weights(), s.shape);
  };
  EXPECT_DEATH(backward(dx, {.fn = dx, .base = {}, .scale = {}}, h), "dw.fn is f32 \\[2, 4, 8\\]");
  EXPECT_DEATH(backward(dx, {}, dx), "dh is f32 \\[2, 4, 8\\]");
  EXPECT_DEATH(backward(dxout, {}, h), "dx is dxout");
  EXPECT_DEATH(hyper_post(c, dx, s.x, half, m.post, m.comb), "y is bf16");
  EXPECT_DEATH(hyper_post_backward(c, h, m.comb, m.comb, dxout, s.x, h, m.post), "dpost is f32 \\[2, 16\\]");
}

}  // namespace
}  // namespace lockstep
