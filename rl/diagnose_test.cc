// Locating a first difference: two schedules of one model agree everywhere; one changed weight is found at its layer and
// operator.

#include "rl/diagnose.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/rng.h"
#include "model/testing.h"

namespace lockstep {
namespace {

ModelConfig tiny_config() {
  ModelConfig m = testing::tiny_config();
  m.num_experts = 6;
  m.max_positions = 128;
  m.sinkhorn_iters = 20;
  return m;
}

// Weights from seed 3; with `changed`, one element of the tensor of that name is nudged first.
struct World {
  explicit World(Numerics numerics, const std::string& changed = "") : weights(config, numerics, arena) {
    TensorSet masters = make_tensor_set(weights.table(), arena, [](const TensorSpec&) { return true; });
    initialize_masters(config, weights.table(), masters, 3);
    bool found = changed.empty();
    for (const TensorSpec& s : weights.table()) {
      if (s.name != changed) continue;
      masters.views[static_cast<size_t>(s.id)].ptr<float>()[0] += 0.25f;
      found = true;
    }
    CHECK(found, "no tensor {}", changed);
    weights.load(context, masters, 0);
    model.weights = &weights;
    model.rope = make_rope_tables(config, config.max_positions, arena);
  }
  ModelConfig config = tiny_config();
  CpuContext context{1, size_t{1} << 30};
  Arena arena{"diagnose test", size_t{1} << 28};
  Weights weights;
  Model model;
};

std::vector<int32_t> random_tokens(int64_t count) {
  Philox random(1, RngPurpose::test);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(random.below(40)));
  return tokens;
}

TEST(Diagnose, EveryScheduleGivesTheSameTrace) {
  for (const Numerics numerics : {Numerics::f32, Numerics::bf16}) {
    World w(numerics);
    const std::vector<int32_t> tokens = random_tokens(45);
    const Trace packed = trace_sequence(w.context, w.model, tokens, 0, 0.8f);
    ASSERT_EQ(packed.logprobs.size(), 44u);
    EXPECT_GT(packed.points.size(), 3u * 9);
    for (const int64_t chunk : {1, 3, 16, 100}) {
      const Difference d = first_difference(packed, trace_sequence(w.context, w.model, tokens, chunk, 0.8f));
      EXPECT_FALSE(d.found) << numerics_name(numerics) << " chunk " << chunk << ": " << d.str();
    }
  }
}

TEST(Diagnose, NamesTheLayerOfAChangedWeight) {
  const std::vector<int32_t> tokens = random_tokens(30);
  World reference(Numerics::f32);
  const Trace before = trace_sequence(reference.context, reference.model, tokens, 0, 1.0f);
  const std::tuple<const char*, int, const char*> cases[] = {
      {"layers.0.attn.wq_a.weight", 0, "attn.q"},
      {"layers.1.attn.wo_b.weight", 1, "attn.y"},
      {"layers.2.attn.wkv.weight", 2, "attn.kv"},
      {"layers.2.ffn.shared_experts.w2.weight", 2, "ffn.y"},
      {"norm.weight", -1, "final"},
      {"head.weight", -1, "logprob"},
  };
  for (const auto& [name, layer, point] : cases) {
    World changed(Numerics::f32, name);
    const Difference d = first_difference(before, trace_sequence(changed.context, changed.model, tokens, 1, 1.0f));
    EXPECT_TRUE(d.found) << name;
    EXPECT_EQ(d.layer, layer) << name << ": " << d.str();
    EXPECT_EQ(d.point, point) << name << ": " << d.str();
    EXPECT_EQ(d.row, 0) << name;
  }
}

TEST(Diagnose, TheRowIsTheFirstThatDiffers) {
  World w(Numerics::bf16);
  std::vector<int32_t> tokens = random_tokens(30);
  const Trace before = trace_sequence(w.context, w.model, tokens, 0, 1.0f);
  tokens[17] = (tokens[17] + 1) % 40;
  const Difference d = first_difference(before, trace_sequence(w.context, w.model, tokens, 1, 1.0f));
  ASSERT_TRUE(d.found);
  EXPECT_EQ(d.point, "embed");
  EXPECT_EQ(d.row, 17);
}

TEST(Compare, FindsOneBit) {
  TrainSample a, b;
  a.index = 4;
  a.mask = {1, 1};
  a.rollout_logprob = {-1.0f, -2.0f};
  b.index = 5;
  b.tokens = {0, 3, 4, 5};
  b.prompt_length = 1;
  b.mask = {1, 0, 1};
  b.rollout_logprob = {-0.0f, -1.0f, -3.0f};
  const std::vector<TrainSample> samples = {a, b};
  const std::vector<TokenLogprobs> equal = {{.logprob = {-1.0f, -2.0f}, .entropy = {}},
                                            {.logprob = {-0.0f, -7.0f, -3.0f}, .entropy = {}}};
  Comparison c = compare_logprobs(samples, equal);
  EXPECT_EQ(c.num_tokens, 4);  // the masked token is not compared
  EXPECT_EQ(c.max_gap, 0);
  EXPECT_FALSE(c.first.has_value());

  std::vector<TokenLogprobs> seen = equal;
  seen[1].logprob[2] = std::nextafter(-3.0f, 0.0f);
  c = compare_logprobs(samples, seen);
  ASSERT_TRUE(c.first.has_value());
  EXPECT_EQ(c.first->sample_index, 5);
  EXPECT_EQ(c.first->response_token, 2);
  EXPECT_EQ(c.first->tokens.size(), 4u);
  EXPECT_GT(c.max_gap, 0);

  seen[0].logprob[1] = std::numeric_limits<float>::quiet_NaN();
  c = compare_logprobs(samples, seen);
  ASSERT_TRUE(c.first.has_value());
  EXPECT_EQ(c.first->sample_index, 4);
  EXPECT_EQ(c.first->response_token, 1);

  seen = equal;
  seen[1].logprob[0] = 0.0f;  // the same number with another sign bit
  EXPECT_TRUE(compare_logprobs(samples, seen).first.has_value());
}

TEST(Diagnose, TheSentenceNamesSampleAndToken) {
  World w(Numerics::bf16);
  const std::vector<int32_t> tokens = random_tokens(12);
  const std::string text = diagnose_difference(w.context, w.model,
                                               {.sample_index = 71,
                                                .tokens = tokens,
                                                .prompt_length = 4,
                                                .response_token = 2,
                                                .temperature = 1,
                                                .rollout_logprob = -0.5f,
                                                .train_logprob = -0.25f});
  EXPECT_NE(text.find("sample 71: response token 2 (position 6)"), std::string::npos) << text;
  EXPECT_NE(text.find("equal bits everywhere"), std::string::npos) << text;
}

}  // namespace
}  // namespace lockstep
