#include "rollout/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "core/device.h"
#include "model/batch.h"
#include "model/head.h"
#include "model/state.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/sample/sample.h"
#include "rollout/decode_graphs.h"
#include "rollout/pages.h"
#include "rollout/scheduler.h"

namespace lockstep {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of what was drawn, [2, draws] words: tokens, then log-probs, so that both come from the device as one.
template <typename View>
View token_words(const View& words) { return words.at(0); }
template <typename View>
View logprob_words(const View& words) { return View(words.at(1).data, DType::f32, {words.dim(1)}); }

int64_t page_count(const EngineOptions& o, int64_t page_tokens) {
  CHECK(o.max_running >= 1 && o.max_context >= 2, "{} running samples of {} positions", o.max_running, o.max_context);
  // The prompt that waits for its samples has a slot beside the running ones (scheduler.h) and is given pages like one more.
  const int64_t per_sequence = (o.max_context + page_tokens - 1) / page_tokens;
  const int64_t pages = o.num_pages > 0 ? o.num_pages : (o.max_running + 1) * per_sequence;
  CHECK(pages > per_sequence, "{} pages of {} positions: a context of {} may need {}", pages, page_tokens, o.max_context,
        per_sequence + 1);
  return pages;
}

}  // namespace

struct Engine::Impl {
  struct Active {
    Request request;
    std::vector<int32_t> tokens;        // prompt and log
    ChoiceLog choices;                  // of the rows that were run of them
    int32_t started = 0, finished = 0;  // samples
  };
  struct Running {
    Active* active = nullptr;  // nullptr: no sample has this slot
    Completion completion;
  };

  Impl(Context& c, const Model& model, const EngineOptions& options, Arena& arena)
      : c(c), model(model), config(model.weights->config()), options(options), page_tokens(default_page_tokens(config)),
        num_pages(page_count(options, page_tokens)),
        pages(options.max_running + 1 + options.cache_slots, num_pages, page_tokens, options.max_context),
        scheduler(pages, options.max_running, options.max_batch_tokens, options.cache_slots),
        state(config, model.weights->numerics(), options.max_running + 1 + options.cache_slots, num_pages, page_tokens, arena),
        builder(config, page_tokens),
        kept_hidden(arena.tensor(model.weights->dtype(), {1, config.hidden_size}, "engine.kept_hidden")),
        routing(config, ReplayKind::routing), routing_index(config, ReplayKind::routing_index) {
    CHECK(arena.device() == c.device && c.workspace->device() == c.device, "arenas of another device than the context's");
    CHECK(options.max_context <= config.max_positions && options.max_context <= model.rope.window.rows(),
          "a context of {} for a model of {} positions with rotations for {}", options.max_context, config.max_positions,
          model.rope.window.rows());
    const size_t sequences = static_cast<size_t>(options.max_running + 1);
    running.resize(static_cast<size_t>(pages.num_slots()));
    rows.reserve(sequences);
    params.reserve(sequences);
    drawn.reserve(sequences);
  }

  Status check(const Request& request) const;
  void add(Request request);
  bool step();
  void abort_all();
  bool abort(uint64_t tag);
  bool stop(uint64_t tag, int32_t sample_idx);
  void retract_all();

  // Whether steps that only decode may be graphs: a probe is a call of the host, and peers are talked to by way of it.
  bool use_graphs() const { return options.graphs && c.on_gpu() && model.probe == nullptr && !has_peers() && (model.tp == nullptr || model.tp->size() == 1); }
  bool has_peers() const { return model.ep != nullptr && model.ep->size() > 1; }
  static Completion new_completion(const Active& active, int32_t sample) {
    Completion completion;
    completion.tag = active.request.tag;
    completion.prompt_id = active.request.prompt_id;
    completion.sample_idx = active.request.first_sample + sample;
    return completion;
  }
  void abort_unstarted(const Active& active);
  SequenceRows sequence_rows(const PlannedRows& r) const;
  TensorView run_forward(const Plan& plan);
  bool only_decodes(const Plan& plan) const;
  TensorView run_graph(const Plan& plan);
  const ChoiceLayout& layout_of(ReplayKind kind) const { return kind == ReplayKind::routing ? routing : routing_index; }
  void record_rows(int layer, std::string_view point, ConstTensorView seen);
  void start(const PlannedDraw& draw);
  SampleParams sample_params(const Running& r) const;
  void append(int32_t slot, int32_t token, float logprob);
  void finish(Running& r, FinishReason reason);

