#include "rl/diagnose.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/formats.h"
#include "model/head.h"

namespace lockstep {

namespace {

// Appends the rows of one probe call. Calls come in the order of the forward, again for every chunk.
void record(Trace& trace, int layer, std::string_view name, ConstTensorView rows) {
  auto point = std::find_if(trace.points.begin(), trace.points.end(),
                            [&](const Trace::Point& p) { return p.layer == layer && p.name == name; });
  const size_t row_bytes = static_cast<size_t>(rows.shape.row_elements()) * dtype_bytes(rows.dtype);
  if (point == trace.points.end()) {
    trace.points.push_back({layer, std::string(name), rows.dtype, row_bytes, {}});
    point = trace.points.end() - 1;
  }
  CHECK(point->row_bytes == row_bytes && point->dtype == rows.dtype, "layer {} {}: rows of {} {} bytes after rows of {} {}",
        layer, name, row_bytes, dtype_name(rows.dtype), point->row_bytes, dtype_name(point->dtype));
  for (int64_t r = 0; r < rows.rows(); ++r) {
    const std::byte* from =
        static_cast<const std::byte*>(rows.data) + r * rows.row_stride * static_cast<int64_t>(dtype_bytes(rows.dtype));
    point->rows.insert(point->rows.end(), from, from + row_bytes);
  }
}

double element_value(const std::byte* data, DType dtype, size_t i) {
  const auto read = [&]<typename T>(T value) {
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f32: return read(float{});
    case DType::bf16: return to_f32(read(bf16{}));
    case DType::f64: return read(double{});
    case DType::i32: return read(int32_t{});
    case DType::i64: return static_cast<double>(read(int64_t{}));
    case DType::u8: return read(uint8_t{});
    case DType::e4m3: return to_f32(read(e4m3{}));
    case DType::e5m2: return to_f32(read(e5m2{}));
    case DType::ue8m0: return to_f32(read(ue8m0{}));
    case DType::e2m1x2: return read(e2m1x2{}).bits;  // two numbers: the byte
  }
  return 0;
}

}  // namespace

Trace trace_sequence(Context& c, const Model& model, std::span<const int32_t> tokens, int64_t chunk, float temperature) {
  const int64_t rows = static_cast<int64_t>(tokens.size()) - 1;
  CHECK(rows >= 1, "a sequence of {} tokens has no next token", tokens.size());
  CHECK(chunk >= 0 && temperature > 0, "chunk {} temperature {}", chunk, temperature);
  const ModelConfig& config = model.weights->config();
  Trace trace;
  const Probe probe = [&](int layer, std::string_view point, ConstTensorView seen) { record(trace, layer, point, seen); };
  Model probed = model;
  probed.probe = &probe;

  const bool whole = chunk == 0;
  const int64_t page_tokens = default_page_tokens(config);
  const int64_t num_pages = (rows + page_tokens - 1) / page_tokens;
  const StateSize size = StatePool::size(config, model.weights->numerics(), page_tokens);
  Arena state_arena("diagnosis state",
                    size.slot_bytes + static_cast<size_t>(num_pages + 1) * size.page_bytes + (size_t{1} << 20));
  const StatePool state(config, model.weights->numerics(), 1, num_pages, page_tokens, state_arena);
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  BatchBuilder builder(config, page_tokens);

  trace.logprobs.resize(static_cast<size_t>(rows));
  const int64_t step = whole ? rows : chunk;
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = std::min(step, rows - first);
    ArenaScope scope(*c.workspace);
    const SequenceRows piece{.tokens = tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                             .first_position = first,
                             .slot = whole ? -1 : 0,
                             .pages = std::span(pages).first(static_cast<size_t>(state.pages_for(first + count)))};
    const SequenceBatch& batch = builder.build(c, *c.workspace, std::span(&piece, 1), WantedRows::all);
    const TensorView hidden = forward(c, probed, batch, state, nullptr);
    const TensorView target = c.workspace->tensor(DType::i32, {count}, "target");
    const TensorView temperatures = c.workspace->tensor(DType::f32, {count}, "temperature");
    std::memcpy(target.data, tokens.data() + first + 1, static_cast<size_t>(count) * sizeof(int32_t));
    std::fill_n(temperatures.ptr<float>(), count, temperature);
    const TensorView logprob(trace.logprobs.data() + first, DType::f32, {count});
    head_logprob(c, probed, logprob, {}, {}, hidden, target, temperatures);
  }
  return trace;
}

