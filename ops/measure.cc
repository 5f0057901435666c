#include "ops/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/device.h"
#include "ops/fma_peak.h"

namespace lockstep {

namespace {

bool emulated(const Context& c) { return c.on_gpu() && device_info().emulated; }
size_t reserve_bytes(const Context& c) { return c.on_gpu() && !emulated(c) ? device_info().memory_bytes : size_t{64} << 30; }

}  // namespace

Clock::Clock(Context& c, bool cold) : c_(c), arena_("bench caches", size_t{1} << 30, c.device) {
  if (cold && !emulated(c)) sweep_ = arena_.tensor(DType::u8, {int64_t{c.on_gpu() ? 256 : 64} << 20}, "sweep");
}

Timing Clock::time(const std::function<void()>& f, int runs) {
  std::vector<double> seconds;
  StreamMark begin, end;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i <= runs; ++i) {
    if (cold() && c_.on_gpu()) set_zero(c_, sweep_);
    if (cold() && !c_.on_gpu())
      parallel_for(c_, sweep_.rows() / 64, 64, [&](int64_t b, int64_t e, int) { std::memset(sweep_.ptr<uint8_t>() + b * 64, i, static_cast<size_t>(e - b) * 64); });
    begin.set(c_);
    f();
    end.set(c_);
    const double s = end.seconds_since(begin);
    if (i > 0) seconds.push_back(s);
    if (seconds.size() >= 2 && std::chrono::steady_clock::now() - start > std::chrono::seconds(2)) break;
  }
  std::sort(seconds.begin(), seconds.end());
  return {.median = seconds[seconds.size() / 2], .min = seconds.front(), .max = seconds.back()};
}

Operands::Operands(Context& c) : c_(c), arena_("bench operands", reserve_bytes(c), c.device) {}

TensorView Operands::zeros(DType dtype, Shape shape) {
  const TensorView v = make(dtype, shape);
  set_zero(c_, v);
  return v;
}
TensorView Operands::ones(Shape shape) {
  const TensorView v = make(DType::f32, shape);
  const std::vector<float> values(static_cast<size_t>(shape.elements()), 1.0f);
  upload_bytes(c_, v.data, values.data(), v.bytes());
  return v;
}
TensorView Operands::ints(const std::vector<int32_t>& values, Shape shape) {
  CHECK(static_cast<int64_t>(values.size()) == shape.elements(), "{} numbers for {}", values.size(), shape.str());
  const TensorView v = make(DType::i32, shape);
  upload_bytes(c_, v.data, values.data(), v.bytes());
  return v;
}

TensorView Operands::random(DType dtype, Shape shape) {
  constexpr int64_t kPeriod = 1048573;  // prime
  const TensorView v = make(dtype, shape);
  const int64_t n = shape.elements(), first = std::min(n, kPeriod);
  if (n == 0) return v;
  std::vector<char> pattern(static_cast<size_t>(first) * dtype_bytes(dtype));
  uint64_t x = 0x9e3779b97f4a7c15u;
  for (int64_t i = 0; i < first; ++i) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const auto bits = static_cast<uint32_t>(x >> 40);
    const float value = static_cast<float>(bits) * 0x1p-23f - 1.0f;
    switch (dtype) {
      case DType::f32: reinterpret_cast<float*>(pattern.data())[i] = value; break;
      case DType::bf16: reinterpret_cast<bf16*>(pattern.data())[i] = to_bf16(value); break;
      case DType::e4m3: pattern[static_cast<size_t>(i)] = static_cast<char>((bits & 0x80) | (bits >> 8) % 0x7f); break;
      case DType::e2m1x2: pattern[static_cast<size_t>(i)] = static_cast<char>(bits); break;
      case DType::ue8m0: pattern[static_cast<size_t>(i)] = static_cast<char>(120 + bits % 7); break;
      default: CHECK(false, "random {}", dtype_name(dtype));
    }
  }
  upload_bytes(c_, v.data, pattern.data(), pattern.size());
  // The rest is copies of what there is, twice as much each time.
  for (size_t done = pattern.size(); done < v.bytes();) {
    const size_t more = std::min(done, v.bytes() - done);
    copy_bytes(c_, static_cast<char*>(v.data) + done, v.data, more);
    done += more;
  }
  return v;
}

