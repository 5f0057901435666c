// How fast conversions are, beside memcpy in the same millisecond on the same cores. Both are counted in bytes read plus bytes written, and
// walk through matrices larger than any cache, so that the ratio says how near to the floor a conversion is.
//
// A round times the copy and the conversion of one part of the matrix one after the other. Other work on the machine only ever slows a round
// down: a row holds the fastest tenth's slowest round of each, and their ratio; and the ratio of the medians. One JSON line a row.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "ops/quantize/quantize.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;

constexpr int64_t kRows = 4096, kCols = 8192;
constexpr int kRounds = 200;

template <typename F>
double seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Aligned as in the program.
Arena& arena() {
  static Arena a("bench", size_t{2} << 30);
  return a;
}
TensorView dense(DType dtype, Shape shape) {
  TensorView v(nullptr, dtype, shape);
  v.data = arena().allocate(v.bytes(), "bench");
  std::memset(v.data, 1, v.bytes());
  return v;
}
QuantView quantised(const QuantFormat& f) {
  return {dense(f.codes, code_shape(f, kRows, kCols)), dense(f.scales, scale_shape(f, kRows, kCols)), f.block_rows, f.block_cols};
}
// Parts that a millisecond converts, but enough rows of blocks for each thread.
int64_t part_rows(CpuContext& c) { return c.get().num_threads() == 1 ? kRows / 8 : kRows / 2; }
double bytes_of(const QuantView& q) { return static_cast<double>(q.codes.bytes() + q.scales.bytes()); }
struct Part {
  int64_t begin, rows;
  TensorView of(const TensorView& x) const { return x.slice(begin, rows); }
  QuantView of(const QuantView& q) const {
    return {of(q.codes), q.scales.slice(begin / q.block_rows, rows / q.block_rows), q.block_rows, q.block_cols};
  }
};

// Normal numbers, as weights are, by repeating one row's worth from a random place: drawing each would take longer than all else here.
TensorView numbers(DType dtype) {
  constexpr int64_t kDrawn = 1 << 16;
  static_assert(kDrawn >= kCols);
  Tensor drawn(dtype, {2 * kDrawn});
  const TensorView x = dense(dtype, {kRows, kCols});
  Philox rng(1, RngPurpose::test);
  for (int64_t i = 0; i < kDrawn; ++i) {
    const float v = 0.02f * rng.normal();
    drawn.set(i, v);
    drawn.set(i + kDrawn, v);
  }
  const size_t element = dtype_bytes(dtype), row_bytes = kCols * element;
  for (int64_t r = 0; r < kRows; ++r)
    std::memcpy(static_cast<char*>(x.data) + static_cast<size_t>(r) * row_bytes,
                static_cast<char*>(drawn.view().data) + rng.below(kDrawn) * element, row_bytes);
  return x;
}

// `bytes`: what converting the whole matrix reads and writes. `ours(part)` converts one part.
void run_row(benchmark::State& state, const std::string& name, CpuContext& c, double bytes, const std::function<void(const Part&)>& ours) {
  // The copy moves as many bytes: half of them read, half written.
  const int64_t rows = part_rows(c), parts = kRows / rows, lines = static_cast<int64_t>(bytes / 2) / parts / 64;
  const TensorView from = dense(DType::u8, {parts, lines * 64}), to = dense(DType::u8, {parts, lines * 64});
  const auto copy = [&](int64_t part) {
    parallel_for(c, lines, 64, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to.row<uint8_t>(part) + begin * 64, from.row<uint8_t>(part) + begin * 64, static_cast<size_t>(end - begin) * 64);
    });
  };
  std::vector<double> copies, conversions;
  int64_t part = 0;
  for (auto _ : state) {
    part = (part + 1) % parts;
    copies.push_back(seconds([&] { copy(part); }));
    conversions.push_back(seconds([&] { ours({part * rows, rows}); }));
    state.SetIterationTime(conversions.back());
  }
  std::sort(copies.begin(), copies.end());
  std::sort(conversions.begin(), conversions.end());
  const size_t tenth = copies.size() / 10, half = copies.size() / 2;
  const double part_bytes = bytes / static_cast<double>(parts);
  fmt::print("{{\"bench\":\"quantize\",\"case\":\"{}\",\"threads\":{},\"us\":{:.1f},\"gbytes_per_s\":{:.2f},\"copy_gbytes_per_s\":{:.2f},"
             "\"ratio\":{:.3f},\"ratio_median\":{:.3f}}}\n",
             name, c.get().num_threads(), conversions[tenth] * 1e6, part_bytes / conversions[tenth] * 1e-9, part_bytes / copies[tenth] * 1e-9,
             copies[tenth] / conversions[tenth], copies[half] / conversions[half]);
  std::fflush(stdout);
  arena().release(0);
}