  Context& c;
  const Model& model;
  const ModelConfig& config;
  const EngineOptions options;
  const int64_t page_tokens, num_pages;
  Pages pages;
  Scheduler scheduler;
  StatePool state;
  BatchBuilder builder;
  TensorView kept_hidden;  // [1, D] the last hidden row of the prompt that waits for its samples (Plan::keep)

  std::map<int64_t, Active> requests;  // unfinished, by order of submission
  int64_t next_request = 0;
  int64_t state_version = -1;  // of the weights that wrote the state in use
  std::vector<Running> running;  // by slot
  std::vector<Completion> done;
  std::vector<Drawn> drawn;  // by the last step
  EngineStats stats;
  DecodeGraphs graphs;

  // Of the forward at hand: where the choices of a sequence's rows go.
  struct Recording {
    ChoiceLog* log;
    const ChoiceLayout* layout;
    int64_t first, count;  // rows of the sequence
    int64_t row;           // of the call, the first of them
  };
  std::vector<Recording> recordings;
  const ChoiceLayout routing, routing_index;
  const Probe record = [this](int layer, std::string_view point, ConstTensorView seen) { record_rows(layer, point, seen); };

  // Kept for their capacity.
  std::vector<SequenceRows> rows;
  std::vector<SampleParams> params;
  DecodeShape shape;
};

Status Engine::Impl::check(const Request& request) const {
  const SamplingOptions& s = request.sampling;
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const auto in_vocabulary = [&](int32_t id) { return id >= 0 && id < config.vocab_size; };
  if (request.prompt.empty()) return errorf("prompt {}: the prompt is empty; it needs at least one token", request.prompt_id);
  for (size_t i = 0; i < request.prompt.size(); ++i)
    if (!in_vocabulary(request.prompt[i]))
      return errorf("prompt {}: token {} at position {} is outside the vocabulary of {}", request.prompt_id, request.prompt[i], i,
                    config.vocab_size);
  if (request.num_samples < 1 || request.first_sample < 0 ||
      request.num_samples - 1 > std::numeric_limits<int32_t>::max() - request.first_sample)
    return errorf("prompt {}: {} samples from index {}; at least one sample and indices from 0 are needed", request.prompt_id,
                  request.num_samples, request.first_sample);
  if (s.max_new_tokens < 1 || s.min_new_tokens < 0 || s.min_new_tokens > s.max_new_tokens)
    return errorf("prompt {}: min_new_tokens {} and max_new_tokens {}; wanted 0 <= min <= max and max >= 1", request.prompt_id,
                  s.min_new_tokens, s.max_new_tokens);
  if (s.max_new_tokens > options.max_context - prompt_tokens)
    return errorf("prompt {}: {} prompt tokens and max_new_tokens {} exceed the context of {}", request.prompt_id, prompt_tokens,
                  s.max_new_tokens, options.max_context);
  if (!(std::isfinite(s.temperature) && s.temperature >= 0.0f))
    return errorf("prompt {}: temperature {}; wanted a finite number >= 0 (0 is greedy)", request.prompt_id, s.temperature);
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f))
    return errorf("prompt {}: top_p {}; wanted 0 < top_p <= 1 (1 is off)", request.prompt_id, s.top_p);
  if (!(s.min_p >= 0.0f && s.min_p <= 1.0f))
    return errorf("prompt {}: min_p {}; wanted 0 <= min_p <= 1 (0 is off)", request.prompt_id, s.min_p);
  for (int32_t id : s.stop_ids)
    if (!in_vocabulary(id))
      return errorf("prompt {}: stop id {} is outside the vocabulary of {}", request.prompt_id, id, config.vocab_size);
  if (s.min_new_tokens > 0 && s.stop_ids.size() > 1)
    return errorf("prompt {}: min_new_tokens {} with {} stop ids; at most one can be held back", request.prompt_id,
                  s.min_new_tokens, s.stop_ids.size());
  if (request.record != ReplayKind::none && options.cache_slots > 0)
    return errorf("prompt {}: choices are to be recorded, which an engine with a prefix cache does not see of all rows", request.prompt_id);
  const TokenLog& log = request.log;
  if (log.tokens.empty()) return Status::ok();
  if (request.num_samples != 1 || log.logprobs.size() != log.tokens.size() || log.versions.size() != log.tokens.size() ||
      static_cast<int64_t>(log.tokens.size()) >= s.max_new_tokens)
    return errorf("prompt {}: a log of {} tokens, {} log-probs and {} versions for {} samples of {} tokens; wanted as many of each, one sample, and a "
                  "token left to draw",
                  request.prompt_id, log.tokens.size(), log.logprobs.size(), log.versions.size(), request.num_samples, s.max_new_tokens);
  for (const int32_t id : log.tokens)
    if (!in_vocabulary(id) || std::find(s.stop_ids.begin(), s.stop_ids.end(), id) != s.stop_ids.end())
      return errorf("prompt {}: token {} of the log is a stop id or outside the vocabulary of {}", request.prompt_id, id, config.vocab_size);
  return Status::ok();
}

