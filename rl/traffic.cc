#include "rl/traffic.h"

#include <algorithm>
#include <numeric>

#include "model/expert_exchange.h"
#include "model/tensor_parallel.h"
#include "ops/logprob/logprob.h"
#include "sync/transfer.h"
#include "train/loss.h"
#include "train/optimizer.h"
#include "train/partition.h"

namespace lockstep {

namespace {

constexpr int64_t kFloat = sizeof(float);

int64_t sum_of(std::span<const int64_t> values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

class Counter {
 public:
  void add(const char* name, const CommBytes& bytes, int64_t calls = 1) {
    if (calls == 0) return;
    Traffic& t = sum_[name];
    t.calls += calls;
    t.bytes.sent += bytes.sent;
    t.bytes.received += bytes.received;
  }
  TrafficByName take() { return std::move(sum_); }

 private:
  TrafficByName sum_;
};

// The forward and backward of one rank's part of the model, in the groups of one layout.
class ModelTraffic {
 public:
  ModelTraffic(const ModelConfig& config, Numerics numerics, const Grid& grid, const StageLayers& stages, int64_t exchange_rows, int rank, Counter& counter)
      : m_(config), dtype_(storage_dtype(numerics)), shard_(shard_of(config, grid, stages, rank)), tp_(grid.layout().tp), tp_index_(grid.coordinates(rank).tp),
        ep_(grid.layout().ep), ep_index_(grid.ep_index(rank)), first_dp_(grid.ep_block(rank) * grid.layout().ep), exchange_rows_(exchange_rows), counter_(counter) {}

  const Shard& shard() const { return shard_; }

  // `calls`: by dp index, what they run at the same time; this rank's is at `own`.
  void forward(std::span<const ModelCall* const> calls, int own) {
    const ModelCall& call = *calls[static_cast<size_t>(own)];
    if (tp_ > 1 && shard_.embedding) counter_.add(kTpEmbedding, tp_embedding_bytes(m_, dtype_, call.embedded, tp_index_));
    for (int64_t layer = shard_.layers.begin; layer < shard_.layers.end; ++layer) layer_forward(calls, call, layer);
  }

  void head(const ModelCall& call) {
    if (tp_ > 1 && shard_.head) counter_.add(kTpLogprob, tp_logprob_bytes(m_, call.wanted, /*entropy=*/true, tp_, tp_index_), 2 * row_blocks(call.wanted));
  }

  void logits(int64_t rows) {
    if (tp_ > 1) counter_.add(kTpLogits, tp_logits_bytes(m_, rows, tp_, tp_index_), row_blocks(rows));
  }

  void backward(std::span<const ModelCall* const> calls, int own, bool recompute) {
    const ModelCall& call = *calls[static_cast<size_t>(own)];
    if (tp_ > 1 && shard_.head) counter_.add(kTpLogprobGradient, tp_logprob_gradient_bytes(m_, call.wanted, tp_, tp_index_), call.wanted > 0 ? 1 : 0);
    for (int64_t layer = shard_.layers.begin; layer < shard_.layers.end; ++layer) {
      if (recompute) layer_forward(calls, call, layer);
      if (ep_ > 1) {
        const std::vector<int64_t> counts = counts_of(calls, layer);
        const int64_t rounds = expert_exchange_rounds(counts, ep_, exchange_rows_);
        const ExchangeBytes b = expert_exchange_bytes(counts, ep_, ep_index_, m_.hidden_size, dtype_, ExchangePass::backward);
        counter_.add("expert gradient dispatch", b.dispatch, rounds);
        counter_.add("expert gradient combine", b.combine, rounds);
      }
      if (tp_ > 1) {
        const int64_t ratio = m_.layers[static_cast<size_t>(layer)].ratio;
        int64_t entries = 0;
        for (const int64_t n : call.sequences) entries += ratio > 0 ? n / ratio : 0;
        counter_.add(kTpAttentionGradient, tp_attention_gradient_bytes(m_, call.tokens(), entries, tp_, tp_index_), call.tokens() > 0 ? 1 : 0);
      }
    }
  }

 private:
  static int64_t row_blocks(int64_t rows) { return (rows + kLogprobRowBlock - 1) / kLogprobRowBlock; }

  void layer_forward(std::span<const ModelCall* const> calls, const ModelCall& call, int64_t layer) {
    const LayerConfig& l = m_.layers[static_cast<size_t>(layer)];
    const int64_t T = call.tokens();
    if (tp_ > 1) {
      if (l.attention == AttentionKind::csa) counter_.add(kTpEntries, tp_entries_bytes(m_, l.ratio, T, tp_, tp_index_));
      counter_.add(kTpAttentionOutput, tp_attention_output_bytes(m_, dtype_, T, tp_, tp_index_), tp_attention_output_calls(m_, T, tp_));
    }
    if (ep_ == 1) return;
    const std::vector<int64_t> counts = counts_of(calls, layer);
    const int64_t rounds = expert_exchange_rounds(counts, ep_, exchange_rows_);
    const ExchangeBytes b = expert_exchange_bytes(counts, ep_, ep_index_, m_.hidden_size, dtype_, ExchangePass::forward);
    counter_.add("expert counts", b.counts);
    counter_.add("expert dispatch", b.dispatch, rounds);
    counter_.add("expert combine", b.combine, rounds);
  }

  // [ep, E] of this rank's ep group.
  std::vector<int64_t> counts_of(std::span<const ModelCall* const> calls, int64_t layer) const {
    std::vector<int64_t> counts;
    for (int i = 0; i < ep_; ++i) {
      const std::vector<int64_t>& all = calls[static_cast<size_t>(first_dp_ + i)]->experts;
      CHECK_EQ(static_cast<int64_t>(all.size()), m_.num_layers() * m_.num_experts);
      const auto begin = all.begin() + layer * m_.num_experts;
      counts.insert(counts.end(), begin, begin + m_.num_experts);
    }
    return counts;
  }

  const ModelConfig& m_;
  const DType dtype_;
  const Shard shard_;
  const int tp_, tp_index_, ep_, ep_index_, first_dp_;
  const int64_t exchange_rows_;
  Counter& counter_;
};

// Bytes of the weights' rows that a part gives to the others.
int64_t weight_bytes_of(const std::vector<Piece>& pieces, const std::vector<TensorSpec>& table, Numerics numerics) {
  int64_t bytes = 0;
  for (const Piece& p : pieces) bytes += p.elements.size() * static_cast<int64_t>(dtype_bytes(table[static_cast<size_t>(p.id)].weight_dtype(numerics)));
  return bytes;
}

// The run of dense gradients or of experts', in parts.
CutRun cut_of(const std::vector<TensorSpec>& table, const GradientPlaces& places, bool experts, int ranks) {
  std::vector<int64_t> begin(places.begin);
  for (const TensorSpec& spec : table)
    if ((spec.cut == Cut::experts) != experts) begin[static_cast<size_t>(spec.id)] = -1;
  return cut_run(table, begin, experts ? places.experts : places.dense, ranks);
}

// Gradients to their owners and rows back, over the ranks that hold one run.
void add_run(Counter& counter, const std::vector<TensorSpec>& table, const GradientPlaces& places, bool experts, Numerics numerics, int ranks, int index,
             bool applied) {
  if (ranks == 1 || (experts ? places.experts : places.dense) == 0) return;
  const CutRun cut = cut_of(table, places, experts, ranks);
  counter.add("gradients", reduce_scatter_bytes(cut.parts, DType::f32, index));
  if (!applied) return;
  int64_t longest = 0;
  std::vector<int64_t> bytes;
  for (int r = 0; r < ranks; ++r) {
    longest = std::max(longest, cut.parts[static_cast<size_t>(r)].size());
    bytes.push_back(weight_bytes_of(cut.pieces[static_cast<size_t>(r)], table, numerics));
  }
  const int64_t step = Partition::round_elements(ranks);
  counter.add("weights", all_gather_bytes(bytes, 1, index), (longest + step - 1) / step);
}

// Completions travel as 32-bit words: seven each, token, log-prob and version of each token, and what the sampler chose.
int64_t completion_words(int64_t samples, int64_t tokens, int64_t choice_words) { return 7 * samples + 3 * tokens + choice_words; }

// By rank: rows of the dp indices, which the first tp rank of the last stage brings.
std::vector<int64_t> rows_of_speakers(const Grid& grid, std::span<const int64_t> by_dp) {
  std::vector<int64_t> rows(static_cast<size_t>(grid.ranks()));
  for (int d = 0; d < grid.layout().dp; ++d)
    rows[static_cast<size_t>(grid.rank_of({.tp = 0, .pp = grid.layout().pp - 1, .dp = d}))] = by_dp[static_cast<size_t>(d)];
  return rows;
}

}  // namespace

int64_t ModelCall::tokens() const { return sum_of(sequences); }

ModelCall even_call(const ModelConfig& config, int tp, std::vector<int64_t> sequences, int64_t wanted) {
  ModelCall call{.sequences = std::move(sequences), .wanted = wanted, .embedded = {}, .experts = {}};
  const int64_t T = call.tokens(), E = config.num_experts;
  for (int r = 0; r < tp; ++r) call.embedded.push_back(part_of(T, tp, r).size());
  call.experts.reserve(static_cast<size_t>(config.num_layers() * E));
  const int64_t rows = T * config.experts_per_token;
  for (int64_t i = 0; i < config.num_layers() * E; ++i) {
    const int64_t e = i % E;
    call.experts.push_back((e + 1) * rows / E - e * rows / E);  // few rows are spread over all experts too
  }
  return call;
}

TrainStepCalls train_step_calls(const ModelConfig& config, const Layout& layout, std::span<const TrainSample> samples, const ActorOptions& options,
                                const Routing& routing) {
  std::vector<int32_t> chosen = canonical_order(samples);
  std::erase_if(chosen, [&](int32_t i) { return std::all_of(samples[i].mask.begin(), samples[i].mask.end(), [](uint8_t m) { return m == 0; }); });
  TrainStepCalls calls{.micro_batches = {}, .samples = {}, .response_tokens = {}, .recompute = options.recompute};
  for (int d = 0; d < layout.dp; ++d) {
    const Work work = plan_work(samples, chosen, layout.dp, d, options.max_tokens_per_microbatch);
    std::vector<ModelCall>& own = calls.micro_batches.emplace_back();
    int64_t wanted_of_all = 0, num_samples = 0;
    for (const MicroBatch& micro : work.micro_batches) {
      std::vector<int64_t> sequences, embedded(static_cast<size_t>(layout.tp));
      int64_t wanted = 0;
      for (const int32_t i : micro.samples) {
        const TrainSample& s = samples[i];
        sequences.push_back(trained_rows(s));
        wanted += s.response_length();
        for (int r = 0; r < layout.tp; ++r) {
          const Range ids = tp_vocabulary(config, layout.tp, r);
          embedded[static_cast<size_t>(r)] += std::count_if(s.tokens.begin(), s.tokens.end() - 1, [&](int32_t id) { return ids.contains(id); });
        }
      }
      num_samples += static_cast<int64_t>(micro.samples.size());
      wanted_of_all += wanted;
      own.push_back(even_call(config, layout.tp, std::move(sequences), wanted));
      own.back().embedded = std::move(embedded);
      if (routing) own.back().experts = routing(samples, micro);
    }
    calls.samples.push_back(num_samples);
    calls.response_tokens.push_back(wanted_of_all);
  }
  return calls;
}

TrafficByName train_step_traffic(const TrainerShape& t, const TrainStepCalls& calls, int rank) {
  const Grid grid(t.layout);
  const Coordinates at = grid.coordinates(rank);
  Counter counter;
  ModelTraffic model(t.config, t.numerics, grid, t.stages, t.exchange_rows, rank, counter);

  const size_t num_micro_batches = calls.micro_batches.front().size();
  std::vector<const ModelCall*> together(calls.micro_batches.size());
  for (size_t m = 0; m < num_micro_batches; ++m) {
    for (size_t d = 0; d < together.size(); ++d) together[d] = &calls.micro_batches[d][m];
    const ModelCall& own = *together[static_cast<size_t>(at.dp)];
    model.forward(together, at.dp);
    model.head(own);
    model.backward(together, at.dp, calls.recompute);
    // Streams pass from stage to stage; a micro-batch without rows sends nothing.
    const int64_t numbers = own.tokens() * t.config.hc_mult * t.config.hidden_size;
    if (numbers == 0) continue;
    const int64_t forward = numbers * static_cast<int64_t>(dtype_bytes(storage_dtype(t.numerics))), backward = numbers * kFloat;
    if (at.pp > 0) counter.add("streams", {0, forward}), counter.add("stream gradients", {backward, 0});
    if (at.pp + 1 < t.layout.pp) counter.add("streams", {forward, 0}), counter.add("stream gradients", {0, backward});
  }

  const int ranks = grid.ranks();
  if (ranks == 1) return counter.take();
  counter.add("loss sums", all_gather_bytes(rows_of_speakers(grid, calls.samples), sizeof(LossSums), rank));
  if (calls.logprobs) counter.add("log-probs", all_gather_bytes(rows_of_speakers(grid, calls.response_tokens), 2 * kFloat, rank));
  if (calls.asks) counter.add("accept", all_reduce_int_bytes(1, ranks));
  const std::vector<TensorSpec> table = tensor_table(t.config, model.shard());
  const GradientPlaces places = gradient_places(table, [&](const TensorSpec& s) { return is_trained(s, t.optimizer); });
  add_run(counter, table, places, /*experts=*/false, t.numerics, t.layout.dp, at.dp, calls.applied);
  add_run(counter, table, places, /*experts=*/true, t.numerics, t.layout.dp / t.layout.ep, grid.ep_block(rank), calls.applied);
  counter.add("gradient norm", all_reduce_bytes(1, DType::f64, ranks, rank));
  return counter.take();
}

TrafficByName sync_traffic(const TrainerShape& t, const Placement& to, const WantedTensors& wanted, int64_t bucket_bytes, int rank) {
  const Grid grid(t.layout);
  Placement from = placement_of(t.config, grid, t.stages, t.numerics);
  from.shards.resize(to.shards.size(), {.layers = {}, .embedding = false, .head = false, .experts = {}});
  const SyncPlan plan = make_plan(t.config, from, to, wanted);
  Counter counter;
  if (plan.ranks == 1) return counter.take();
  const std::vector<int64_t> one_each(static_cast<size_t>(plan.ranks), 1);
  counter.add("weights begin", all_gather_bytes(one_each, Transfer::kBeginBytes, rank));
  counter.add("weights begin", all_reduce_int_bytes(1, plan.ranks));
  counter.add("weights", plan_bytes(plan, rank), cut_into_rounds(plan, bucket_bytes, [](int64_t, size_t, const Range&) {}));
  counter.add("weights check", plan_check_bytes(plan, rank));
  counter.add("weights agreed", all_reduce_int_bytes(1, plan.ranks));
  counter.add("weights agreed", all_gather_bytes(one_each, sizeof(int64_t), rank));  // a hash of each
  if (is_quantized(to.numerics)) counter.add("weights agreed", all_reduce_int_bytes(Transfer::kTotals, plan.ranks));
  if (!is_quantized(to.numerics) || is_quantized(from.numerics) || rank >= grid.ranks()) return counter.take();
  // The masters of trained tensors are spread; each rank quantises whole ones.
  const std::vector<TensorSpec> table = tensor_table(t.config, from.shards[static_cast<size_t>(rank)]);
  const GradientPlaces places = gradient_places(table, [&](const TensorSpec& s) { return is_trained(s, t.optimizer); });
  for (const bool experts : {false, true}) {
    const int ranks = experts ? t.layout.dp / t.layout.ep : t.layout.dp, index = experts ? grid.ep_block(rank) : grid.coordinates(rank).dp;
    if (ranks == 1) continue;
    const CutRun cut = cut_of(table, places, experts, ranks);
    for (const TensorSpec& spec : table) {
      if ((spec.cut == Cut::experts) != experts || places.begin[static_cast<size_t>(spec.id)] < 0 || !wanted(spec) || !spec.quant_format(to.numerics)) continue;
      std::vector<int64_t> counts;
      for (const std::vector<Piece>& pieces : cut.pieces) {
        counts.push_back(0);
        for (const Piece& piece : pieces)
          if (piece.id == spec.id) counts.back() += piece.elements.size();
      }
      counter.add("masters", all_gather_bytes(counts, kFloat, index));
    }
  }
  return counter.take();
}

TrafficByName rollout_traffic(const ModelConfig& config, Numerics numerics, const Layout& layout, int64_t exchange_rows, std::span<const EngineCalls> engines,
                              int rank) {
  const Grid grid(layout);
  const Coordinates at = grid.coordinates(rank);
  const StageLayers whole = {{0, config.num_layers()}};
  Counter counter;
  ModelTraffic model(config, numerics, grid, whole, exchange_rows, rank, counter);
  const EngineCalls& own = engines[static_cast<size_t>(at.dp)];
  const ModelCall none;
  std::vector<const ModelCall*> together(engines.size(), &none);
  for (size_t i = 0; i < own.forwards.size(); ++i) {
    for (int d = 0; d < layout.dp; ++d)  // only those of an ep group keep step
      if (d / layout.ep == at.dp / layout.ep) together[static_cast<size_t>(d)] = &engines[static_cast<size_t>(d)].forwards[i];
    model.forward(together, at.dp);
  }
  for (const int64_t rows : own.draws) model.logits(rows);
  // Before every step, and once more when nobody has work.
  if (layout.ep > 1) {
    const CommBytes each = all_reduce_int_bytes(1, layout.ep);
    counter.add("engine step", {each.sent * (own.steps + 1), each.received * (own.steps + 1)}, own.steps + 1);
  }

  const int ranks = grid.ranks();
  if (ranks == 1) return counter.take();
  for (int i = 0; i < 2; ++i) counter.add("rollout", all_reduce_int_bytes(1, ranks));  // all took their requests; all finished them
  // The first rank of an engine brings its completions.
  std::vector<int64_t> words(static_cast<size_t>(ranks));
  for (int d = 0; d < layout.dp; ++d) {
    const EngineCalls& e = engines[static_cast<size_t>(d)];
    words[static_cast<size_t>(grid.rank_of({.tp = 0, .pp = 0, .dp = d}))] = completion_words(e.samples, e.tokens, e.choice_words);
  }
  const std::vector<int64_t> one_each(static_cast<size_t>(ranks), 1);
  counter.add("completions", all_gather_bytes(one_each, 2 * sizeof(int64_t), rank));  // whose, and a hash
  counter.add("completions", all_gather_bytes(one_each, sizeof(int64_t), rank));      // how many words
  counter.add("completions", all_gather_bytes(words, sizeof(int32_t), rank));
  return counter.take();
}

int64_t choice_words(const ChoiceLayout& layout, int64_t rows) { return (layout.experts_of(rows) + 1) / 2 + layout.entries_of(rows); }

TrafficByName share_traffic(int64_t samples, int64_t tokens, int64_t choice_words, int first_sampler, int rank, int ranks) {
  Counter counter;
  const bool root = rank == first_sampler;
  counter.add("rollout", broadcast_bytes(sizeof(int64_t), ranks, root));  // of no error
  counter.add("completions", broadcast_bytes(sizeof(int64_t), ranks, root));
  counter.add("completions", broadcast_bytes(completion_words(samples, tokens, choice_words) * static_cast<int64_t>(sizeof(int32_t)), ranks, root));
  return counter.take();
}

TrafficByName version_traffic(int rank, int ranks) {
  Counter counter;
  counter.add("weights version", broadcast_bytes(sizeof(int64_t), ranks, rank == 0));
  return counter.take();
}

void add_traffic(TrafficByName& sum, const TrafficByName& more) {
  for (const auto& [name, t] : more) {
    Traffic& s = sum[name];
    s.calls += t.calls;
    s.bytes.sent += t.bytes.sent;
    s.bytes.received += t.bytes.received;
  }
}

}  // namespace lockstep
