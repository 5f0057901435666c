// The engine on a small model of every layer kind. What a sample says must not depend on how it was run: the reference is a
// generator that knows no state, no batch and no engine, and runs the whole sequence again for every token. All comparisons are
// of bits.

#include "rollout/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "model/stack.h"
#include "ops/sample/sample.h"

namespace {
std::atomic<int64_t> g_news{0};  // calls of operator new in this program
}

// Not inlined: the compiler would otherwise see malloc and delete, or new and free, meet in callers and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  g_news.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  g_news.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace lockstep {
namespace {

constexpr int64_t kContext = 160;

ModelConfig small_config() {
  ModelConfig m;
  m.vocab_size = 50;
  m.hidden_size = 32;
  m.num_heads = 4;
  m.head_dim = 16;
  m.rope_dim = 8;
  m.q_rank = 16;
  m.o_groups = 2;
  m.o_rank = 8;
  m.window = 6;
  m.index_heads = 2;
  m.index_head_dim = 8;
  m.index_topk = 3;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_dim = 16;
  m.swiglu_limit = 10.0f;
  m.sinkhorn_iters = 4;
  m.max_positions = kContext;
  m.initializer_range = 0.25f;  // large enough that what is drawn depends on the context
  m.layers = {{AttentionKind::swa, 0, true}, {AttentionKind::csa, 4, false}, {AttentionKind::hca, 8, false}};
  return m;
}

struct World {
  explicit World(Numerics numerics = Numerics::f32, int threads = 1)
      : context(threads, size_t{1} << 30),
        arena("test.model", size_t{1} << 28),
        config(small_config()),
        weights(config, numerics, arena) {
    const Status s = check_model_config(config, "test");
    CHECK(s.is_ok(), "{}", s.message());
    masters = make_tensor_set(weights.table(), arena, [](const TensorSpec&) { return true; });
    load(1, 5);
    model.weights = &weights;
    model.rope = make_rope_tables(config, kContext, arena);
  }
  void load(uint64_t seed, int64_t version) {
    initialize_masters(config, weights.table(), masters, seed);
    weights.load(context, masters, version);
  }
  CpuContext context;
  Arena arena;
  ModelConfig config;
  Weights weights;
  TensorSet masters;
  Model model;
};

struct EngineUnderTest {
  EngineUnderTest(World& w, const EngineOptions& o)
      : arena("test.state", size_t{1} << 30), engine(w.context, w.model, o, arena) {}
  Engine* operator->() { return &engine; }
  Arena arena;
  Engine engine;
};

std::vector<int32_t> random_prompt(uint64_t seed, int64_t length) {
  Philox rng(seed, RngPurpose::test);
  std::vector<int32_t> p(static_cast<size_t>(length));
  for (int32_t& t : p) t = static_cast<int32_t>(rng.below(50));
  return p;
}

Request request(uint64_t prompt_id, int64_t prompt_tokens, int32_t n, int64_t max_new) {
  Request r;
  r.prompt_id = prompt_id;
  r.prompt = random_prompt(prompt_id, prompt_tokens);
  r.num_samples = n;
  r.seed = 99;
  r.sampling.max_new_tokens = max_new;
  return r;
}

// Prompts around the page size (64) and the window, groups larger and smaller than what runs at once, and every sampling option.
std::vector<Request> mixed_requests() {
  std::vector<Request> v;
  v.push_back(request(10, 1, 3, 12));
  v.push_back(request(11, 64, 4, 9));
  v.push_back(request(12, 63, 2, 6));
  v.push_back(request(13, 70, 5, 7));
  v.push_back(request(14, 5, 1, 20));
  v.push_back(request(15, 17, 2, 1));
  v[1].sampling.temperature = 0.7f;
  v[2].sampling.top_k = 5;
  v[3].sampling.top_p = 0.8f;
  v[3].sampling.stop_ids = {3, 11, 27, 40};
  v[4].sampling.min_p = 0.1f;
  v[5].first_sample = 6;
  v[0].sampling.stop_ids = {7};
  v[0].sampling.min_new_tokens = 4;
  return v;
}

using Key = std::pair<uint64_t, int32_t>;
using Results = std::map<Key, Completion>;

Results collect(std::vector<Completion> completions) {
  Results r;
  for (Completion& c : completions) {
    const Key key{c.prompt_id, c.sample_idx};
    EXPECT_FALSE(r.contains(key)) << key.first << "/" << key.second << " finished twice";
    r[key] = std::move(c);
  }
  return r;
}

void run_to_end(Engine& e) {
  for (int64_t steps = 0; e.step(); ++steps) ASSERT_LT(steps, 20000);
  EXPECT_TRUE(e.idle());
}

Results run_all(World& w, const EngineOptions& o, const std::vector<Request>& requests) {
  EngineUnderTest e(w, o);
  for (const Request& r : requests) {
    const Status s = e->submit(r);
    EXPECT_TRUE(s.is_ok()) << s.message();
  }
  run_to_end(e.engine);
  return collect(e->take_finished());
}

void expect_same(const Completion& a, const Completion& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
  for (size_t i = 0; i < a.logprobs.size(); ++i)
    EXPECT_EQ(std::bit_cast<uint32_t>(a.logprobs[i]), std::bit_cast<uint32_t>(b.logprobs[i])) << "logprob " << i;
  EXPECT_EQ(a.versions, b.versions);
  EXPECT_EQ(a.reason, b.reason);
}

void expect_same(const Results& a, const Results& b) {
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [key, completion] : a) {
    SCOPED_TRACE(std::to_string(key.first) + "/" + std::to_string(key.second));
    ASSERT_TRUE(b.contains(key));
    expect_same(completion, b.at(key));
  }
}

