// How fast matmul is, beside OpenBLAS sgemm in the same minute on the same cores, and beside what the machine can do at all.
//
// Every row of the table is one shape. A round times our call and the peer's one after the other (each long enough for the
// clock); the row holds the fastest round of each, since other work on the machine only ever slows a round down, and the median
// ratio. The peer multiplies f32 in every row; at M = 1 it is the faster of sgemm and sgemv. "cold" rows walk through 64 MiB of
// weights so that no cache holds them, as a decode step of a large model does. Rows "fp8" and "fp4" have our own bf16 product as their peer.

#include <benchmark/benchmark.h>
#ifdef LOCKSTEP_HAVE_OPENBLAS
#include <cblas.h>
extern "C" char* openblas_get_corename(void);
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "ops/fma_peak.h"
#include "ops/matmul/matmul.h"
#include "ops/testing.h"

namespace lockstep {

namespace {

using testing::Tensor;
using Call = std::function<void()>;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Calls that fill about `seconds`.
int64_t calibrate(const Call& f, double seconds) {
  f();
  const double start = now();
  f();
  return std::clamp<int64_t>(static_cast<int64_t>(seconds / std::max(now() - start, 1e-8)), 1, 100000);
}

double time_one(const Call& f, int64_t calls) {
  f();
  const double start = now();
  for (int64_t i = 0; i < calls; ++i) f();
  return (now() - start) / static_cast<double>(calls);
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

constexpr int kRounds = 60;
constexpr double kRoundSeconds = 0.001;

struct Row {
  int threads = 1;
  double operations = 0;  // floating-point operations a call
  double bytes = 0;       // bytes of w a call, where those are the limit
  Call ours, peer;
};

CpuContext& context(int threads) {
  static CpuContext one(1), two(2);
  return threads == 1 ? one : two;
}

void set_peer_threads(int threads) {
#ifdef LOCKSTEP_HAVE_OPENBLAS
  openblas_set_num_threads(threads);
#endif
}

// The tensors of the row being measured; a deque never moves them.
std::deque<Tensor>& row_tensors() {
  static std::deque<Tensor> tensors;
  return tensors;
}
Tensor& keep(Tensor t) {
  row_tensors().push_back(std::move(t));
  return row_tensors().back();
}

Tensor& inputs(DType dtype, Shape shape) {
  return keep(testing::random_tensor(static_cast<uint64_t>(shape.elements()), dtype, shape));
}

WeightView weight(Tensor& rows) {
  Tensor& panels = keep(Tensor(rows.view().dtype, panel_shape(rows.view().shape)));
  pack_panels(context(1), panels, rows);
  return {rows, panels};
}

Call peer_product(float* y, const float* x, std::vector<const float*> w, int64_t m, int64_t n, int64_t k, bool gemv) {
#ifdef LOCKSTEP_HAVE_OPENBLAS
  return [=, i = size_t{0}]() mutable {
    i = (i + 1) % w.size();
    const int mi = static_cast<int>(m), ni = static_cast<int>(n), ki = static_cast<int>(k);
    if (gemv) cblas_sgemv(CblasRowMajor, CblasNoTrans, ni, ki, 1.0f, w[i], ki, x, 1, 0.0f, y, 1);
    else cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, mi, ni, ki, 1.0f, x, ki, w[i], ki, 0.0f, y, ni);
  };
#else
  return {};
#endif
}

Row product_row(DType dtype, int64_t m, int64_t n, int64_t k, int threads, int64_t copies) {
  Row row;
  row.threads = threads;
  row.operations = 2.0 * static_cast<double>(m * n * k);
  if (m == 1) row.bytes = static_cast<double>(n * k) * static_cast<double>(dtype_bytes(dtype));

  Tensor& x = inputs(dtype, {m, k});
  Tensor& y = keep(Tensor(dtype, {m, n}));
  std::vector<WeightView> w;
  for (int64_t i = 0; i < copies; ++i) w.push_back(weight(inputs(dtype, {n, k})));
  row.ours = [=, &x, &y, i = size_t{0}]() mutable {
    i = (i + 1) % w.size();
    matmul(context(threads), y, x, w[i]);
  };

  Tensor& x32 = inputs(DType::f32, {m, k});
  Tensor& y32 = keep(Tensor(DType::f32, {m, n}));
  std::vector<const float*> w32;
  for (int64_t i = 0; i < copies; ++i) w32.push_back(inputs(DType::f32, {n, k}).ptr<float>());
  row.peer = peer_product(y32.ptr<float>(), x32.ptr<float>(), w32, m, n, k, false);
  if (m == 1 && row.peer) {
    const Call gemv = peer_product(y32.ptr<float>(), x32.ptr<float>(), w32, m, n, k, true);
    set_peer_threads(threads);
    if (time_one(gemv, calibrate(gemv, 0.01)) < time_one(row.peer, calibrate(row.peer, 0.01))) row.peer = gemv;
  }
  return row;
}

// Quantised weights; the peer is our own product in bf16 of the same sizes.
Row quantized_row(const QuantFormat& format, int64_t m, int64_t n, int64_t k, int threads, int64_t copies) {
  Row row;
  row.threads = threads;
  row.operations = 2.0 * static_cast<double>(m * n * k);
  if (m == 1) row.bytes = static_cast<double>(n * k) / (format.codes == DType::e2m1x2 ? 2 : 1);
  Tensor& x = inputs(DType::bf16, {m, k});
  Tensor& y = keep(Tensor(DType::bf16, {m, n}));
  std::vector<WeightView> w, w16;
  for (int64_t i = 0; i < copies; ++i) {
    Tensor& master = inputs(DType::bf16, {n, k});
    w16.push_back(weight(master));
    WeightView q;
    q.row_grid = {format.block_rows, 0};
    q.col_grid = {format.block_cols, 0};
    Tensor& codes = keep(Tensor(format.codes, code_shape(format, n, k)));
    Tensor& scales = keep(Tensor(DType::ue8m0, scale_shape(format, n, k)));
    quantize_by_grid(context(1), codes, scales, q.row_grid, q.col_grid, master);
    q.rows = codes;
    q.scales = scales;
    Tensor& panels = keep(Tensor(format.codes, panel_shape(codes.view().shape)));
    Tensor& panel_scales = keep(Tensor(DType::f32, panel_scale_shape(q)));
    pack_panels(context(1), panels, codes);
    pack_panel_scales(context(1), panel_scales, q);
    q.panels = panels;
    q.panel_scales = panel_scales;
    w.push_back(q);
  }
  const auto walk = [threads, &x, &y](std::vector<WeightView> all) {
    return [=, &x, &y, i = size_t{0}]() mutable {
      i = (i + 1) % all.size();
      matmul(context(threads), y, x, all[i]);
    };
  };
  row.ours = walk(w);
  row.peer = walk(w16);
  return row;
}

enum class Pass { forward, input, weight };

Row gradient_row(DType dtype, int64_t m, int64_t n, int64_t k, int threads, Pass pass) {
  Row row;
  row.threads = threads;
  row.operations = 2.0 * static_cast<double>(m * n * k);
  Tensor& dy = inputs(DType::f32, {m, n});
  Tensor& x = inputs(dtype, {m, k});
  Tensor& w = inputs(dtype, {n, k});
  Tensor& dx = keep(Tensor(DType::f32, {m, k}));
  Tensor& dw = keep(Tensor(DType::f32, {n, k}));
  if (pass == Pass::input) row.ours = [=, &dx, &dy, &w] { matmul_backward_input(context(threads), dx, dy, {w, {}}); };
  else row.ours = [=, &dw, &dy, &x] { matmul_backward_weight(context(threads), dw, dy, x); };
#ifdef LOCKSTEP_HAVE_OPENBLAS
  const float* other = inputs(DType::f32, pass == Pass::input ? Shape{n, k} : Shape{m, k}).ptr<float>();
  float* out = keep(Tensor(DType::f32, pass == Pass::input ? Shape{m, k} : Shape{n, k})).ptr<float>();
  const float* left = dy.ptr<float>();
  const int mi = static_cast<int>(m), ni = static_cast<int>(n), ki = static_cast<int>(k);
  if (pass == Pass::input)
    row.peer = [=] {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, mi, ki, ni, 1.0f, left, ni, other, ki, 0.0f, out, ki);
    };
  else
    row.peer = [=] {
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, ni, ki, mi, 1.0f, left, ni, other, ki, 1.0f, out, ki);
    };
#endif
  return row;
}

