#include "rl/gates.h"

#include <algorithm>
#include <bit>

#include "core/rng.h"
#include "io/json.h"
#include "parallel/grid.h"
#include "rl/gates_rig.h"

namespace lockstep {

namespace {

constexpr int kUpdates[] = {2, 10};
constexpr int kIdleSteps = 20;  // with lr = 0

// Comparisons of one gate, added up.
struct Tally {
  int64_t tokens = 0, different = 0;
  std::string note;  // of the first difference

  // Everyone who compares has the same comparison, so all ranks run the diagnosis or none.
  void add(Rig& rig, const Comparison& c) {
    tokens += c.num_tokens;
    different += c.different;
    if (c.first && note.empty()) note = diagnose_difference(rig.policy().context(), rig.policy().model(), *c.first);
  }
  // Two accounts of the same requests.
  void add(std::span<const Completion> expected, std::span<const Completion> words) {
    CHECK_EQ(expected.size(), words.size());
    for (size_t i = 0; i < words.size(); ++i) {
      const Completion &a = expected[i], &b = words[i];
      CHECK(a.prompt_id == b.prompt_id && a.sample_idx == b.sample_idx && a.tokens.size() == b.tokens.size(), "other samples than before");
      for (size_t t = 0; t < a.tokens.size(); ++t) {
        ++tokens;
        if (a.tokens[t] == b.tokens[t] && std::bit_cast<uint32_t>(a.logprobs[t]) == std::bit_cast<uint32_t>(b.logprobs[t])) continue;
        ++different;
        if (note.empty())
          note = fmt::format("prompt {}, sample {}, token {}: id {} with log-prob {:.9g} before, id {} with {:.9g} now", a.prompt_id, a.sample_idx, t,
                             a.tokens[t], a.logprobs[t], b.tokens[t], b.logprobs[t]);
      }
    }
  }
};

bool wants_gate(const GatesOptions& o, const char* gate) { return o.only.empty() || std::find(o.only.begin(), o.only.end(), gate) != o.only.end(); }

void shuffle(Philox& random, std::vector<int64_t>& v) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[random.below(static_cast<uint32_t>(i))]);
}

// The gates in one numerics, in order; each leaves what the next ones need.
class Column {
 public:
  using Report = std::function<void(GateResult)>;
  Column(const GatesOptions& o, Numerics numerics, const ModelConfig& config, const Hooks& hooks, RankWorld* world, const Report& report)
      : o_(o), numerics_(numerics), config_(config), hooks_(hooks), world_(world), report_(report), work_(make_workload(config, o.tokens, o.seed)) {}

  Status run() {
    if (wants("G1") || wants("G2") || wants("G3") || wants("G4") || wants("G5") || wants("G6") || wants("G10")) {
      Result<std::unique_ptr<Rig>> rig = make_rig(o_.parallel, o_.optimizer.lr);
      if (!rig) return rig.status();
      rig_ = rig.take();
      hooks_.begin();
    }
    if (wants("G1")) LOCKSTEP_RETURN_IF_ERROR(lengths_and_temperatures());
    if (wants("G2")) LOCKSTEP_RETURN_IF_ERROR(after_updates());
    if (words_.empty() && (wants("G3") || wants("G4") || wants("G5") || wants("G6"))) {
      Tally unused;
      LOCKSTEP_RETURN_IF_ERROR(sample_and_compare(*rig_, work_, unused));
    }
    if (wants("G3")) LOCKSTEP_RETURN_IF_ERROR(batches());
    if (wants("G4")) LOCKSTEP_RETURN_IF_ERROR(chunks());
    if (wants("G5")) LOCKSTEP_RETURN_IF_ERROR(prefix_cache());
    if (wants("G6")) LOCKSTEP_RETURN_IF_ERROR(graphs());
    if (wants("G10")) LOCKSTEP_RETURN_IF_ERROR(damage());
    rig_.reset();
    if (wants("G7")) LOCKSTEP_RETURN_IF_ERROR(layout_pairs());
    return wants("G9") ? idle_steps() : Status::ok();
  }

 private:
  bool wants(const char* gate) const { return wants_gate(o_, gate); }
  Result<std::unique_ptr<Rig>> make_rig(const ParallelOptions& parallel, float lr) const {
    return Rig::make(o_, numerics_, parallel, lr, work_.context, world_);
  }
  Workload smaller(int64_t parts, uint64_t seed) const { return make_workload(config_, std::max<int64_t>(o_.tokens / parts, 4), seed); }

