#include "ops/adamw/adamw.h"

#include <algorithm>

#include "ops/adamw/adamw_cpu.h"

namespace lockstep {

namespace {

void check_elements(const char* op, const char* name, ConstTensorView v, const Shape& shape) {
  CHECK(v.dtype == DType::f32 && v.shape == shape && v.contiguous(), "{}: {} is {} {} with stride {}, wanted contiguous f32 {}",
        op, name, dtype_name(v.dtype), v.shape.str(), v.row_stride, shape.str());
}

void check_scalar(const char* op, ConstTensorView out, DType dtype) {
  CHECK(out.dtype == dtype && out.shape.elements() == 1, "{}: out is {} {}, wanted one {}", op, dtype_name(out.dtype),
        out.shape.str(), dtype_name(dtype));
}

// Runs f(first element, elements, block, worker) over blocks of kSumSquaresBlock, `cost` a rough cost per element.
template <typename F>
void for_each_block(Context& c, int64_t n, int64_t cost, const F& f) {
  const int64_t blocks = (n + kSumSquaresBlock - 1) / kSumSquaresBlock;
  parallel_for(c, blocks, kSumSquaresBlock * cost, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t b = begin; b < end; ++b)
      f(b * kSumSquaresBlock, std::min(kSumSquaresBlock, n - b * kSumSquaresBlock), b, worker);
  });
}

}  // namespace

void adamw(Context& c, TensorView w, TensorView m, TensorView v, ConstTensorView grad, const AdamWStep& step) {
  check_elements("adamw", "w", w, w.shape);
  check_elements("adamw", "m", m, w.shape);
  check_elements("adamw", "v", v, w.shape);
  check_elements("adamw", "grad", grad, w.shape);
  CHECK(step.bias1 > 0 && step.bias2 > 0, "adamw: bias corrections {} and {} must be positive", step.bias1, step.bias2);
  if (c.on_gpu()) return device::adamw(c, w, m, v, grad, step);
  float* wp = w.ptr<float>();
  float* mp = m.ptr<float>();
  float* vp = v.ptr<float>();
  const float* gp = grad.ptr<float>();
  for_each_block(c, w.shape.elements(), 2, [&](int64_t at, int64_t n, int64_t, int) {
    simd::adamw_range(wp + at, mp + at, vp + at, gp + at, n, step);
  });
}

void sum_squares(Context& c, TensorView out, std::span<const ConstTensorView> grads) {
  const auto tensors = static_cast<int64_t>(grads.size());
  for (const ConstTensorView& grad : grads) check_elements("sum_squares", "grad", grad, grad.shape);
  CHECK(out.dtype == DType::f64 && out.shape == Shape{tensors} && out.contiguous(), "sum_squares: out is {} {}, wanted f64 [{}]", dtype_name(out.dtype),
        out.shape.str(), tensors);
  if (tensors == 0) return;
  if (c.on_gpu()) return device::sum_squares(c, out, grads);
  for (int64_t i = 0; i < tensors; ++i) {
    const ConstTensorView grad = grads[static_cast<size_t>(i)];
    const int64_t n = grad.shape.elements(), blocks = (n + kSumSquaresBlock - 1) / kSumSquaresBlock;
    ArenaScope scope(*c.workspace);
    double* block_sum = c.workspace->tensor(DType::f64, {blocks}, "sum_squares blocks").ptr<double>();
    const float* gp = grad.ptr<float>();
    for_each_block(c, n, 1, [&](int64_t at, int64_t count, int64_t block, int) {
      block_sum[block] = simd::sum_squares_block(gp + at, count);
    });
    double sum = 0.0;
    for (int64_t b = 0; b < blocks; ++b) sum += block_sum[b];
    out.ptr<double>()[i] = sum;
  }
}

void all_finite(Context& c, TensorView out, ConstTensorView x) {
  check_elements("all_finite", "x", x, x.shape);
  check_scalar("all_finite", out, DType::i32);
  if (c.on_gpu()) return device::all_finite(c, out, x);
  ArenaScope scope(*c.workspace);
  const int64_t workers = c.num_threads();
  int32_t* bad = c.workspace->zeros(DType::i32, {workers}, "all_finite flags").ptr<int32_t>();
  const float* xp = x.ptr<float>();
  for_each_block(c, x.shape.elements(), 1, [&](int64_t at, int64_t n, int64_t, int worker) {
    if (bad[worker] == 0 && !simd::all_finite_range(xp + at, n)) bad[worker] = 1;
  });
  *out.ptr<int32_t>() = std::all_of(bad, bad + workers, [](int32_t b) { return b == 0; });
}

}  // namespace lockstep