// One sample, by running the whole sequence from position 0 for every token.
Completion generate_plainly(World& w, const Request& r, int32_t sample_idx) {
  const int64_t page_tokens = default_page_tokens(w.config);
  Arena arena("test.plain", size_t{1} << 26);
  StatePool state(w.config, w.weights.numerics(), 0, kContext / page_tokens + 1, page_tokens, arena);
  BatchBuilder builder(w.config, page_tokens);
  std::vector<int32_t> pages, tokens = r.prompt;
  for (int64_t p = 0; p < state.num_pages(); ++p) pages.push_back(static_cast<int32_t>(p));
  Completion out{.prompt_id = r.prompt_id, .sample_idx = sample_idx, .tokens = {}, .logprobs = {}, .versions = {}};
  const SamplingOptions& s = r.sampling;
  for (int64_t t = 0; t < s.max_new_tokens; ++t) {
    ArenaScope scope(w.context.workspace());
    Arena& ws = w.context.workspace();
    const std::vector<SequenceRows> rows = {{.tokens = tokens, .first_position = 0, .slot = -1, .pages = pages}};
    const SequenceBatch& batch = builder.build(ws, rows, WantedRows::last_of_each);
    const TensorView hidden = forward(w.context, w.model, batch, state, nullptr);
    const TensorView logits = ws.tensor(DType::f32, {1, w.config.vocab_size}, "test.logits");
    matmul(w.context, logits, hidden, w.weights.tensors().head);
    SampleParams p{.temperature = s.temperature, .top_p = s.top_p, .min_p = s.min_p, .top_k = s.top_k};
    if (t < s.min_new_tokens) p.forbid = s.stop_ids.at(0);
    p.seed = r.seed;
    p.prompt_id = r.prompt_id;
    p.sample_idx = static_cast<uint32_t>(sample_idx);
    p.position = static_cast<uint32_t>(tokens.size());
    const TensorView token = ws.tensor(DType::i32, {1}, "test.token"), logprob = ws.tensor(DType::f32, {1}, "test.logprob");
    sample(w.context, token, logprob, logits, &p);
    tokens.push_back(token.ptr<int32_t>()[0]);
    out.tokens.push_back(tokens.back());
    out.logprobs.push_back(logprob.ptr<float>()[0]);
    out.versions.push_back(static_cast<int32_t>(w.weights.version()));
    if (std::find(s.stop_ids.begin(), s.stop_ids.end(), tokens.back()) != s.stop_ids.end()) {
      out.reason = FinishReason::stop;
      break;
    }
  }
  return out;
}

class EngineNumerics : public ::testing::TestWithParam<Numerics> {};
INSTANTIATE_TEST_SUITE_P(Modes, EngineNumerics, ::testing::ValuesIn(kAllNumerics),
                         [](const auto& info) { return std::string(numerics_name(info.param)); });

TEST_P(EngineNumerics, SaysWhatRunningEverySampleAloneFromTheStartSays) {
  World w(GetParam());
  const std::vector<Request> requests = mixed_requests();
  const Results engine = run_all(w, {.max_running = 6, .max_batch_tokens = 48, .max_context = kContext}, requests);
  Results plain;
  for (const Request& r : requests)
    for (int32_t i = 0; i < r.num_samples; ++i)
      plain[{r.prompt_id, r.first_sample + i}] = generate_plainly(w, r, r.first_sample + i);
  expect_same(plain, engine);
  // The comparison means something only if contexts, samples and reasons differ.
  EXPECT_NE(engine.at({11, 0}).tokens, engine.at({11, 1}).tokens);
  EXPECT_TRUE(std::any_of(engine.begin(), engine.end(), [](const auto& e) { return e.second.reason == FinishReason::stop; }));
  EXPECT_TRUE(std::any_of(engine.begin(), engine.end(), [](const auto& e) { return e.second.reason == FinishReason::length; }));
}

