// The Hopper products and gradients against f64 on the host (small), against themselves for the row contract, and against cuBLASLt's best algorithm for speed at
// V4-Flash shapes. One JSON line a measurement; exits with 1 if a check fails.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/matmul/matmul_gpu.h"

using namespace lockstep;

namespace {

#define CUDA_OK(x)                                                                                    \
  do {                                                                                                \
    const cudaError_t e_ = (x);                                                                       \
    if (e_ != cudaSuccess) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));        \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (0)

__global__ void fill(__nv_bfloat16* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    unsigned long long z = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    p[i] = __float2bfloat16(static_cast<float>(static_cast<int>(z >> 40) - (1 << 23)) * (1.0f / (1 << 23)));
  }
}

template <typename T>
struct DeviceArray {
  T* p = nullptr;
  explicit DeviceArray(size_t n) { CUDA_OK(cudaMalloc(&p, n * sizeof(T))); }
  DeviceArray(DeviceArray&& o) noexcept : p(std::exchange(o.p, nullptr)) {}
  ~DeviceArray() { cudaFree(p); }
};
using Bf16Array = DeviceArray<__nv_bfloat16>;

bool ok = true;
void require(bool good, const char* what) {
  if (!good) std::printf("{\"check\": \"%s\", \"ok\": false}\n", what);
  ok = ok && good;
}

// Median of several runs of `f`, each alone after the L2 was overwritten.
template <typename F>
double median_seconds(F f) {
  static DeviceArray<char> flush(size_t{256} << 20);
  cudaEvent_t a, b;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int i = 0; i < 12; ++i) {
    CUDA_OK(cudaMemsetAsync(flush.p, i, size_t{256} << 20));
    CUDA_OK(cudaEventRecord(a));
    f();
    CUDA_OK(cudaEventRecord(b));
    CUDA_OK(cudaEventSynchronize(b));
    float t;
    CUDA_OK(cudaEventElapsedTime(&t, a, b));
    if (i >= 2) ms.push_back(t);
  }
  std::nth_element(ms.begin(), ms.begin() + 5, ms.end());
  return ms[5] * 1e-3;
}

// Scales: null for bf16, otherwise E4M3 with scales of 1 x 128 and 128 x 128. Infinity if the library has no such product.
double cublaslt_seconds(int64_t m, int64_t n, int64_t k, const void* x, const void* w, void* y, const float* x_scale = nullptr, const float* w_scale = nullptr) {
  static cublasLtHandle_t handle = [] { cublasLtHandle_t h; cublasLtCreate(&h); return h; }();
  static DeviceArray<char> workspace(size_t{64} << 20);
  cublasLtMatmulDesc_t op;
  cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t t = CUBLAS_OP_T, nn = CUBLAS_OP_N;
  cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
  cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &nn, sizeof nn);
  cublasLtMatrixLayout_t a, b, c;
  const cudaDataType_t type = x_scale == nullptr ? CUDA_R_16BF : CUDA_R_8F_E4M3;
  if (x_scale != nullptr) {
    const cublasLtMatmulMatrixScale_t rows = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, blocks = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks, sizeof blocks);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows, sizeof rows);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w_scale, sizeof w_scale);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x_scale, sizeof x_scale);
  }
  cublasLtMatrixLayoutCreate(&a, type, static_cast<uint64_t>(k), static_cast<uint64_t>(n), k);
  cublasLtMatrixLayoutCreate(&b, type, static_cast<uint64_t>(k), static_cast<uint64_t>(m), k);
  cublasLtMatrixLayoutCreate(&c, CUDA_R_16BF, static_cast<uint64_t>(n), static_cast<uint64_t>(m), n);
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulPreferenceCreate(&preference);
  const size_t bytes = size_t{64} << 20;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
  cublasLtMatmulHeuristicResult_t found[16];
  int count = 0;
  cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, c, c, preference, 16, found, &count);
  const float one = 1, zero = 0;
  double best = INFINITY;
  for (int i = 0; i < count; ++i)
    best = std::min(best, median_seconds([&] { cublasLtMatmul(handle, op, &one, w, a, x, b, &zero, y, c, y, c, &found[i].algo, workspace.p, bytes, nullptr); }));
  return best;
}

gpu::MatmulProblem problem(int64_t m, int64_t n, int64_t k, const void* x, const void* w, void* y, bool f32) {
  return {.m = m, .n = n, .k = k, .x = x, .w = w, .y = y, .x_stride = k, .w_stride = k, .y_stride = n, .y_is_f32 = f32};
}