// REQUIRES: check(request).
void Engine::Impl::add(Request request) {
  const int64_t id = next_request++;
  Active& active = requests.emplace(id, Active{.request = std::move(request), .tokens = {}, .choices = {}}).first->second;
  const Request& r = active.request;
  active.tokens = r.prompt;
  active.tokens.insert(active.tokens.end(), r.log.tokens.begin(), r.log.tokens.end());
  Work work{.request = id,
            .prompt_tokens = static_cast<int64_t>(active.tokens.size()),
            .max_new_tokens = r.sampling.max_new_tokens - static_cast<int64_t>(r.log.tokens.size()),
            .num_samples = r.num_samples,
            .expected_tokens = r.expected_tokens};
  if (options.cache_slots > 0) work.prompt = active.tokens;
  scheduler.submit(work);
}

SequenceRows Engine::Impl::sequence_rows(const PlannedRows& r) const {
  std::span<const int32_t> tokens;
  if (r.prompt) {
    tokens = std::span(requests.at(r.request).tokens).subspan(static_cast<size_t>(r.first_position), static_cast<size_t>(r.count));
  } else {
    tokens = std::span(running[static_cast<size_t>(r.slot)].completion.tokens).last(1);
  }
  const auto covering = static_cast<size_t>(pages.pages_for(r.first_position + r.count));
  return {.tokens = tokens, .first_position = r.first_position, .slot = r.slot, .pages = pages.pages(r.slot).first(covering)};
}

// Runs the plan's rows and returns the hidden row of every draw, [draws, D].
TensorView Engine::Impl::run_forward(const Plan& plan) {
  rows.clear();
  recordings.clear();
  int64_t num_rows = 0;
  for (const PlannedRows& r : plan.rows) {
    const Running& sample = running[static_cast<size_t>(r.slot)];
    Active& active = r.prompt ? requests.at(r.request) : *sample.active;
    if (active.request.record != ReplayKind::none) {
      ChoiceLog& log = r.prompt ? active.choices : running[static_cast<size_t>(r.slot)].completion.choices;
      const ChoiceLayout& layout = layout_of(active.request.record);
      layout.resize(log, r.first_position + r.count);
      recordings.push_back({&log, &layout, r.first_position, r.count, num_rows});
    }
    num_rows += r.count;
    if (r.prompt) stats.prefill_tokens += r.count;
    rows.push_back(sequence_rows(r));
  }

  const int64_t num_draws = static_cast<int64_t>(plan.draws.size());
  TensorView drawn = c.workspace->tensor(kept_hidden.dtype, {num_draws, config.hidden_size}, "engine.drawn");
  TensorView hidden;
  ArenaScope scope(*c.workspace);
  Model recorded = model;
  if (!recordings.empty()) recorded.probe = &record;
  for (const SlotCopy& copy : plan.restores) state.copy_slot(c, copy.to, copy.from);
  if (!rows.empty() || has_peers()) hidden = forward(c, recorded, builder.build(c, *c.workspace, rows, WantedRows::last_of_each), state, nullptr);

  for (const SlotCopy& copy : plan.saves) state.copy_slot(c, copy.to, copy.from);

  // Samples that start on the same prompt draw from equal copies of its row. The kept row is read before it is replaced.
  const ArenaScope host_scope(*c.host);
  TensorView from = c.host->tensor(DType::i32, {num_draws}, "engine.from");
  bool kept = false;
  for (int64_t i = 0; i < num_draws; ++i) {
    const int32_t row = plan.draws[static_cast<size_t>(i)].rows;
    from.ptr<int32_t>()[i] = std::max(row, 0);
    kept = kept || row < 0;
  }
  if (num_draws > 0 && !hidden.empty()) moe_gather(c, drawn, hidden, on_device(c, from, *c.workspace));
  for (int64_t i = 0; kept && i < num_draws; ++i)
    if (plan.draws[static_cast<size_t>(i)].rows < 0) copy(c, drawn.slice(i, 1), kept_hidden);
  if (plan.keep >= 0) copy(c, kept_hidden, hidden.slice(plan.keep, 1));
  return drawn;
}

