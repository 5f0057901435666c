#include "ops/embed/embed_cpu.h"

#include <algorithm>
#include <cstring>

namespace lockstep::reference {

void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens) {
  const size_t element = dtype_bytes(table.dtype);
  const int64_t streams = x.dim(1), width = x.dim(2);
  if (x.empty()) return;
  const int32_t* id = tokens.ptr<int32_t>();
  const size_t row_bytes = static_cast<size_t>(width) * element;
  parallel_for(c, x.rows(), streams * width / 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const char* from = static_cast<const char*>(table.data) + static_cast<size_t>(id[t] * table.row_stride) * element;
      char* to = static_cast<char*>(x.data) + static_cast<size_t>(t * x.row_stride) * element;
      for (int64_t j = 0; j < streams; ++j) std::memcpy(to + static_cast<size_t>(j) * row_bytes, from, row_bytes);
    }
  });
}

// Each worker owns a range of columns and walks all tokens, so a token that repeats needs no lock and its rows always add in
// the same order.
void embed_backward(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens) {
  constexpr int64_t kBlock = 16;
  const int64_t rows = dx.rows(), streams = dx.dim(1), width = dx.dim(2);
  if (dx.empty()) return;
  const int32_t* id = tokens.ptr<int32_t>();
  parallel_for(c, (width + kBlock - 1) / kBlock, rows * streams * kBlock / 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = 0; t < rows; ++t) {
      if (id[t] < first || id[t] >= first + dtable_accum.rows()) continue;
      const float* from = dx.row<float>(t);
      float* to = dtable_accum.row<float>(id[t] - first);
      for (int64_t d0 = begin * kBlock; d0 < std::min(end * kBlock, width); d0 += kBlock) {
        const int64_t count = std::min(kBlock, width - d0);
        float sum[kBlock] = {};
        for (int64_t j = 0; j < streams; ++j)
          for (int64_t i = 0; i < count; ++i) sum[i] += from[j * width + d0 + i];
        for (int64_t i = 0; i < count; ++i) to[d0 + i] += sum[i];
      }
    }
  });
}

}  // namespace lockstep::reference
