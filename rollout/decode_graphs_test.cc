// Decode steps as graphs say what steps kernel by kernel say, bit for bit, whatever happens in between; and a graph that is not told of something is found out.

#include "rollout/decode_graphs.h"

#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "model/stack.h"
#include "model/testing.h"
#include "ops/testing.h"
#include "rollout/engine.h"

namespace lockstep {
namespace {

constexpr int64_t kContext = 150;

TEST(DecodeGraphs, FewSizesServeAllBatches) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= 64; ++n) {
    const int64_t padded = padded_rows(n);
    EXPECT_GE(padded, n);
    EXPECT_LE(padded - n, padded / 5);
    if (sizes.empty() || sizes.back() != padded) sizes.push_back(padded);
  }
  EXPECT_EQ(sizes, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64}));
  EXPECT_EQ(padded_positions(1), 1024);
  EXPECT_EQ(padded_positions(1024), 1024);
  EXPECT_EQ(padded_positions(1025), 2048);
}

// One number that is copied by way of a graph.
struct Copier {
  Copier() : arena("test", size_t{1} << 20, Device::gpu), to(arena.zeros(DType::i32, {1}, "to")) {}
  void run(DecodeGraphs& graphs, const DecodeShape& shape, ConstTensorView from) {
    graph = graphs.run(gpu, shape, [&] {
      ++asked;
      copy(gpu, to, from);
    });
  }
  TensorView place(int32_t value) {
    const TensorView v = arena.tensor(DType::i32, {1}, "from");
    put(v, value);
    return v;
  }
  void put(TensorView v, int32_t value) { upload(gpu, v, ConstTensorView(&value, DType::i32, {1})); }
  int32_t got() {
    int32_t value = -1;
    download(gpu, TensorView(&value, DType::i32, {1}), to);
    return value;
  }
  DeviceContext gpu{Device::gpu};
  Arena arena;
  TensorView to;
  int asked = 0;
  bool graph = false;
};

TEST(DecodeGraphs, TheSecondStepOfAShapeIsCapturedAndLaterOnesReplayIt) {
  Copier copier;
  DecodeGraphs graphs;
  DecodeShape shape;
  const TensorView from = copier.place(1);
  shape.add(from);
  for (int32_t step = 1; step <= 5; ++step) {
    copier.put(from, step);
    copier.run(graphs, shape, from);
    EXPECT_EQ(copier.got(), step);
    EXPECT_EQ(copier.asked, std::min(step, 2));
    EXPECT_EQ(copier.graph, step > 1);
  }
}

// The control of the test below it: what the shape does not tell apart is replayed from where it was.
TEST(DecodeGraphs, AnAddressThatTheShapeLacksIsStale) {
  Copier copier;
  DecodeGraphs graphs;
  const DecodeShape shape;
  const TensorView first = copier.place(1), second = copier.place(2);
  for (int i = 0; i < 2; ++i) copier.run(graphs, shape, first);
  copier.run(graphs, shape, second);
  EXPECT_EQ(copier.got(), 1);
}

TEST(DecodeGraphs, TheShapesUsedLastAreKept) {
  Copier copier;
  DecodeGraphs graphs;
  std::vector<std::pair<DecodeShape, TensorView>> all;
  for (size_t i = 0; i <= kDecodeGraphsMax; ++i) {
    all.emplace_back(DecodeShape(), copier.place(static_cast<int32_t>(i)));
    all.back().first.add(all.back().second);
  }
  const auto run = [&](size_t i) {
    copier.run(graphs, all[i].first, all[i].second);
    EXPECT_EQ(copier.got(), static_cast<int32_t>(i));
    return copier.graph;
  };
  for (size_t i = 0; i < kDecodeGraphsMax; ++i) EXPECT_FALSE(run(i));
  for (size_t i = 0; i < kDecodeGraphsMax; ++i) EXPECT_TRUE(run(i));
  EXPECT_TRUE(run(0));
  EXPECT_FALSE(run(kDecodeGraphsMax));  // in the place of 1
  EXPECT_EQ(graphs.size(), kDecodeGraphsMax);
  EXPECT_TRUE(run(0));
  EXPECT_TRUE(run(2));
  EXPECT_FALSE(run(1));
}