// The peer runs one sgemm an expert.
Row grouped_row(DType dtype, int64_t experts, int64_t rows, int64_t n, int64_t k, int threads, Pass pass) {
  Row row;
  const int64_t m = experts * rows;
  row.threads = threads;
  row.operations = 2.0 * static_cast<double>(m * n * k);
  std::vector<int32_t> at;
  for (int64_t e = 0; e <= experts; ++e) at.push_back(static_cast<int32_t>(e * rows));
  Tensor& offsets = keep(testing::int_tensor(at));
  Tensor& x = inputs(dtype, {m, k});
  Tensor& y = keep(Tensor(dtype, {m, n}));
  const WeightView w = weight(inputs(dtype, {experts, n, k}));
  Tensor& dy = inputs(DType::f32, {m, n});
  Tensor& dx = keep(Tensor(DType::f32, {m, k}));
  Tensor& dw = keep(Tensor(DType::f32, {experts, n, k}));
  switch (pass) {
    case Pass::forward: row.ours = [=, &x, &y, &offsets] { grouped_matmul(context(threads), y, x, w, offsets); }; break;
    case Pass::input:
      row.ours = [=, &dx, &dy, &offsets] { grouped_matmul_backward_input(context(threads), dx, dy, w, offsets); };
      break;
    case Pass::weight:
      row.ours = [=, &dw, &dy, &x, &offsets] { grouped_matmul_backward_weight(context(threads), dw, dy, x, offsets); };
      break;
  }
#ifdef LOCKSTEP_HAVE_OPENBLAS
  const float* x32 = inputs(DType::f32, {m, k}).ptr<float>();
  const float* w32 = inputs(DType::f32, {experts, n, k}).ptr<float>();
  const float* dy32 = dy.ptr<float>();
  float* out = keep(Tensor(DType::f32, {m + experts * n, n + k})).ptr<float>();
  const int mi = static_cast<int>(rows), ni = static_cast<int>(n), ki = static_cast<int>(k);
  row.peer = [=] {
    for (int64_t e = 0; e < experts; ++e) {
      const float* xe = x32 + e * rows * k;
      const float* we = w32 + e * n * k;
      const float* dye = dy32 + e * rows * n;
      switch (pass) {
        case Pass::forward:
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, mi, ni, ki, 1.0f, xe, ki, we, ki, 0.0f, out + e * rows * n, ni);
          break;
        case Pass::input:
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, mi, ki, ni, 1.0f, dye, ni, we, ki, 0.0f, out + e * rows * k, ki);
          break;
        case Pass::weight:
          cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, ni, ki, mi, 1.0f, dye, ni, xe, ki, 1.0f, out + e * n * k, ki);
          break;
      }
    }
  };