TEST_P(EngineNumerics, ResultsDoNotDependOnHowSamplesAreBatched) {
  const std::vector<Request> requests = mixed_requests();
  World base(GetParam());
  const Results expected = run_all(base, {.max_running = 64, .max_batch_tokens = 4096, .max_context = kContext}, requests);
  struct Case {
    int64_t max_running, max_batch_tokens, num_pages;
    int threads;
  };
  for (const Case& k :
       {Case{1, 1, 0, 1}, Case{1, 4096, 4, 2}, Case{2, 7, 4, 1}, Case{3, 2, 6, 1}, Case{4, 33, 9, 3}, Case{64, 4096, 0, 2}}) {
    SCOPED_TRACE(std::to_string(k.max_running) + " running, " + std::to_string(k.max_batch_tokens) + " rows, " +
                 std::to_string(k.num_pages) + " pages, " + std::to_string(k.threads) + " threads");
    World w(GetParam(), k.threads);
    const EngineOptions o{
        .max_running = k.max_running, .max_batch_tokens = k.max_batch_tokens, .max_context = kContext, .num_pages = k.num_pages};
    expect_same(expected, run_all(w, o, requests));
  }
}

TEST_P(EngineNumerics, SamplesOfAGroupEqualSeparateRequests) {
  World w(GetParam());
  std::vector<Request> grouped = mixed_requests(), separate;
  for (const Request& r : grouped)
    for (int32_t i = r.num_samples; i-- > 0;) {  // and in another order
      Request one = r;
      one.num_samples = 1;
      one.first_sample = r.first_sample + i;
      separate.push_back(one);
    }
  const EngineOptions o{.max_running = 5, .max_batch_tokens = 64, .max_context = kContext};
  expect_same(run_all(w, o, grouped), run_all(w, o, separate));
}

TEST(Engine, RequestsMayArriveWhileOthersRun) {
  World w;
  const std::vector<Request> requests = mixed_requests();
  const EngineOptions o{.max_running = 4, .max_batch_tokens = 32, .max_context = kContext};
  const Results expected = run_all(w, o, requests);
  EngineUnderTest e(w, o);
  std::vector<Completion> done;
  for (const Request& r : requests) {
    ASSERT_TRUE(e->submit(r).is_ok());
    for (int i = 0; i < 3; ++i) e->step();
    for (Completion& c : e->take_finished()) done.push_back(std::move(c));
  }
  run_to_end(e.engine);
  for (Completion& c : e->take_finished()) done.push_back(std::move(c));
  expect_same(expected, collect(std::move(done)));
  EXPECT_TRUE(e->take_finished().empty());
  EXPECT_FALSE(e->step());
}

TEST(Engine, GreedyTakesTheMostLikelyTokenForEverySample) {
  World w;
  Request r = request(20, 9, 3, 10);
  r.sampling.temperature = 0.0f;
  const Results got = run_all(w, {.max_running = 2, .max_context = kContext}, {r});
  ASSERT_EQ(got.size(), 3u);
  for (int32_t i = 0; i < 3; ++i) EXPECT_EQ(got.at({20, i}).tokens, got.at({20, 0}).tokens);
  // The first token against the logits themselves.
  ArenaScope scope(w.context.workspace());
  Arena arena("test.plain", size_t{1} << 26);
  StatePool state(w.config, Numerics::f32, 0, 1, 64, arena);
  BatchBuilder builder(w.config, 64);
  const std::vector<int32_t> pages = {0};
  const std::vector<SequenceRows> rows = {{.tokens = r.prompt, .first_position = 0, .slot = -1, .pages = pages}};
  const TensorView hidden =
      forward(w.context, w.model, builder.build(w.context.workspace(), rows, WantedRows::last_of_each), state, nullptr);
  const TensorView logits = w.context.workspace().tensor(DType::f32, {1, 50}, "test.logits");
  matmul(w.context, logits, hidden, w.weights.tensors().head);
  EXPECT_EQ(got.at({20, 0}).tokens[0], std::max_element(logits.ptr<float>(), logits.ptr<float>() + 50) - logits.ptr<float>());
}

