#include "rl/memory.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "model/cost.h"
#include "model/expert_exchange.h"
#include "model/state.h"
#include "ops/logprob/logprob.h"
#include "train/loss.h"
#include "train/optimizer.h"
#include "train/partition.h"
#include "train/pipeline.h"

namespace lockstep {

namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kExpectedTokens = 1 << 16;  // train/micro_batch.cc: pages are reserved for no larger budget

int64_t footprint(int64_t bytes) { return static_cast<int64_t>(Arena::footprint(static_cast<size_t>(bytes))); }
int64_t f32(int64_t n) { return footprint(n * kFloat); }
int64_t width_of(Numerics numerics) { return static_cast<int64_t>(dtype_bytes(storage_dtype(numerics))); }

// StatePool's arena.
int64_t pool_bytes(const ModelConfig& m, Numerics numerics, int64_t slots, int64_t pages, int64_t page_tokens) {
  const int64_t s = width_of(numerics);
  int64_t bytes = 0;
  for (const LayerConfig& l : m.layers) {
    bytes += footprint(slots * m.window * m.head_dim * s);
    if (!l.compressed()) continue;
    const int64_t halves = l.overlap() ? 2 : 1, entries = pages * (page_tokens / l.ratio);
    bytes += f32(slots * halves * l.ratio * 2 * halves * m.head_dim) + footprint(entries * m.head_dim * s);
    if (l.attention != AttentionKind::csa) continue;
    bytes += f32(slots * halves * l.ratio * 2 * halves * m.index_head_dim) + footprint(entries * m.index_head_dim * s);
  }
  return bytes;
}

// What a micro-batch's place takes beside the model's kept activations: the packed batch, rows of the head and their gradients.
int64_t batch_bytes(const ModelConfig& m, Numerics numerics, const Shard& shard, const ModelCall& call, int64_t page_tokens) {
  const int64_t T = call.tokens(), S = static_cast<int64_t>(call.sequences.size()), R = call.wanted;
  int64_t max_pages = 0;
  for (const int64_t rows : call.sequences) max_pages = std::max(max_pages, (rows + page_tokens - 1) / page_tokens);
  int64_t bytes = 3 * f32(T) + f32(S + 1) + 3 * f32(S) + f32(S * max_pages);
  std::set<int64_t> ratios;
  for (const LayerConfig& l : m.layers)
    if (l.compressed()) ratios.insert(l.ratio);
  for (const int64_t ratio : ratios) {
    int64_t entries = 0;
    for (const int64_t rows : call.sequences) entries += rows / ratio;
    bytes += 3 * f32(entries) + f32(S + 1);
  }
  bytes += 3 * f32(R);  // wanted, targets, temperatures
  if (shard.head) bytes += footprint(R * m.hidden_size * width_of(numerics)) + 3 * f32(R) + 2 * f32(R) + f32(R * m.hidden_size);
  return bytes;
}

}  // namespace

int64_t total_bytes(const MemoryByOwner& memory) {
  int64_t sum = 0;
  for (const OwnerBytes& o : memory) sum += o.bytes;
  return sum;
}

namespace {

// Choices that are repeated, as the forward takes them.
int64_t choice_bytes(const ModelConfig& m, const Shard& shard, ReplayKind replay, int64_t tokens) {
  int64_t bytes = 0;
  for (int64_t i = shard.layers.begin; i < shard.layers.end && replay != ReplayKind::none; ++i) {
    const LayerConfig& l = m.layers[static_cast<size_t>(i)];
    bytes += f32(tokens * m.experts_per_token);
    if (replay == ReplayKind::routing_index && l.attention == AttentionKind::csa) bytes += f32(tokens * m.selected_columns(l.ratio));
  }
  return bytes;
}

}  // namespace