#endif
  return row;
}

// The limits: fused multiply-adds on `threads` cores, and a copy of `bytes` from and to fresh memory.
Row peak_row(int threads) {
  Row row;
  row.threads = threads;
  row.operations = fma_chains(context(threads));
  row.ours = [=] { fma_chains(context(threads)); };
  return row;
}

Row copy_row(int64_t bytes, int64_t copies, int threads) {
  Row row;
  row.threads = threads;
  row.bytes = static_cast<double>(bytes);
  Tensor& from = keep(Tensor(DType::u8, {copies, bytes}));
  Tensor& to = keep(Tensor(DType::u8, {copies, bytes}));
  std::memset(from.view().data, 1, static_cast<size_t>(copies * bytes));
  std::memset(to.view().data, 2, static_cast<size_t>(copies * bytes));
  row.ours = [=, &from, &to, i = int64_t{0}]() mutable {
    i = (i + 1) % copies;
    uint8_t* target = to.view().row<uint8_t>(i);
    const uint8_t* source = from.view().row<uint8_t>(i);
    parallel_for(context(threads), bytes / 64, 64, [&](int64_t begin, int64_t end, int) {
      std::memcpy(target + begin * 64, source + begin * 64, static_cast<size_t>((end - begin) * 64));
    });
  };
  return row;
}