template <typename T>
std::vector<T> host(const DeviceArray<T>& a, size_t n) {
  std::vector<T> v(n);
  CUDA_OK(cudaMemcpy(v.data(), a.p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}
DeviceArray<int32_t> on_device(const std::vector<int32_t>& v) {
  DeviceArray<int32_t> a(v.size());
  CUDA_OK(cudaMemcpy(a.p, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
  return a;
}
int64_t expert_of(const std::vector<int32_t>& offsets, int64_t row) {
  return std::upper_bound(offsets.begin(), offsets.end(), row) - offsets.begin() - 1;
}
// Rows of each expert: none, one, a few, more than a tile.
std::vector<int32_t> some_offsets() { return {0, 0, 1, 66, 66, 194, 500, 503}; }

// The worst |y - sum of terms| over its bound. `terms(i, j, add)` calls add(a, b) for each product of element (i, j); `start` is what was there.
// Of every row_step-th row.
template <typename Terms, typename Start>
void check_sums(const char* what, const std::vector<float>& y, int64_t rows, int64_t columns, Terms terms, Start start, int64_t row_step = 1) {
  double worst = 0;
  for (int64_t i = 0; i < rows; i += row_step)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = start(i, j), size = std::fabs(sum);
      int64_t count = 2;
      terms(i, j, [&](__nv_bfloat16 a, __nv_bfloat16 b) {
        const double term = static_cast<double>(__bfloat162float(a)) * static_cast<double>(__bfloat162float(b));
        sum += term;
        size += std::fabs(term);
        ++count;
      });
      // One addition in f32 a term at most: 2^-23 of the sum of sizes each (truncating adders: one ulp).
      const double difference = std::fabs(y[static_cast<size_t>(i * columns + j)] - sum), bound = size * static_cast<double>(count) * 0x1p-23;
      const double error = difference == 0 ? 0 : difference / bound;
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  std::printf("{\"check\": \"%s\", \"rows\": %ld, \"columns\": %ld, \"error_over_bound\": %.4f}\n", what, rows, columns, worst);
  require(worst <= 1, what);
}

const double kStart = static_cast<double>(std::bit_cast<float>(0x3f3f3f3fu));  // what memset makes of 0x3f

void check_values() {
  for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 64, 64}, {130, 257, 200}, {64, 1000, 1032}, {300, 130, 4096}})
    for (const int64_t k_segment : {0, 64, 512})
      for (const bool accumulate : {false, true}) {
        Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k));
        DeviceArray<float> y(static_cast<size_t>(m * n));
        fill<<<256, 256>>>(x.p, static_cast<size_t>(m * k), 1);
        fill<<<256, 256>>>(w.p, static_cast<size_t>(n * k), 2);
        CUDA_OK(cudaMemset(y.p, accumulate ? 0x3f : 0xff, static_cast<size_t>(m * n) * 4));
        gpu::MatmulProblem p = problem(m, n, k, x.p, w.p, y.p, true);
        p.k_segment = k_segment;
        p.accumulate = accumulate;
        gpu::matmul_bf16(p, nullptr);
        const auto hx = host(x, static_cast<size_t>(m * k)), hw = host(w, static_cast<size_t>(n * k));
        check_sums("values", host(y, static_cast<size_t>(m * n)), m, n,
                   [&, n = n, k = k](int64_t i, int64_t j, auto add) {
                     for (int64_t l = 0; l < k; ++l) add(hx[static_cast<size_t>(i * k + l)], hw[static_cast<size_t>(j * k + l)]);
                   },
                   [&](int64_t, int64_t) { return accumulate ? kStart : 0.0; });
      }
}

