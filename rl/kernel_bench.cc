#include "rl/kernel_bench.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <regex>
#include <set>

#include "core/device.h"
#include "core/rng.h"
#include "io/json.h"
#include "model/state.h"
#include "rl/kernel_table.h"

namespace lockstep {

namespace {

// A call's arrays in the context's memory: random tokens, pages that lie in another order than they are read.
struct BuiltCall {
  BatchBuilder builder;
  const SequenceBatch* batch = nullptr;

  BuiltCall(Context& c, Arena& arena, const ModelConfig& config, const Call& call) : builder(config, default_page_tokens(config)) {
    Philox rng(1, RngPurpose::test);
    const int64_t S = call.sequences(), pages = (call.length + builder.page_tokens() - 1) / builder.page_tokens();
    std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(S)), page_ids(static_cast<size_t>(S));
    std::vector<SequenceRows> rows;
    for (int64_t s = 0; s < S; ++s) {
      auto& words = tokens[static_cast<size_t>(s)];
      auto& own = page_ids[static_cast<size_t>(s)];
      for (int64_t t = 0; t < call.tokens_of(s); ++t) words.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(config.vocab_size))));
      for (int64_t i = 0; i < pages; ++i) own.push_back(static_cast<int32_t>((pages - 1 - i) * S + s));
      rows.push_back({.tokens = words, .first_position = call.train ? 0 : call.length - 1, .slot = call.train ? -1 : static_cast<int32_t>(s), .pages = own});
    }
    batch = &builder.build(c, arena, rows, WantedRows::all);
  }
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s;
  for (const int64_t n : shape) s += (s.empty() ? "" : " x ") + std::to_string(n);
  return s;
}

Status keep_wanted(std::vector<Kernel>* kernels, const std::string& only) {
  if (only.empty()) return Status::ok();
  std::regex wanted;
  try {
    wanted.assign(only);
  } catch (const std::regex_error& e) {
    return errorf("bench: --only \"{}\" is no regular expression: {}", only, e.what());
  }
  std::set<std::string> names;
  for (const Kernel& k : *kernels) names.insert(k.title());
  std::erase_if(*kernels, [&](const Kernel& k) { return !std::regex_search(k.title(), wanted); });
  if (!kernels->empty()) return Status::ok();
  std::string list;
  for (const std::string& n : names) list += "\n  " + n;
  return errorf("bench: --only \"{}\" finds no kernel; there are{}", only, list);
}

float written(double x) { return static_cast<float>(x); }  // in as many digits as a measurement has

}  // namespace

Status bench_kernels(const ModelConfig& config, const KernelBenchOptions& o, const std::function<void(const std::string& line)>& tell) {
  const int64_t page = default_page_tokens(config), context = o.context > 0 ? o.context : std::min<int64_t>(4096, config.max_positions);
  std::vector<Call> calls;
  for (const int64_t n : o.decode) calls.push_back({.train = false, .tokens = n, .length = std::max(page, context / page * page)});
  calls.push_back({.train = true, .tokens = o.train_tokens, .length = std::min(o.row_tokens, o.train_tokens)});
  for (const Call& call : calls)
    if (call.length > config.max_positions)
      return errorf("bench: sequences of {} tokens for a model with max_position_embeddings {}; lower --context or --row", call.length, config.max_positions);
  std::vector<Kernel> kernels = kernel_table(config, calls, o.device);
  LOCKSTEP_RETURN_IF_ERROR(keep_wanted(&kernels, o.only));

  DeviceContext device(o.device, o.threads);
  Context& c = device;
  Operands operands(c);
  Clock clock(c, !o.warm);
  const Ceiling ceiling = measure_ceiling(clock, operands);
  const Result<std::string> library = gpu::blas_library();
  JsonLine head;
  head.add("bench", "ceiling").add("device", c.on_gpu() ? device_info().name : "cpu").add("threads", o.threads).add("copy_gb_s", written(ceiling.copy_bytes * 1e-9));
  head.add("f32_tflops", written(ceiling.f32 * 1e-12)).add("f32_by", ceiling.f32_by).add("bf16_tflops", written(ceiling.bf16 * 1e-12)).add("bf16_by", ceiling.bf16_by);
  head.add("e4m3_tflops", written(ceiling.e4m3 * 1e-12)).add("e4m3_by", ceiling.e4m3_by).add("library", library ? library.value() : library.message());
  tell(head.str());

  std::vector<std::unique_ptr<BuiltCall>> built;
  for (const Call& call : calls) built.push_back(std::make_unique<BuiltCall>(c, operands.arena(), config, call));
  for (const Kernel& k : kernels) {
    Timing t;
    {
      const ArenaScope scope(operands.arena());
      const auto run = k.set_up({operands, *built[k.call]->batch});
      t = clock.time(run, o.repeat);
      synchronize(c);
    }
    const double floor = ceiling.seconds(k.bytes, k.operations, k.unit);
    JsonLine line;
    line.add("bench", "kernel").add("op", k.op).add("name", k.name).add("pass", k.pass).add("dtype", dtype_name(k.dtype));
    if (k.pass != "update") line.add("tokens", calls[k.call].tokens);
    line.add("shape", shape_text(k.shape)).add("us", written(t.median * 1e6)).add("us_min", written(t.min * 1e6)).add("us_max", written(t.max * 1e6)).add("caches", clock.cold() ? "cold" : "warm");
    line.add("bytes", k.bytes).add("operations", k.operations).add("gb_s", written(k.bytes / t.median * 1e-9)).add("tflops", written(k.operations / t.median * 1e-12));
    line.add("floor_us", written(floor * 1e6)).add("bound", k.bytes / ceiling.copy_bytes >= floor ? "bytes" : "operations").add("share", written(floor / t.median));
    if (k.library) {
      const double theirs = library_seconds(clock, operands, *k.library, o.repeat);
      if (std::isfinite(theirs)) line.add("library_us", written(theirs * 1e6)).add("ratio", written(theirs / t.median));
    }
    tell(line.str());
  }
  return Status::ok();
}

}  // namespace lockstep
