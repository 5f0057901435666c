// Index scores and the choice at V4-Flash shapes on the device: the matrix units' scores beside the portable ones (largest difference, time), and the time of scores and choice
// together. One JSON line a measurement.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "core/device.h"
#include "ops/indexer/indexer.h"
#include "ops/indexer/indexer_gpu.h"

using namespace lockstep;

namespace {

float value(uint64_t i, uint64_t seed) {  // in (-1, 1)
  uint64_t z = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>(static_cast<int>(z >> 40) - (1 << 23)) * (1.0f / (1 << 23));
}

struct Bench {
  DeviceContext context{Device::gpu};
  Arena device{"bench tensors", size_t{16} << 30, Device::gpu};

  template <typename T>
  TensorView put(DType dtype, Shape shape, const std::vector<T>& host) {
    const TensorView v = device.tensor(dtype, shape, "bench");
    upload_bytes(context, v.data, host.data(), v.bytes());
    return v;
  }
  TensorView random(DType dtype, Shape shape, uint64_t seed) {
    const auto n = static_cast<size_t>(shape.elements());
    std::vector<float> f(n);
    for (size_t i = 0; i < n; ++i) f[i] = value(i, seed);
    if (dtype == DType::f32) return put(dtype, shape, f);
    std::vector<bf16> b(n);
    for (size_t i = 0; i < n; ++i) b[i] = to_bf16(f[i]);
    return put(dtype, shape, b);
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

// The last `tokens` rows of each sequence.
void measure(const char* name, int64_t sequences, int64_t length, int64_t tokens, int64_t heads, int64_t width, int64_t k) {
  Bench b;
  Context& c = b.context;
  constexpr int64_t kRatio = 4, kPageTokens = 256, kPerPage = kPageTokens / kRatio;
  const int64_t rows = sequences * tokens, pages = (length + kPageTokens - 1) / kPageTokens, longest = length / kRatio;
  std::vector<int32_t> token_seq, token_pos, seq_row, seq_pos, seq_slot, page_table;
  double scores = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    seq_row.push_back(static_cast<int32_t>(s * tokens));
    seq_pos.push_back(static_cast<int32_t>(length - tokens));
    seq_slot.push_back(static_cast<int32_t>(s));
    for (int64_t i = 0; i < pages; ++i) page_table.push_back(static_cast<int32_t>((i * 7 % pages) * sequences + s));
    for (int64_t i = 0; i < tokens; ++i) {
      token_seq.push_back(static_cast<int32_t>(s));
      token_pos.push_back(static_cast<int32_t>(length - tokens + i));
      const int64_t visible = (length - tokens + i + 1) / kRatio;
      if (visible > k) scores += static_cast<double>(visible);
    }
  }
  seq_row.push_back(static_cast<int32_t>(rows));
  const auto ints = [&](const std::vector<int32_t>& v, Shape shape) { return b.put(DType::i32, shape, v); };
  const SequenceView seq = {rows, sequences, ints(token_seq, {rows}), ints(token_pos, {rows}), ints(seq_row, {sequences + 1}), ints(seq_pos, {sequences}),
                            ints(seq_slot, {sequences}), ints(page_table, {sequences, pages}), kPageTokens, length};
  const TensorView q = b.random(DType::bf16, {rows, heads, width}, 1), weight = b.random(DType::f32, {rows, heads}, 2),
                   keys = b.random(DType::bf16, {sequences * pages * kPerPage, width}, 3), selected = b.device.tensor(DType::i32, {rows, k}, "selected");
  gpu::IndexScores<bf16> p = {};
  p.seq = gpu::arrays(seq);
  p.q = q.ptr<bf16>(), p.q_stride = q.row_stride, p.keys = keys.ptr<bf16>(), p.key_stride = width, p.weight = weight.ptr<float>(), p.weight_stride = heads;
  p.heads = static_cast<int>(heads), p.width = static_cast<int>(width), p.ratio = kRatio, p.per_page = kPerPage, p.k = static_cast<int>(k);
  p.rank_stride = longest, p.longest = static_cast<int>(longest), p.queries = rows;
  std::vector<int32_t> got[2];
  for (const bool units : {false, true}) {
    std::vector<int32_t>& host = got[units];
    host.assign(static_cast<size_t>(rows * longest), 0);
    const TensorView ranks = b.put(DType::i32, {rows, longest}, host);
    p.ranks = ranks.ptr<int32_t>();
    units ? index_scores_on_matrix_units(c, p) : index_scores_portable(c, p);
    download_bytes(c, host.data(), ranks.data, ranks.bytes());
  }
  double difference = 0, size = 0;
  for (size_t i = 0; i < got[0].size(); ++i) {
    const auto score = [](int32_t rank) { return static_cast<double>(std::bit_cast<float>(rank ^ (rank >> 31 & 0x7fffffff))); };
    const double d = std::abs(score(got[1][i]) - score(got[0][i]));
    if (!(d <= difference)) difference = d;
    size = std::max(size, std::abs(score(got[0][i])));
  }
  const double units = b.seconds(9, [&] { index_scores_on_matrix_units(c, p); }), portable = b.seconds(1, [&] { index_scores_portable(c, p); });
  const double all = b.seconds(9, [&] { index_select(c, selected, q, weight, keys, seq, {.ratio = kRatio, .per_page = kPerPage}); });
  const double flops = scores * 2 * static_cast<double>(heads * width);
  std::printf("{\"bench\": \"index %s\", \"queries\": %ld, \"entries\": %ld, \"heads\": %ld, \"us\": %.1f, \"tflops\": %.1f, \"key GB/s\": %.0f, \"portable us\": %.1f, "
              "\"with choice us\": %.1f, \"largest difference\": %.3g, \"largest\": %.3g}\n",
              name, static_cast<long>(rows), static_cast<long>(longest), static_cast<long>(heads), units * 1e6, flops / units * 1e-12,
              static_cast<double>(sequences * longest * width * 2) / units * 1e-9, portable * 1e6, all * 1e6, difference, size);
}

}  // namespace

int main() {
  measure("Flash, prefill", 1, 16384, 4096, 64, 128, 512);
  measure("Flash, packed", 4, 4096, 4096, 64, 128, 512);
  measure("Flash, decode", 64, 16384, 1, 64, 128, 512);
  measure("Flash, decode, long", 16, 131072, 1, 64, 128, 512);
  measure("16 heads, packed", 2, 2048, 2048, 16, 128, 256);
  measure("16 heads, decode", 64, 2048, 1, 16, 128, 256);
}