// Rows of experts, each with its own matrix; rows of dx likewise; dw over the rows of each.
void check_experts() {
  const std::vector<int32_t> offsets = some_offsets();
  const auto at = on_device(offsets);
  const int64_t experts = static_cast<int64_t>(offsets.size()) - 1, m = offsets.back();
  for (const auto [n, k] : {std::array<int64_t, 2>{72, 64}, {136, 200}, {520, 1032}}) {
    Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(experts * n * k)), dy(static_cast<size_t>(m * n));
    DeviceArray<float> y(static_cast<size_t>(m * n)), dx(static_cast<size_t>(m * k)), dw(static_cast<size_t>(experts * n * k));
    fill<<<256, 256>>>(x.p, static_cast<size_t>(m * k), 1);
    fill<<<256, 256>>>(w.p, static_cast<size_t>(experts * n * k), 2);
    fill<<<256, 256>>>(dy.p, static_cast<size_t>(m * n), 3);
    const auto hx = host(x, static_cast<size_t>(m * k)), hw = host(w, static_cast<size_t>(experts * n * k)), hdy = host(dy, static_cast<size_t>(m * n));
    const auto nothing = [](int64_t, int64_t) { return 0.0; };
    const auto there = [](int64_t, int64_t) { return kStart; };

    CUDA_OK(cudaMemset(y.p, 0xff, static_cast<size_t>(m * n) * 4));
    gpu::MatmulProblem p = problem(m, n, k, x.p, w.p, y.p, true);
    p.offsets = at.p;
    p.experts = experts;
    gpu::matmul_bf16(p, nullptr);
    check_sums("experts' values", host(y, static_cast<size_t>(m * n)), m, n,
               [&, n = n, k = k](int64_t i, int64_t j, auto add) {
                 const int64_t e = expert_of(offsets, i);
                 for (int64_t l = 0; l < k; ++l) add(hx[static_cast<size_t>(i * k + l)], hw[static_cast<size_t>((e * n + j) * k + l)]);
               },
               nothing);

    for (const bool grouped : {true, false})
      for (const bool accumulate : {true, false}) {
        CUDA_OK(cudaMemset(dx.p, accumulate ? 0x3f : 0xff, static_cast<size_t>(m * k) * 4));
        gpu::matmul_backward_input_bf16({.m = m, .n = n, .k = k, .dy = dy.p, .other = w.p, .grad = dx.p, .dy_stride = n, .other_stride = k, .grad_stride = k,
                                         .accumulate = accumulate, .offsets = grouped ? at.p : nullptr, .experts = grouped ? experts : 1},
                                        nullptr);
        const auto terms = [&, n = n, k = k](int64_t i, int64_t j, auto add) {
          const int64_t e = grouped ? expert_of(offsets, i) : 0;
          for (int64_t l = 0; l < n; ++l) add(hdy[static_cast<size_t>(i * n + l)], hw[static_cast<size_t>((e * n + l) * k + j)]);
        };
        const auto values = host(dx, static_cast<size_t>(m * k));
        accumulate ? check_sums("dx", values, m, k, terms, there) : check_sums("dx", values, m, k, terms, nothing);
      }

    for (const bool grouped : {true, false}) {
      const int64_t matrices = grouped ? experts : 1;
      CUDA_OK(cudaMemset(dw.p, 0x3f, static_cast<size_t>(experts * n * k) * 4));
      gpu::matmul_backward_weight_bf16({.m = m, .n = n, .k = k, .dy = dy.p, .other = x.p, .grad = dw.p, .dy_stride = n, .other_stride = k, .grad_stride = k,
                                        .accumulate = true, .offsets = grouped ? at.p : nullptr, .experts = matrices},
                                       nullptr);
      check_sums("dw", host(dw, static_cast<size_t>(experts * n * k)), matrices * n, k,
                 [&, n = n, k = k](int64_t i, int64_t j, auto add) {
                   const int64_t first = grouped ? offsets[static_cast<size_t>(i / n)] : 0, last = grouped ? offsets[static_cast<size_t>(i / n + 1)] : m;
                   for (int64_t l = first; l < last; ++l) add(hdy[static_cast<size_t>(l * n + i % n)], hx[static_cast<size_t>(l * k + j)]);
                 },
                 there);
    }
  }
}