MemoryByOwner actor_bytes(const TrainerShape& t, const TrainStepCalls& calls, const ActorOptions& options, int rank) {
  const ModelConfig& m = t.config;
  const Grid grid(t.layout);
  const Coordinates at = grid.coordinates(rank);
  const Shard shard = shard_of(m, grid, t.stages, rank);
  const std::vector<TensorSpec> table = tensor_table(m, shard);
  const auto trained = [&](const TensorSpec& s) { return is_trained(s, t.optimizer); };
  const GradientPlaces places = gradient_places(table, trained);

  int64_t owned = footprint(sizeof(double)), frozen = 0;
  for (const bool experts : {false, true}) {
    const int64_t length = experts ? places.experts : places.dense;
    std::vector<int64_t> begin(places.begin);
    for (const TensorSpec& spec : table)
      if ((spec.cut == Cut::experts) != experts) begin[static_cast<size_t>(spec.id)] = -1;
    const CutRun cut = cut_run(table, begin, length, experts ? t.layout.dp / t.layout.ep : t.layout.dp);
    for (const Piece& p : cut.pieces[static_cast<size_t>(experts ? grid.ep_block(rank) : at.dp)]) owned += 3 * f32(p.elements.size());
  }
  for (const TensorSpec& spec : table)
    if (spec.held() && !trained(spec)) frozen += f32(spec.shape.elements());

  // Micro-batch i has place i % in flight; each place's arenas reach what its largest micro-batch needs.
  const std::vector<ModelCall>& own = calls.micro_batches[static_cast<size_t>(at.dp)];
  const int64_t page_tokens = default_page_tokens(m);
  const auto in_flight = static_cast<size_t>(in_flight_max(at.pp, t.layout.pp));
  const auto pages_for = [&](int64_t rows) { return (rows + page_tokens - 1) / page_tokens; };
  int64_t activations = 0, expert_rows = 0, state = 0;
  for (size_t place = 0; place < in_flight; ++place) {
    int64_t largest = 0, rows_of_largest = 0, pages = pages_for(std::min(options.max_tokens_per_microbatch, kExpectedTokens));
    for (size_t i = place; i < own.size(); i += in_flight) {
      const ModelCall& call = own[i];
      KeptCall kept{.sequences = call.sequences, .wanted = call.wanted, .ep = t.layout.ep, .expert_rows = {}, .recompute = calls.recompute};
      int64_t row_bytes = 0;
      for (int64_t layer = 0; layer < m.num_layers(); ++layer) {
        int64_t rows = call.tokens() * m.experts_per_token;
        if (t.layout.ep > 1) {
          rows = 0;
          for (int d = grid.ep_block(rank) * t.layout.ep; d < (grid.ep_block(rank) + 1) * t.layout.ep; ++d) {
            const std::vector<int64_t>& counts = calls.micro_batches[static_cast<size_t>(d)][i].experts;
            for (int64_t e = shard.experts.begin; e < shard.experts.end; ++e) rows += counts[static_cast<size_t>(layer * m.num_experts + e)];
          }
        }
        kept.expert_rows.push_back(rows);
        if (!shard.layers.contains(layer)) continue;
        const int64_t bytes = kept_expert_row_bytes(m, t.numerics, t.layout.ep, rows);
        row_bytes = calls.recompute ? std::max(row_bytes, bytes) : row_bytes + bytes;
      }
      const int64_t bytes = kept_activation_bytes(m, t.numerics, shard, kept) + batch_bytes(m, t.numerics, shard, call, page_tokens) +
                            choice_bytes(m, shard, options.replay, call.tokens());
      if (bytes > largest) largest = bytes, rows_of_largest = row_bytes;
      int64_t needed = 0;
      for (const int64_t rows : call.sequences) needed += pages_for(rows);
      pages = std::max(pages, needed);
    }
    activations += largest - rows_of_largest;
    expert_rows += rows_of_largest;
    state += pool_bytes(m, t.numerics, 0, pages, page_tokens);
  }

  // StageLinks: rings of buffers, micro-batch i in place i % ring.
  int64_t links = 0;
  const auto add_ring = [&](size_t ring, int64_t number_bytes) {
    for (size_t place = 0; place < ring; ++place) {
      int64_t largest = 0;
      for (size_t i = place; i < own.size(); i += ring) largest = std::max(largest, footprint(own[i].tokens() * m.hc_mult * m.hidden_size * number_bytes));
      links += largest;
    }
  };
  if (at.pp > 0) add_ring(in_flight + 1, width_of(t.numerics)), add_ring(2, kFloat);
  if (at.pp + 1 < t.layout.pp) add_ring(2, width_of(t.numerics)), add_ring(2, kFloat);

  const auto sum = [](const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); };
  int64_t results = footprint(sum(calls.samples) * static_cast<int64_t>(sizeof(LossSums)));
  if (calls.logprobs) results = std::max(results, f32(2 * sum(calls.response_tokens)));
  return {{"gradients", (places.dense > 0 ? f32(places.dense) : 0) + (places.experts > 0 ? f32(places.experts) : 0)},
          {"masters and moments", owned},
          {"frozen masters", frozen},
          {"activations", activations},
          {"expert rows", expert_rows},
          {"training state", state},
          {"stage links", links},
          {"results", results}};
}

WeightBytes weights_arena_bytes(const std::vector<TensorSpec>& table, Numerics numerics) {
  WeightBytes bytes;
  for (const TensorSpec& t : table) {
    if (!t.held()) continue;
    const auto width = static_cast<int64_t>(dtype_bytes(t.weight_dtype(numerics)));
    const Shape stored = t.stored_shape(numerics), scales = t.scale_shape(numerics);
    bytes.rows += footprint(stored.elements() * width);
    if (t.has_panels()) bytes.panels += footprint(panel_shape(stored).elements() * width);
    if (scales.rank == 0) continue;
    bytes.rows += footprint(scales.elements());
    const int64_t panels = panel_shape(stored).elements() / (kPanelWidth * stored[stored.rank - 1]);
    bytes.panels += f32(panels * scales[scales.rank - 1] * kPanelWidth);
  }
  return bytes;
}

