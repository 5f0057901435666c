#include "model/golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/device.h"
#include "io/safetensors.h"
#include "model/checkpoint_io.h"
#include "model/stack.h"
#include "ops/cast/cast.h"
#include "ops/logprob/logprob.h"

namespace lockstep {

namespace {

// Reference numbers of one tensor as f64, whatever float dtype the file has.
Result<std::vector<double>> read_reals(const SafetensorsFile& file, const std::string& name, size_t expected) {
  const SafetensorsEntry* e = file.find(name);
  if (e == nullptr) return errorf("{}: tensor {} is missing", file.path(), name);
  const size_t width = e->dtype == "F64" ? 8 : e->dtype == "F32" ? 4 : 0;
  if (width == 0) return errorf("{}: tensor {} is {}, expected F32 or F64", file.path(), name, e->dtype);
  const auto bytes = file.bytes(*e);
  if (bytes.size() != expected * width) return errorf("{}: tensor {} has shape {}, expected {} elements", file.path(), name, e->shape_str(), expected);
  std::vector<double> out(expected);
  for (size_t i = 0; i < expected; ++i) {
    float f;
    if (width == 8) {
      std::memcpy(&out[i], bytes.data() + i * 8, 8);
    } else {
      std::memcpy(&f, bytes.data() + i * 4, 4);
      out[i] = f;
    }
    if (!std::isfinite(out[i])) return errorf("{}: tensor {} holds {} at element {}; nothing can be compared with that", file.path(), name, out[i], i);
  }
  return out;
}

double element(ConstTensorView v, int64_t row, int64_t i) {
  return v.dtype == DType::f32 ? v.row<float>(row)[i] : to_f32(v.row<bf16>(row)[i]);
}

bool all_zero(ConstTensorView v) {
  const float* p = v.ptr<float>();
  return std::all_of(p, p + v.shape.elements(), [](float x) { return x == 0.0f; });
}

void keep_max(double& worst, double value) {
  if (!(value <= worst) && !std::isnan(worst)) worst = value;  // a NaN stays
}

double max_abs(ConstTensorView v, const std::vector<double>& want) {
  double worst = 0;
  const int64_t width = v.shape.row_elements();
  for (int64_t r = 0; r < v.rows(); ++r)
    for (int64_t i = 0; i < width; ++i) keep_max(worst, std::abs(element(v, r, i) - want[static_cast<size_t>(r * width + i)]));
  return worst;
}

// The model of one golden file with everything it needs to run.
class GoldenModel {
 public:
  static Result<std::unique_ptr<GoldenModel>> open(Context& c, const std::string& path, Numerics numerics) {
    Result<SafetensorsFile> file = SafetensorsFile::open(path);
    if (!file) return file.status();
    const auto it = file.value().metadata().find("config");
    if (it == file.value().metadata().end()) return errorf("{}: metadata key config is missing; is this a golden file?", path);
    Result<ModelConfig> config = parse_model_config(it->second, path + ": config");
    if (!config) return config.status();
    // Before memory is reserved for them: weights of at least two bytes each that are not in the file need not be asked for.
    int64_t elements = 0;
    uint64_t bytes_of_file = 0;
    for (const TensorSpec& t : tensor_table(config.value())) elements += t.shape.elements();
    for (const SafetensorsEntry& e : file.value().tensors()) bytes_of_file += e.bytes();
    if (static_cast<uint64_t>(elements) > bytes_of_file / 2)
      return errorf("{}: config describes a model of {} weights, the file has {} bytes", path, elements, bytes_of_file);
    const SafetensorsEntry* ids = file.value().find("input_ids");
    if (ids == nullptr || ids->dtype != "I64" || ids->shape.size() != 2 || ids->shape[0] < 1 || ids->shape[1] < 1)
      return errorf("{}: input_ids must be I64 [B, S] with B, S >= 1", path);
    auto g = std::unique_ptr<GoldenModel>(new GoldenModel(file.take(), config.take(), numerics, c.device));
    g->batch_size = ids->shape[0];
    g->length = ids->shape[1];
    if (g->length > g->config.max_positions)
      return errorf("{}: {} tokens a sequence, max_position_embeddings is {}", path, g->length, g->config.max_positions);
    const auto bytes = g->file.bytes(*ids);
    for (int64_t i = 0; i < g->batch_size * g->length; ++i) {
      int64_t id;
      std::memcpy(&id, bytes.data() + i * 8, 8);
      if (id < 0 || id >= g->config.vocab_size) return errorf("{}: input_ids holds {}, vocab_size is {}", path, id, g->config.vocab_size);
      g->tokens.push_back(static_cast<int32_t>(id));
    }
    Result<ReadBox> source = released_source(path, {path}, "weight.", g->config);
    if (!source) return source.status();
    LOCKSTEP_RETURN_IF_ERROR(g->weights.load(c, source.value(), 0));
    g->model.weights = &g->weights;
    g->model.rope = make_rope_tables(c, g->config, g->length, g->arena);
    return g;
  }

