// config.json in both spellings, round trips, and every kind of impossible value.

#include "model/config.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

// A legal released-form config without one member and with `extra` members, which take the place of those of the same name.
std::string released(const std::string& without = "", const std::string& extra = "") {
  const std::pair<const char*, const char*> members[] = {
      {"model_type", "\"deepseek_v4\""}, {"vocab_size", "96"},       {"hidden_size", "64"},          {"num_hidden_layers", "4"},
      {"num_attention_heads", "4"},      {"head_dim", "32"},         {"qk_rope_head_dim", "8"},      {"q_lora_rank", "32"},
      {"o_groups", "2"},                 {"o_lora_rank", "16"},      {"sliding_window", "8"},        {"compress_ratios", "[0, 4, 128, 16, 0]"},
      {"index_n_heads", "24"},           {"index_head_dim", "16"},   {"index_topk", "4"},            {"n_routed_experts", "8"},
      {"num_experts_per_tok", "2"},      {"num_hash_layers", "1"},   {"moe_intermediate_size", "32"}, {"max_position_embeddings", "4096"},
      {"rope_scaling", R"({"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1})"}};
  std::string json;
  for (const auto& [name, value] : members)
    if (name != without && extra.find(fmt::format("\"{}\":", name)) == std::string::npos) json += fmt::format("{}\"{}\": {}", json.empty() ? "" : ", ", name, value);
  return "{" + json + (extra.empty() ? "" : ", " + extra) + "}";
}

TEST(ModelConfig, ReleasedFormGivesKindsAndRatios) {
  const auto r = parse_model_config(released(), "config.json");
  ASSERT_TRUE(r) << r.message();
  const ModelConfig& m = r.value();
  ASSERT_EQ(m.num_layers(), 4);
  EXPECT_EQ(m.layers[0].attention, AttentionKind::swa);
  EXPECT_EQ(m.layers[1].attention, AttentionKind::csa);
  EXPECT_EQ(m.layers[2].attention, AttentionKind::hca);
  EXPECT_EQ(m.layers[3].ratio, 16);
  EXPECT_TRUE(m.layers[0].hash_routed);
  EXPECT_FALSE(m.layers[1].hash_routed);
  EXPECT_EQ(m.page_unit(), 128);
  EXPECT_EQ(m.compress_rope_scaling.factor, 16.0f);
  EXPECT_EQ(m.compress_rope_theta, 160000.0);
}

TEST(ModelConfig, TransformersFormReadsNamesRatesAndRotaryFactor) {
  const auto r = parse_model_config(
      released("compress_ratios",
               R"("layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
                  "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 24},
                  "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
                  "rope_parameters": {"main": {"rope_type": "default", "rope_theta": 5000.0}, "compress": {"rope_type": "default", "rope_theta": 9000.0}})"),
      "config.json");
  ASSERT_TRUE(r) << r.message();
  const ModelConfig& m = r.value();
  EXPECT_EQ(m.layers[1].ratio, 24);
  EXPECT_EQ(m.layers[2].ratio, 8);
  EXPECT_TRUE(m.layers[2].overlap());
  EXPECT_TRUE(m.layers[1].hash_routed);
  EXPECT_FALSE(m.layers[0].hash_routed);
  EXPECT_EQ(m.rope_theta, 5000.0);
  EXPECT_EQ(m.compress_rope_theta, 9000.0);
  EXPECT_EQ(m.compress_rope_scaling, RopeScaling());
}

TEST(ModelConfig, WhatWeWriteReadsBackTheSame) {
  const std::string named = released("compress_ratios", R"("layer_types": ["sliding_attention", "heavily_compressed_attention",
      "compressed_sparse_attention", "sliding_attention"], "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"])");
  for (const std::string& json : {released(), named}) {
    const auto first = parse_model_config(json, "a");
    ASSERT_TRUE(first) << first.message();
    const auto second = parse_model_config(model_config_json(first.value()), "b");
    ASSERT_TRUE(second) << second.message();
    EXPECT_EQ(first.value(), second.value());
  }
}

struct Bad {
  std::string json, message;
};

