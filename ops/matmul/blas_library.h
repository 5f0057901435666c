#pragma once
// The GPU maker's own matrix products, cuBLASLt or hipBLASLt behind one seam: the peer that `lockstep bench` measures ours beside. Nothing in the model calls them.
// Which algorithm they take changes with the number of rows, so a row's bits would depend on who shares the call; and ours are near enough (docs/gpu.md).
//
// The library is loaded when it is first asked for. A program built or run without it works, and blas_library() says why there is none.

#include <cstddef>
#include <memory>
#include <string>

#include "core/context.h"

namespace lockstep::gpu {

Result<std::string> blas_library();  // name and version

// y[m, n] = sum_k a[m, k] b[n, k]: operands contiguous in device memory, summed in f32, rounded once to y.
//   f32, bf16: a [m, k] or, `a_by_k`, [k, m]; b [n, k] or, `b_by_k`, [k, n]
//   e4m3:      a [m, k] with a f32 scale for each 1 x 128, b [n, k] with one for each 128 x 128, in the library's own order; y bf16
struct BlasProblem {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::bf16;  // of a and b
  DType y_dtype = DType::bf16;
  bool a_by_k = false, b_by_k = false;
  const void *a = nullptr, *b = nullptr;
  const float *a_scale = nullptr, *b_scale = nullptr;
  void* y = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// The algorithms that the library would try, the best by its own guess first. None: it has no such product, or there is no library.
class BlasProduct {
 public:
  explicit BlasProduct(const BlasProblem& p);
  ~BlasProduct();
  int algorithms() const;
  bool run(int algorithm, void* stream) const;  // enqueues; false: the library declined after all

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::gpu
