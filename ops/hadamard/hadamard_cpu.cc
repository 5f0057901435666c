#include "ops/hadamard/hadamard_cpu.h"

#include <bit>
#include <cmath>

namespace lockstep::reference {

namespace {

template <typename T>
void rotate(T* x, int64_t n, float scale, float* work) {
  for (int64_t i = 0; i < n; ++i) work[i] = to_f32(x[i]);
  for (int64_t half = 1; half < n; half *= 2)
    for (int64_t first = 0; first < n; first += 2 * half)
      for (int64_t i = first; i < first + half; ++i) {
        const float a = work[i], b = work[i + half];
        work[i] = a + b;
        work[i + half] = a - b;
      }
  for (int64_t i = 0; i < n; ++i) x[i] = from_f32<T>(work[i] * scale);
}

}  // namespace

void hadamard(Context& c, TensorView x) {
  const int64_t n = x.dim(1);
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
  ArenaScope scope(*c.workspace);
  const TensorView work = c.workspace->tensor(DType::f32, {c.num_threads(), n}, "hadamard");
  parallel_for(c, x.rows(), n * (std::bit_width(static_cast<uint64_t>(n)) + 1), [&](int64_t begin, int64_t end, int worker) {
    for (int64_t t = begin; t < end; ++t) {
      if (x.dtype == DType::f32) rotate(x.row<float>(t), n, scale, work.row<float>(worker));
      else rotate(x.row<bf16>(t), n, scale, work.row<float>(worker));
    }
  });
}

}  // namespace lockstep::reference
