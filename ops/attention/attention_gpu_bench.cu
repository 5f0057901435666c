// Attention at V4-Flash shapes on the device: the tensor cores' kernel beside the portable one (largest difference, time), forward and backward. One JSON line a
// measurement.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/gpu_check.h"
#include "ops/attention/attention_cpu.h"

using namespace lockstep;

namespace {

float value(uint64_t i, uint64_t seed) {  // in (-1, 1)
  uint64_t z = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>(static_cast<int>(z >> 40) - (1 << 23)) * (1.0f / (1 << 23));
}

struct Bench {
  DeviceContext context{Device::gpu};
  Arena device{"bench tensors", size_t{64} << 30, Device::gpu};

  template <typename T, typename F>
  TensorView fill(DType dtype, Shape shape, F f) {
    std::vector<T> host(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < host.size(); ++i) host[i] = f(i);
    const TensorView v = device.tensor(dtype, shape, "bench");
    upload_bytes(context, v.data, host.data(), v.bytes());
    return v;
  }
  TensorView random(DType dtype, Shape shape, uint64_t seed) {
    if (dtype == DType::f32) return fill<float>(dtype, shape, [&](size_t i) { return value(i, seed); });
    return fill<bf16>(dtype, shape, [&](size_t i) { return to_bf16(2.0f * value(i, seed)); });
  }
  TensorView ints(const std::vector<int32_t>& v, Shape shape) {
    return fill<int32_t>(DType::i32, shape, [&](size_t i) { return v[i]; });
  }
  template <typename F>
  double seconds(int runs, F f) {
    cudaEvent_t a, b;
    const auto stream = static_cast<cudaStream_t>(static_cast<Context&>(context).stream);
    GPU_CHECK(cudaEventCreate(&a) == cudaSuccess && cudaEventCreate(&b) == cudaSuccess, "no events");
    std::vector<float> ms;
    for (int i = 0; i <= runs; ++i) {
      (void)cudaEventRecord(a, stream);
      f();
      (void)cudaEventRecord(b, stream);
      const cudaError_t e = cudaEventSynchronize(b);
      GPU_CHECK(e == cudaSuccess, "%s", cudaGetErrorString(e));
      float t = 0;
      (void)cudaEventElapsedTime(&t, a, b);
      if (i > 0) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e-3;
  }
};

// `tokens` rows of each sequence, the last ones of `length` positions. k: entries chosen, 0: all visible.
void measure(const char* name, int64_t sequences, int64_t length, int64_t tokens, int64_t heads, int64_t width, int64_t ratio, int64_t k, bool backward) {
  Bench b;
  Context& c = b.context;
  constexpr int64_t kWindow = 128, kPageTokens = 256;
  const int64_t rows = sequences * tokens, pages = (length + kPageTokens - 1) / kPageTokens, per_page = ratio == 0 ? 0 : kPageTokens / ratio;
  std::vector<int32_t> token_seq, token_pos, seq_row, seq_pos, seq_slot, page_table, selected;
  double pairs = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    seq_row.push_back(static_cast<int32_t>(s * tokens));
    seq_pos.push_back(static_cast<int32_t>(length - tokens));
    seq_slot.push_back(static_cast<int32_t>(s));
    for (int64_t i = 0; i < pages; ++i) page_table.push_back(static_cast<int32_t>((i * 7 % pages) * sequences + s));
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t pos = length - tokens + i, visible = ratio == 0 ? 0 : (pos + 1) / ratio, n = k == 0 ? visible : std::min(k, visible);
      token_seq.push_back(static_cast<int32_t>(s));
      token_pos.push_back(static_cast<int32_t>(pos));
      pairs += static_cast<double>(std::min(pos + 1, kWindow) + n);
      for (int64_t j = 0; j < k; ++j) selected.push_back(j < n ? static_cast<int32_t>(j * visible / n) : -1);
    }
  }
  seq_row.push_back(static_cast<int32_t>(rows));
  const SequenceView seq = {rows,
                            sequences,
                            b.ints(token_seq, {rows}),
                            b.ints(token_pos, {rows}),
                            b.ints(seq_row, {sequences + 1}),
                            b.ints(seq_pos, {sequences}),
                            b.ints(seq_slot, {sequences}),
                            b.ints(page_table, {sequences, pages}),
                            kPageTokens,
                            length};
  const AttentionShape shape = {.window = kWindow, .ratio = ratio, .per_page = per_page, .scale = 1.0f / std::sqrt(static_cast<float>(width))};
  const AttentionKeys keys = {.kv = b.random(DType::bf16, {rows, width}, 1),
                              .ring = b.random(DType::bf16, {sequences, kWindow, width}, 2),
                              .entries = ratio == 0 ? ConstTensorView() : b.random(DType::bf16, {sequences * pages * per_page, width}, 3),
                              .selected = k == 0 ? ConstTensorView() : b.ints(selected, {rows, k})};
  const TensorView q = b.random(DType::bf16, {rows, heads, width}, 4), sink = b.random(DType::f32, {heads}, 5);
  const TensorView o = b.device.tensor(DType::bf16, q.shape, "o"), lse = b.device.tensor(DType::f32, {rows, heads}, "lse");
  const TensorView want = b.device.tensor(DType::bf16, q.shape, "want"), want_lse = b.device.tensor(DType::f32, {rows, heads}, "want lse");
  const double flops = pairs * static_cast<double>(heads * width) * 4;