ModelConfig long_config() {
  ModelConfig m = testing::tiny_config();
  m.max_positions = kContext;
  return m;
}
struct World {
  explicit World(Numerics numerics, Device device = Device::gpu)
      : context(device), arena("model", size_t{1} << 30, device), config(long_config()), weights(config, numerics, arena) {
    load(1, 5);
    model.weights = &weights;
    model.rope = make_rope_tables(context, config, kContext, arena);
  }
  void load(uint64_t seed, int64_t version) { EXPECT_TRUE(weights.load(context, random_boxes(config, seed), version).is_ok()); }
  DeviceContext context;
  Arena arena;
  ModelConfig config;
  Weights weights;
  Model model;
};

Request request(const World& w, uint64_t id, int64_t prompt_tokens, int32_t n, int64_t max_new) {
  Request r;
  r.tag = r.prompt_id = id;
  r.num_samples = n;
  r.seed = 99;
  r.sampling.max_new_tokens = max_new;
  Philox rng(id, RngPurpose::test);
  for (int64_t i = 0; i < prompt_tokens; ++i) r.prompt.push_back(static_cast<int32_t>(rng.below(static_cast<uint32_t>(w.config.vocab_size))));
  return r;
}
// Of lengths that complete entries at different steps; one ends at a stop id, one is filtered, one holds its stop id back for a while.
std::vector<Request> ragged_requests(const World& w) {
  std::vector<Request> v = {request(w, 1, 1, 2, 30), request(w, 2, 6, 1, 11), request(w, 3, 13, 1, 15), request(w, 4, 3, 1, 5)};
  v[0].sampling.stop_ids = {7};
  v[0].sampling.min_new_tokens = 6;
  v[1].sampling.temperature = 0.7f;
  v[2].sampling.top_p = 0.8f;
  v[3].sampling.temperature = 0;
  return v;
}

using Words = std::map<std::pair<uint64_t, int32_t>, Completion>;
// What `script` makes an engine say.
struct Said {
  Words words;
  EngineStats stats;
};
Said say(Numerics numerics, bool graphs, const std::function<void(World&, Engine&)>& script, int64_t max_running = 7) {
  World w(numerics);
  Arena arena("state", size_t{1} << 30, Device::gpu);
  Engine engine(w.context, w.model, {.max_running = max_running, .max_batch_tokens = 40, .max_context = kContext, .graphs = graphs}, arena);
  script(w, engine);
  while (engine.step()) {
  }
  Said said;
  for (Completion& c : engine.take_finished()) said.words[{c.prompt_id, c.sample_idx}] = std::move(c);
  said.stats = engine.stats();
  return said;
}
void expect_same(const Words& a, const Words& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [key, x] : a) {
    const Completion& y = b.at(key);
    EXPECT_EQ(x.tokens, y.tokens) << key.first << "/" << key.second;
    EXPECT_EQ(x.versions, y.versions);
    EXPECT_EQ(x.reason, y.reason);
    ASSERT_EQ(x.logprobs.size(), y.logprobs.size());
    for (size_t i = 0; i < x.logprobs.size(); ++i) EXPECT_EQ(std::bit_cast<uint32_t>(x.logprobs[i]), std::bit_cast<uint32_t>(y.logprobs[i])) << key.first << ": " << i;
  }
}
void expect_graphs_change_nothing(Numerics numerics, const std::function<void(World&, Engine&)>& script) {
  const Said on = say(numerics, true, script), off = say(numerics, false, script);
  expect_same(on.words, off.words);
  EXPECT_EQ(on.stats.steps, off.stats.steps);
  EXPECT_EQ(on.stats.decode_tokens, off.stats.decode_tokens);
  EXPECT_GE(on.stats.graph_steps, 8);
  EXPECT_EQ(off.stats.graph_steps, 0);
}
void submit(World& w, Engine& engine, std::vector<Request> requests) {
  for (Request& r : requests) ASSERT_TRUE(engine.submit(std::move(r)).is_ok());
}

class GraphNumerics : public ::testing::TestWithParam<Numerics> {};