// Large tiles on their way out: bf16 are the f32 rounded, which are right in some rows; so are dx and dw.
void check_large() {
  const int64_t m = 1000, n = 8200, k = 520;
  std::vector<int32_t> offsets = {0, 300, 300, 729, 1000};
  const auto at = on_device(offsets);
  const int64_t experts = 4;
  Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(experts * n * k)), dy(static_cast<size_t>(m * n)), rounded(static_cast<size_t>(m * n));
  DeviceArray<float> y(static_cast<size_t>(m * n)), dw(static_cast<size_t>(n * k)), dx(static_cast<size_t>(m * n));
  fill<<<256, 256>>>(x.p, static_cast<size_t>(m * k), 1);
  fill<<<256, 256>>>(w.p, static_cast<size_t>(experts * n * k), 2);
  fill<<<256, 256>>>(dy.p, static_cast<size_t>(m * n), 3);
  const auto hx = host(x, static_cast<size_t>(m * k)), hw = host(w, static_cast<size_t>(experts * n * k)), hdy = host(dy, static_cast<size_t>(m * n));
  const auto nothing = [](int64_t, int64_t) { return 0.0; };
  for (const bool grouped : {false, true})
    for (const int64_t k_segment : {0, 128}) {
      gpu::MatmulProblem p = problem(m, n, k, x.p, w.p, y.p, true);
      p.k_segment = k_segment;
      p.offsets = grouped ? at.p : nullptr;
      p.experts = grouped ? experts : 1;
      CUDA_OK(cudaMemset(y.p, 0xff, static_cast<size_t>(m * n) * 4));
      CUDA_OK(cudaMemset(rounded.p, 0xff, static_cast<size_t>(m * n) * 2));
      gpu::matmul_bf16(p, nullptr);
      p.y = rounded.p;
      p.y_is_f32 = false;
      gpu::matmul_bf16(p, nullptr);
      const auto hy = host(y, static_cast<size_t>(m * n));
      const auto hr = host(rounded, static_cast<size_t>(m * n));
      bool same = true;
      for (size_t i = 0; i < hy.size(); ++i) same = same && __bfloat162float(__float2bfloat16(hy[i])) == __bfloat162float(hr[i]);
      require(same, "bf16 results are the f32 rounded");
      check_sums("large values", hy, m, n,
                 [&](int64_t i, int64_t j, auto add) {
                   const int64_t e = grouped ? expert_of(offsets, i) : 0;
                   for (int64_t l = 0; l < k; ++l) add(hx[static_cast<size_t>(i * k + l)], hw[static_cast<size_t>((e * n + j) * k + l)]);
                 },
                 nothing, 29);
    }
  CUDA_OK(cudaMemset(dw.p, 0, static_cast<size_t>(n * k) * 4));
  gpu::matmul_backward_weight_bf16({.m = m, .n = n, .k = k, .dy = dy.p, .other = x.p, .grad = dw.p, .dy_stride = n, .other_stride = k, .grad_stride = k}, nullptr);
  check_sums("large dw", host(dw, static_cast<size_t>(n * k)), n, k,
             [&](int64_t i, int64_t j, auto add) {
               for (int64_t l = 0; l < m; ++l) add(hdy[static_cast<size_t>(l * n + i)], hx[static_cast<size_t>(l * k + j)]);
             },
             nothing, 67);
  // dx [m, n] of dy [m, k], which is x here, and w [k, n]: experts' matrices lie k * n apart.
  gpu::matmul_backward_input_bf16({.m = m, .n = k, .k = n, .dy = x.p, .other = w.p, .grad = dx.p, .dy_stride = k, .other_stride = n, .grad_stride = n, .offsets = at.p,
                                   .experts = experts},
                                  nullptr);
  check_sums("large dx", host(dx, static_cast<size_t>(m * n)), m, n,
             [&](int64_t i, int64_t j, auto add) {
               const int64_t e = expert_of(offsets, i);
               for (int64_t l = 0; l < k; ++l) add(hx[static_cast<size_t>(i * k + l)], hw[static_cast<size_t>((e * k + l) * n + j)]);
             },
             nothing, 29);
}

// Rows of a product of `most` rows, against products of `m` of them from `first`: `run(first, m, y)`, elements of two bytes.
template <typename Run>
void check_rows_of(const char* what, int64_t most, int64_t n, Run run) {
  Bf16Array y(static_cast<size_t>(most * n));
  run(0, most, y.p);
  const auto whole = host(y, static_cast<size_t>(most * n));
  for (const int64_t m : {1, 3, 8, 64, 257, 2048, 8192})
    for (const int64_t first : {int64_t{0}, std::min<int64_t>(most - m, 1001)}) {
      CUDA_OK(cudaMemset(y.p, 0xff, static_cast<size_t>(m * n) * 2));
      run(first, m, y.p);
      const auto part = host(y, static_cast<size_t>(m * n));
      require(std::memcmp(part.data(), whole.data() + first * n, static_cast<size_t>(m * n) * 2) == 0, what);
    }
}
// Offsets of rows [first, first + m) when expert e has rows [e * most / experts, (e + 1) * most / experts).
std::vector<int32_t> part_of_offsets(int64_t most, int64_t experts, int64_t first, int64_t m) {
  std::vector<int32_t> v;
  for (int64_t e = 0; e <= experts; ++e) v.push_back(static_cast<int32_t>(std::clamp(e * most / experts, first, first + m) - first));
  return v;
}