  std::span<const int32_t> sequence(int64_t b) const { return std::span(tokens).subspan(static_cast<size_t>(b * length), static_cast<size_t>(length)); }

  SafetensorsFile file;
  ModelConfig config;
  Arena arena;
  Weights weights;
  Model model;
  std::vector<int32_t> tokens;  // [B, S]
  int64_t batch_size = 0, length = 0;

 private:
  GoldenModel(SafetensorsFile f, ModelConfig m, Numerics numerics, Device device)
      : file(std::move(f)), config(std::move(m)), arena("golden", size_t{64} << 30, device), weights(config, numerics, arena) {}
};

// Prefill of length / 3 tokens (at least one), then one token at a time, through slots and pages; the final hidden rows [B * S, D] in order.
TensorView decode_hidden(Context& c, GoldenModel& g) {
  const int64_t B = g.batch_size, S = g.length, page_tokens = default_page_tokens(g.config);
  StatePool state(g.config, g.weights.numerics(), B, B * ((S + page_tokens - 1) / page_tokens), page_tokens, g.arena);
  const int64_t pages_each = state.pages_for(S);
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(B));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < pages_each; ++i) pages[static_cast<size_t>(b)].push_back(static_cast<int32_t>(i * B + b));  // interleaved
  TensorView out = g.arena.tensor(g.weights.dtype(), {B * S, g.config.hidden_size}, "golden.decode");
  BatchBuilder builder(g.config, page_tokens);
  for (int64_t at = 0; at < S;) {
    const int64_t count = at == 0 ? std::max<int64_t>(1, S / 3) : 1;
    ArenaScope scope(*c.workspace);
    std::vector<SequenceRows> rows;
    for (int64_t b = 0; b < B; ++b)
      rows.push_back({g.sequence(b).subspan(static_cast<size_t>(at), static_cast<size_t>(count)), at, static_cast<int32_t>(b), pages[static_cast<size_t>(b)]});
    const TensorView hidden = forward(c, g.model, builder.build(c, *c.workspace, rows, WantedRows::all), state, nullptr);
    for (int64_t b = 0; b < B; ++b)
      copy(c, out.slice(b * S + at, count), hidden.slice(b * count, count));
    at += count;
  }
  return out;
}

Status compare_gradients(GoldenModel& g, const Gradients& gradients, GoldenReport& report) {
  const TensorNames names(gradients.table);
  std::vector<uint8_t> seen(gradients.table.size(), 0);
  std::vector<double> reference_norms;
  double whole = 0;  // |all reference gradients|^2
  for (const SafetensorsEntry& e : g.file.tensors()) {
    constexpr std::string_view kPrefix = "grad.";
    if (!std::string_view(e.name).starts_with(kPrefix)) continue;
    report.has_gradients = true;
    const std::vector<TensorPiece> pieces = names.pieces(std::string_view(e.name).substr(kPrefix.size()));
    if (pieces.empty()) return errorf("{}: {} is not a tensor of the config", g.file.path(), e.name);
    size_t elements = 1;
    for (int64_t d : e.shape) elements *= static_cast<size_t>(d);
    Result<std::vector<double>> want = read_reals(g.file, e.name, elements);
    if (!want) return want.status();
    // A gate_up stack holds two of our tensors; its error is taken over both.
    double difference = 0, norm = 0;
    bool have = true;
    for (const TensorPiece& piece : pieces) {
      const TensorView& ours = gradients.set.views[static_cast<size_t>(piece.id)];
      seen[static_cast<size_t>(piece.id)] = 1;
      if (ours.empty()) {
        report.grad_unexpected.push_back(e.name + " (in the file alone)");
        have = false;
        continue;
      }
      const TensorView v = piece.expert >= 0 ? ours.at(piece.expert) : ours;
      const int64_t halves = piece.gate_up_half < 0 ? 1 : 2;
      if (v.shape.elements() * halves != static_cast<int64_t>(elements))
        return errorf("{}: {} has shape {}, the config asks for {} elements", g.file.path(), e.name, e.shape_str(), v.shape.elements() * halves);
      const int64_t block = halves == 1 ? v.shape.elements() : v.shape[1] * v.shape[2];
      for (int64_t i = 0; i < v.shape.elements(); ++i) {
        const int64_t at = halves == 1 ? i : (2 * (i / block) + piece.gate_up_half) * block + i % block;
        const double w = want.value()[static_cast<size_t>(at)], d = v.ptr<float>()[i] - w;
        difference += d * d;
        norm += w * w;
      }
    }
    if (!have) continue;
    report.gradients.push_back({released_name(std::string_view(e.name).substr(kPrefix.size())), std::sqrt(difference)});
    reference_norms.push_back(std::sqrt(norm));
    whole += norm;
  }
  for (size_t i = 0; i < report.gradients.size(); ++i) {
    const double scale = std::max(reference_norms[i], kGradientFloor * std::sqrt(whole));
    if (scale > 0) report.gradients[i].relative_l2 /= scale;
    keep_max(report.grad_rel_l2_max, report.gradients[i].relative_l2);
  }
  if (!report.has_gradients) return Status::ok();
  for (size_t i = 0; i < seen.size(); ++i)
    if (!seen[i] && !gradients.set.views[i].empty() && !all_zero(gradients.set.views[i])) report.grad_unexpected.push_back(gradients.table[i].name + " (ours alone)");
  // A NaN is the worst of all.
  const auto badness = [](const GoldenGradient& g) { return std::isnan(g.relative_l2) ? std::numeric_limits<double>::infinity() : g.relative_l2; };
  std::sort(report.gradients.begin(), report.gradients.end(), [&](const auto& a, const auto& b) { return badness(a) > badness(b); });
  return Status::ok();
}

}  // namespace