TEST(ModelConfig, EveryImpossibleValueIsNamed) {
  const Bad cases[] = {
      {"", "not valid JSON"},
      {"{\n\"vocab_size\": 5,,", "not valid JSON: line 2, column 17"},
      {"[1]", "expected a JSON object"},
      {released("", "\"hc_mult\": 4, \"hc_mult\": 4"), "the key \"hc_mult\" stands twice"},
      {released("rope_scaling", "\"rope_parameters\": 5"), "rope_parameters is 5, expected an object"},
      {released("rope_scaling", "\"rope_scaling\": [2]"), "rope_scaling is a list, expected an object"},
      {released("", "\"swiglu_limit\": -1"), "swiglu_limit is -1, expected a positive number, or 0"},
      {released("hidden_size"), "hidden_size is missing"},
      {released("hidden_size", "\"hidden_size\": \"64\""), "hidden_size is \"64\", expected a number"},
      {released("hidden_size", "\"hidden_size\": 64.5"), "hidden_size is 64.5, expected an integer"},
      {released("hidden_size", "\"hidden_size\": -1"), "hidden_size is -1, expected 1 to"},
      {released("hidden_size", "\"hidden_size\": 99999999999999"), "hidden_size is 99999999999999"},
      {released("o_groups", "\"o_groups\": 3"), "num_attention_heads 4 is not divisible by o_groups 3"},
      {released("qk_rope_head_dim", "\"qk_rope_head_dim\": 7"), "must be even"},
      {released("qk_rope_head_dim", "\"qk_rope_head_dim\": 34"), "qk_rope_head_dim is 34, expected 2 to 32"},
      {released("num_experts_per_tok", "\"num_experts_per_tok\": 9"), "num_experts_per_tok is 9, expected 1 to 8"},
      {released("index_topk", "\"index_topk\": 0"), "index_topk is 0"},
      {released("index_head_dim", "\"index_head_dim\": 4"), "index_head_dim is 4, expected 8"},
      {released("compress_ratios"), "neither compress_ratios nor layer_types"},
      {released("compress_ratios", "\"compress_ratios\": [0, 4]"), "2 entries for 4 layers"},
      {released("compress_ratios", "\"compress_ratios\": [0, 4, 1, 0]"), "compress_ratios[2] is 1"},
      {released("compress_ratios", "\"layer_types\": [\"sliding_attention\"]"), "layer_types must list 4 layers"},
      {released("compress_ratios", "\"layer_types\": [\"a\", \"b\", \"c\", \"d\"]"), "layer_types[0] is \"a\""},
      {released("num_hash_layers", "\"num_hash_layers\": 5"), "num_hash_layers is 5"},
      {released("model_type", "\"model_type\": \"llama\""), "model_type is \"llama\""},
      {released("", "\"scoring_func\": \"softmax\""), "scoring_func"},
      {released("", "\"tie_word_embeddings\": true"), "tie_word_embeddings"},
      {released("", "\"n_shared_experts\": 2"), "n_shared_experts is 2"},
      {released("", "\"hc_mult\": 9"), "hc_mult is 9, expected 1 to 8"},
      {released("", "\"rms_norm_eps\": 0"), "rms_norm_eps is 0"},
      {released("", "\"eos_token_id\": 96"), "eos_token_id is 96, expected 0 to 95"},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}"), "rope scaling type is \"linear\""},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}"), "original_max_position_embeddings"},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": \"x\"}"), "rope_scaling: factor is \"x\", expected a number"},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 1e39, \"original_max_position_embeddings\": 8}"), "factor is 1e+39"},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 8, \"beta_slow\": 0}"),
       "beta_slow of the rope scaling is 0"},
      {released("rope_scaling", "\"rope_scaling\": {\"type\": [], \"factor\": 2}"), "rope scaling type is a list"},
      {released("", "\"initializer_range\": -0.5"), "initializer_range is -0.5"},
      {released("", "\"hc_eps\": 1e300"), "hc_eps is 1e+300, expected a number of magnitude up to"},
      {released("qk_rope_head_dim", "\"partial_rotary_factor\": 1e30"), "partial_rotary_factor is 1e+30, expected 0 to 1"},
      {released("n_routed_experts", "\"n_routed_experts\": 1025"), "n_routed_experts is 1025, expected 1 to 1024"},
      // Values that a narrower type would have taken for others.
      {released("", "\"bos_token_id\": 4294967297"), "bos_token_id is 4294967297, expected an integer of at most 32 bits"},
      {released("", "\"hc_sinkhorn_iters\": 18446744073709551615"), "hc_sinkhorn_iters is 18446744073709551615, expected an integer"},
      {released("compress_ratios", R"("layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
                                      "compress_rates": {"heavily_compressed_attention": 4.5})"), "heavily_compressed_attention is 4.5, expected an integer"},
      {released("num_hidden_layers", "\"num_hidden_layers\": 1000000"), "num_hidden_layers is 1000000"},
      // Products and least common multiples beyond 64 bits.
      {released("hidden_size", "\"hidden_size\": 16777216, \"n_routed_experts\": 1024, \"moe_intermediate_size\": 16777216"), "numbers that a tensor may hold"},
      {released("compress_ratios", "\"compress_ratios\": [65521, 65519, 65497, 65479]"), "least common multiple is 4292870399 or more"},
  };
  for (const Bad& b : cases) {
    const auto r = parse_model_config(b.json, "dir/config.json");
    ASSERT_FALSE(r) << b.json;
    EXPECT_NE(r.message().find(b.message), std::string::npos) << r.message() << "\nwanted: " << b.message;
    EXPECT_EQ(r.message().find("dir/config.json"), 0u) << r.message();
  }
}

// A message that wrote out a value of many levels would need as many stack frames.
TEST(ModelConfig, ManyLevelsAreAnOrdinaryWrongValue) {
  const std::string levels = std::string(100'000, '[') + std::string(100'000, ']');
  for (const char* key : {"hidden_size", "scoring_func", "model_type", "compress_ratios"}) {
    const auto r = parse_model_config(released(key, fmt::format("\"{}\": {}", key, levels)), "config.json");
    ASSERT_FALSE(r);
    EXPECT_LT(r.message().size(), 200u);
  }
}

TEST(ModelConfig, MissingFileIsNamed) {
  const auto r = load_model_config("/nonexistent/config.json");
  ASSERT_FALSE(r);
  EXPECT_NE(r.message().find("/nonexistent/config.json"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