void quantize_row(benchmark::State& state, const std::string& name, int threads, DType dtype, QuantFormat f) {
  CpuContext c(threads);
  const TensorView x = numbers(dtype);
  const QuantView q = quantised(f);
  run_row(state, name, c, static_cast<double>(x.bytes()) + bytes_of(q),
          [&](const Part& part) { quantize(c, part.of(q), part.of(x), f.amax_floor); });
}

void dequantize_row(benchmark::State& state, const std::string& name, int threads, DType dtype, QuantFormat f) {
  CpuContext c(threads);
  const TensorView x = numbers(dtype);
  const QuantView q = quantised(f);
  quantize(c, q, x, f.amax_floor);
  run_row(state, name, c, static_cast<double>(x.bytes()) + bytes_of(q), [&](const Part& part) { dequantize(c, part.of(x), part.of(q)); });
}

void recode_row(benchmark::State& state, const std::string& name, int threads) {
  CpuContext c(threads);
  const TensorView x = numbers(DType::bf16);
  const QuantView q4 = quantised(kFp4), q8 = quantised(kFp8Weight);
  quantize(c, q4, x, 0);
  run_row(state, name, c, bytes_of(q4) + bytes_of(q8), [&](const Part& part) { recode_fp4(c, part.of(q8), {}, part.of(q4)); });
}

// The console's own table would repeat the JSON lines.
class Quiet : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

void register_rows() {
  const auto add = [](const std::string& name, auto run) {
    for (const int threads : {1, 2})
      benchmark::RegisterBenchmark(fmt::format("{}/{}", name, threads).c_str(),
                                   [=](benchmark::State& state) { run(state, name, threads); })
          ->UseManualTime()
          ->Iterations(kRounds);
  };
  QuantFormat weight_f32 = kFp8Weight;
  weight_f32.scales = DType::f32;
  const auto from = [&](DType t, QuantFormat f) {
    return [=](benchmark::State& state, const std::string& name, int threads) { quantize_row(state, name, threads, t, f); };
  };
  const auto to = [&](DType t, QuantFormat f) {
    return [=](benchmark::State& state, const std::string& name, int threads) { dequantize_row(state, name, threads, t, f); };
  };
  add("bf16 to e4m3 128x128 ue8m0", from(DType::bf16, kFp8Weight));
  add("bf16 to e4m3 128x128 f32", from(DType::bf16, weight_f32));
  add("f32 to e4m3 128x128 ue8m0", from(DType::f32, kFp8Weight));
  add("bf16 to e4m3 1x128 ue8m0", from(DType::bf16, kFp8Activation));
  add("bf16 to e4m3 1x64 ue8m0", from(DType::bf16, kFp8Kv));
  add("f32 to e2m1 1x32 ue8m0", from(DType::f32, kFp4));
  add("bf16 to e2m1 1x32 ue8m0", from(DType::bf16, kFp4));
  add("e4m3 128x128 ue8m0 to bf16", to(DType::bf16, kFp8Weight));
  add("e2m1 1x32 ue8m0 to bf16", to(DType::bf16, kFp4));
  add("e2m1 1x32 to e4m3 128x128", recode_row);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  lockstep::register_rows();
  lockstep::Quiet reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  return 0;
}