Result<GoldenReport> verify_golden(Context& c, const std::string& path, Numerics numerics) {
  Result<std::unique_ptr<GoldenModel>> opened = GoldenModel::open(c, path, numerics);
  if (!opened) return opened.status();
  GoldenModel& g = *opened.value();
  const ModelConfig& m = g.config;
  const int64_t B = g.batch_size, S = g.length, T = B * S, D = m.hidden_size, V = m.vocab_size, L = m.num_layers();
  GoldenReport report;
  const ArenaScope scope(*c.workspace), host_scope(*c.host);

  // The packed forward over whole sequences, keeping activations.
  const int64_t page_tokens = default_page_tokens(m);
  StatePool state(m, numerics, 0, B * ((S + page_tokens - 1) / page_tokens), page_tokens, g.arena);
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(B));
  std::vector<SequenceRows> rows;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < state.pages_for(S); ++i) pages[static_cast<size_t>(b)].push_back(static_cast<int32_t>(b * state.pages_for(S) + i));
    rows.push_back({g.sequence(b), 0, -1, pages[static_cast<size_t>(b)]});
  }
  BatchBuilder builder(m, page_tokens);
  const SequenceBatch& batch = builder.build(c, *c.workspace, rows, WantedRows::all);
  Saved saved;
  saved.arena = &g.arena;
  const TensorView hidden = forward(c, g.model, batch, state, &saved);

  // Hidden states: every layer's input streams, then the normed output.
  for (int64_t i = 0; i <= L; ++i) {
    const std::string name = "hidden." + std::to_string(i);
    if (g.file.find(name) == nullptr) continue;
    const ConstTensorView ours = i < L ? saved.layer_inputs[static_cast<size_t>(i)] : ConstTensorView(hidden);
    Result<std::vector<double>> want = read_reals(g.file, name, static_cast<size_t>(ours.shape.elements()));
    if (!want) return want.status();
    report.has_hidden = true;
    report.hidden_max_abs.push_back(max_abs(on_host(c, ours), want.value()));
    keep_max(report.hidden_max_abs_all, report.hidden_max_abs.back());
  }

  // Logits and next-token log-probabilities.
  const WeightView& head = g.weights.tensors().head;
  TensorView logits = g.arena.tensor(DType::f32, {T, V}, "golden.logits");
  matmul(c, logits, hidden, head);
  if (g.file.find("logits.f64") != nullptr) {
    Result<std::vector<double>> want = read_reals(g.file, "logits.f64", static_cast<size_t>(T * V));
    if (!want) return want.status();
    report.has_logits = true;
    report.logits_max_abs = max_abs(on_host(c, logits), want.value());
  }
  const TensorView target = c.host->zeros(DType::i32, {T}, "golden.target"), temperature = c.host->tensor(DType::f32, {T}, "golden.temperature");
  const TensorView dlogprob = c.host->zeros(DType::f32, {T}, "golden.dlogprob");
  for (int64_t t = 0; t < T; ++t) {
    temperature.ptr<float>()[t] = 1.0f;
    if (t % S + 1 == S) continue;  // the last token predicts nothing
    target.ptr<int32_t>()[t] = g.tokens[static_cast<size_t>(t + 1)];
    dlogprob.ptr<float>()[t] = static_cast<float>(-1.0 / static_cast<double>(B * (S - 1)));
  }
  const ConstTensorView targets = on_device(c, target, g.arena), temperatures = on_device(c, temperature, g.arena);
  const TensorView logprob = g.arena.tensor(DType::f32, {T}, "golden.logprob"), lse = g.arena.tensor(DType::f32, {T}, "golden.lse");
  const TensorView entropy = g.arena.tensor(DType::f32, {T}, "golden.entropy");
  select_logprob(c, logprob, lse, entropy, hidden, head, targets, temperatures);
  if (g.file.find("logprob.f64") != nullptr && S > 1) {
    Result<std::vector<double>> want = read_reals(g.file, "logprob.f64", static_cast<size_t>(B * (S - 1)));
    if (!want) return want.status();
    report.has_logprobs = true;
    double sum = 0;
    const ConstTensorView ours = on_host(c, logprob);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t + 1 < S; ++t) {
        const double error = std::abs(ours.ptr<float>()[b * S + t] - want.value()[static_cast<size_t>(b * (S - 1) + t)]);
        keep_max(report.logprob_max_abs, error);
        sum += error;
      }
    report.logprob_mean_abs = sum / static_cast<double>(B * (S - 1));
  }

  // Gradients of the mean next-token loss.
  Gradients gradients = make_gradients(m, g.arena, [](const TensorSpec&) { return true; });
  if (S > 1) {
    TensorView dhidden = g.arena.tensor(DType::f32, {T, D}, "golden.dhidden");
    select_logprob_backward(c, dhidden, gradients.tensors.head, on_device(c, dlogprob, g.arena), ConstTensorView(), hidden, head, targets, temperatures, lse,
                            entropy);
    backward(c, g.model, batch, state, saved, dhidden, gradients);
    for (TensorView& v : gradients.set.views)
      if (c.on_gpu() && !v.empty()) v = host_copy(c, v);
    LOCKSTEP_RETURN_IF_ERROR(compare_gradients(g, gradients, report));
  }

  // Decoding through state gives the same bits.
  const TensorView decoded = decode_hidden(c, g);
  report.decode_bit_equal = std::memcmp(on_host(c, decoded).data, on_host(c, hidden).data, hidden.bytes()) == 0;
  if (g.file.find("decode_logits.f64") != nullptr) {
    Result<std::vector<double>> want = read_reals(g.file, "decode_logits.f64", static_cast<size_t>(T * V));
    if (!want) return want.status();
    matmul(c, logits, decoded, head);
    report.has_decode_logits = true;
    report.decode_logits_max_abs = max_abs(on_host(c, logits), want.value());
  }
  return report;
}

