#pragma once
// What op tests share: reproducible random tensors, owned storage, bit comparison, the SIMD targets to run under, finite
// differences. Not linked into the program.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/rng.h"

namespace lockstep::testing {

// Owned, zeroed tensor storage for tests; `view` stays valid while it lives (moves keep it valid).
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);
  TensorView view() const { return view_; }
  operator TensorView() const { return view_; }
  operator ConstTensorView() const { return view_; }
  template <typename T>
  T* ptr() const { return view_.ptr<T>(); }
  int64_t elements() const { return view_.shape.elements(); }
  float get(int64_t i) const;          // f32, bf16 or f64 element as float
  void set(int64_t i, double value);   // rounds to the dtype

 private:
  std::unique_ptr<char[]> storage_;
  TensorView view_;
};

// Values uniform in (-magnitude, magnitude), rounded to dtype (f32, bf16, f64).
Tensor random_tensor(uint64_t seed, DType dtype, Shape shape, float magnitude = 1.0f);
Tensor random_ints(uint64_t seed, Shape shape, int32_t below);  // i32 in [0, below)
Tensor int_tensor(const std::vector<int32_t>& values);           // [n] i32
Tensor to_dtype(ConstTensorView x, DType dtype);                 // copy, rounded

// Number of elements whose bits differ; shapes and dtypes must match. NaNs with equal bits are equal.
int64_t count_bit_differences(ConstTensorView a, ConstTensorView b);
double max_abs_difference(ConstTensorView a, ConstTensorView b);
// |a - b|_2 / |b|_2 in f64 (|a|_2 when b is zero).
double relative_l2(ConstTensorView a, ConstTensorView b);

// Calls f once for every SIMD target this machine and build have, with that target forced (names like "AVX2", "AVX3"), then restores the
// best. num_simd_targets() is how many that is: at least two on an AVX-512 machine.
void for_each_simd_target(const std::function<void(const std::string& target)>& f);
int num_simd_targets();

// Central difference of f with respect to element i of x (f32 storage): (f(x + h) - f(x - h)) / 2h.
double finite_difference(const std::function<double()>& f, Tensor& x, int64_t i, double h);

}  // namespace lockstep::testing
