// The Hopper product against f64 on the host (small), against itself for the row contract, and against cuBLASLt's best algorithm for speed at V4-Flash shapes. One JSON
// line a measurement; exits with 1 if a check fails.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

void check_values() {
  for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 64, 64}, {130, 257, 200}, {64, 1000, 1032}, {300, 130, 4096}}) {
    Bf16Array x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k));
    DeviceArray<float> y(static_cast<size_t>(m * n));
    fill<<<256, 256>>>(x.p, static_cast<size_t>(m * k), 1);
    fill<<<256, 256>>>(w.p, static_cast<size_t>(n * k), 2);
    CUDA_OK(cudaMemset(y.p, 0xff, static_cast<size_t>(m * n) * 4));
    gpu::matmul_bf16(problem(m, n, k, x.p, w.p, y.p, true), nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<__nv_bfloat16> hx(static_cast<size_t>(m * k)), hw(static_cast<size_t>(n * k));
    std::vector<float> hy(static_cast<size_t>(m * n));
    cudaMemcpy(hx.data(), x.p, hx.size() * 2, cudaMemcpyDeviceToHost);
    cudaMemcpy(hw.data(), w.p, hw.size() * 2, cudaMemcpyDeviceToHost);
    cudaMemcpy(hy.data(), y.p, hy.size() * 4, cudaMemcpyDeviceToHost);
    double worst = 0;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, size = 0;
        for (int64_t l = 0; l < k; ++l) {
          const double term = static_cast<double>(__bfloat162float(hx[static_cast<size_t>(i * k + l)])) * static_cast<double>(__bfloat162float(hw[static_cast<size_t>(j * k + l)]));
          sum += term;
          size += std::fabs(term);
        }
        // k additions in f32 at most: k * 2^-23 of the sum of sizes (truncating adders: one ulp each).
        const double error = std::fabs(hy[static_cast<size_t>(i * n + j)] - sum) / (size * static_cast<double>(k) * 0x1p-23);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    std::printf("{\"check\": \"values\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"error_over_bound\": %.4f}\n", m, n, k, worst);
    require(worst <= 1, "values");
  }
}

void check_rows() {
  const int64_t n = 4096, k = 4096, most = 8192;
  Bf16Array x(static_cast<size_t>(most * k)), w(static_cast<size_t>(n * k)), y(static_cast<size_t>(most * n)), z(static_cast<size_t>(most * n));
  fill<<<1024, 256>>>(x.p, static_cast<size_t>(most * k), 3);
  fill<<<1024, 256>>>(w.p, static_cast<size_t>(n * k), 4);
  gpu::matmul_bf16(problem(most, n, k, x.p, w.p, y.p, false), nullptr);
  std::vector<__nv_bfloat16> whole(static_cast<size_t>(most * n)), part(static_cast<size_t>(most * n));
  cudaMemcpy(whole.data(), y.p, whole.size() * 2, cudaMemcpyDeviceToHost);
  for (const int64_t m : {1, 3, 8, 64, 257, 2048, 8192})
    for (const int64_t first : {int64_t{0}, std::min<int64_t>(most - m, 1001)}) {
      gpu::matmul_bf16(problem(m, n, k, x.p + first * k, w.p, z.p, false), nullptr);
      cudaMemcpy(part.data(), z.p, static_cast<size_t>(m * n) * 2, cudaMemcpyDeviceToHost);
      require(std::memcmp(part.data(), whole.data() + first * n, static_cast<size_t>(m * n) * 2) == 0, "rows are those of any other M");
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

double e4m3(unsigned char c) {
  const int exponent = c >> 3 & 15, mantissa = c & 7;
  const double v = exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return c & 0x80 ? -v : v;
}

struct Fp8Arrays {
  DeviceArray<unsigned char> x, w;
  DeviceArray<float> x_scale, w_scale;
  gpu::Fp8Problem problem;
  Fp8Arrays(int64_t m, int64_t n, int64_t k, void* y, bool f32)
      : x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k)), x_scale(static_cast<size_t>(m * ((k + 127) / 128))),
        w_scale(static_cast<size_t>((n + 127) / 128 * ((k + 127) / 128))) {
    fill_codes<<<1024, 256>>>(x.p, static_cast<size_t>(m * k), 1);
    fill_codes<<<1024, 256>>>(w.p, static_cast<size_t>(n * k), 2);
    fill_scales<<<64, 256>>>(x_scale.p, static_cast<size_t>(m * ((k + 127) / 128)), 3);
    fill_scales<<<64, 256>>>(w_scale.p, static_cast<size_t>((n + 127) / 128 * ((k + 127) / 128)), 5);
    problem = {.codes = {.m = m, .n = n, .k = k, .x = x.p, .w = w.p, .y = y, .x_stride = k, .w_stride = k, .y_stride = n, .y_is_f32 = f32},
               .x_scale = x_scale.p, .w_scale = w_scale.p, .x_scale_stride = (k + 127) / 128, .w_scale_stride = (k + 127) / 128};
  }
};