WeightView Operands::weight(DType dtype, Shape shape, int64_t column_period) {
  const int e = shape.rank - 2;
  const int64_t rows = shape[e], columns = shape[e + 1];
  Shape stored = shape;
  if (dtype == DType::e2m1x2) stored.dims[static_cast<size_t>(e + 1)] = num_blocks(columns, 2);
  WeightView w;
  w.rows = random(dtype, stored);
  if (dtype == DType::e4m3 || dtype == DType::e2m1x2) {
    const QuantFormat f = dtype == DType::e4m3 ? kFp8Weight : kFp4;
    w.row_grid = {f.block_rows, e == 1 ? rows : 0};
    w.col_grid = {f.block_cols, column_period};
    const int64_t row_blocks = w.row_grid.blocks_in(rows), column_blocks = w.col_grid.blocks_in(columns);
    w.scales = random(f.scales, e == 1 ? Shape{shape[0], row_blocks, column_blocks} : Shape{row_blocks, column_blocks});
  }
  if (c_.on_gpu()) return w;
  const TensorView panels = make(dtype, panel_shape(stored));
  pack_panels(c_, panels, w.rows);
  w.panels = panels;
  if (w.quantized()) {
    const TensorView scales = make(DType::f32, panel_scale_shape(w));
    pack_panel_scales(c_, scales, w);
    w.panel_scales = scales;
  }
  return w;
}

double library_seconds(Clock& clock, Operands& operands, gpu::BlasProblem p, int runs) {
  double best = std::numeric_limits<double>::infinity();
  Context& c = clock.context();
  if (!c.on_gpu() || !gpu::blas_library()) return best;
  constexpr int64_t kWorkspace = int64_t{64} << 20;
  const ArenaScope scope(operands.arena());
  p.a = operands.random(p.dtype, {p.m, p.k}).data;
  p.b = operands.random(p.dtype, {p.n, p.k}).data;
  p.y = operands.make(p.y_dtype, {p.m, p.n}).data;
  p.workspace = operands.make(DType::u8, {kWorkspace}).data;
  p.workspace_bytes = kWorkspace;
  if (p.dtype == DType::e4m3) {
    p.a_scale = operands.ones({p.m, num_blocks(p.k, 128)}).ptr<float>();
    p.b_scale = operands.ones({num_blocks(p.n, 128), num_blocks(p.k, 128)}).ptr<float>();
  }
  const gpu::BlasProduct product(p);
  for (int i = 0; i < product.algorithms(); ++i) {
    bool done = true;
    const Timing t = clock.time([&] { done = product.run(i, c.stream) && done; }, runs);
    if (done) best = std::min(best, t.median);
  }
  return best;
}

Ceiling measure_ceiling(Clock& clock, Operands& operands) {
  Context& c = clock.context();
  Ceiling ceiling;
  {
    const ArenaScope scope(operands.arena());
    const int64_t bytes = emulated(c) ? 1 << 16 : int64_t{c.on_gpu() ? 1024 : 64} << 20;
    const TensorView from = operands.random(DType::f32, {bytes / 4}), to = operands.make(DType::f32, {bytes / 4});
    const auto run = [&] {
      if (c.on_gpu()) return copy(c, to, from);
      parallel_for(c, bytes / 64, 64, [&](int64_t b, int64_t e, int) {
        std::memcpy(static_cast<char*>(to.data) + b * 64, static_cast<const char*>(from.data) + b * 64, static_cast<size_t>(e - b) * 64);
      });
    };
    ceiling.copy_bytes = 2.0 * static_cast<double>(bytes) / clock.time(run, 10).min;
  }
  if (!c.on_gpu()) {
    double operations = 0;
    const Timing t = clock.time([&] { operations = fma_chains(c); }, 5);
    ceiling.f32 = ceiling.bf16 = ceiling.e4m3 = operations / t.min;
    ceiling.f32_by = ceiling.bf16_by = ceiling.e4m3_by = "multiply-adds in f32";
    return ceiling;
  }
  const auto rate = [&](DType dtype, double* best, std::string* by) {
    const ArenaScope scope(operands.arena());
    const int64_t n = emulated(c) ? 32 : 8192;
    const DType activation = dtype == DType::f32 ? DType::f32 : DType::bf16;
    const WeightView w = operands.weight(dtype, {n, n});
    const TensorView x = operands.random(activation, {n, n}), y = operands.make(activation, {n, n});
    const double operations = 2.0 * std::pow(static_cast<double>(n), 3);
    const double ours = operations / clock.time([&] { matmul(c, y, x, w); }, 5).median;
    const double theirs = operations / library_seconds(clock, operands, {.m = n, .n = n, .k = n, .dtype = dtype, .y_dtype = activation}, 5);
    *best = std::max(ours, theirs);
    *by = theirs > ours ? "library" : "own";
  };
  rate(DType::f32, &ceiling.f32, &ceiling.f32_by);
  rate(DType::bf16, &ceiling.bf16, &ceiling.bf16_by);
  rate(DType::e4m3, &ceiling.e4m3, &ceiling.e4m3_by);
  return ceiling;
}

}  // namespace lockstep
