// Elementwise, except codes, of which sixteen threads have a block of 128 (quantize/quantize_gpu.h), and drho, for which 16 threads take a row: a piece each,
// whose terms go by way of shared memory to the tree's virtual lanes. Forward 3 elements of g's dtype (2 and a byte for codes), backward 2 of them and 3 f32.
// Floor: bytes / 4 TB/s.

#include "ops/elements_gpu.h"
#include "ops/quantize/quantize_gpu.h"
#include "ops/row_gpu.h"
#include "ops/swiglu/swiglu_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

GPU_INLINE float clamp_gate(float g, float limit) { return limit > 0 && g > limit ? limit : g; }
GPU_INLINE float clamp_up(float u, float limit) {
  if (!(limit > 0)) return u;
  return u > limit ? limit : u < -limit ? -limit : u;
}

template <typename T>
struct Inputs {
  const T *g, *u;
  const float* rho;  // may be null
  int64_t g_stride, u_stride;
  float limit;
  bool aligned;
};

// Zero past the piece's count.
template <typename T>
GPU_INLINE Elements<T> activate(const Inputs<T>& in, const Piece& p) {
  const Elements<T> gates = load(in.g + p.row * in.g_stride + p.at, p.count, in.aligned), ups = load(in.u + p.row * in.u_stride + p.at, p.count, in.aligned);
  const float weight = in.rho == nullptr || p.count == 0 ? 1.0f : in.rho[p.row];  // a product with 1 changes no bit
  Elements<T> out;
  for (int i = 0; i < kPiece; ++i) {
    const float gate = clamp_gate(to_f32(gates.v[i]), in.limit), up = clamp_up(to_f32(ups.v[i]), in.limit);
    out.v[i] = from_f32<T>(gate * sigmoid_f32(gate) * up * weight);
  }
  return out;
}

template <typename T>
GPU_KERNEL swiglu_kernel(T* a, int64_t a_stride, Inputs<T> in, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count > 0) store(a + p.row * a_stride + p.at, activate(in, p), p.count, in.aligned);
}

// Rows are padded to whole blocks, so that the sixteen threads of one stay together.
template <typename T>
GPU_KERNEL swiglu_codes_kernel(uint8_t* codes, int64_t codes_stride, float* scales, int64_t scales_stride, Inputs<T> in, int64_t rows, int64_t n, int64_t padded) {
  const Piece p = piece_of_thread(rows, n, padded);
  const Elements<T> a = activate(in, p);
  float v[2][kPiece / 2];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i / 4][i % 4] = to_f32(a.v[i]);
  const BlockCodes q = quantize_block(v);
  if (p.count == 0) return;
  if (p.at % kCodeBlock == 0) scales[p.row * scales_stride + p.at / kCodeBlock] = q.scale;
  store(codes + p.row * codes_stride + p.at, q.codes, p.count, in.aligned);
}

struct Gradient {
  float dg, du, drho;  // drho: what da multiplies
};
GPU_INLINE Gradient gradient(float da, float g, float u, float rho, float limit) {
  const float gate = clamp_gate(g, limit), up = clamp_up(u, limit);
  const float s = sigmoid_f32(gate), silu = gate * s, scaled = da * rho;
  const float slope = s * fma(gate, 1.0f - s, 1.0f);  // silu'
  return {limit > 0 && g > limit ? 0.0f : scaled * up * slope, limit > 0 && (u > limit || u < -limit) ? 0.0f : scaled * silu, silu * up};
}

template <typename T>
GPU_KERNEL swiglu_backward_kernel(float* dg, int64_t dg_stride, float* du, int64_t du_stride, const float* da, int64_t da_stride, const T* g, int64_t g_stride,
                                  const T* u, int64_t u_stride, float limit, bool aligned, int64_t rows, int64_t n) {
  const Piece p = piece_of_thread(rows, n);
  if (p.count == 0) return;
  const Elements<T> gates = load(g + p.row * g_stride + p.at, p.count, aligned), ups = load(u + p.row * u_stride + p.at, p.count, aligned);
  Elements<float> to_gate = load(da + p.row * da_stride + p.at, p.count, aligned), to_up;
  for (int i = 0; i < kPiece; ++i) {
    const Gradient d = gradient(to_gate.v[i], to_f32(gates.v[i]), to_f32(ups.v[i]), 1.0f, limit);
    to_gate.v[i] = d.dg;
    to_up.v[i] = d.du;
  }
  store(dg + p.row * dg_stride + p.at, to_gate, p.count, aligned);
  store(du + p.row * du_stride + p.at, to_up, p.count, aligned);
}

// Elements of a row that its threads take at once, and the pitch of rows in shared memory: those of a wave lie in different banks.
constexpr int kSpan = kTreeLanes * kPiece, kPitch = kSpan + kTreeLanes;

GPU_INLINE void stage(Shared<float> to, const Elements<float>& e) {
  to.store_vector<4>(0, {{e.v[0], e.v[1], e.v[2], e.v[3]}});
  to.store_vector<4>(4, {{e.v[4], e.v[5], e.v[6], e.v[7]}});
}