// Repacking weights after an optimizer step: bytes of w read, as many written.
Row pack_row(DType dtype, int64_t n, int64_t k, int threads) {
  Row row;
  row.threads = threads;
  row.bytes = static_cast<double>(n * k) * static_cast<double>(dtype_bytes(dtype));
  Tensor& rows = inputs(dtype, {n, k});
  Tensor& panels = keep(Tensor(dtype, panel_shape({n, k})));
  row.ours = [=, &rows, &panels] { pack_panels(context(threads), panels, rows); };
  return row;
}

void run_row(benchmark::State& state, const Row& row) {
  set_peer_threads(row.threads);
  const int64_t our_calls = calibrate(row.ours, kRoundSeconds);
  const int64_t peer_calls = row.peer ? calibrate(row.peer, kRoundSeconds) : 0;
  std::vector<double> ours, peer, ratio;
  for (auto _ : state) {
    ours.push_back(time_one(row.ours, our_calls));
    if (row.peer) {
      peer.push_back(time_one(row.peer, peer_calls));
      ratio.push_back(peer.back() / ours.back());
      // OpenBLAS workers poll for some 20 ms after a call; wait until they leave the cores to us.
      if (row.threads > 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
    state.SetIterationTime(ours.back());
  }
  const double best = *std::min_element(ours.begin(), ours.end());
  state.counters["threads"] = row.threads;
  state.counters["us"] = best * 1e6;
  state.counters["gflops"] = row.operations / best * 1e-9;
  state.counters["gbytes"] = row.bytes / best * 1e-9;
  if (row.peer) {
    const double peer_best = *std::min_element(peer.begin(), peer.end());
    state.counters["peer_gflops"] = row.operations / peer_best * 1e-9;
    state.counters["ratio"] = peer_best / best;
    state.counters["ratio_median"] = median(ratio);
  }
}

// One JSON line a row while it runs, one table at the end.
class Reporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      const std::string full = run.run_name.function_name, name = full.substr(0, full.rfind('/'));
      const auto value = [&](const char* key) {
        const auto it = run.counters.find(key);
        return it == run.counters.end() ? 0.0 : static_cast<double>(it->second);
      };
      fmt::print("{{\"bench\":\"matmul\",\"case\":\"{}\",\"threads\":{},\"us\":{:.3f},\"gflops\":{:.2f},\"gbytes_per_s\":{:.2f},"
                 "\"peer_gflops\":{:.2f},\"ratio\":{:.3f},\"ratio_median\":{:.3f}}}\n",
                 name, value("threads"), value("us"), value("gflops"), value("gbytes"), value("peer_gflops"), value("ratio"),
                 value("ratio_median"));
      std::fflush(stdout);
      const auto cell = [&](const char* key, int precision) {
        return value(key) == 0 ? std::string("-") : fmt::format("{:.{}f}", value(key), precision);
      };
      table_ +=
          fmt::format("{:<42} {:>2} {:>10} {:>9} {:>8} {:>9} {:>7} {:>7}\n", name, value("threads"), cell("us", 1),
                      cell("gflops", 1), cell("gbytes", 1), cell("peer_gflops", 1), cell("ratio", 2), cell("ratio_median", 2));
    }
  }
  void Finalize() override {
    fmt::print("\n{:<42} {:>2} {:>10} {:>9} {:>8} {:>9} {:>7} {:>7}\n{}", "case", "th", "us", "GFLOP/s", "GB/s", "OpenBLAS",
               "ratio", "median", table_);
  }

 private:
  std::string table_;
};