TEST(Engine, StopIdsEndASampleAndMinNewTokensHoldThemBack) {
  World w;
  const EngineOptions o{.max_running = 8, .max_context = kContext};
  Request r = request(30, 12, 1, 24);
  const Completion free = run_all(w, o, {r}).at({30, 0});
  ASSERT_EQ(free.tokens.size(), 24u);
  EXPECT_EQ(free.reason, FinishReason::length);

  // Any token that was said may end it; it ends at its first place and all before is the same.
  for (size_t i = 0; i < 6; ++i) {
    Request stopped = r;
    stopped.sampling.stop_ids = {free.tokens[i]};
    const size_t first = static_cast<size_t>(std::find(free.tokens.begin(), free.tokens.end(), stopped.sampling.stop_ids[0]) -
                                             free.tokens.begin());
    const Completion got = run_all(w, o, {stopped}).at({30, 0});
    EXPECT_EQ(got.reason, FinishReason::stop);
    EXPECT_EQ(got.tokens, std::vector<int32_t>(free.tokens.begin(), free.tokens.begin() + static_cast<int64_t>(first) + 1));
    EXPECT_EQ(got.logprobs.size(), got.tokens.size());
    EXPECT_EQ(got.versions.size(), got.tokens.size());
  }

  // Held back for ten tokens: the stop id is not among them, and it may come right after.
  Request held = r;
  held.num_samples = 40;
  held.sampling.stop_ids = {free.tokens[0]};
  held.sampling.min_new_tokens = 10;
  int64_t stopped = 0;
  for (const auto& [key, c] : run_all(w, o, {held})) {
    ASSERT_GE(c.tokens.size(), 10u);
    for (size_t t = 0; t < 10; ++t) EXPECT_NE(c.tokens[t], free.tokens[0]);
    stopped += c.reason == FinishReason::stop;
    EXPECT_EQ(c.reason == FinishReason::stop, c.tokens.back() == free.tokens[0]);
    EXPECT_LE(c.tokens.size(), 24u);
  }
  EXPECT_GT(stopped, 0);
}

TEST(Engine, StatsCountRowsAndSharedPrompts) {
  World w;
  const std::vector<Request> requests = mixed_requests();
  EngineUnderTest e(w, {.max_running = 3, .max_batch_tokens = 40, .max_context = kContext});
  int64_t prompt_tokens = 0, shared = 0, samples = 0, tokens = 0;
  for (const Request& r : requests) {
    ASSERT_TRUE(e->submit(r).is_ok());
    const int64_t length = static_cast<int64_t>(r.prompt.size());
    prompt_tokens += length;
    shared += (r.num_samples - 1) * length;
    samples += r.num_samples;
  }
  int64_t steps = 0;
  while (e->step()) ++steps;
  for (const Completion& c : e->take_finished()) tokens += static_cast<int64_t>(c.tokens.size());
  const EngineStats& s = e->stats();
  EXPECT_EQ(s.steps, steps);
  EXPECT_EQ(s.prefill_tokens, prompt_tokens);
  EXPECT_EQ(s.shared_prompt_tokens, shared);
  EXPECT_EQ(s.finished, samples);
  EXPECT_EQ(s.decode_tokens, tokens);
  EXPECT_GT(s.forward_seconds, 0.0);
  EXPECT_GT(s.sample_seconds, 0.0);
}

TEST(Engine, AbortEndsEverySampleOnceAndLeavesTheEngineUsable) {
  World w;
  const std::vector<Request> requests = mixed_requests();
  const EngineOptions o{.max_running = 3, .max_batch_tokens = 40, .max_context = kContext};
  const Results whole = run_all(w, o, requests);
  EngineUnderTest e(w, o);
  for (int steps : {0, 1, 2, 5, 9, 14}) {
    SCOPED_TRACE(steps);
    for (const Request& r : requests) ASSERT_TRUE(e->submit(r).is_ok());
    for (int i = 0; i < steps; ++i) e->step();
    e->abort_all();
    EXPECT_TRUE(e->idle());
    EXPECT_FALSE(e->step());
    const Results got = collect(e->take_finished());
    ASSERT_EQ(got.size(), whole.size());
    for (const auto& [key, c] : got) {
      const Completion& full = whole.at(key);
      if (c.reason != FinishReason::abort) {
        expect_same(full, c);
        continue;
      }
      ASSERT_LE(c.tokens.size(), full.tokens.size());
      EXPECT_EQ(c.tokens, std::vector<int32_t>(full.tokens.begin(), full.tokens.begin() + static_cast<int64_t>(c.tokens.size())));
    }
  }
  for (const Request& r : requests) ASSERT_TRUE(e->submit(r).is_ok());
  run_to_end(e.engine);
  expect_same(whole, collect(e->take_finished()));
}

