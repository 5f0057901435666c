#include "ops/sum/sum.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

namespace {

template <typename T>
void add(Context& c, TensorView y, ConstTensorView mine, ConstTensorView parts, int64_t own) {
  constexpr int64_t kBlock = 512;
  const int64_t n = y.rows(), count = parts.rows();
  parallel_for(c, (n + kBlock - 1) / kBlock, kBlock * count, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * kBlock; at < std::min(n, end * kBlock); at += kBlock) {
      const int64_t m = std::min(kBlock, n - at);
      const auto part = [&](int64_t r) { return (r == own ? mine.ptr<T>() : parts.row<T>(r)) + at; };
      T sum[kBlock];
      std::memcpy(sum, part(0), static_cast<size_t>(m) * sizeof(T));
      for (int64_t r = 1; r < count; ++r) {
        const T* const x = part(r);
        for (int64_t i = 0; i < m; ++i) sum[i] += x[i];
      }
      std::memcpy(y.ptr<T>() + at, sum, static_cast<size_t>(m) * sizeof(T));
    }
  });
}

}  // namespace

void sum_in_order(Context& c, TensorView y, ConstTensorView mine, ConstTensorView parts, int64_t own) {
  CHECK((y.dtype == DType::f32 || y.dtype == DType::f64) && mine.dtype == y.dtype && parts.dtype == y.dtype && y.shape.rank == 1 && mine.shape == y.shape &&
            parts.shape.rank == 2 && parts.dim(1) >= y.rows() && own >= 0 && own < parts.rows(),
        "sum_in_order: y {} {}, mine {} {}, parts {} {}, own {}", dtype_name(y.dtype), y.shape.str(), dtype_name(mine.dtype), mine.shape.str(),
        dtype_name(parts.dtype), parts.shape.str(), own);
  if (y.empty()) return;
  if (c.on_gpu()) return device::sum_in_order(c, y, mine, parts, own);
  y.dtype == DType::f32 ? add<float>(c, y, mine, parts, own) : add<double>(c, y, mine, parts, own);
}

}  // namespace lockstep