void register_rows() {
  for (const int threads : {1, 2}) {
    // Names end in /1 or /2 so that --benchmark_filter can choose the thread count; columns and JSON have it apart.
    const auto add_row = [threads](const std::function<Row()>& make, const std::string& name) {
      const auto run = [make](benchmark::State& state) {
        row_tensors().clear();
        run_row(state, make());
      };
      benchmark::RegisterBenchmark(fmt::format("{}/{}", name, threads).c_str(), run)->UseManualTime()->Iterations(kRounds);
    };
    add_row([=] { return peak_row(threads); }, "fma peak");
    for (const int64_t kib : {2048, 4096}) {
      add_row([=] { return copy_row(kib << 10, 1, threads); }, fmt::format("copy {} KiB", kib));
      add_row([=] { return copy_row(kib << 10, (64 << 10) / kib, threads); }, fmt::format("copy {} KiB cold", kib));
    }
    for (const bool fp4 : {false, true}) {
      const QuantFormat format = fp4 ? kFp4 : kFp8Weight;
      const std::string d = fp4 ? "fp4" : "fp8";
      add_row([=] { return quantized_row(format, 1, 1024, 1024, threads, 32); }, d + " M=1 N=1024 K=1024 cold");
      for (const int64_t m : {1, 8, 64, 512})
        add_row([=] { return quantized_row(format, m, 1024, 1024, threads, 1); }, fmt::format("{} M={} N=1024 K=1024", d, m));
      add_row([=] { return quantized_row(format, 64, 2048, 4096, threads, 1); }, d + " M=64 N=2048 K=4096");
    }
    for (const DType t : {DType::bf16, DType::f32}) {
      const std::string d = dtype_name(t);
      const int64_t copies = (64 << 20) / (1024 * 1024 * static_cast<int64_t>(dtype_bytes(t)));
      add_row([=] { return product_row(t, 1, 1024, 1024, threads, copies); }, d + " M=1 N=1024 K=1024 cold");
      for (const int64_t m : {1, 8, 64, 512})
        add_row([=] { return product_row(t, m, 1024, 1024, threads, 1); }, fmt::format("{} M={} N=1024 K=1024", d, m));
      for (const int64_t n : {24, 64, 128, 256})
        for (const int64_t k : {64, 128})
          add_row([=] { return product_row(t, 2048, n, k, threads, 1); }, fmt::format("{} M=2048 N={} K={}", d, n, k));
      add_row([=] { return pack_row(t, 1024, 1024, threads); }, d + " pack_panels N=1024 K=1024");
      add_row([=] { return product_row(t, 1, 64, 64, threads, 1); }, d + " M=1 N=64 K=64");
      add_row([=] { return gradient_row(t, 512, 1024, 1024, threads, Pass::input); }, d + " M=512 N=1024 K=1024 dx");
      add_row([=] { return gradient_row(t, 512, 1024, 1024, threads, Pass::weight); }, d + " M=512 N=1024 K=1024 dw");
      add_row([=] { return gradient_row(t, 2048, 128, 64, threads, Pass::input); }, d + " M=2048 N=128 K=64 dx");
      add_row([=] { return gradient_row(t, 2048, 128, 64, threads, Pass::weight); }, d + " M=2048 N=128 K=64 dw");
      add_row([=] { return grouped_row(t, 8, 100, 64, 64, threads, Pass::forward); }, d + " 8 experts 100 rows N=64 K=64");
      add_row([=] { return grouped_row(t, 8, 100, 64, 64, threads, Pass::input); }, d + " 8 experts 100 rows N=64 K=64 dx");
      add_row([=] { return grouped_row(t, 8, 100, 64, 64, threads, Pass::weight); }, d + " 8 experts 100 rows N=64 K=64 dw");
    }
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
#ifdef LOCKSTEP_HAVE_OPENBLAS
  fmt::print("OpenBLAS core: {}\n", openblas_get_corename());
#else
  fmt::print("built without OpenBLAS: no peer\n");
#endif
  lockstep::register_rows();
  lockstep::Reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  return 0;
}