TEST(Engine, TokensCarryTheVersionOfTheWeights) {
  World w;
  const EngineOptions o{.max_running = 2, .max_context = kContext};
  EngineUnderTest e(w, o);
  const Request r = request(40, 10, 3, 5);
  ASSERT_TRUE(e->submit(r).is_ok());
  run_to_end(e.engine);
  const Results old = collect(e->take_finished());
  w.load(2, 6);
  ASSERT_TRUE(e->submit(r).is_ok());
  run_to_end(e.engine);
  const Results updated = collect(e->take_finished());
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(old.at({40, i}).versions, std::vector<int32_t>(5, 5));
    EXPECT_EQ(updated.at({40, i}).versions, std::vector<int32_t>(5, 6));
    EXPECT_NE(old.at({40, i}).logprobs, updated.at({40, i}).logprobs);
  }
  expect_same(run_all(w, o, {r}), updated);  // nothing of the old weights is left
}

TEST(EngineDeathTest, WeightsMayNotChangeUnderRunningSamples) {
  World w;
  EngineUnderTest e(w, {.max_running = 2, .max_context = kContext});
  ASSERT_TRUE(e->submit(request(40, 10, 1, 5)).is_ok());
  e->step();
  w.load(2, 6);
  EXPECT_DEATH(e->step(), "version 5 to 6");
}

TEST(EngineDeathTest, OptionsThatCannotWork) {
  World w;
  EXPECT_DEATH(EngineUnderTest(w, {.max_context = kContext + 1}), "context of 161");
  EXPECT_DEATH(EngineUnderTest(w, {.max_context = kContext, .num_pages = 3}), "may need 4");
  EXPECT_DEATH(EngineUnderTest(w, {.max_running = 0, .max_context = kContext}), "0 running samples");
}

TEST(Engine, BadRequestsAreRefusedWithTheReason) {
  World w;
  EngineUnderTest e(w, {.max_running = 2, .max_context = 64});
  const auto refuses = [&](const char* what, auto change) {
    Request r = request(50, 8, 2, 16);
    change(r);
    const Status s = e->submit(r);
    EXPECT_FALSE(s.is_ok()) << what;
    EXPECT_NE(s.message().find(what), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("prompt 50"), std::string::npos) << s.message();
  };
  refuses("empty", [](Request& r) { r.prompt.clear(); });
  refuses("token 50 at position 3", [](Request& r) { r.prompt[3] = 50; });
  refuses("token -1 at position 0", [](Request& r) { r.prompt[0] = -1; });
  refuses("exceed the context of 64", [](Request& r) { r.sampling.max_new_tokens = 57; });
  refuses("0 samples", [](Request& r) { r.num_samples = 0; });
  refuses("from index -1", [](Request& r) { r.first_sample = -1; });
  refuses("from index 2147483647", [](Request& r) { r.first_sample = 2147483647; });
  refuses("max_new_tokens 0", [](Request& r) { r.sampling.max_new_tokens = 0; });
  refuses("min_new_tokens 17", [](Request& r) { r.sampling.min_new_tokens = 17; });
  refuses("temperature -0.5", [](Request& r) { r.sampling.temperature = -0.5f; });
  refuses("temperature nan", [](Request& r) { r.sampling.temperature = std::bit_cast<float>(0x7fc00000u); });
  refuses("top_p 0", [](Request& r) { r.sampling.top_p = 0.0f; });
  refuses("top_p 1.5", [](Request& r) { r.sampling.top_p = 1.5f; });
  refuses("min_p -0.1", [](Request& r) { r.sampling.min_p = -0.1f; });
  refuses("min_p nan", [](Request& r) { r.sampling.min_p = std::bit_cast<float>(0x7fc00000u); });
  refuses("stop id 50", [](Request& r) { r.sampling.stop_ids = {50}; });
  refuses("with 2 stop ids", [](Request& r) {
    r.sampling.stop_ids = {1, 2};
    r.sampling.min_new_tokens = 1;
  });
  EXPECT_TRUE(e->idle());
  EXPECT_FALSE(e->step());
  EXPECT_TRUE(e->submit(request(50, 8, 2, 56)).is_ok());
}