int64_t engine_state_bytes(const ModelConfig& m, Numerics numerics, const EngineOptions& o) {
  const int64_t page_tokens = default_page_tokens(m), slots = o.max_running + 1;
  const int64_t pages = o.num_pages > 0 ? o.num_pages : slots * ((o.max_context + page_tokens - 1) / page_tokens);
  return pool_bytes(m, numerics, slots, pages, page_tokens) + footprint(m.hidden_size * width_of(numerics));
}

int64_t transfer_bytes(const TransferSide& trainer, const TransferSide& sampler, int ranks, int64_t bucket_bytes, Device device) {
  int64_t bytes = (ranks > 1 ? 2 : 1) * footprint(bucket_bytes);
  const auto code_bytes = [&](const TensorSpec& t) {
    return footprint(t.stored_shape(sampler.numerics).elements() * static_cast<int64_t>(dtype_bytes(t.weight_dtype(sampler.numerics))));
  };
  const auto scale_bytes = [&](const TensorSpec& t) { return footprint(t.scale_shape(sampler.numerics).elements()); };
  for (const TensorSpec& t : sampler.table) {
    if (!t.held()) continue;
    if (!t.has_panels() || device == Device::gpu) bytes += code_bytes(t);
    if (t.quant_format(sampler.numerics)) bytes += scale_bytes(t);
  }
  if (is_quantized(trainer.numerics)) return bytes;
  for (const TensorSpec& t : trainer.table)
    if (t.held() && t.quant_format(sampler.numerics)) bytes += code_bytes(t) + scale_bytes(t);
  return bytes;
}

int64_t trainer_scratch_bytes(const ModelConfig& m, Numerics numerics, const Shard& shard, int ep, int64_t exchange_rows, int64_t T, int64_t wanted) {
  const int64_t n = m.hc_mult, D = m.hidden_size, R = T * m.experts_per_token, I = m.expert_dim, s = width_of(numerics), d = m.head_dim;
  const int64_t HD = shard.heads(m).size() * d, A = shard.groups(m).size() * m.o_rank;
  const auto exchange = [&](ExchangePass pass) { return static_cast<int64_t>(exchange_workspace(m, storage_dtype(numerics), ep, exchange_rows, pass)); };
  const int64_t experts = f32(R * D) + f32(R) + (ep > 1 ? exchange(ExchangePass::backward) : footprint(R * D * s) + footprint(R * I * s) + 2 * f32(R * I));
  int64_t entries = 0;
  for (int64_t i = shard.layers.begin; i < shard.layers.end; ++i)
    if (const LayerConfig& l = m.layers[static_cast<size_t>(i)]; l.compressed()) entries = std::max(entries, (T + default_page_tokens(m) - 1) / default_page_tokens(m) * (default_page_tokens(m) / l.ratio));
  const int64_t attention = f32(T * A) + 2 * f32(T * HD) + footprint(T * HD * s) + f32(T * (m.q_rank + d)) + f32(entries * d);
  const int64_t site = 2 * f32(T * D) + 2 * f32(T * n) + f32(T * n * n);
  const int64_t layer = shard.layers.size() > 0 ? site + std::max(experts, attention) : 0;
  const int64_t backward = 2 * f32(T * n * D) + layer;
  const int64_t forward = shard.layers.size() == 0 ? 0 : footprint(R * D * s) +
                          (ep > 1 ? f32(R) + exchange(ExchangePass::forward) : footprint(R * I * s)) + footprint(T * I * s) + footprint(T * D * s);
  const int64_t head = shard.head ? f32(std::min(wanted, kLogprobRowBlock) * shard.vocabulary(m).size()) : 0;
  return std::max({backward, forward, head});
}

int64_t sampler_scratch_bytes(const ModelConfig& m, Numerics numerics, const Shard& shard, int ep, int64_t exchange_rows, int64_t T, int64_t draws) {
  const int64_t n = m.hc_mult, D = m.hidden_size, R = T * m.experts_per_token, s = width_of(numerics);
  const int64_t kept = kept_activation_bytes(m, numerics, Shard{.layers = {0, 1}, .embedding = false, .head = false, .experts = shard.experts, .tp = shard.tp, .tp_index = shard.tp_index},
                                             {.sequences = {T}, .ep = ep, .expert_rows = std::vector<int64_t>(static_cast<size_t>(m.num_layers()), 0)});
  const int64_t streams = 3 * footprint(T * n * D * s);
  const int64_t experts = footprint(R * D * s) + (ep > 1 ? static_cast<int64_t>(exchange_workspace(m, storage_dtype(numerics), ep, exchange_rows, ExchangePass::forward)) : 0);
  return std::max(streams + kept + experts, f32(draws * m.vocab_size));
}

}  // namespace lockstep