std::string golden_failures(const GoldenReport& r, Numerics numerics, const GoldenLimits& limits) {
  std::vector<std::string> failed;
  const auto within = [&](const char* what, bool present, double value, double limit) {
    if (present && !(value <= limit)) failed.push_back(fmt::format("{} {:.3g} over {:.3g}", what, value, limit));
  };
  if (numerics == Numerics::f32) {
    within("logits_max_abs", r.has_logits, r.logits_max_abs, limits.logits);
    within("logprob_max_abs", r.has_logprobs, r.logprob_max_abs, limits.logprob);
    within("hidden_max_abs", r.has_hidden, r.hidden_max_abs_all, limits.hidden);
    within("grad_rel_l2_max", r.has_gradients, r.grad_rel_l2_max, limits.gradient);
  }
  for (const double value : {r.logits_max_abs, r.logprob_max_abs, r.hidden_max_abs_all, r.grad_rel_l2_max, r.decode_logits_max_abs})
    if (!std::isfinite(value)) {
      failed.push_back("a result is not finite");
      break;
    }
  if (!r.has_logits && !r.has_logprobs && !r.has_hidden && !r.has_gradients) failed.push_back("the file holds no reference to compare with");
  if (!r.grad_unexpected.empty()) failed.push_back(fmt::format("{} gradients do not match the file's list, first {}", r.grad_unexpected.size(), r.grad_unexpected.front()));
  if (!r.decode_bit_equal) failed.push_back("decode differs from the packed forward");
  std::string text;
  for (const std::string& f : failed) text += (text.empty() ? "" : "; ") + f;
  return text;
}

}  // namespace lockstep