TEST(Engine, DrawnTokensAreThoseOfTheCompletions) {
  World w;
  EngineUnderTest e(w, {.max_running = 4, .max_batch_tokens = 32, .max_context = kContext});
  std::vector<Request> requests = mixed_requests();
  Results streamed;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].tag = 100 + i;
    ASSERT_TRUE(e->submit(requests[i]).is_ok());
  }
  std::vector<Completion> done;
  while (e->step()) {
    EXPECT_LE(e->drawn().size(), 4u);
    for (const Drawn& d : e->drawn()) {
      Completion& c = streamed[{requests[d.tag - 100].prompt_id, d.sample_idx}];
      c.tokens.push_back(d.token);
      c.logprobs.push_back(d.logprob);
      c.versions.push_back(d.version);
    }
    for (Completion& c : e->take_finished()) done.push_back(std::move(c));
  }
  const Results whole = collect(std::move(done));
  ASSERT_EQ(streamed.size(), whole.size());
  for (auto& [key, c] : streamed) {
    c.reason = whole.at(key).reason;
    expect_same(whole.at(key), c);
  }
}

TEST(Engine, ALogContinuesWithTheSameBits) {
  World w;
  const EngineOptions o{.max_running = 4, .max_batch_tokens = 24, .max_context = kContext};
  const std::vector<Request> requests = mixed_requests();
  const Results whole = run_all(w, o, requests);
  std::vector<Request> rest;
  Results expected;
  for (const Request& r : requests) {
    for (int32_t i = 0; i < r.num_samples; ++i) {
      const Completion& c = whole.at({r.prompt_id, r.first_sample + i});
      const auto kept = static_cast<int64_t>(c.tokens.size()) / 2;
      Request one = r;
      one.first_sample = r.first_sample + i;
      one.num_samples = 1;
      one.log = {.tokens = {c.tokens.begin(), c.tokens.begin() + kept},
                 .logprobs = {c.logprobs.begin(), c.logprobs.begin() + kept},
                 .versions = {c.versions.begin(), c.versions.begin() + kept}};
      rest.push_back(one);
    }
  }
  expect_same(whole, run_all(w, o, rest));
}

TEST(Engine, WhoGoesFirstChangesNoBitAndTheLongestFirstTakesFewerSteps) {
  World w;
  const EngineOptions o{.max_running = 3, .max_batch_tokens = 64, .max_context = kContext};
  std::vector<Request> requests;
  for (uint64_t p = 0; p < 9; ++p) requests.push_back(request(50 + p, 7, 1, p == 8 ? 40 : 6));
  const auto run = [&](int64_t* steps) {
    EngineUnderTest e(w, o);
    for (const Request& r : requests) EXPECT_TRUE(e->submit(r).is_ok());
    run_to_end(e.engine);
    *steps = e->stats().steps;
    return collect(e->take_finished());
  };
  int64_t given = 0, longest = 0;
  const Results whole = run(&given);
  for (Request& r : requests) r.expected_tokens = r.sampling.max_new_tokens;
  expect_same(whole, run(&longest));
  EXPECT_EQ(longest, 40) << "the others fit beside the long one";
  EXPECT_GT(given, longest);
}

TEST(Engine, RetractedSamplesContinueWithTheSameBitsAndUnderNewWeightsWithTheirVersion) {
  World w;
  const EngineOptions o{.max_running = 4, .max_batch_tokens = 24, .max_context = kContext, .cache_slots = 3};
  const std::vector<Request> requests = mixed_requests();
  const Results whole = run_all(w, o, requests);
  EngineUnderTest e(w, o);
  for (const Request& r : requests) ASSERT_TRUE(e->submit(r).is_ok());
  while (e->step()) {
    if (e->stats().steps % 3 != 0) continue;
    e->retract_all();
    EXPECT_EQ(e->load().running, 0);
  }
  expect_same(whole, collect(e->take_finished()));

  const Request r = request(41, 80, 3, 20);
  const Results old = run_all(w, o, {r});
  ASSERT_TRUE(e->submit(r).is_ok());
  while (e->stats().steps % 10 != 0) e->step();
  e->retract_all();
  w.load(2, 6);
  run_to_end(e.engine);
  for (const auto& [key, c] : collect(e->take_finished())) {
    const auto turn = std::find(c.versions.begin(), c.versions.end(), 6) - c.versions.begin();
    EXPECT_TRUE(std::all_of(c.versions.begin(), c.versions.begin() + turn, [](int32_t v) { return v == 5; }));
    EXPECT_TRUE(std::equal(c.tokens.begin(), c.tokens.begin() + turn, old.at(key).tokens.begin()));
    // The rest is what the new weights say after that beginning, and no state of the old ones is in it.
    Request rest = r;
    rest.first_sample = key.second;
    rest.num_samples = 1;
    rest.log = {.tokens = {c.tokens.begin(), c.tokens.begin() + turn},
                .logprobs = {c.logprobs.begin(), c.logprobs.begin() + turn},
                .versions = {c.versions.begin(), c.versions.begin() + turn}};
    expect_same(run_all(w, o, {rest}).at(key), c);
  }
}