template <typename T>
GPU_KERNEL GPU_BOUNDS(kRowThreads)
swiglu_backward_weighted_kernel(float* dg, int64_t dg_stride, float* du, int64_t du_stride, float* drho, const float* da, int64_t da_stride, const T* g,
                                int64_t g_stride, const T* u, int64_t u_stride, const float* rho, float limit, bool aligned, int64_t rows, int64_t n) {
  SharedMemory memory;
  const int own = thread_x() / kTreeLanes * kPitch;
  const Shared<float> grads = memory.take<float>(kRowsABlock * kPitch).from(own), factors = memory.take<float>(kRowsABlock * kPitch).from(own);
  const int64_t r = row_of_thread();
  const bool mine = r < rows;
  const float weight = mine ? rho[r] : 0.0f;
  float sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t at = begin + row_lane() * kPiece;
    const int count = !mine || at >= n ? 0 : n - at < kPiece ? static_cast<int>(n - at) : kPiece;
    const Elements<T> gates = load(g + r * g_stride + at, count, aligned), ups = load(u + r * u_stride + at, count, aligned);
    const Elements<float> grad = load(da + r * da_stride + at, count, aligned);
    Elements<float> to_gate, to_up, factor;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const Gradient d = gradient(grad.v[i], to_f32(gates.v[i]), to_f32(ups.v[i]), weight, limit);
      to_gate.v[i] = d.dg;
      to_up.v[i] = d.du;
      factor.v[i] = d.drho;
    }
    store(dg + r * dg_stride + at, to_gate, count, aligned);
    store(du + r * du_stride + at, to_up, count, aligned);
    stage(grads.from(row_lane() * kPiece), grad);
    stage(factors.from(row_lane() * kPiece), factor);
    sync_wave();
    const int64_t left = n - begin - row_lane();
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      if (j * kTreeLanes < left) sum = fma(grads.load(j * kTreeLanes + row_lane()), factors.load(j * kTreeLanes + row_lane()), sum);
    sync_wave();
  }
  sum = fold_row(sum);
  if (mine && row_lane() == 0) drho[r] = sum;
}

template <typename T>
Inputs<T> inputs(ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit, bool aligned) {
  return {g.ptr<T>(), u.ptr<T>(), rho.empty() ? nullptr : rho.ptr<float>(), g.row_stride, u.row_stride, limit, aligned};
}

template <typename T>
void forward(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  launch(c, "swiglu", grid_of_pieces(g.rows(), g.dim(1)), swiglu_kernel<T>, a.ptr<T>(), a.row_stride, inputs<T>(g, u, rho, limit, all_aligned(a, g, u)), g.rows(), g.dim(1));
}

template <typename T>
void forward_codes(Context& c, TensorView codes, TensorView scales, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  const int64_t padded = blocks_for(g.dim(1), kCodeBlock) * kCodeBlock;
  launch(c, "swiglu_codes", grid_of_pieces(g.rows(), padded), swiglu_codes_kernel<T>, static_cast<uint8_t*>(codes.data), codes.row_stride, scales.ptr<float>(), scales.row_stride,
         inputs<T>(g, u, rho, limit, all_aligned(codes, g, u)), g.rows(), g.dim(1), padded);
}

template <typename T>
void backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u, ConstTensorView rho,
              float limit) {
  const int64_t rows = g.rows(), n = g.dim(1);
  if (rho.empty())
    launch(c, "swiglu_backward", grid_of_pieces(rows, n), swiglu_backward_kernel<T>, dg.ptr<float>(), dg.row_stride, du.ptr<float>(), du.row_stride,
           da.ptr<float>(), da.row_stride, g.ptr<T>(), g.row_stride, u.ptr<T>(), u.row_stride, limit, all_aligned(dg, du, da, g, u), rows, n);
  else
    launch(c, "swiglu_backward_weighted", {.blocks = blocks_for(rows, kRowsABlock), .threads = kRowThreads, .shared_bytes = sizeof(float) * 2 * kRowsABlock * kPitch},
           swiglu_backward_weighted_kernel<T>,
           dg.ptr<float>(), dg.row_stride, du.ptr<float>(), du.row_stride, drho.ptr<float>(), da.ptr<float>(), da.row_stride, g.ptr<T>(), g.row_stride,
           u.ptr<T>(), u.row_stride, rho.ptr<float>(), limit, all_aligned(dg, du, da, g, u), rows, n);
}

}  // namespace

void swiglu(Context& c, TensorView a, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? forward<float>(c, a, g, u, rho, limit) : forward<bf16>(c, a, g, u, rho, limit);
}
void swiglu(Context& c, TensorView codes, TensorView scales, ConstTensorView g, ConstTensorView u, ConstTensorView rho, float limit) {
  g.dtype == DType::f32 ? forward_codes<float>(c, codes, scales, g, u, rho, limit) : forward_codes<bf16>(c, codes, scales, g, u, rho, limit);
}
void swiglu_backward(Context& c, TensorView dg, TensorView du, TensorView drho, ConstTensorView da, ConstTensorView g, ConstTensorView u, ConstTensorView rho,
                     float limit) {
  g.dtype == DType::f32 ? backward<float>(c, dg, du, drho, da, g, u, rho, limit) : backward<bf16>(c, dg, du, drho, da, g, u, rho, limit);
}

}  // namespace lockstep::device
