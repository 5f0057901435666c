#include "train/micro_batch.h"

#include <algorithm>
#include <numeric>

#include "core/device.h"
#include "model/head.h"

namespace lockstep {

namespace {

// Address space only; pages are committed by first touch.
constexpr size_t kReserve = size_t{256} << 30;
constexpr int64_t kExpectedTokens = 1 << 16;  // a budget beyond is a way to say "all at once", however many these will be

}  // namespace

MicroBatchPlace::MicroBatchPlace(Context& c, const Weights& weights, const ActorOptions& options)
    : weights_(weights), layout_(weights.config(), options.replay), state_arena_("training state", kReserve, c.device), arena_("training step", kReserve, c.device),
      builder_(weights.config(), default_page_tokens(weights.config())) {
  saved_.arena = &arena_;
  saved_.recompute = options.recompute ? Recompute::layer : Recompute::none;
  reserve_pages(pages_for(std::min(options.max_tokens_per_microbatch, kExpectedTokens)));
}

// Grows to the largest micro-batch seen: short sequences and those over the budget need more pages than the budget's tokens alone.
void MicroBatchPlace::reserve_pages(int64_t pages) {
  if (pool_ && pool_->num_pages() >= pages) return;
  pool_.reset();
  state_arena_.release(0);
  pool_.emplace(weights_.config(), weights_.numerics(), 0, pages, builder_.page_tokens(), state_arena_);
  page_ids_.resize(static_cast<size_t>(pages));
  std::iota(page_ids_.begin(), page_ids_.end(), 0);
}

// Sequences into batch_, and their response rows into head_.
void MicroBatchPlace::pack_rows(Context& c, std::span<const TrainSample> samples, const MicroBatch& micro) {
  int64_t num_pages = 0, num_wanted = 0;
  for (const int32_t i : micro.samples) {
    num_pages += pages_for(trained_rows(samples[i]));
    num_wanted += samples[i].response_length();
  }
  reserve_pages(num_pages);

  rows_.clear();
  int64_t page = 0;
  for (const int32_t i : micro.samples) {
    const int64_t n = trained_rows(samples[i]), pages = pages_for(n);
    rows_.push_back({.tokens = std::span(samples[i].tokens).first(static_cast<size_t>(n)),
                     .first_position = 0,
                     .slot = -1,
                     .pages = std::span(page_ids_).subspan(static_cast<size_t>(page), static_cast<size_t>(pages))});
    page += pages;
  }
  batch_ = builder_.build(c, arena_, rows_, WantedRows::all);

  const ArenaScope host_scope(*c.host);
  Arena& made = c.on_gpu() ? *c.host : arena_;
  const TensorView wanted = made.tensor(DType::i32, {num_wanted}, "wanted rows");
  const TensorView target = made.tensor(DType::i32, {num_wanted}, "targets"), temperature = made.tensor(DType::f32, {num_wanted}, "temperatures");
  int64_t r = 0, first_row = 0;
  for (const int32_t i : micro.samples) {
    const TrainSample& s = samples[i];
    for (int64_t t = 0; t < s.response_length(); ++t, ++r) {
      wanted.ptr<int32_t>()[r] = static_cast<int32_t>(first_row + s.prompt_length + t - 1);
      target.ptr<int32_t>()[r] = s.tokens[static_cast<size_t>(s.prompt_length + t)];
      temperature.ptr<float>()[r] = s.temperature;
    }
    first_row += trained_rows(s);
  }
  batch_.wanted = on_device(c, wanted, arena_);
  head_.target = on_device(c, target, arena_);
  head_.temperature = on_device(c, temperature, arena_);
}

void MicroBatchPlace::unpack_choices(Context& c, std::span<const TrainSample> samples, const MicroBatch& micro) {
  const ModelConfig& m = weights_.config();
  const auto layers = static_cast<size_t>(m.num_layers());
  const bool entries = layout_.kind() == ReplayKind::routing_index;
  choices_.experts.assign(layers, {});
  choices_.entries.assign(entries ? layers : 0, {});
  for (const int32_t i : micro.samples)
    CHECK(layout_.holds(samples[i].choices, trained_rows(samples[i])), "sample {}: choices of {} experts and {} entries for {} rows", samples[i].index,
          samples[i].choices.experts.size(), samples[i].choices.entries.size(), trained_rows(samples[i]));
  // [T, width] of a layer, from its rows in every sample.
  const auto unpack = [&](int64_t width, auto get) {
    const TensorView all = arena_.tensor(DType::i32, {batch_.seq.num_tokens, width}, "choices");
    (void)fill_on_host(c, all, [&](TensorView host) {
      int64_t row = 0;
      for (const int32_t i : micro.samples) {
        const int64_t n = trained_rows(samples[i]);
        get(samples[i].choices, host.slice(row, n));
        row += n;
      }
      return Status::ok();
    });
    return all;
  };
  const Range& held = weights_.shard().layers;
  for (int64_t i = held.begin; i < held.end; ++i) {
    const auto layer = static_cast<int>(i);
    const LayerConfig& l = m.layers[static_cast<size_t>(i)];
    choices_.experts[static_cast<size_t>(i)] =
        unpack(m.experts_per_token, [&](const ChoiceLog& log, TensorView rows) { layout_.get_experts(log, 0, layer, rows); });
    if (!entries || l.attention != AttentionKind::csa) continue;
    choices_.entries[static_cast<size_t>(i)] =
        unpack(m.selected_columns(l.ratio), [&](const ChoiceLog& log, TensorView rows) { layout_.get_entries(log, 0, layer, rows); });
  }
}

Model MicroBatchPlace::repeating(const Model& model) const {
  Model m = model;
  if (!choices_.experts.empty()) m.replay = &choices_;
  return m;
}

ConstTensorView MicroBatchPlace::forward(Context& c, const Model& model, std::span<const TrainSample> samples, const MicroBatch& micro, bool keep,
                                         ConstTensorView input) {
  arena_.release(0);
  head_ = {};
  pack_rows(c, samples, micro);
  if (layout_.kind() != ReplayKind::none) unpack_choices(c, samples, micro);
  const TensorView output = lockstep::forward(c, repeating(model), batch_, *pool_, keep ? &saved_ : nullptr, input);
  if (!weights_.shard().head) return output;

  HeadRows& h = head_;
  const int64_t num_wanted = h.target.rows();
  h.hidden = arena_.tensor(output.dtype, output.shape, "hidden");
  copy(c, h.hidden, output);
  h.logprob = arena_.tensor(DType::f32, {num_wanted}, "log-probs");
  h.lse = arena_.tensor(DType::f32, {num_wanted}, "lse");
  h.entropy = arena_.tensor(DType::f32, {num_wanted}, "entropies");
  head_logprob(c, model, h.logprob, h.lse, h.entropy, h.hidden, h.target, h.temperature);
  return {};
}

TensorView MicroBatchPlace::head_backward(Context& c, const Model& model, ConstTensorView dlogprob, ConstTensorView dentropy, Gradients& gradients) {
  const TensorView dhidden = arena_.tensor(DType::f32, head_.hidden.shape, "dhidden");
  head_logprob_backward(c, model, dhidden, gradients.tensors.head, dlogprob, dentropy, head_.hidden, head_.target, head_.temperature, head_.lse,
                        head_.entropy);
  return dhidden;
}

void MicroBatchPlace::backward(Context& c, const Model& model, ConstTensorView doutput, Gradients& gradients, TensorView dinput) {
  lockstep::backward(c, repeating(model), batch_, *pool_, saved_, doutput, gradients, dinput);
}

}  // namespace lockstep
