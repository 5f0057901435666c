// matmul, said plainly. How matmul_simd.cc gets the same bits fast:
//
// Every output is one chain of fused multiply-adds, so K is never split; instead a tile of outputs (12 rows by two panels with
// AVX-512, 6 rows by one panel with AVX2) runs its chains side by side in registers. Step k broadcasts x[m, k] and multiplies
// it into w[., k], 16 consecutive columns of a panel. Long K is walked in blocks that fit the caches; between blocks the chain
// rests in an f32 array, which rounds nothing. The backward products are the same tile with other operands:
//   forward   rows m, columns n, chain over k:  x[m, k]            * panel of w
//   dx        rows m, columns k, chain over n:  dy[m, n]           * row n of w
//   dw        rows n, columns k, chain over m:  dy[m, n] (a column) * row m of x

#include "ops/matmul/matmul_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::reference {

namespace {

float at(ConstTensorView v, int64_t row, int64_t col) {
  const int64_t i = row * v.row_stride + col;
  return v.dtype == DType::f32 ? static_cast<const float*>(v.data)[i] : to_f32(static_cast<const bf16*>(v.data)[i]);
}

void put(TensorView v, int64_t row, int64_t col, float value) {
  const int64_t i = row * v.row_stride + col;
  if (v.dtype == DType::f32) static_cast<float*>(v.data)[i] = value;
  else static_cast<bf16*>(v.data)[i] = to_bf16(value);
}

template <typename T>
void pack(T* panels, const T* rows, int64_t n, int64_t k, int64_t row_stride) {
  const int64_t num_panels = (n + kPanelWidth - 1) / kPanelWidth;
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < kPanelWidth; ++j) {
        const int64_t row = p * kPanelWidth + j;
        panels[(p * k + i) * kPanelWidth + j] = row < n ? rows[row * row_stride + i] : T{};
      }
}

template <typename T>
void pack_all(TensorView panels, ConstTensorView rows) {
  if (rows.shape.rank == 2) return pack(panels.ptr<T>(), rows.ptr<T>(), rows.shape[0], rows.shape[1], rows.row_stride);
  for (int64_t e = 0; e < rows.rows(); ++e)
    pack(panels.row<T>(e), rows.row<T>(e), rows.shape[1], rows.shape[2], rows.shape[2]);
}

// Calls f(expert, first row, number of rows) for every expert.
template <typename F>
void for_each_expert(ConstTensorView offsets, F f) {
  const int32_t* at = offsets.ptr<int32_t>();
  for (int64_t e = 0; e + 1 < offsets.rows(); ++e) f(e, at[e], at[e + 1] - at[e]);
}

}  // namespace

void pack_panels(TensorView panels, ConstTensorView rows) {
  if (rows.dtype == DType::f32) pack_all<float>(panels, rows);
  else if (rows.dtype == DType::bf16) pack_all<bf16>(panels, rows);
  else if (rows.dtype == DType::e4m3) pack_all<e4m3>(panels, rows);
  else pack_all<e2m1x2>(panels, rows);
}

void matmul(TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  const int64_t k = x.shape[1];
  for (int64_t m = 0; m < y.rows(); ++m)
    for (int64_t n = 0; n < y.shape[1]; ++n) {
      float acc = 0.0f;
      if (k_segment == 0) {
        for (int64_t i = 0; i < k; ++i) acc = std::fmaf(at(x, m, i), at(w.rows, n, i), acc);
      } else {
        for (int64_t begin = 0; begin < k; begin += k_segment) {
          float segment = 0.0f;
          for (int64_t i = begin; i < std::min(k, begin + k_segment); ++i)
            segment = std::fmaf(at(x, m, i), at(w.rows, n, i), segment);
          acc += segment;
        }
      }
      put(y, m, n, acc);
    }
}