TEST_P(GraphNumerics, ChangeNothingWhateverHappensInBetween) {
  expect_graphs_change_nothing(GetParam(), [](World& w, Engine& engine) {
    const auto steps = [&](int n) {
      for (int i = 0; i < n; ++i) ASSERT_TRUE(engine.step());
    };
    submit(w, engine, ragged_requests(w));
    steps(8);
    submit(w, engine, {request(w, 6, 5, 1, 9)});
    steps(4);
    EXPECT_TRUE(engine.abort(6));
    steps(2);
    engine.retract_all();
    w.load(2, 6);  // where the graphs have the old ones
    steps(3);
    EXPECT_TRUE(engine.stop(1, 0));
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, GraphNumerics, ::testing::Values(Numerics::f32, Numerics::bf16, Numerics::fp8),
                         [](const auto& info) { return std::string(numerics_name(info.param)); });

// Steps of the same rows with weights that lie elsewhere, and with the kernels of a filter.
TEST(EngineGraphs, WhatGraphsCannotShareIsToldApart) {
  expect_graphs_change_nothing(Numerics::f32, [](World& w, Engine& engine) {
    const auto draw = [&](uint64_t id, int32_t top_k) {
      Request r = request(w, id, 3, 1, 9);
      r.sampling.top_k = top_k;
      submit(w, engine, {r});
      while (engine.step()) {
      }
    };
    World other(Numerics::f32);
    other.load(8, 6);
    draw(1, 0);
    w.model.weights = &other.weights;
    draw(2, 0);
    w.model.weights = &w.weights;
    draw(3, 4);
    draw(4, 0);
  });
}

// A step reads what the batch holds now: with the positions of the step before it, it would say something else.
TEST(EngineGraphs, AStaleBufferOfTheBatchIsSeen) {
  World gpu(Numerics::f32), cpu(Numerics::f32, Device::cpu);
  const int64_t page_tokens = default_page_tokens(gpu.config);
  Arena gpu_arena("state", size_t{1} << 28, Device::gpu), cpu_arena("state", size_t{1} << 28);
  StatePool gpu_state(gpu.config, Numerics::f32, 2, 2, page_tokens, gpu_arena), cpu_state(cpu.config, Numerics::f32, 2, 2, page_tokens, cpu_arena);
  BatchBuilder gpu_builder(gpu.config, page_tokens), cpu_builder(cpu.config, page_tokens);
  const std::vector<int32_t> tokens = {1, 5, 9, 2, 8, 7, 3, 30, 11, 12, 4, 17}, pages = {0, 1};
  const auto rows_at = [&](int64_t t) {
    std::vector<SequenceRows> rows;
    for (int32_t s = 0; s < 2; ++s) rows.push_back({std::span(tokens).subspan(static_cast<size_t>(t + s), 1), t, s, std::span(pages).subspan(static_cast<size_t>(s), 1)});
    return rows;
  };
  Context& c = gpu.context;
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  const TensorView hidden = c.workspace->tensor(DType::f32, {2, gpu.config.hidden_size}, "hidden");
  DecodeGraphs graphs;
  DecodeShape shape;
  int64_t differing_when_stale = 0, graph_steps = 0;
  for (int64_t t = 0; t < 9; ++t) {
    const ArenaScope step_scope(*c.workspace), cpu_scope(*cpu.context.get().workspace);
    const SequenceBatch& batch = gpu_builder.build(c, *c.workspace, rows_at(t), WantedRows::all, 16);
    shape.clear();
    shape.add(batch);
    const auto step = [&] {
      return graphs.run(c, shape, [&] {
        const ArenaScope inner(*c.workspace);
        copy(c, hidden, forward(c, gpu.model, batch, gpu_state, nullptr));
      });
    };
    const ConstTensorView want = forward(cpu.context, cpu.model, cpu_builder.build(*cpu.context.get().workspace, rows_at(t), WantedRows::all), cpu_state, nullptr);
    const auto differing = [&] { return testing::count_bit_differences(host_copy(c, hidden), want); };
    if (graph_steps > 0) {  // what it writes of other positions, the true step writes over, or nobody reads
      const testing::Tensor before = testing::int_tensor(std::vector<int32_t>(2, static_cast<int32_t>(t - 1)));
      const TensorView positions(const_cast<void*>(batch.seq.token_pos.data), DType::i32, {2});
      const ConstTensorView now = host_copy(c, positions);
      upload(c, positions, before);
      graph_steps += step();
      differing_when_stale += differing();
      upload(c, positions, now);
    }
    graph_steps += step();
    if (differing_when_stale == 0) {
      EXPECT_EQ(differing(), 0) << "step " << t;
    } else {
      break;  // the window's ring holds a key at another place now
    }
  }
  EXPECT_GT(graph_steps, 0);
  EXPECT_GT(differing_when_stale, 0);
}

}  // namespace
}  // namespace lockstep
