#pragma once
// Block quantisation: a matrix as small codes and one scale a block; value = code * scale.
//
//   x      [M, N]  f32 | bf16           row_stride may exceed the row (so x.cols(0, 448) of a kv row quantises its first channels)
//   codes  [M, N]  e4m3 | e5m2, or [M, ceil(N / 2)] e2m1x2 (an odd row ends in a zero nibble); row_stride may exceed the row
//   scales [ceil(M / block_rows), ceil(N / block_cols)]  f32 | ue8m0; row_stride may exceed the row
//   y      as x
// Blocks at the edges are smaller. block_cols must be even for e2m1x2. Any of M, N may be 0.
//
// quantize, block by block:
//   amax  = max(largest finite |x| of the block, amax_floor, kMax * 2^-126)
//   scale = ue8m0: the least power of two with amax <= scale * kMax, by exponent arithmetic (core/formats.h, ue8m0_scale);
//           f32: amax / kMax, rounded up to 20 significant bits (f32_scale): each code * scale is exact
//   code  = encode(x * (1 / scale)), nearest even, saturating; the reciprocal is one IEEE division (exact for powers of two), the
//           product one f32 rounding
// A block of zeros has the floor's scale and zero codes; zeros keep their signs. Sub-normal x are values like others. Inf becomes
// +-kMax; NaN becomes the code NaN of its sign; neither counts in amax. E2M1 has no NaN: the block's scale becomes NaN instead
// (UE8M0 FF), so that none is lost, as in OCP MX. Quantising what was de-quantised (to f32; with ue8m0 scales to bf16 also) gives the
// same values again, and with f32 scales the same codes and scales.
// Row contract: with block_rows == 1 a row's codes and scales depend on that row alone. Threads take whole blocks; counts are sums
// of integers.
// quantize_given_scales takes q.scales as they are: x may overflow then. They must be positive, finite, and not less than 2^-126;
// NaN x becomes +0 in E2M1.
// dequantize: y = code * scale, one f32 product, rounded to y's dtype; every NaN becomes 7fc00000 (7fc0). N comes from y.
// Cost: quantize reads x once from memory, writes codes and scales; bound by memory. Scratch: none.
// Source: V4 release, inference/kernel.py (act_quant, fp4 quant); technical report, section 3.4; OCP microscaling formats 1.0.
// Fails: CHECK on shapes, dtypes, block sizes, and, on the CPU, given scales.

#include "core/context.h"
#include "core/formats.h"

namespace lockstep {

struct QuantFormat {
  DType codes;             // e4m3 | e5m2 | e2m1x2
  DType scales;            // f32 | ue8m0
  int64_t block_rows = 1, block_cols = 128;
  float amax_floor = 0;
};
// The release's formats. Those with UE8M0 scales may hold them as f32 with equal values.
inline constexpr QuantFormat kFp8Weight{DType::e4m3, DType::ue8m0, 128, 128};
inline constexpr QuantFormat kFp8Activation{DType::e4m3, DType::ue8m0, 1, 128, 1e-4f};
inline constexpr QuantFormat kFp8Kv{DType::e4m3, DType::ue8m0, 1, 64, 1e-4f};
inline constexpr QuantFormat kFp4{DType::e2m1x2, DType::ue8m0, 1, 32};  // expert weights; indexer queries and keys

constexpr int64_t num_blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }
inline Shape code_shape(const QuantFormat& f, int64_t rows, int64_t cols) {
  return {rows, f.codes == DType::e2m1x2 ? num_blocks(cols, 2) : cols};
}
inline Shape scale_shape(const QuantFormat& f, int64_t rows, int64_t cols) {
  return {num_blocks(rows, f.block_rows), num_blocks(cols, f.block_cols)};
}

// A quantised matrix: what a product takes. Views like others: passed by value, outlived by their storage. Void is void or const void.
template <typename Void>
struct BasicQuantView {
  BasicTensorView<Void> codes, scales;
  int64_t block_rows = 1, block_cols = 128;

