#pragma once
// What benchmarks of operators share: a clock for a context's work, operands that are quickly made, and what the machine gives at best, seen in the same run.

#include <functional>
#include <string>
#include <vector>

#include "core/context.h"
#include "ops/matmul/blas_library.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

struct Timing {
  double median = 0, min = 0, max = 0;  // seconds
};

class Clock {
 public:
  // cold: before each run the caches are overwritten, with 256 MiB on a GPU and 64 MiB on a CPU. The executor's kernels meet no caches worth the name.
  Clock(Context& c, bool cold);
  Context& context() { return c_; }
  bool cold() const { return sweep_.data != nullptr; }
  // f alone, `runs` times after one that warms up; after two seconds as many as there are, two at least.
  Timing time(const std::function<void()>& f, int runs);

 private:
  Context& c_;
  Arena arena_;
  TensorView sweep_;
};

// Tensors in the context's memory, from one arena: the caller's ArenaScope gives them back.
class Operands {
 public:
  explicit Operands(Context& c);
  Context& context() { return c_; }
  Arena& arena() { return arena_; }
  TensorView make(DType dtype, Shape shape) { return arena_.tensor(dtype, shape, "operand"); }  // undefined
  TensorView zeros(DType dtype, Shape shape);
  TensorView ones(Shape shape);  // f32
  TensorView ints(const std::vector<int32_t>& values, Shape shape);
  // f32, bf16: in (-1, 1). e4m3, e2m1x2: codes of finite numbers. ue8m0: 2^-7 to 2^-1. They repeat after some 10^6, at no width of a row.
  TensorView random(DType dtype, Shape shape);
  // [N, K] or [E, N, K] in f32, bf16, e4m3 (blocks of 128 x 128) or e2m1x2 (1 x 32), as the model holds it. column_period: of BlockGrid.
  WeightView weight(DType dtype, Shape shape, int64_t column_period = 0);

 private:
  Context& c_;
  Arena arena_;
};

// The library's best of all algorithms that it would try, for random operands of p's sizes and dtypes. Infinity: it has no such product, or there is no library.
double library_seconds(Clock& clock, Operands& operands, gpu::BlasProblem p, int runs);

// Rates a second. Of operations by the dtype that units multiply: on a GPU the best large product, ours or the library's; on a CPU fused multiply-adds in f32.
struct Ceiling {
  double copy_bytes = 0;  // read and written
  double f32 = 0, bf16 = 0, e4m3 = 0;
  std::string f32_by, bf16_by, e4m3_by;
  double operations(DType dtype) const { return dtype == DType::f32 ? f32 : dtype == DType::bf16 ? bf16 : e4m3; }
  double seconds(double bytes, double operations_done, DType dtype) const { return std::max(bytes / copy_bytes, operations_done / operations(dtype)); }
};
Ceiling measure_ceiling(Clock& clock, Operands& operands);

}  // namespace lockstep
