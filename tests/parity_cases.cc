#include "tests/parity_cases.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/rng.h"
#include "model/stack.h"
#include "ops/logprob/logprob.h"
#include "rollout/engine.h"

namespace lockstep {

namespace {

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed, RngPurpose::test) {}
  int64_t range(int64_t low, int64_t high) { return low + rng_.below(static_cast<uint32_t>(high - low + 1)); }
  template <typename T>
  T one_of(std::initializer_list<T> values) { return values.begin()[rng_.below(static_cast<uint32_t>(values.size()))]; }
  float normal() { return rng_.normal(); }

 private:
  Philox rng_;
};

ModelConfig random_config(Draw& d) {
  ModelConfig m;
  m.vocab_size = d.range(20, 150);
  m.hidden_size = d.one_of<int64_t>({16, 24, 40, 64});
  m.o_groups = d.one_of<int64_t>({1, 2, 3});
  m.num_heads = m.o_groups * d.range(1, 4);
  m.head_dim = d.one_of<int64_t>({8, 16, 24, 40});
  m.rope_dim = d.one_of<int64_t>({4, 8});
  m.q_rank = d.one_of<int64_t>({8, 20, 32});
  m.o_rank = d.one_of<int64_t>({5, 8, 16});
  m.window = d.one_of<int64_t>({1, 3, 8, 16});
  m.index_heads = d.one_of<int64_t>({3, 8, 24});
  m.index_head_dim = d.one_of<int64_t>({8, 16});
  m.index_topk = d.one_of<int64_t>({1, 2, 4});
  m.num_experts = d.range(4, 9);
  m.experts_per_token = d.range(1, 3);
  m.expert_dim = d.one_of<int64_t>({8, 24, 32});
  m.routed_scale = 1.5f;
  m.swiglu_limit = d.one_of<float>({0.0f, 0.05f, 10.0f});
  m.hc_mult = d.one_of<int64_t>({1, 2, 4});
  m.max_positions = 128;
  if (d.range(0, 1) == 1) m.compress_rope_scaling = {16.0f, 64, 32.0f, 1.0f};
  const int64_t csa_ratio = d.one_of<int64_t>({2, 4}), hca_ratio = d.one_of<int64_t>({4, 8, 16});
  for (int64_t i = d.range(1, 4); i > 0; --i) {
    LayerConfig l;
    l.attention = d.one_of({AttentionKind::swa, AttentionKind::csa, AttentionKind::hca});
    l.ratio = l.attention == AttentionKind::swa ? 0 : l.attention == AttentionKind::csa ? csa_ratio : hca_ratio;
    l.hash_routed = d.range(0, 2) == 0;
    m.layers.push_back(l);
  }
  return m;
}

// Rows of one block of 128 columns, of two, of three.
void widen(Draw& d, ModelConfig& m) {
  m.hidden_size = d.one_of<int64_t>({40, 136, 264});
  m.expert_dim = d.one_of<int64_t>({24, 128, 160});
  m.q_rank = d.one_of<int64_t>({20, 136});
  m.o_rank = d.one_of<int64_t>({16, 136});
}

// Every parameter away from its symmetric initial value, so that no path is idle.
void randomize(Draw& d, const std::vector<TensorSpec>& table, TensorSet& masters) {
  for (const TensorSpec& spec : table) {
    if (spec.role == TensorRole::hash_table) continue;
    float* p = masters.views[static_cast<size_t>(spec.id)].ptr<float>();
    const float center = spec.role == TensorRole::norm ? 1.0f : 0.0f, spread = spec.shape.rank >= 2 ? 0.25f : 0.3f;
    for (int64_t i = 0; i < spec.shape.elements(); ++i) p[i] = center + spread * d.normal();
  }
}

struct Sampled {
  std::vector<int32_t> tokens;
  int64_t prompt_length;
  float temperature;
  std::vector<float> logprobs;
};