std::string Difference::str() const {
  if (!found) return "no difference";
  const std::string where = layer < 0 ? point : fmt::format("layer {} {}", layer, point);
  return fmt::format("{}, row {}, element {}: {:.9g} against {:.9g}", where, row, element, a, b);
}

Difference first_difference(const Trace& a, const Trace& b) {
  Difference d;
  for (const Trace::Point& pa : a.points) {
    const auto pb = std::find_if(b.points.begin(), b.points.end(),
                                 [&](const Trace::Point& p) { return p.layer == pa.layer && p.name == pa.name; });
    if (pb == b.points.end() || pb->dtype != pa.dtype || pb->row_bytes != pa.row_bytes) {
      return {.found = true, .layer = pa.layer, .point = pa.name + " (shape)"};
    }
    const size_t rows = pa.row_bytes == 0 ? 0 : std::min(pa.rows.size(), pb->rows.size()) / pa.row_bytes;
    for (size_t r = 0; r < rows; ++r) {
      const std::byte* ra = pa.rows.data() + r * pa.row_bytes;
      const std::byte* rb = pb->rows.data() + r * pa.row_bytes;
      if (std::memcmp(ra, rb, pa.row_bytes) == 0) continue;
      const size_t width = dtype_bytes(pa.dtype);
      size_t e = 0;
      while (std::memcmp(ra + e * width, rb + e * width, width) == 0) ++e;
      return {.found = true,
              .layer = pa.layer,
              .point = pa.name,
              .row = static_cast<int64_t>(r),
              .element = static_cast<int64_t>(e),
              .a = element_value(ra, pa.dtype, e),
              .b = element_value(rb, pa.dtype, e)};
    }
    if (pa.rows.size() != pb->rows.size()) return {.found = true, .layer = pa.layer, .point = pa.name + " (number of rows)"};
  }
  for (size_t r = 0; r < std::min(a.logprobs.size(), b.logprobs.size()); ++r) {
    if (std::bit_cast<uint32_t>(a.logprobs[r]) != std::bit_cast<uint32_t>(b.logprobs[r])) {
      return {.found = true, .point = "logprob", .row = static_cast<int64_t>(r), .a = a.logprobs[r], .b = b.logprobs[r]};
    }
  }
  return d;
}

Comparison compare_logprobs(std::span<const TrainSample> samples, std::span<const TokenLogprobs> seen) {
  CHECK_EQ(samples.size(), seen.size());
  Comparison result;
  for (size_t i = 0; i < samples.size(); ++i) {
    const TrainSample& s = samples[i];
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (s.mask[t] == 0) continue;
      ++result.num_tokens;
      const float sampled = s.rollout_logprob[t], trained = seen[i].logprob[t];
      if (std::bit_cast<uint32_t>(sampled) == std::bit_cast<uint32_t>(trained)) continue;
      ++result.different;
      const double gap = std::abs(static_cast<double>(trained) - static_cast<double>(sampled));
      if (!(gap <= result.max_gap)) result.max_gap = gap;
      if (!result.first) {
        result.first = Mismatch{.sample_index = s.index,
                                .tokens = s.tokens,
                                .prompt_length = s.prompt_length,
                                .response_token = static_cast<int64_t>(t),
                                .temperature = s.temperature,
                                .rollout_logprob = sampled,
                                .train_logprob = trained};
      }
    }
  }
  return result;
}

std::string diagnose_difference(Context& c, const Model& model, const Mismatch& m) {
  const Trace sampled = trace_sequence(c, model, m.tokens, 1, m.temperature);
  const Trace packed = trace_sequence(c, model, m.tokens, 0, m.temperature);
  const Difference difference = first_difference(sampled, packed);
  std::string text = fmt::format(
      "sample {}: response token {} (position {}) was sampled with log-prob {:.9g}, training computed {:.9g}; this run demands "
      "equal bits.\n",
      m.sample_index, m.response_token, m.prompt_length + m.response_token, m.rollout_logprob, m.train_logprob);
  if (difference.found) {
    text += fmt::format("  Run again, token by token and packed, the forward first differs at {}.", difference.str());
  } else {
    text +=
        "  Run again, token by token and packed, this sequence gives equal bits everywhere when it is alone: one of the two depended on its "
        "neighbours in the batch, or read other weights or another temperature.";
  }
  return text;
}

}  // namespace lockstep