  void put(const char* gate, std::string what, const Tally& t) {
    report_({.gate = gate, .numerics = numerics_, .what = std::move(what), .tokens = t.tokens, .different = t.different,
             .verdict = t.different == 0 && t.tokens > 0 ? Verdict::pass : Verdict::fail, .note = t.note});
  }
  void put(const char* gate, std::string what, std::string why_not) {
    report_({.gate = gate, .numerics = numerics_, .what = std::move(what), .verdict = Verdict::not_run, .note = std::move(why_not)});
  }
  // A control: the undamaged side must agree, the damaged one must not.
  void put_control(std::string what, const Comparison& clean, const Comparison& damaged) {
    GateResult r{.gate = "G10", .numerics = numerics_, .what = std::move(what), .tokens = damaged.num_tokens, .different = damaged.different,
                 .verdict = clean.different == 0 && damaged.different > 0 ? Verdict::pass : Verdict::fail, .note = {}};
    if (damaged.different == 0) r.note = "the comparison did not notice, so it proves nothing";
    if (clean.different > 0) r.note = fmt::format("{} tokens differ without the damage", clean.different);
    report_(std::move(r));
  }

  // Draws a workload, and compares every token with what the trainer computes.
  Status sample_and_compare(Rig& rig, const Workload& w, Tally& tally) {
    Result<std::vector<Completion>> words = rig.sample(w);
    if (!words) return words.status();
    words_ = words.take();
    const std::vector<TrainSample> samples = train_samples(w, words_);
    tally.add(rig, compare_logprobs(samples, rig.actor().logprobs(samples)));
    return Status::ok();
  }
  // Draws one and trains on it: an update, whose forward is compared too.
  Status step(Rig& rig, const Workload& w, Tally& tally) {
    const Result<std::vector<Completion>> words = rig.sample(w);
    if (!words) return words.status();
    return rig.update(train_samples(w, words.value()), [&](const Comparison& c) { tally.add(rig, c); });
  }

  Status lengths_and_temperatures() {
    Tally tally;
    LOCKSTEP_RETURN_IF_ERROR(sample_and_compare(*rig_, work_, tally));
    put("G1", work_.str(), tally);
    return Status::ok();
  }

  Status after_updates() {
    int done = 0;
    Tally tally;
    uint64_t sum = rig_->weights_sum();
    for (const int wanted : kUpdates) {
      for (; done < wanted; ++done) {
        LOCKSTEP_RETURN_IF_ERROR(step(*rig_, smaller(10, o_.seed + 1 + static_cast<uint64_t>(done)), tally));
        const uint64_t now = rig_->weights_sum();
        if (now == sum) return errorf("update {} of the gates changed no weight; raise optimizer.lr, which is {}", done + 1, o_.optimizer.lr);
        sum = now;
      }
      LOCKSTEP_RETURN_IF_ERROR(sample_and_compare(*rig_, work_, tally));
      put("G2", fmt::format("after {} updates, and in their steps", done), tally);
      tally = {};
    }
    return Status::ok();
  }