  BasicQuantView() = default;
  BasicQuantView(BasicTensorView<Void> codes, BasicTensorView<Void> scales, int64_t block_rows, int64_t block_cols)
      : codes(codes), scales(scales), block_rows(block_rows), block_cols(block_cols) {}
  template <typename Other>
    requires(!std::is_same_v<Void, Other> && std::is_convertible_v<Other*, Void*>)
  BasicQuantView(const BasicQuantView<Other>& o) : BasicQuantView(o.codes, o.scales, o.block_rows, o.block_cols) {}

  int64_t rows() const { return codes.rows(); }
  int64_t code_cols() const { return codes.dtype == DType::e2m1x2 ? 2 * codes.dim(1) : codes.dim(1); }  // N, or N + 1 for odd N in FP4
  float scale(int64_t block_row, int64_t block_col) const {
    return scales.dtype == DType::f32 ? scales.template row<float>(block_row)[block_col]
                                      : to_f32(scales.template row<ue8m0>(block_row)[block_col]);
  }
};
using QuantView = BasicQuantView<void>;
using ConstQuantView = BasicQuantView<const void>;

// Of one tensor; sums over tensors add up.
struct QuantStats {
  int64_t elements = 0;
  int64_t saturated = 0;    // finite, but the nearest number, had the format no largest exponent, is over kMax: 0 with scales of amax
  int64_t underflowed = 0;  // not 0, but the code is
  int64_t nonfinite = 0;    // NaN or Inf in x
  QuantStats& operator+=(const QuantStats& o) {
    elements += o.elements;
    saturated += o.saturated;
    underflowed += o.underflowed;
    nonfinite += o.nonfinite;
    return *this;
  }
  bool operator==(const QuantStats&) const = default;
};

// On the GPU nothing is counted and the statistics are empty: whoever wants them asks quant_stats, and the host does not wait for the others.
QuantStats quantize(Context& c, QuantView q, ConstTensorView x, float amax_floor);
QuantStats quantize_given_scales(Context& c, QuantView q, ConstTensorView x);
// What the quantisation of x to q counted. Reads x once more; on the GPU the host waits.
QuantStats quant_stats(Context& c, ConstQuantView q, ConstTensorView x);
void dequantize(Context& c, TensorView y, ConstQuantView q);
// x becomes what quantising and de-quantising make of it. Scratch: its codes and scales.
void round_through(Context& c, TensorView x, const QuantFormat& format);

// FP4 to FP8, value for value.
//   from  e2m1x2 with ue8m0 scales, blocks [1, B]; an even number of columns
//   to    e4m3, the same rows and columns, scales f32 | ue8m0; block_cols a multiple of B
//   lossy u8, shape of to.scales: 1 where a block is not representable, else 0; or an empty view
// A block of `to` has the scale S / 2^6, S being its largest sub-scale (the release's rule; 6 * 2^6 <= 448). Each value is then
// verified. Lossless whenever S / smallest sub-scale <= 2^14: 2^-8 is the least factor that keeps 0.5 and 1.5 multiples of E4M3's
// smallest step 2^-9. Where the rule loses, the least scale under which no value overflows is taken, which any power of two that
// is lossless implies to be lossless. Where that loses too, values are rounded to nearest even, the block is marked, and its
// owner must keep the FP4 form. A sub-block whose scale is NaN becomes NaN codes and has no part in S.
// Source: technical report, section 3.4; V4 release, inference/convert.py.
struct RecodeStats {
  int64_t blocks = 0, lossy_blocks = 0;
  int64_t inexact = 0;    // elements whose value changed
  int64_t nonfinite = 0;  // elements under a NaN sub-scale
  RecodeStats& operator+=(const RecodeStats& o) {
    blocks += o.blocks;
    lossy_blocks += o.lossy_blocks;
    inexact += o.inexact;
    nonfinite += o.nonfinite;
    return *this;
  }
  bool operator==(const RecodeStats&) const = default;
};
RecodeStats recode_fp4(Context& c, QuantView to, TensorView lossy, ConstQuantView from);  // on the GPU the statistics are empty; `lossy` tells

}  // namespace lockstep