// Every running sample draws its next token, and nothing else happens or is to be seen.
bool Engine::Impl::only_decodes(const Plan& plan) const {
  const bool plain = plan.restores.empty() && plan.saves.empty() && !plan.rows.empty() && plan.rows.size() == plan.draws.size();
  return plain && std::none_of(plan.rows.begin(), plan.rows.end(), [&](const PlannedRows& r) {
           return r.prompt || running[static_cast<size_t>(r.slot)].active->request.record != ReplayKind::none;
         });
}

// Draws for the plan's rows by a graph: token and log-prob of every row and of padding, [2, rows] words.
TensorView Engine::Impl::run_graph(const Plan& plan) {
  static constexpr int32_t kPadding[] = {0};
  rows.clear();
  params.clear();
  int64_t longest = 0;
  for (const PlannedRows& r : plan.rows) {
    rows.push_back(sequence_rows(r));
    params.push_back(sample_params(running[static_cast<size_t>(r.slot)]));
    longest = std::max(longest, r.first_position + 1);
  }
  // Padding reads no state and leaves none.
  const int64_t num_rows = std::min(padded_rows(static_cast<int64_t>(rows.size())), options.max_running);
  rows.resize(static_cast<size_t>(num_rows), {.tokens = kPadding, .first_position = 0, .slot = -1, .pages = {}});
  params.resize(static_cast<size_t>(num_rows), params.back());

  Arena& ws = *c.workspace;
  const ArenaScope host_scope(*c.host);
  const TensorView words = ws.tensor(DType::i32, {2, num_rows}, "engine.words");
  const TensorView packed = c.host->tensor(DType::i32, {num_rows * kSampleParamWords}, "engine.params");
  const SampleFilters filters = pack_sample_params(packed, params.data(), config.vocab_size);
  const ConstTensorView sampling = on_device(c, packed, ws);
  const SequenceBatch& batch = builder.build(c, ws, rows, WantedRows::all, std::min(padded_positions(longest), options.max_context));
  shape.clear();
  shape.add(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(model.weights)));
  shape.add(static_cast<uint64_t>(ws.mark()));
  shape.add(static_cast<uint64_t>(filters));
  shape.add(words);
  shape.add(sampling);
  shape.add(batch);
  stats.graph_steps += graphs.run(c, shape, [&] {
    const ArenaScope scope(ws);
    const TensorView hidden = forward(c, model, batch, state, nullptr);
    const TensorView logits = ws.tensor(DType::f32, {num_rows, config.vocab_size}, "engine.logits");
    head_logits(c, model, logits, hidden);
    sample(c, token_words(words), logprob_words(words), logits, sampling, filters);
  });
  return words;
}

void Engine::Impl::record_rows(int layer, std::string_view point, ConstTensorView seen) {
  if (const bool experts = point == "ffn.ids", entries = point == "attn.selected"; experts || entries) {
    const ArenaScope host_scope(*c.host);
    const ConstTensorView rows = on_host(c, seen);
    for (const Recording& r : recordings) {
      if (experts) r.layout->put_experts(*r.log, r.first, layer, rows.slice(r.row, r.count));
      if (entries && r.layout->kind() == ReplayKind::routing_index) r.layout->put_entries(*r.log, r.first, layer, rows.slice(r.row, r.count));
    }
  }
  if (model.probe != nullptr) (*model.probe)(layer, point, seen);
}

void Engine::Impl::start(const PlannedDraw& draw) {
  Active& active = requests.at(draw.request);
  if (draw.copy_from >= 0) {
    state.copy_slot(c, draw.slot, draw.copy_from);
    if (draw.page.to >= 0) state.copy_page(c, draw.page.to, draw.page.from);
    stats.shared_prompt_tokens += static_cast<int64_t>(active.tokens.size());
  }
  ++active.started;
  Running& r = running[static_cast<size_t>(draw.slot)];
  r.active = &active;
  r.completion = new_completion(active, draw.sample);
  const size_t most = static_cast<size_t>(active.request.sampling.max_new_tokens);
  r.completion.tokens.reserve(most);
  r.completion.logprobs.reserve(most);
  r.completion.versions.reserve(most);
  const TokenLog& log = active.request.log;
  r.completion.tokens.insert(r.completion.tokens.end(), log.tokens.begin(), log.tokens.end());
  r.completion.logprobs.insert(r.completion.logprobs.end(), log.logprobs.begin(), log.logprobs.end());
  r.completion.versions.insert(r.completion.versions.end(), log.versions.begin(), log.versions.end());
  r.completion.choices = active.choices;
}