void check_rows() {
  const int64_t n = 4096, k = 4096, most = 8192, experts = 24;
  Bf16Array x(static_cast<size_t>(most * k)), w(static_cast<size_t>(experts * n * k));
  fill<<<1024, 256>>>(x.p, static_cast<size_t>(most * k), 3);
  fill<<<1024, 256>>>(w.p, static_cast<size_t>(experts * n * k), 4);
  for (const int64_t k_segment : {0, 512})
    check_rows_of("rows are those of any other M", most, n, [&](int64_t first, int64_t m, void* y) {
      gpu::MatmulProblem p = problem(m, n, k, x.p + first * k, w.p, y, false);
      p.k_segment = k_segment;
      gpu::matmul_bf16(p, nullptr);
    });
  check_rows_of("rows of experts are those of any other M", most, n, [&](int64_t first, int64_t m, void* y) {
    const auto at = on_device(part_of_offsets(most, experts, first, m));
    gpu::MatmulProblem p = problem(m, n, k, x.p + first * k, w.p, y, false);
    p.offsets = at.p;
    p.experts = experts;
    gpu::matmul_bf16(p, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
  });
  // A row of an expert is the row of a product with that expert alone.
  Bf16Array y(static_cast<size_t>(most * n)), z(static_cast<size_t>(most * n));
  const auto at = on_device(part_of_offsets(most, experts, 0, most));
  gpu::MatmulProblem p = problem(most, n, k, x.p, w.p, y.p, false);
  p.offsets = at.p;
  p.experts = experts;
  gpu::matmul_bf16(p, nullptr);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = e * most / experts, last = (e + 1) * most / experts;
    gpu::matmul_bf16(problem(last - first, n, k, x.p + first * k, w.p + e * n * k, z.p + first * n, false), nullptr);
  }
  require(std::memcmp(host(y, static_cast<size_t>(most * n)).data(), host(z, static_cast<size_t>(most * n)).data(), static_cast<size_t>(most * n) * 2) == 0,
          "rows of experts are those of each alone");
  // Rows of dx [m, k] = dy [m, n] . w.
  DeviceArray<float> dx(static_cast<size_t>(most * k));
  const auto input = [&](int64_t first, int64_t m) {
    gpu::matmul_backward_input_bf16({.m = m, .n = n, .k = k, .dy = x.p + first * n, .other = w.p, .grad = dx.p, .dy_stride = n, .other_stride = k, .grad_stride = k}, nullptr);
    return host(dx, static_cast<size_t>(m * k));
  };
  const auto whole = input(0, most);
  for (const int64_t m : {1, 3, 64, 257, 2048}) {
    const auto part = input(1001, m);
    require(std::memcmp(part.data(), whole.data() + 1001 * k, static_cast<size_t>(m * k) * 4) == 0, "rows of dx are those of any other M");
  }
}

// E4M3 codes of every finite value but the largest, which a random sum would drown in.
__global__ void fill_codes(unsigned char* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    unsigned long long z = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    p[i] = static_cast<unsigned char>((z >> 56 & 0x80) | (z >> 40) % 0x70);
  }
}
__global__ void fill_scales(float* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x)
    p[i] = static_cast<float>((i * 7 + seed) % 13 + 1) * 0.01f;
}
__global__ void fill_exponents(unsigned char* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x)
    p[i] = static_cast<unsigned char>(118 + (i * 5 + seed) % 7);
}

double e4m3(unsigned char c) {
  const int exponent = c >> 3 & 15, mantissa = c & 7;
  const double v = exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return c & 0x80 ? -v : v;
}

int64_t blocks_of(int64_t n) { return (n + 127) / 128; }

struct Fp8Arrays {
  DeviceArray<unsigned char> x, w, w_scale;
  DeviceArray<float> x_scale;
  gpu::Fp8Problem problem;
  Fp8Arrays(int64_t m, int64_t n, int64_t k, void* y, bool f32, int64_t experts = 1)
      : x(static_cast<size_t>(m * k)), w(static_cast<size_t>(experts * n * k)), w_scale(static_cast<size_t>(experts * blocks_of(n) * blocks_of(k))),
        x_scale(static_cast<size_t>(m * blocks_of(k))) {
    fill_codes<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 1);
    fill_codes<<<1024, 256>>>(w.p, static_cast<size_t>(experts * n * k), 2);
    fill_scales<<<64, 256>>>(x_scale.p, static_cast<size_t>(m * blocks_of(k)), 3);
    fill_exponents<<<64, 256>>>(w_scale.p, static_cast<size_t>(experts * blocks_of(n) * blocks_of(k)), 5);
    problem = {.codes = {.m = m, .n = n, .k = k, .x = x.p, .w = w.p, .y = y, .x_stride = k, .w_stride = k, .y_stride = n, .y_is_f32 = f32},
               .x_scale = x_scale.p, .w_scale = w_scale.p, .x_scale_stride = blocks_of(k), .w_scale_stride = blocks_of(k)};
  }
};

// The same x, and bytes of w as two E2M1 codes each.
gpu::Fp8Problem fp4_problem(const Fp8Arrays& a, const unsigned char* scales) {
  gpu::Fp8Problem p = a.problem;
  p.codes.w_stride = p.codes.k / 2;
  p.w_scale = scales;
  p.w_scale_stride = p.codes.k / 32;
  return p;
}