  device::portable_attention(c, want, want_lse, q, keys, sink, seq, shape);
  device::attention(c, o, lse, q, keys, sink, seq, shape);
  const auto on_host = [&](TensorView v) {
    std::vector<char> bytes(v.bytes());
    download_bytes(c, bytes.data(), v.data, v.bytes());
    return bytes;
  };
  const auto compare = [&](TensorView a, TensorView e, double* difference, double* size) {
    const std::vector<char> x = on_host(a), y = on_host(e);
    *difference = *size = 0;
    for (int64_t i = 0; i < a.shape.elements(); ++i) {
      const auto read = [&](const std::vector<char>& v) -> double {
        return a.dtype == DType::f32 ? reinterpret_cast<const float*>(v.data())[i] : to_f32(reinterpret_cast<const bf16*>(v.data())[i]);
      };
      const double d = std::abs(read(x) - read(y));
      if (!(d <= *difference)) *difference = d;
      *size = std::max(*size, std::abs(read(y)));
    }
  };
  double difference, size, lse_difference, lse_size;
  compare(o, want, &difference, &size);
  compare(lse, want_lse, &lse_difference, &lse_size);
  const double fast = b.seconds(9, [&] { device::attention(c, o, lse, q, keys, sink, seq, shape); });
  const double portable = b.seconds(1, [&] { device::portable_attention(c, want, want_lse, q, keys, sink, seq, shape); });
  std::printf("{\"bench\": \"attention %s\", \"queries\": %ld, \"rows a query\": %.1f, \"us\": %.1f, \"tflops\": %.1f, \"portable us\": %.1f, \"portable tflops\": %.1f, "
              "\"largest difference\": %.3g, \"largest\": %.3g, \"lse difference\": %.3g}\n",
              name, static_cast<long>(rows), pairs / static_cast<double>(rows), fast * 1e6, flops / fast * 1e-12, portable * 1e6, flops / portable * 1e-12, difference, size,
              lse_difference);
  if (!backward) return;
  const TensorView d_o = b.random(DType::f32, q.shape, 6), dq = b.device.tensor(DType::f32, q.shape, "dq"), dkv = b.device.tensor(DType::f32, keys.kv.shape, "dkv"),
                   want_dq = b.device.tensor(DType::f32, q.shape, "want dq"), want_dkv = b.device.tensor(DType::f32, keys.kv.shape, "want dkv"),
                   dsink = b.random(DType::f32, {heads}, 7);
  const TensorView dentries = ratio == 0 ? TensorView() : b.random(DType::f32, keys.entries.shape, 8);
  const double back = b.seconds(3, [&] { device::attention_backward(c, dq, dkv, dentries, dsink, d_o, o, lse, q, keys, sink, seq, shape); });
  const double portable_back =
      b.seconds(1, [&] { device::portable_attention_backward(c, want_dq, want_dkv, dentries, dsink, d_o, o, lse, q, keys, sink, seq, shape); });
  double dq_difference, dq_size, dkv_difference, dkv_size;
  compare(dq, want_dq, &dq_difference, &dq_size);
  compare(dkv, want_dkv, &dkv_difference, &dkv_size);
  std::printf("{\"bench\": \"attention backward %s\", \"queries\": %ld, \"us\": %.1f, \"tflops\": %.1f, \"portable us\": %.1f, \"dq difference\": %.3g, \"dq\": %.3g, "
              "\"dkv difference\": %.3g, \"dkv\": %.3g}\n",
              name, static_cast<long>(rows), back * 1e6, flops * 2.5 / back * 1e-12, portable_back * 1e6, dq_difference, dq_size, dkv_difference, dkv_size);
}

}  // namespace

// attention_gpu_bench [PART OF A NAME]: all cases, or those.
int main(int argc, char** argv) {
  const auto measure = [&](const char* name, auto... sizes) {
    if (argc < 2 || std::strstr(name, argv[1]) != nullptr) ::measure(name, sizes...);
  };
  measure("training, 128 + 512 chosen", 1, 8192, 8192, 64, 512, 4, 512, true);
  measure("prefill, 128 + 512 chosen", 1, 16384, 4096, 64, 512, 4, 512, false);
  measure("training, all of ratio 128", 1, 8192, 8192, 64, 512, 128, 0, true);
  measure("window alone", 1, 8192, 8192, 64, 512, 0, 0, true);
  measure("decoding, 128 + 512 chosen", 256, 16384, 1, 64, 512, 4, 512, false);
  measure("128 heads, 128 + 1024 chosen", 1, 16384, 2048, 128, 512, 4, 1024, false);
  measure("8 heads, 128 + 512 chosen", 1, 16384, 4096, 8, 512, 4, 512, false);
  measure("16 heads, training, 128 + 160", 12, 640, 640, 16, 512, 4, 256, true);
  measure("16 heads, training, window alone", 12, 640, 640, 16, 512, 0, 0, true);
  measure("16 heads, decoding, 128 + 160", 64, 640, 1, 16, 512, 4, 256, false);
  measure("32 heads, 128 + 512 chosen", 1, 8192, 4096, 32, 512, 4, 512, true);
}