  // Of the same weights from here on, whose words were words_.
  Status batches() {
    Philox random(o_.seed, RngPurpose::shuffle);
    std::vector<int64_t> order(work_.requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    shuffle(random, order);
    std::vector<Request> shuffled;
    for (const int64_t i : order) shuffled.push_back(work_.requests[static_cast<size_t>(i)]);
    const Result<std::vector<Completion>> mixed = rig_->sample_with({.max_running = 48, .max_batch_tokens = 200}, shuffled);
    if (!mixed) return mixed.status();
    Tally tally;
    tally.add(words_, mixed.value());
    // The trainer packs by index.
    std::vector<TrainSample> samples = train_samples(work_, words_);
    std::vector<int64_t> index(samples.size());
    for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int64_t>(i);
    shuffle(random, index);
    for (size_t i = 0; i < index.size(); ++i) samples[i].index = index[i];
    tally.add(*rig_, compare_logprobs(samples, rig_->actor().logprobs(samples)));
    put("G3", "requests and micro-batches shuffled", tally);

    tally = {};
    const Result<std::vector<Completion>> alone = rig_->sample_with({.max_running = 1, .max_batch_tokens = 512}, work_.requests);
    if (!alone) return alone.status();
    tally.add(words_, alone.value());
    const Result<std::vector<TokenLogprobs>> one_by_one = rig_->other_logprobs(samples, 1);
    if (!one_by_one) return one_by_one.status();
    tally.add(*rig_, compare_logprobs(samples, one_by_one.value()));
    put("G3", "batch size 1 against 64", tally);
    return Status::ok();
  }

  Status chunks() {
    Tally tally;
    for (const EngineOptions& options : {EngineOptions{.max_running = 8, .max_batch_tokens = 8}, {.max_running = 64, .max_batch_tokens = 65},
                                         {.max_running = 64, .max_batch_tokens = 1 << 16}}) {
      const Result<std::vector<Completion>> words = rig_->sample_with(options, work_.requests);
      if (!words) return words.status();
      tally.add(words_, words.value());
    }
    put("G4", "prompts in chunks of up to 8, 65 and 65536 rows", tally);
    return Status::ok();
  }

  Status prefix_cache() {
    uint64_t cached = 0;
    const EngineOptions options = {.max_running = 64, .max_batch_tokens = 512, .cache_slots = 16};
    const Result<std::vector<Completion>> words = rig_->sample_with(options, work_.requests, 2, &cached);
    if (!words) return words.status();
    Tally tally;
    tally.add(words_, words.value());
    if (cached == 0) {
      put("G5", "prefix cache on and off", "no prompt took anything from the cache: the model's pages are longer than its prompts can be");
    } else {
      put("G5", fmt::format("prefix cache on and off, {} prompt tokens from it", cached), tally);
    }
    return Status::ok();
  }

  // What was drawn with graphs, against the same without.
  Status graphs() {
    const uint64_t steps = rig_->graph_steps();
    if (steps == 0) {
      put("G6", "decode graphs on and off", o_.model.device == Device::cpu ? "a CPU has no graphs" : "ranks that share a step have no graphs");
      return Status::ok();
    }
    const Result<std::vector<Completion>> words = rig_->sample_with({.max_running = 64, .max_batch_tokens = 512, .graphs = false}, work_.requests);
    if (!words) return words.status();
    Tally tally;
    tally.add(words_, words.value());
    put("G6", fmt::format("decode graphs on and off, {} steps so far", steps), tally);
    return Status::ok();
  }

  Status damage() {
    const Workload w = smaller(10, o_.seed);
    const Result<std::vector<Completion>> words = rig_->sample(w);
    if (!words) return words.status();
    const std::vector<TrainSample> samples = train_samples(w, words.value());
    const Result<std::vector<TokenLogprobs>> damaged = rig_->damaged_logprobs(samples);
    if (!damaged) return damaged.status();
    put_control(fmt::format("control: the lowest bit of one weight of {} flipped", rig_->damaged_weight()),
                compare_logprobs(samples, rig_->actor().logprobs(samples)), compare_logprobs(samples, damaged.value()));

    const auto sample = std::find_if(samples.begin(), samples.end(), [](const TrainSample& s) { return s.response_length() <= 500; });
    const std::optional<TokenLogprobs> flipped = rig_->routed_logprobs(*sample, true);
    if (!flipped) {
      put("G10", "control: one routing id flipped", "every token goes to every expert");
      return Status::ok();
    }
    const TokenLogprobs own = *rig_->routed_logprobs(*sample, false);
    put_control("control: one routing id of one token flipped", compare_logprobs({&*sample, 1}, {&own, 1}), compare_logprobs({&*sample, 1}, {&*flipped, 1}));
    return Status::ok();
  }

  // Every layout of the trainer, with the sampler's layouts in turn: the words of the first pair, by the same log-probs.
  Status layout_pairs() {
    const int ranks = world_ == nullptr ? 1 : world_->size();
    if (ranks == 1) {
      put("G7", "pairs of layouts", "one rank has one layout; start as mpirun -n 2, 4 or 8 lockstep gates");
      return Status::ok();
    }
    LayoutLimits limits{.ranks = ranks, .layers = config_.num_layers(), .experts = config_.num_experts, .output_groups = config_.o_groups};
    const std::vector<Layout> trainers = possible_layouts(limits);
    limits.layers = 1;
    const std::vector<Layout> samplers = possible_layouts(limits);
    const size_t pairs = std::max(trainers.size(), samplers.size());
    const Workload w = smaller(2 * static_cast<int64_t>(pairs), o_.seed);
    Tally tally;
    std::vector<Completion> first;
    for (size_t i = 0; i < pairs; ++i) {
      const Layout &trainer = trainers[i % trainers.size()], &sampler = samplers[(i + 1) % samplers.size()];
      ParallelOptions parallel = o_.parallel;
      parallel.tp = trainer.tp;
      parallel.pp = trainer.pp;
      parallel.ep = trainer.ep;
      parallel.dp = trainer.dp;
      parallel.stages.clear();
      parallel.rollout_tp = sampler.tp;
      parallel.rollout_ep = sampler.ep;
      const Result<std::unique_ptr<Rig>> rig = make_rig(parallel, o_.optimizer.lr);
      if (!rig) return rig.status();
      LOCKSTEP_RETURN_IF_ERROR(sample_and_compare(*rig.value(), w, tally));
      if (i == 0) first = words_;
      tally.add(first, words_);
      LOCKSTEP_RETURN_IF_ERROR(step(*rig.value(), w, tally));
      LOCKSTEP_RETURN_IF_ERROR(sample_and_compare(*rig.value(), w, tally));
    }
    put("G7", fmt::format("{} pairs of layouts of {} ranks, before and after an update", pairs, ranks), tally);
    return Status::ok();
  }

  Status idle_steps() {
    Result<std::unique_ptr<Rig>> rig = make_rig(o_.parallel, 0);
    if (!rig) return rig.status();
    const uint64_t sum = rig.value()->weights_sum();
    Tally tally;
    for (int i = 0; i < kIdleSteps; ++i) LOCKSTEP_RETURN_IF_ERROR(step(*rig.value(), smaller(kIdleSteps, o_.seed + static_cast<uint64_t>(i)), tally));
    if (rig.value()->weights_sum() != sum) return Status::error("steps with lr = 0 changed weights");
    put("G9", fmt::format("{} steps with lr = 0", kIdleSteps), tally);
    return Status::ok();
  }

  const GatesOptions& o_;
  const Numerics numerics_;
  const ModelConfig& config_;
  const Hooks& hooks_;
  RankWorld* const world_;
  const Report& report_;
  const Workload work_;
  std::unique_ptr<Rig> rig_;
  std::vector<Completion> words_;  // of the last sample_and_compare()
};

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::pass: return "pass";
    case Verdict::fail: return "FAIL";
    case Verdict::not_run: return "n/a";
  }
  return "?";
}