// Log-probabilities of every response token of `group`, whole sequences packed into one call.
int64_t count_differences(Context& c, const Model& model, std::span<const Sampled> group) {
  ArenaScope scope(*c.workspace);
  const ModelConfig& m = model.weights->config();
  const int64_t page_tokens = default_page_tokens(m);
  int64_t num_pages = 0;
  std::vector<std::vector<int32_t>> pages;
  std::vector<SequenceRows> rows;
  for (const Sampled& s : group) {
    const int64_t count = (static_cast<int64_t>(s.tokens.size()) + page_tokens - 1) / page_tokens;
    pages.emplace_back();
    for (int64_t i = 0; i < count; ++i) pages.back().push_back(static_cast<int32_t>(num_pages++));
  }
  for (size_t i = 0; i < group.size(); ++i) rows.push_back({group[i].tokens, 0, -1, pages[i]});
  StatePool state(m, model.weights->numerics(), 0, num_pages, page_tokens, *c.workspace);
  BatchBuilder builder(m, page_tokens);
  const TensorView hidden = forward(c, model, builder.build(c, *c.workspace, rows, WantedRows::all), state, nullptr);
  const int64_t T = hidden.rows();
  TensorView target = c.workspace->zeros(DType::i32, {T}, "target"), temperature = c.workspace->tensor(DType::f32, {T}, "temperature");
  TensorView logprob = c.workspace->tensor(DType::f32, {T}, "logprob");
  int64_t row = 0;
  for (const Sampled& s : group)
    for (size_t i = 0; i < s.tokens.size(); ++i, ++row) {
      temperature.ptr<float>()[row] = s.temperature;
      target.ptr<int32_t>()[row] = i + 1 < s.tokens.size() ? s.tokens[i + 1] : 0;
    }
  select_logprob(c, logprob, TensorView(), TensorView(), hidden, model.weights->tensors().head, target, temperature);
  int64_t different = 0;
  row = 0;
  for (const Sampled& s : group) {
    for (size_t t = 0; t < s.logprobs.size(); ++t)
      different += std::bit_cast<uint32_t>(logprob.ptr<float>()[row + s.prompt_length - 1 + static_cast<int64_t>(t)]) !=
                   std::bit_cast<uint32_t>(s.logprobs[t]);
    row += static_cast<int64_t>(s.tokens.size());
  }
  return different;
}

}  // namespace

ParityResult run_parity_case(uint64_t seed, Numerics numerics, CacheRounding cache) {
  Draw d(seed);
  ModelConfig config = random_config(d);
  if (is_quantized(numerics)) widen(d, config);
  ParityResult result;
  result.where = fmt::format("seed {} {}{}{}", seed, numerics_name(numerics), cache.kv_fp8 ? " kv_fp8" : "", cache.index_fp4 ? " index_fp4" : "");
  const Status legal = check_model_config(config, result.where);
  CHECK(legal.is_ok(), "{}", legal.message());

  Arena arena("parity", size_t{4} << 30);
  Weights weights(config, numerics, arena);
  TensorSet masters = make_tensor_set(weights.table(), arena, [](const TensorSpec&) { return true; });
  initialize_masters(config, weights.table(), masters, seed);
  randomize(d, weights.table(), masters);
  CpuContext rollout_context(static_cast<int>(d.range(1, 4)), size_t{4} << 30);
  weights.load(rollout_context, masters, 0);
  Model model;
  model.weights = &weights;
  model.cache = cache;
  model.rope = make_rope_tables(config, config.max_positions, arena);

  // Rollout.
  EngineOptions options;
  options.max_running = d.range(1, 8);
  options.max_batch_tokens = d.range(std::max<int64_t>(4, options.max_running), 64);
  options.max_context = 100;
  Engine engine(rollout_context, model, options, arena);
  std::vector<Request> requests;
  for (int64_t i = d.range(1, 4); i > 0; --i) {
    Request r;
    r.prompt_id = static_cast<uint64_t>(i);
    r.seed = seed;
    r.num_samples = static_cast<int32_t>(d.range(1, 3));
    r.sampling.temperature = d.one_of<float>({1.0f, 0.8f});
    r.sampling.max_new_tokens = d.range(1, 40);
    r.sampling.stop_ids = {config.eos_id};
    for (int64_t t = d.range(1, 40); t > 0; --t) r.prompt.push_back(static_cast<int32_t>(d.range(0, config.vocab_size - 1)));
    requests.push_back(r);
    const Status submitted = engine.submit(std::move(r));
    CHECK(submitted.is_ok(), "{}", submitted.message());
  }
  std::vector<Sampled> sampled;
  while (!engine.idle()) engine.step();
  for (const Completion& done : engine.take_finished()) {
    const Request& r = *std::find_if(requests.begin(), requests.end(), [&](const Request& q) { return q.prompt_id == done.prompt_id; });
    Sampled s{r.prompt, static_cast<int64_t>(r.prompt.size()), r.sampling.temperature, done.logprobs};
    s.tokens.insert(s.tokens.end(), done.tokens.begin(), done.tokens.end());
    result.tokens += static_cast<int64_t>(done.tokens.size());
    sampled.push_back(std::move(s));
  }

  // Training: shuffled, in random groups, on another number of threads.
  for (size_t i = sampled.size(); i > 1; --i) std::swap(sampled[i - 1], sampled[static_cast<size_t>(d.range(0, static_cast<int64_t>(i) - 1))]);
  CpuContext training_context(static_cast<int>(d.range(1, 4)), size_t{4} << 30);
  for (size_t at = 0; at < sampled.size();) {
    const size_t count = std::min<size_t>(static_cast<size_t>(d.range(1, 5)), sampled.size() - at);
    result.different += count_differences(training_context, model, std::span(sampled).subspan(at, count));
    at += count;
  }
  return result;
}

}  // namespace lockstep