void quantized_matmul(TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment) {
  const int64_t K = x.shape[1];
  const BlockGrid x_grid = {kFp8Activation.block_cols, w.col_grid.period};
  std::vector<float> code(static_cast<size_t>(K)), scale(static_cast<size_t>(K));  // of x; the scale is that of the block
  for (int64_t m = 0; m < y.rows(); ++m) {
    for (int64_t begin = 0, end = 0; begin < K; begin = end) {
      end = x_grid.end_of_block(begin, K);
      float amax = kFp8Activation.amax_floor;
      for (int64_t i = begin; i < end; ++i)
        if (std::isfinite(at(x, m, i))) amax = std::max(amax, std::abs(at(x, m, i)));
      const float s = to_f32(ue8m0_scale<e4m3>(amax));
      for (int64_t i = begin; i < end; ++i) {
        code[static_cast<size_t>(i)] = to_f32(to_e4m3(at(x, m, i) * (1.0f / s)));
        scale[static_cast<size_t>(i)] = s;
      }
    }
    for (int64_t n = 0; n < y.shape[1]; ++n) {
      const auto w_code = [&](int64_t i) {
        if (w.rows.dtype == DType::e4m3) return to_f32(w.rows.row<e4m3>(n)[i]);
        const e2m1x2 two = w.rows.row<e2m1x2>(n)[i / 2];
        return i % 2 == 0 ? low_to_f32(two) : high_to_f32(two);
      };
      const ue8m0* w_scale = w.scales.row<ue8m0>(w.row_grid.block_of(n));
      float total = 0.0f, sum = 0.0f;
      for (int64_t begin = 0, end = 0; begin < K; begin = end) {
        end = w.col_grid.end_of_block(begin, K);
        float partial = 0.0f;
        for (int64_t i = begin; i < end; ++i) partial = std::fmaf(code[static_cast<size_t>(i)], w_code(i), partial);
        sum = std::fmaf(partial, scale[static_cast<size_t>(begin)] * to_f32(w_scale[w.col_grid.block_of(begin)]), sum);
        if (k_segment > 0 && (end % k_segment == 0 || end == K)) {
          total += sum;
          sum = 0.0f;
        }
      }
      put(y, m, n, k_segment > 0 ? total : sum);
    }
  }
}

void matmul_backward_input(TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate) {
  for (int64_t m = 0; m < dx.rows(); ++m)
    for (int64_t k = 0; k < dx.shape[1]; ++k) {
      float acc = accumulate ? at(dx, m, k) : 0.0f;
      for (int64_t n = 0; n < dy.shape[1]; ++n) acc = std::fmaf(at(dy, m, n), at(w.rows, n, k), acc);
      put(dx, m, k, acc);
    }
}

void matmul_backward_weight(TensorView dw_accum, ConstTensorView dy, ConstTensorView x) {
  for (int64_t n = 0; n < dw_accum.rows(); ++n)
    for (int64_t k = 0; k < dw_accum.shape[1]; ++k) {
      float acc = at(dw_accum, n, k);
      for (int64_t m = 0; m < x.rows(); ++m) acc = std::fmaf(at(dy, m, n), at(x, m, k), acc);
      put(dw_accum, n, k, acc);
    }
}

void grouped_matmul(TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
  for_each_expert(offsets, [&](int64_t e, int64_t first, int64_t count) {
    matmul(y.slice(first, count), x.slice(first, count), {w.rows.at(e), {}}, 0);
  });
}

void grouped_matmul_backward_input(TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets,
                                   bool accumulate) {
  for_each_expert(offsets, [&](int64_t e, int64_t first, int64_t count) {
    matmul_backward_input(dx.slice(first, count), dy.slice(first, count), {w.rows.at(e), {}}, accumulate);
  });
}

void grouped_matmul_backward_weight(TensorView dw_accum, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
  for_each_expert(offsets, [&](int64_t e, int64_t first, int64_t count) {
    matmul_backward_weight(dw_accum.at(e), dy.slice(first, count), x.slice(first, count));
  });
}

}  // namespace lockstep::reference