SampleParams Engine::Impl::sample_params(const Running& r) const {
  const Request& request = r.active->request;
  const SamplingOptions& s = request.sampling;
  const size_t t = r.completion.tokens.size();
  SampleParams p;
  p.temperature = s.temperature;
  p.top_p = s.top_p;
  p.min_p = s.min_p;
  p.top_k = s.top_k;
  if (static_cast<int64_t>(t) < s.min_new_tokens && !s.stop_ids.empty()) p.forbid = s.stop_ids[0];
  p.seed = request.seed;
  p.prompt_id = request.prompt_id;
  p.sample_idx = static_cast<uint32_t>(r.completion.sample_idx);
  p.position = static_cast<uint32_t>(request.prompt.size() + t);
  return p;
}

void Engine::Impl::finish(Running& r, FinishReason reason) {
  Active& active = *r.active;
  r.completion.reason = reason;
  done.push_back(std::move(r.completion));
  r = Running();
  ++active.finished;
  ++stats.finished;
}

void Engine::Impl::append(int32_t slot, int32_t token, float logprob) {
  Running& r = running[static_cast<size_t>(slot)];
  const SamplingOptions& s = r.active->request.sampling;
  r.completion.tokens.push_back(token);
  r.completion.logprobs.push_back(logprob);
  r.completion.versions.push_back(static_cast<int32_t>(state_version));
  drawn.push_back({.tag = r.completion.tag, .sample_idx = r.completion.sample_idx, .token = token, .logprob = logprob, .version = r.completion.versions.back()});
  ++stats.decode_tokens;
  const bool stop = std::find(s.stop_ids.begin(), s.stop_ids.end(), token) != s.stop_ids.end();
  if (!stop && static_cast<int64_t>(r.completion.tokens.size()) < s.max_new_tokens) return;
  finish(r, stop ? FinishReason::stop : FinishReason::length);
  scheduler.finish(slot);
}

bool Engine::Impl::step() {
  drawn.clear();
  if (has_peers() && !model.ep->any(!scheduler.idle(), "engine step")) return false;
  if (scheduler.idle()) {
    if (!has_peers()) return false;
    const auto start = std::chrono::steady_clock::now();
    ArenaScope scope(*c.workspace);
    forward(c, model, builder.build(c, *c.workspace, {}, WantedRows::last_of_each), state, nullptr);
    stats.forward_seconds += seconds_since(start);
    ++stats.empty_steps;
    return true;
  }
  const int64_t version = model.weights->version();
  if (version != state_version) {
    CHECK(scheduler.holds_nothing(), "weights went from version {} to {} while samples were running", state_version, version);
    scheduler.forget_prefixes();
    state_version = version;
  }

  const Plan& plan = scheduler.next();
  const int64_t num_draws = static_cast<int64_t>(plan.draws.size());
  ArenaScope scope(*c.workspace);

  const auto forward_start = std::chrono::steady_clock::now();
  const bool as_graph = use_graphs() && only_decodes(plan);
  TensorView words, logits;
  if (as_graph) {
    words = run_graph(plan);
  } else {
    words = c.workspace->tensor(DType::i32, {2, num_draws}, "engine.words");
    const TensorView drawn = run_forward(plan);
    logits = c.workspace->tensor(DType::f32, {num_draws, config.vocab_size}, "engine.logits");
    if (num_draws > 0) head_logits(c, model, logits, drawn);
  }
  stats.forward_seconds += seconds_since(forward_start);

  const auto sample_start = std::chrono::steady_clock::now();
  if (!as_graph) {
    params.clear();
    for (const PlannedDraw& d : plan.draws) {
      if (d.first) start(d);
      params.push_back(sample_params(running[static_cast<size_t>(d.slot)]));
    }
    if (num_draws > 0) sample(c, token_words(words), logprob_words(words), logits, params.data());
  }
  const ArenaScope host_scope(*c.host);
  const ConstTensorView on_host_words = on_host(c, words);
  const ConstTensorView tokens = token_words(on_host_words), logprobs = logprob_words(on_host_words);
  for (int64_t i = 0; i < num_draws; ++i) {
    const PlannedDraw& d = plan.draws[static_cast<size_t>(i)];
    append(d.slot, tokens.ptr<int32_t>()[i], logprobs.ptr<float>()[i]);
    const auto active = requests.find(d.request);
    if (active->second.finished == active->second.request.num_samples) requests.erase(active);
  }
  stats.sample_seconds += seconds_since(sample_start);
  stats.cached_prompt_tokens = scheduler.cached_tokens();
  ++stats.steps;
  return true;
}