template <typename T>
std::vector<T> host(const DeviceArray<T>& a, size_t n) {
  std::vector<T> v(n);
  CUDA_OK(cudaMemcpy(v.data(), a.p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

void check_fp8() {
  for (const auto [m, n, k] : {std::array<int64_t, 3>{1, 64, 128}, {130, 257, 208}, {64, 1000, 1040}, {300, 130, 4096}}) {
    DeviceArray<float> y(static_cast<size_t>(m * n));
    const Fp8Arrays a(m, n, k, y.p, true);
    gpu::matmul_fp8(a.problem, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    const int64_t blocks = (k + 127) / 128;
    const auto hx = host(a.x, static_cast<size_t>(m * k)), hw = host(a.w, static_cast<size_t>(n * k));
    const auto sx = host(a.x_scale, static_cast<size_t>(m * blocks)), sw = host(a.w_scale, static_cast<size_t>((n + 127) / 128 * blocks));
    const auto hy = host(y, static_cast<size_t>(m * n));
    double worst = 0;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, bound = 0, largest = 0;
        for (int64_t l = 0; l < k; ++l) {
          const double scale = static_cast<double>(sx[static_cast<size_t>(i * blocks + l / 128)]) * static_cast<double>(sw[static_cast<size_t>(j / 128 * blocks + l / 128)]);
          const double term = e4m3(hx[static_cast<size_t>(i * k + l)]) * e4m3(hw[static_cast<size_t>(j * k + l)]) * scale;
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
    std::printf("{\"check\": \"fp8 values\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"error_over_bound\": %.4f}\n", m, n, k, worst);
    require(worst <= 1, "fp8 values");
  }
  const int64_t n = 4096, k = 4096, most = 8192;
  Bf16Array y(static_cast<size_t>(most * n)), z(static_cast<size_t>(most * n));
  const Fp8Arrays a(most, n, k, y.p, false);
  gpu::matmul_fp8(a.problem, nullptr);
  const auto whole = host(y, static_cast<size_t>(most * n));
  for (const int64_t m : {1, 3, 8, 64, 257, 2048, 8192})
    for (const int64_t first : {int64_t{0}, std::min<int64_t>(most - m, 1001)}) {
      gpu::Fp8Problem p = a.problem;
      p.codes.m = m;
      p.codes.x = a.x.p + first * k;
      p.codes.y = z.p;
      p.x_scale += first * p.x_scale_stride;
      gpu::matmul_fp8(p, nullptr);
      const auto part = host(z, static_cast<size_t>(m * n));
      require(std::memcmp(part.data(), whole.data() + first * n, static_cast<size_t>(m * n) * 2) == 0, "fp8 rows are those of any other M");
    }
}

}  // namespace

int main() {
  check_values();
  check_rows();
  check_fp8();
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
      const double ours8 = median_seconds([&] { gpu::matmul_fp8(a.problem, nullptr); });
      const double theirs8 = cublaslt_seconds(m, n, k, a.x.p, a.w.p, y.p, a.x_scale.p, a.w_scale.p);
      std::printf("{\"op\": \"matmul fp8\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"us\": %.1f, \"tflops\": %.0f, \"cublaslt_us\": %.1f, \"ratio\": %.2f}\n", m, n, k, ours8 * 1e6,
                  flops / ours8 * 1e-12, theirs8 * 1e6, theirs8 / ours8);
    }
  return ok ? 0 : 1;
}