std::string GateResult::str() const {
  std::string text = fmt::format("{:<3}  {:<4}  {:>8} tokens  {:>8} different  {:<4}  {}", gate, numerics_name(numerics), tokens, different,
                                 verdict_name(verdict), what);
  if (!note.empty()) text += ": " + note;
  return text;
}

std::string GateResult::json() const {
  JsonLine line;
  line.add("gate", gate).add("numerics", numerics_name(numerics)).add("what", what).add("tokens", tokens).add("different", different);
  line.add("verdict", verdict == Verdict::pass ? "pass" : verdict == Verdict::fail ? "fail" : "not run");
  if (!note.empty()) line.add("note", note);
  return line.str();
}

ModelConfig gates_config() {
  ModelConfig m;
  m.vocab_size = 512;
  m.hidden_size = 144;
  m.num_heads = 4;
  m.head_dim = 32;
  m.rope_dim = 16;
  m.q_rank = 136;
  m.o_groups = 2;
  m.o_rank = 40;
  m.window = 128;
  m.index_heads = 4;
  m.index_head_dim = 32;
  m.index_topk = 16;
  m.num_experts = 8;
  m.experts_per_token = 2;
  m.expert_dim = 136;
  m.routed_scale = 1.5f;
  m.swiglu_limit = 10.0f;
  m.compress_rope_scaling = {16.0f, 4096, 32.0f, 1.0f};
  m.max_positions = 8192;
  m.initializer_range = 0.1f;
  m.layers = {{AttentionKind::swa, 0, true}, {AttentionKind::csa, 4, true}, {AttentionKind::hca, 128, false}, {AttentionKind::csa, 4, false}};
  return m;
}

Result<std::vector<GateResult>> run_gates(const GatesOptions& options, const Hooks& hooks, RankWorld* world,
                                          const std::function<void(const GateResult&)>& on_result) {
  GatesOptions o = options;
  if (o.model.init.empty()) {
    o.model.init = "random";
    o.model.shape = gates_config();
  }
  const Result<ModelConfig> config = find_model_config(o.model);
  LOCKSTEP_RETURN_IF_ERROR(Peers(world).agree(config.status(), "config"));
  std::vector<GateResult> results;
  const Column::Report report = [&](GateResult r) {
    if (on_result) on_result(r);
    results.push_back(std::move(r));
  };
  for (const Numerics numerics : o.numerics) {
    const size_t first = results.size();
    LOCKSTEP_RETURN_IF_ERROR(Column(o, numerics, config.value(), hooks, world, report).run());
    if ((numerics != Numerics::bf16 && numerics != Numerics::fp8) || !wants_gate(o, "G8")) continue;
    GateResult whole{.gate = "G8", .numerics = numerics, .what = "the column above", .verdict = Verdict::pass, .note = {}};
    for (size_t i = first; i < results.size(); ++i) {
      if (results[i].gate == "G10") continue;
      whole.tokens += results[i].tokens;
      whole.different += results[i].different;
    }
    if (std::any_of(results.begin() + static_cast<std::ptrdiff_t>(first), results.end(), [](const GateResult& r) { return r.verdict == Verdict::fail; }))
      whole.verdict = Verdict::fail;
    report(std::move(whole));
  }
  return results;
}

}  // namespace lockstep