void check_fp8() {
  const std::vector<int32_t> offsets = some_offsets(), everything = {0, offsets.back()};
  for (const auto [n, k, k_segment, grouped] :
       {std::array<int64_t, 4>{64, 128, 0, 0}, {257, 208, 0, 0}, {1000, 1040, 256, 0}, {130, 4096, 0, 0}, {200, 640, 128, 0}, {136, 400, 0, 1}, {256, 1024, 0, 1}}) {
    const std::vector<int32_t>& at = grouped ? offsets : everything;
    const int64_t m = offsets.back(), experts = static_cast<int64_t>(at.size()) - 1, blocks = blocks_of(k);
    DeviceArray<float> y(static_cast<size_t>(m * n));
    Fp8Arrays a(m, n, k, y.p, true, experts);
    const auto device_at = on_device(at);
    a.problem.codes.k_segment = k_segment;
    a.problem.codes.offsets = grouped ? device_at.p : nullptr;
    a.problem.codes.experts = experts;
    CUDA_OK(cudaMemset(y.p, 0xff, static_cast<size_t>(m * n) * 4));
    gpu::matmul_fp8(a.problem, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    const auto hx = host(a.x, static_cast<size_t>(m * k)), hw = host(a.w, static_cast<size_t>(experts * n * k)), sw = host(a.w_scale, static_cast<size_t>(experts * blocks_of(n) * blocks));
    const auto sx = host(a.x_scale, static_cast<size_t>(m * blocks));
    const auto hy = host(y, static_cast<size_t>(m * n));
    std::array<double, 256> value;
    for (size_t code = 0; code < 256; ++code) value[code] = e4m3(static_cast<unsigned char>(code));
    double worst = 0;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        const int64_t e = expert_of(at, i);
        double sum = 0, bound = 0, largest = 0, scale = 0;
        for (int64_t l = 0; l < k; ++l) {
          if (l % 128 == 0)
            scale = static_cast<double>(sx[static_cast<size_t>(i * blocks + l / 128)]) *
                    std::ldexp(1.0, sw[static_cast<size_t>((e * blocks_of(n) + j / 128) * blocks + l / 128)] - 127);
          const double term = value[hx[static_cast<size_t>(i * k + l)]] * value[hw[static_cast<size_t>((e * n + j) * k + l)]] * scale;
          sum += term;
          // The unit adds 32 products and the sum so far, each aligned to the largest and cut 13 bits below it; then come the f32 sums over blocks. The largest of a
          // block of 128 is at most the sum so far, which its products bound.
          largest = l % 128 == 0 ? std::fabs(term) : largest + std::fabs(term);
          if (l % 32 == 31 || l + 1 == k) bound += 33 * 0x1p-13 * largest;
          bound += std::fabs(term) * static_cast<double>(blocks + 2) * 0x1p-24;
        }
        const double error = std::fabs(hy[static_cast<size_t>(i * n + j)] - sum) / bound;
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    std::printf("{\"check\": \"fp8 values\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"experts\": %ld, \"error_over_bound\": %.4f}\n", m, n, k, experts, worst);
    require(worst <= 1, "fp8 values");
  }
  const int64_t n = 4096, k = 4096, most = 8192, experts = 24;
  const Fp8Arrays a(most, n, k, nullptr, false, experts);
  const auto part = [&](int64_t first, int64_t m, void* y) {
    gpu::Fp8Problem p = a.problem;
    p.codes.m = m;
    p.codes.x = a.x.p + first * k;
    p.codes.y = y;
    p.x_scale += first * p.x_scale_stride;
    return p;
  };
  for (const int64_t k_segment : {0, 512})
    check_rows_of("fp8 rows are those of any other M", most, n, [&](int64_t first, int64_t m, void* y) {
      gpu::Fp8Problem p = part(first, m, y);
      p.codes.k_segment = k_segment;
      gpu::matmul_fp8(p, nullptr);
    });
  check_rows_of("fp8 rows of experts are those of any other M", most, n, [&](int64_t first, int64_t m, void* y) {
    const auto at = on_device(part_of_offsets(most, experts, first, m));
    gpu::Fp8Problem p = part(first, m, y);
    p.codes.offsets = at.p;
    p.codes.experts = experts;
    gpu::matmul_fp8(p, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
  });
}
// Values are matmul_gpu_fp4_test's business.
void check_fp4() {
  const int64_t n = 4096, k = 4096, most = 8192, experts = 24;
  const Fp8Arrays a(most, n, k, nullptr, false, experts);
  DeviceArray<unsigned char> scales(static_cast<size_t>(experts * n * k / 32));
  fill_exponents<<<64, 256>>>(scales.p, static_cast<size_t>(experts * n * k / 32), 5);
  for (const bool grouped : {false, true})
    check_rows_of("fp4 rows are those of any other M", most, n, [&](int64_t first, int64_t m, void* y) {
      const auto at = on_device(part_of_offsets(most, experts, first, m));
      gpu::Fp8Problem p = fp4_problem(a, scales.p);
      p.codes.m = m;
      p.codes.x = a.x.p + first * k;
      p.codes.y = y;
      p.x_scale += first * p.x_scale_stride;
      if (grouped) p.codes.offsets = at.p, p.codes.experts = experts;
      gpu::matmul_fp4(p, nullptr);
      CUDA_OK(cudaDeviceSynchronize());
    });
}

// Flash: 256 experts, 4096 to 2 x 2048 and back; tokens times 6 rows, spread evenly.
void measure_experts() {
  const int64_t experts = 256;
  for (const auto& [n, k] : {std::array<int64_t, 2>{4096, 4096}, {4096, 2048}})
    for (const int64_t tokens : {1, 8, 64, 256, 2048, 8192}) {
      const int64_t m = tokens * 6;
      // As routing gives them: few tokens meet few experts.
      std::vector<int32_t> offsets(static_cast<size_t>(experts) + 1, 0);
      for (int64_t i = 0; i < m; ++i) ++offsets[static_cast<size_t>(i * 97 % experts) + 1];
      for (int64_t e = 0; e < experts; ++e) offsets[static_cast<size_t>(e) + 1] += offsets[static_cast<size_t>(e)];
      const auto at = on_device(offsets);
      const int64_t busy = std::min(experts, m);
      const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
      const auto print = [&](const char* op, double seconds, double weight_bytes) {
        std::printf("{\"op\": \"%s\", \"experts\": %ld, \"m\": %ld, \"n\": %ld, \"k\": %ld, \"us\": %.1f, \"tflops\": %.0f, \"gb_s\": %.0f}\n", op, experts, m, n, k, seconds * 1e6,
                    flops / seconds * 1e-12, weight_bytes * static_cast<double>(busy * n * k) * 1e-9 / seconds);
      };
      Bf16Array y(static_cast<size_t>(m * n));
      {
        Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(experts * n * k));
        fill<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 5);
        fill<<<1024, 256>>>(w.p, static_cast<size_t>(experts * n * k), 6);
        fill<<<1024, 256>>>(y.p, static_cast<size_t>(m * n), 7);
        gpu::MatmulProblem p = problem(m, n, k, x.p, w.p, y.p, false);
        p.offsets = at.p;
        p.experts = experts;
        if (tokens >= 256) {
          DeviceArray<float> grad(static_cast<size_t>(std::max(experts * n, m) * k));
          gpu::MatmulBackwardProblem b = {.m = m, .n = n, .k = k, .dy = y.p, .other = w.p, .grad = grad.p, .dy_stride = n, .other_stride = k, .grad_stride = k,
                                          .offsets = at.p, .experts = experts};
          print("grouped dx bf16", median_seconds([&] { gpu::matmul_backward_input_bf16(b, nullptr); }), 2);
          b.other = x.p;
          print("grouped dw bf16", median_seconds([&] { gpu::matmul_backward_weight_bf16(b, nullptr); }), 8);
        }
        print("grouped bf16", median_seconds([&] { gpu::matmul_bf16(p, nullptr); }), 2);
      }
      Fp8Arrays a(m, n, k, y.p, false, experts);
      a.problem.codes.offsets = at.p;
      a.problem.codes.experts = experts;
      print("grouped fp8", median_seconds([&] { gpu::matmul_fp8(a.problem, nullptr); }), 1);
      DeviceArray<unsigned char> scales(static_cast<size_t>(experts * n * k / 32));
      fill_exponents<<<1024, 256>>>(scales.p, static_cast<size_t>(experts * n * k / 32), 5);
      const gpu::Fp8Problem fp4 = fp4_problem(a, scales.p);
      print("grouped fp4", median_seconds([&] { gpu::matmul_fp4(fp4, nullptr); }), 17.0 / 32);
    }
}