// Prompts with common beginnings, longer and shorter than pages of 64.
std::vector<Request> related_requests() {
  std::vector<Request> v;
  const std::vector<int32_t> trunk = random_prompt(1, 140);
  for (const auto& [common, own] : {std::pair{70, 3}, {70, 20}, {64, 1}, {128, 5}, {128, 9}, {65, 0}, {129, 0}, {0, 30}, {63, 40}, {130, 4}}) {
    Request r = request(200 + v.size(), 1, 1 + static_cast<int32_t>(v.size() % 3), 8);
    r.prompt.assign(trunk.begin(), trunk.begin() + common);
    const std::vector<int32_t> tail = random_prompt(50 + v.size(), own);
    r.prompt.insert(r.prompt.end(), tail.begin(), tail.end());
    v.push_back(r);
  }
  return v;
}

TEST_P(EngineNumerics, CachedPrefixesChangeNothingAndSaveWork) {
  World w(GetParam());
  const std::vector<Request> requests = related_requests();
  const Results expected = run_all(w, {.max_running = 4, .max_batch_tokens = 48, .max_context = kContext}, requests);
  for (const int64_t num_pages : {0, 4, 6}) {
    for (const int64_t slots : {1, 2, 8}) {
      SCOPED_TRACE(std::to_string(num_pages) + " pages, " + std::to_string(slots) + " cache slots");
      EngineUnderTest e(w, {.max_running = 4, .max_batch_tokens = 48, .max_context = kContext, .num_pages = num_pages, .cache_slots = slots});
      for (int round = 0; round < 2; ++round) {
        for (const Request& r : requests) ASSERT_TRUE(e->submit(r).is_ok());
        run_to_end(e.engine);
        expect_same(expected, collect(e->take_finished()));
      }
      if (num_pages == 0) {
        EXPECT_GT(e->stats().cached_prompt_tokens, slots == 8 ? 1000 : 0);
      }
      const EngineLoad full = e->load();
      EXPECT_LE(full.cached_prefixes, slots);
      e->flush_cache();
      EXPECT_EQ(e->load().free_pages, full.num_pages);
      EXPECT_EQ(e->load().free_slots, 5 + slots);
    }
  }
}

TEST(Engine, TheThirdPromptWithACommonBeginningRunsOnlyItsOwn) {
  World w;
  EngineUnderTest e(w, {.max_running = 2, .max_context = kContext, .cache_slots = 4});
  for (uint64_t i = 0; i < 3; ++i) {
    Request r = request(300 + i, 1, 1, 2);
    r.prompt = random_prompt(1, 66);
    const std::vector<int32_t> own = random_prompt(400 + i, 70);
    r.prompt.insert(r.prompt.end(), own.begin(), own.end());  // 136 tokens, of which 66 common: page 0
    const int64_t before = e->stats().prefill_tokens;
    ASSERT_TRUE(e->submit(r).is_ok());
    run_to_end(e.engine);
    EXPECT_EQ(e->stats().prefill_tokens - before, i < 2 ? 136 : 72);
  }
  EXPECT_EQ(e->stats().cached_prompt_tokens, 64);
}

TEST(Engine, AnOlderVersionsPrefixesAreNeverUsed) {
  World w;
  const EngineOptions o{.max_running = 4, .max_context = kContext, .cache_slots = 8};
  EngineUnderTest e(w, o);
  for (int64_t version = 5; version < 9; ++version) {
    w.load(static_cast<uint64_t>(version), version);
    for (int round = 0; round < 2; ++round) {
      for (const Request& r : related_requests()) ASSERT_TRUE(e->submit(r).is_ok());
      run_to_end(e.engine);
      expect_same(run_all(w, {.max_running = 4, .max_context = kContext}, related_requests()), collect(e->take_finished()));
    }
  }
  EXPECT_GT(e->stats().cached_prompt_tokens, 0);
}

