#include "ops/moe_permute/moe_permute_cpu.h"

#include <algorithm>
#include <cstring>

namespace lockstep::reference {

namespace {

// A piece of a row summed in registers and the first cache, whatever D.
constexpr int64_t kTile = 64;

template <typename T>
void store_row(T* y, const float* sum, int64_t n) {
  for (int64_t d = 0; d < n; ++d) y[d] = from_f32<T>(sum[d]);
}

// sum[0, n) = 0 + rows[slot[0]] + rows[slot[1]] + ... over columns [d, d + n).
template <typename T>
void sum_slots(float* sum, const T* rows, int64_t stride, const int32_t* slot, int64_t k, int64_t d, int64_t n) {
  std::fill_n(sum, n, 0.0f);
  for (int64_t i = 0; i < k; ++i) {
    const T* row = rows + slot[i] * stride + d;
    for (int64_t j = 0; j < n; ++j) sum[j] += to_f32(row[j]);
  }
}

template <typename T>
void combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared) {
  const int64_t width = y.dim(1), k = slot_row.dim(1);
  const T* r = rows.ptr<T>();
  parallel_for(c, y.rows(), (k + 2) * width / 4, [&](int64_t begin, int64_t end, int) {
    float sum[kTile];
    for (int64_t t = begin; t < end; ++t)
      for (int64_t d = 0; d < width; d += kTile) {
        const int64_t n = std::min(kTile, width - d);
        sum_slots(sum, r, rows.row_stride, slot_row.row<int32_t>(t), k, d, n);
        const T* s = shared.row<T>(t) + d;
        for (int64_t j = 0; j < n; ++j) sum[j] += to_f32(s[j]);
        store_row(y.row<T>(t) + d, sum, n);
      }
  });
}

}  // namespace

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids) {
  const int64_t experts = offsets.rows() - 1, rows = ids.rows(), k = ids.dim(1);
  ArenaScope scope(*c.workspace);
  const TensorView next = c.workspace->zeros(DType::i32, {experts}, "moe_plan counters");
  int32_t* n = next.ptr<int32_t>();
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* id = ids.row<int32_t>(t);
    for (int64_t i = 0; i < k; ++i) {
      CHECK(id[i] >= 0 && id[i] < experts, "moe_plan: expert {} of token {}, there are {}", id[i], t, experts);
      ++n[id[i]];
    }
  }
  // Counts become each expert's first row, and then the row its next (token, slot) takes.
  int32_t* first = offsets.ptr<int32_t>();
  int32_t sum = 0;
  for (int64_t e = 0; e < experts; ++e) {
    first[e] = sum;
    sum += n[e];
    n[e] = first[e];
  }
  first[experts] = sum;
  int32_t* token = row_token.ptr<int32_t>();
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* id = ids.row<int32_t>(t);
    int32_t* slot = slot_row.row<int32_t>(t);
    for (int64_t i = 0; i < k; ++i) {
      slot[i] = n[id[i]]++;
      token[slot[i]] = static_cast<int32_t>(t);
    }
  }
}

void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token) {
  const int64_t element = static_cast<int64_t>(dtype_bytes(x.dtype)), bytes = x.dim(1) * element;
  parallel_for(c, rows.rows(), bytes / 16 + 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(static_cast<char*>(rows.data) + r * rows.row_stride * element,
                  static_cast<const char*>(x.data) + *row_token.row<int32_t>(r) * x.row_stride * element,
                  static_cast<size_t>(bytes));
  });
}

void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared) {
  if (y.dtype == DType::f32) combine<float>(c, y, rows, slot_row, shared);
  else combine<bf16>(c, y, rows, slot_row, shared);
}

void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row) {
  const int64_t width = dx_accum.dim(1), k = slot_row.dim(1);
  const float* r = drows.ptr<float>();
  parallel_for(c, dx_accum.rows(), (k + 2) * width / 4, [&](int64_t begin, int64_t end, int) {
    float sum[kTile];
    for (int64_t t = begin; t < end; ++t)
      for (int64_t d = 0; d < width; d += kTile) {
        const int64_t n = std::min(kTile, width - d);
        sum_slots(sum, r, drows.row_stride, slot_row.row<int32_t>(t), k, d, n);
        float* dx = dx_accum.row<float>(t) + d;
        for (int64_t j = 0; j < n; ++j) dx[j] += sum[j];
      }
  });
}

void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row) {
  float* out = row_value.ptr<float>();
  const int64_t k = slot_row.dim(1);
  parallel_for(c, slot_row.rows(), 2 * k, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < k; ++i) out[slot_row.row<int32_t>(t)[i]] = value.row<float>(t)[i];
  });
}

void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row) {
  const float* in = row_value.ptr<float>();
  const int64_t k = slot_row.dim(1);
  parallel_for(c, slot_row.rows(), 2 * k, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < k; ++i) value.row<float>(t)[i] = in[slot_row.row<int32_t>(t)[i]];
  });
}

}  // namespace lockstep::reference