// The gradients beside what cuBLASLt needs for the forward product of as many operations, and rows made into operands.
void measure_gradients() {
  for (const auto& [n, k] : {std::array<int64_t, 2>{4096, 4096}, {32768, 1024}, {1024, 4096}})
    for (const int64_t m : {1024, 8192}) {
      Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k)), dy(static_cast<size_t>(m * n));
      DeviceArray<float> grad(static_cast<size_t>(std::max(n, m) * k));
      fill<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 5);
      fill<<<1024, 256>>>(w.p, static_cast<size_t>(n * k), 6);
      fill<<<1024, 256>>>(dy.p, static_cast<size_t>(m * n), 7);
      gpu::MatmulBackwardProblem p = {.m = m, .n = n, .k = k, .dy = dy.p, .other = w.p, .grad = grad.p, .dy_stride = n, .other_stride = k, .grad_stride = k};
      const double input = median_seconds([&] { gpu::matmul_backward_input_bf16(p, nullptr); });
      p.other = x.p;
      const double weight = median_seconds([&] { gpu::matmul_backward_weight_bf16(p, nullptr); });
      const double theirs = cublaslt_seconds(m, n, k, x.p, w.p, dy.p), flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
      std::printf("{\"op\": \"gradients bf16\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"dx_us\": %.1f, \"dx_tflops\": %.0f, \"dw_us\": %.1f, \"dw_tflops\": %.0f, \"cublaslt_forward_us\": %.1f}\n",
                  m, n, k, input * 1e6, flops / input * 1e-12, weight * 1e6, flops / weight * 1e-12, theirs * 1e6);
    }
  Context c;
  c.device = Device::gpu;
  for (const int64_t m : {64, 8192}) {
    const int64_t k = 4096;
    Bf16Array x(static_cast<size_t>(m * k)), y(static_cast<size_t>(m * k));
    DeviceArray<float> dy(static_cast<size_t>(m * k)), scales(static_cast<size_t>(m * k / 128));
    fill<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 5);
    CUDA_OK(cudaMemset(dy.p, 0x3f, static_cast<size_t>(m * k) * 4));
    const double quantize = median_seconds([&] {
      gpu::quantize_rows(c, TensorView(y.p, DType::e4m3, {m, k}), TensorView(scales.p, DType::f32, {m, k / 128}), TensorView(x.p, DType::bf16, {m, k}));
    });
    const double round = median_seconds([&] { gpu::round_rows(c, TensorView(y.p, DType::bf16, {m, k}), TensorView(dy.p, DType::f32, {m, k})); });
    std::printf("{\"op\": \"operands\", \"m\": %ld, \"k\": %ld, \"quantize_us\": %.1f, \"quantize_gb_s\": %.0f, \"round_us\": %.1f, \"round_gb_s\": %.0f}\n", m, k, quantize * 1e6,
                static_cast<double>(m * k) * 3e-9 / quantize, round * 1e6, static_cast<double>(m * k) * 6e-9 / round);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "experts") == 0) {  // those alone
    check_fp4();
    measure_experts();
    return ok ? 0 : 1;
  }
  check_values();
  check_experts();
  check_large();
  check_rows();
  check_fp8();
  check_fp4();
  std::printf("{\"check\": \"all\", \"ok\": %s}\n", ok ? "true" : "false");
  const int64_t shapes[][2] = {{4096, 4096}, {32768, 1024}, {1024, 4096}, {8192, 4096}, {4096, 8192}, {2048, 4096}, {4096, 2048}};
  for (const auto& [n, k] : shapes)
    for (const int64_t m : {1, 64, 256, 1024, 4096, 8192}) {
      Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k)), y(static_cast<size_t>(m * n));
      fill<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 5);
      fill<<<1024, 256>>>(w.p, static_cast<size_t>(n * k), 6);
      const double ours = median_seconds([&] { gpu::matmul_bf16(problem(m, n, k, x.p, w.p, y.p, false), nullptr); });
      const double theirs = cublaslt_seconds(m, n, k, x.p, w.p, y.p);
      const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
      std::printf("{\"op\": \"matmul bf16\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"us\": %.1f, \"tflops\": %.0f, \"gb_s\": %.0f, \"cublaslt_us\": %.1f, \"ratio\": %.2f}\n", m, n, k, ours * 1e6,
                  flops / ours * 1e-12, static_cast<double>(n * k + m * k + m * n) * 2e-9 / ours, theirs * 1e6, theirs / ours);
      if (m < 64) continue;
      const Fp8Arrays a(m, n, k, y.p, false);
      DeviceArray<float> library_scale(static_cast<size_t>(blocks_of(n) * blocks_of(k)));  // of w, for the library
      fill_scales<<<64, 256>>>(library_scale.p, static_cast<size_t>(blocks_of(n) * blocks_of(k)), 5);
      const double ours8 = median_seconds([&] { gpu::matmul_fp8(a.problem, nullptr); });
      const double theirs8 = cublaslt_seconds(m, n, k, a.x.p, a.w.p, y.p, a.x_scale.p, library_scale.p);
      std::printf("{\"op\": \"matmul fp8\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"us\": %.1f, \"tflops\": %.0f, \"cublaslt_us\": %.1f, \"ratio\": %.2f}\n", m, n, k, ours8 * 1e6,
                  flops / ours8 * 1e-12, theirs8 * 1e6, theirs8 / ours8);
    }
  measure_gradients();
  measure_experts();
  return ok ? 0 : 1;
}