TEST(Engine, RandomSubmitAbortStopRetractAndStepLeakNothingAndChangeNoWord) {
  World w;
  std::vector<Request> kinds = related_requests();
  for (const Request& r : mixed_requests()) kinds.push_back(r);
  const Results expected = run_all(w, {.max_running = 8, .max_context = kContext}, kinds);
  EngineUnderTest e(w, {.max_running = 3, .max_batch_tokens = 40, .max_context = kContext, .num_pages = 7, .cache_slots = 3});
  Philox rng(17, RngPurpose::test);
  std::map<uint64_t, int32_t> open;  // tag to samples that have not ended
  uint64_t next_tag = 1;
  int64_t ended = 0, cut = 0;
  const auto take = [&] {
    for (const Completion& c : e->take_finished()) {
      const Completion& full = expected.at({c.prompt_id, c.sample_idx});
      ASSERT_LE(c.tokens.size(), full.tokens.size());
      for (size_t i = 0; i < c.tokens.size(); ++i) {
        ASSERT_EQ(c.tokens[i], full.tokens[i]);
        ASSERT_EQ(std::bit_cast<uint32_t>(c.logprobs[i]), std::bit_cast<uint32_t>(full.logprobs[i]));
      }
      if (c.reason == full.reason) {
        ASSERT_EQ(c.tokens.size() == full.tokens.size() || c.reason == FinishReason::stop, true);
      } else {
        ++cut;
      }
      ASSERT_GE(--open.at(c.tag), 0) << "a sample ended twice";
      if (open.at(c.tag) == 0) open.erase(c.tag);
      ++ended;
    }
  };
  for (int64_t i = 0; i < 10000; ++i) {
    const uint32_t what = rng.below(100);
    if (what < 22 && open.size() < 12) {
      Request r = kinds[rng.below(static_cast<uint32_t>(kinds.size()))];
      r.tag = next_tag++;
      open[r.tag] = r.num_samples;
      ASSERT_TRUE(e->submit(r).is_ok());
    } else if (what < 30 && !open.empty()) {
      const uint64_t tag = std::next(open.begin(), rng.below(static_cast<uint32_t>(open.size())))->first;
      ASSERT_TRUE(e->abort(tag));
      take();
      ASSERT_FALSE(open.contains(tag)) << "abort ends every sample at once";
      ASSERT_FALSE(e->abort(tag));
    } else if (what < 33 && !e->drawn().empty()) {
      const Drawn d = e->drawn()[rng.below(static_cast<uint32_t>(e->drawn().size()))];
      e->stop(d.tag, d.sample_idx);
    } else if (what == 33) {
      e->retract_all();
    } else if (what == 34 && rng.below(10) == 0) {
      e->abort_all();
      take();
      ASSERT_TRUE(open.empty());
    } else {
      e->step();
    }
    take();
    if (HasFatalFailure()) return;
    if (!e->idle() || rng.below(4) != 0) continue;
    ASSERT_TRUE(open.empty());
    e->flush_cache();
    const EngineLoad load = e->load();
    ASSERT_EQ(load.free_pages, load.num_pages);
    ASSERT_EQ(load.free_slots, 3 + 1 + 3);
  }
  e->abort_all();
  take();
  e->flush_cache();
  EXPECT_EQ(e->load().free_pages, 7);
  EXPECT_EQ(e->load().free_slots, 7);
  EXPECT_GT(ended, 2000);
  EXPECT_GT(cut, 200);
  EXPECT_GT(e->stats().cached_prompt_tokens, 1000);
}

TEST(Engine, DecodingAllocatesNothingAndScratchDoesNotGrow) {
  World w;
  EngineUnderTest e(w, {.max_running = 8, .max_batch_tokens = 64, .max_context = kContext});
  for (uint64_t p = 0; p < 2; ++p) ASSERT_TRUE(e->submit(request(60 + p, 20, 4, 100)).is_ok());
  for (int i = 0; i < 4; ++i) e->step();
  const int64_t before = g_news.load();
  for (int i = 0; i < 60; ++i) e->step();
  EXPECT_EQ(g_news.load() - before, 0);
  run_to_end(e.engine);
  e->take_finished();
  w.context.workspace().seal();
  e.arena.seal();
  for (uint64_t p = 0; p < 2; ++p) ASSERT_TRUE(e->submit(request(60 + p, 20, 4, 100)).is_ok());
  run_to_end(e.engine);
}

TEST(FinishReason, Names) {
  EXPECT_STREQ(finish_reason_name(FinishReason::stop), "stop");
  EXPECT_STREQ(finish_reason_name(FinishReason::length), "length");
  EXPECT_STREQ(finish_reason_name(FinishReason::abort), "abort");
}

}  // namespace
}  // namespace lockstep
