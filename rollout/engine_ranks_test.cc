// Engines over ranks, under every layout of the ranks that were started: what the samples say is what one engine alone with the whole model
// says, bit for bit, however unevenly the requests fall on the engines. Run by any number of ranks.

#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "core/rng.h"
#include "parallel/groups.h"
#include "parallel/testing.h"
#include "rollout/engine.h"

namespace lockstep {
namespace {

RankWorld* world = nullptr;

ModelConfig small_config() {
  return parse_model_config(R"({"vocab_size": 70, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16,
      "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 4, "o_lora_rank": 8, "sliding_window": 6, "compress_ratios": [0, 4, 8],
      "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "n_routed_experts": 5, "num_experts_per_tok": 2, "num_hash_layers": 1,
      "moe_intermediate_size": 16, "max_position_embeddings": 64, "initializer_range": 0.25})", "test").value();
}

constexpr EngineOptions kOptions = {.max_running = 3, .max_batch_tokens = 9, .max_context = 40, .num_pages = 0};  // prompts run in chunks, samples wait

std::vector<Request> requests() {
  Philox random(3, RngPurpose::init, 0);
  std::vector<Request> list;
  for (int i = 0; i < 6; ++i) {
    Request r;
    r.prompt_id = static_cast<uint64_t>(i);
    r.prompt.resize(static_cast<size_t>(1 + (7 * i) % 20));
    for (int32_t& t : r.prompt) t = static_cast<int32_t>(random.below(70));
    r.num_samples = 1 + i % 3;
    r.seed = 9;
    r.sampling.max_new_tokens = 3 + 5 * i % 14;
    r.sampling.stop_ids = {1, 2, 3, 4};
    list.push_back(r);
  }
  return list;
}

using Words = std::map<std::pair<uint64_t, int32_t>, std::vector<int32_t>>;  // of each sample: tokens, then the bits of their log-probs

Words run(Engine& engine) {
  Words words;
  const auto take = [&] {
    for (const Completion& c : engine.take_finished()) {
      std::vector<int32_t>& w = words[{c.prompt_id, c.sample_idx}] = c.tokens;
      for (const float l : c.logprobs) w.push_back(std::bit_cast<int32_t>(l));
    }
  };
  while (engine.step()) take();
  take();
  return words;
}

// One engine of a layout, or the whole model alone.
struct Rank {
  Rank(const ModelConfig& m, Numerics numerics, const Shard& shard, Groups* groups)
      : weights(m, numerics, shard, arena) {
    CHECK(weights.load(context, random_boxes(m, 5), 1).is_ok());
    model.weights = &weights;
    model.rope = make_rope_tables(m, kOptions.max_context, arena);
    if (groups != nullptr && groups->tp.size() > 1) model.tp = &groups->tp;
    if (groups != nullptr && groups->ep.size() > 1) model.ep = &groups->ep;
    engine = std::make_unique<Engine>(context, model, kOptions, arena);
  }
  CpuContext context;
  Arena arena{"test", size_t{1} << 32};
  Weights weights;
  Model model;
  std::unique_ptr<Engine> engine;
};

TEST(EngineRanks, EveryLayoutSaysWhatOneEngineSays) {
  const ModelConfig m = small_config();
  for (const Numerics numerics : {Numerics::f32, Numerics::bf16}) {
    Rank alone(m, numerics, whole_shard(m), nullptr);
    for (const Request& r : requests()) ASSERT_TRUE(alone.engine->submit(r).is_ok());
    const Words expected = run(*alone.engine);
    ASSERT_EQ(expected.size(), 12u);
    for (const Layout& layout : possible_layouts({.ranks = world->size(), .layers = 1, .experts = m.num_experts, .output_groups = m.o_groups})) {
      SCOPED_TRACE(fmt::format("{} {}", layout.str(), numerics_name(numerics)));
      const Grid grid(layout);
      Groups groups = make_groups(*world, grid, fmt::format("test {} {}", numerics_name(numerics), layout.str()));
      Rank rank(m, numerics, shard_of(m, grid, {{0, m.num_layers()}}, world->rank()), &groups);
      // The first engine gets everything but a little, then the last one everything; the others join.
      for (const bool last : {false, true}) {
        const int busy = last ? layout.dp - 1 : 0, engine = groups.at().dp;
        Words own;
        for (const Request& r : requests()) {
          const int goes_to = r.prompt_id == 2 && !last ? layout.dp - 1 : busy;
          if (goes_to != engine) continue;
          ASSERT_TRUE(rank.engine->submit(r).is_ok());
          for (int32_t s = 0; s < r.num_samples; ++s) own[{r.prompt_id, s}] = expected.at({r.prompt_id, s});
        }
        const EngineStats before = rank.engine->stats();
        EXPECT_EQ(run(*rank.engine), own);
        // Of ep peers all went as often; of engines on their own none for nothing.
        const EngineStats& after = rank.engine->stats();
        std::vector<int64_t> calls(static_cast<size_t>(groups.ep.size()));
        const int64_t mine = after.steps - before.steps + after.empty_steps - before.empty_steps;
        groups.ep.all_gather(std::span(calls), std::span(&mine, 1), "test");
        for (const int64_t other : calls) EXPECT_EQ(other, mine);
        if (own.empty()) {
          EXPECT_EQ(after.steps, before.steps);
        }
        if (layout.ep == 1) {
          EXPECT_EQ(after.empty_steps, 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world);
}