void Engine::Impl::abort_unstarted(const Active& active) {
  for (int32_t s = active.started; s < active.request.num_samples; ++s) {
    done.push_back(new_completion(active, s));
    Completion& c = done.back();
    c.tokens = active.request.log.tokens;
    c.logprobs = active.request.log.logprobs;
    c.versions = active.request.log.versions;
    c.reason = FinishReason::abort;
    ++stats.finished;
  }
}

void Engine::Impl::abort_all() {
  for (Running& r : running)
    if (r.active != nullptr) finish(r, FinishReason::abort);
  for (const auto& [id, active] : requests) abort_unstarted(active);
  requests.clear();
  scheduler.clear();
}

bool Engine::Impl::abort(uint64_t tag) {
  bool found = false;
  for (auto i = requests.begin(); i != requests.end();) {
    if (i->second.request.tag != tag) {
      ++i;
      continue;
    }
    found = true;
    for (Running& r : running)
      if (r.active == &i->second) finish(r, FinishReason::abort);
    abort_unstarted(i->second);
    scheduler.abort(i->first);
    i = requests.erase(i);
  }
  return found;
}

bool Engine::Impl::stop(uint64_t tag, int32_t sample_idx) {
  const auto r = std::find_if(running.begin(), running.end(), [&](const Running& x) {
    return x.active != nullptr && x.completion.tag == tag && x.completion.sample_idx == sample_idx;
  });
  if (r == running.end()) return false;
  Active& active = *r->active;
  finish(*r, FinishReason::stop);
  scheduler.finish(static_cast<int32_t>(r - running.begin()));
  if (active.finished == active.request.num_samples)
    requests.erase(std::find_if(requests.begin(), requests.end(), [&](const auto& x) { return &x.second == &active; }));
  return true;
}

void Engine::Impl::retract_all() {
  scheduler.clear();
  std::map<int64_t, Active> before = std::exchange(requests, {});
  // Of one request, started samples continue each on its own; the rest stays together.
  for (auto& [id, active] : before) {
    for (Running& r : running) {
      if (r.active != &active) continue;
      Request one = active.request;
      one.first_sample = r.completion.sample_idx;
      one.num_samples = 1;
      one.log = {.tokens = std::move(r.completion.tokens), .logprobs = std::move(r.completion.logprobs), .versions = std::move(r.completion.versions)};
      r = Running();
      add(std::move(one));
    }
    active.request.first_sample += active.started;
    active.request.num_samples -= active.started;
    if (active.request.num_samples > 0) add(std::move(active.request));
  }
}

Engine::Engine(Context& c, const Model& model, const EngineOptions& options, Arena& arena)
    : impl_(std::make_unique<Impl>(c, model, options, arena)) {}
Engine::~Engine() = default;
Status Engine::submit(Request request) {
  LOCKSTEP_RETURN_IF_ERROR(check(request));
  impl_->add(std::move(request));
  return Status::ok();
}
Status Engine::check(const Request& request) const { return impl_->check(request); }
bool Engine::step() { return impl_->step(); }
bool Engine::idle() const { return impl_->scheduler.idle(); }
std::vector<Completion> Engine::take_finished() { return std::exchange(impl_->done, {}); }
std::span<const Drawn> Engine::drawn() const { return impl_->drawn; }
void Engine::abort_all() { impl_->abort_all(); }
bool Engine::abort(uint64_t tag) { return impl_->abort(tag); }
bool Engine::stop(uint64_t tag, int32_t sample_idx) { return impl_->stop(tag, sample_idx); }
void Engine::retract_all() { impl_->retract_all(); }
void Engine::flush_cache() { impl_->scheduler.forget_prefixes(); }
EngineLoad Engine::load() const {
  const Impl& e = *impl_;
  return {.running = e.scheduler.num_admitted(),
          .waiting = e.scheduler.num_waiting(),
          .free_slots = e.pages.free_slots(),
          .free_pages = e.pages.free_pages(),
          .num_pages = e.pages.num_pages(),
          .cached_prefixes = e.scheduler.cached_prefixes()};
}
const EngineStats& Engine::stats() const { return impl_->stats; }

}  // namespace lockstep
