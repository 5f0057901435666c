// Names in every accepted spelling, round trips through files, and what must be refused.

#include "model/checkpoint_io.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "ops/testing.h"

namespace lockstep {
namespace {

ModelConfig small_config() {
  const auto r = parse_model_config(R"({"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8,
      "qk_rope_head_dim": 4, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "sliding_window": 4, "compress_ratios": [0, 4, 8],
      "index_n_heads": 4, "index_head_dim": 4, "index_topk": 2, "n_routed_experts": 3, "num_experts_per_tok": 2, "num_hash_layers": 1,
      "moe_intermediate_size": 8, "max_position_embeddings": 64})", "test");
  return r.value();
}

struct Masters {
  explicit Masters(const ModelConfig& config) : Masters(config, whole_shard(config)) {}
  Masters(const ModelConfig& config, const Shard& shard) : table(tensor_table(config, shard)), arena("masters", 1 << 26) {
    set = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
  }
  std::vector<TensorSpec> table;
  Arena arena;
  TensorSet set;
};

class CheckpointIo : public ::testing::Test {
 protected:
  void SetUp() override {
    dir = ::testing::TempDir() + "lockstep_checkpoint_io_" + ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(dir);
    std::filesystem::create_directories(dir);
  }
  void TearDown() override { std::filesystem::remove_all(dir); }
  // The checkpoint gives `all`, to a reader of everything and to every rank of a layout that reads its part.
  void expect_holds(const std::vector<TensorView>& all) {
    Result<ReadBox> source = checkpoint_source(dir, config);
    ASSERT_TRUE(source) << source.message();
    for (const Layout& layout : {Layout{}, Layout{2, 3, 3, 3}}) {
      for (int rank = 0; rank < layout.ranks(); ++rank) {
        Masters part(config, shard_of(config, Grid(layout), balance_layers({.layers = {1, 1, 1}}, layout.pp), rank));
        const Status s = read_masters(part.table, source.value(), part.set);
        ASSERT_TRUE(s) << s.message();
        for (const TensorSpec& t : part.table) {
          if (!t.held()) continue;
          const TensorView mine = matrix_view(part.set.views[static_cast<size_t>(t.id)]);
          const TensorView theirs = matrix_view(all[static_cast<size_t>(t.id)]).slice(t.box.rows.begin, t.box.rows.size()).cols(t.box.columns.begin, t.box.columns.size());
          for (int64_t r = 0; r < mine.rows(); ++r)
            ASSERT_EQ(std::memcmp(mine.slice(r, 1).data, theirs.slice(r, 1).data, static_cast<size_t>(mine.dim(1)) * 4), 0)
                << t.name << " row " << r << " of rank " << rank << " of " << layout.str();
        }
      }
    }
  }
  std::string dir;
  ModelConfig config = small_config();
};

TEST(ReleasedName, EverySpellingComesToTheReleasedOne) {
  const std::pair<const char*, const char*> cases[] = {
      {"embed.weight", "embed.weight"},
      {"model.embed_tokens.weight", "embed.weight"},
      {"lm_head.weight", "head.weight"},
      {"model.norm.weight", "norm.weight"},
      {"model.hc_head.hc_fn", "hc_head_fn"},
      {"model.layers.3.self_attn.q_a_proj.weight", "layers.3.attn.wq_a.weight"},
      {"model.layers.3.self_attn.q_a_norm.weight", "layers.3.attn.q_norm.weight"},
      {"model.layers.3.self_attn.q_b_proj.weight", "layers.3.attn.wq_b.weight"},
      {"model.layers.3.self_attn.kv_proj.weight", "layers.3.attn.wkv.weight"},
      {"model.layers.3.self_attn.kv_norm.weight", "layers.3.attn.kv_norm.weight"},
      {"model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"},
      {"model.layers.3.self_attn.sinks", "layers.3.attn.attn_sink"},
      {"model.layers.3.self_attn.compressor.kv_proj.weight", "layers.3.attn.compressor.wkv.weight"},
      {"model.layers.3.self_attn.compressor.gate_proj.weight", "layers.3.attn.compressor.wgate.weight"},
      {"model.layers.3.self_attn.compressor.position_bias", "layers.3.attn.compressor.ape"},
      {"model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"},
      {"model.layers.3.self_attn.compressor.indexer.q_b_proj.weight", "layers.3.attn.indexer.wq_b.weight"},
      {"model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight", "layers.3.attn.indexer.weights_proj.weight"},
      {"model.layers.3.self_attn.compressor.indexer.weights_proj.weight", "layers.3.attn.indexer.weights_proj.weight"},
      {"model.layers.3.self_attn.compressor.indexer.gate_proj.weight", "layers.3.attn.indexer.compressor.wgate.weight"},
      {"model.layers.3.self_attn.compressor.indexer.position_bias", "layers.3.attn.indexer.compressor.ape"},
      {"model.layers.3.attn_hc.fn", "layers.3.hc_attn_fn"},
      {"model.layers.3.hc_ffn_scale", "layers.3.hc_ffn_scale"},
      {"model.layers.3.input_layernorm.weight", "layers.3.attn_norm.weight"},
      {"model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"},
      {"model.layers.3.mlp.topk.tid2eid", "layers.3.ffn.gate.tid2eid"},
      {"model.layers.3.mlp.experts.7.gate_proj.weight", "layers.3.ffn.experts.7.w1.weight"},
      {"model.layers.3.mlp.shared_experts.down_proj.weight", "layers.3.ffn.shared_experts.w2.weight"},
      {"model.layers.3.self_attn.wq_a.weight", "layers.3.attn.wq_a.weight"},
  };
  for (const auto& [from, to] : cases) EXPECT_EQ(released_name(from), to) << from;
}

TEST_F(CheckpointIo, EveryTensorSurvivesTheRoundTrip) {
  Masters a(config), b(config);
  initialize_masters(config, a.table, a.set, 11);
  ASSERT_TRUE(save_checkpoint(dir, config, a.table, a.set));
  const Status s = load_checkpoint(dir, config, b.table, b.set);
  ASSERT_TRUE(s) << s.message();
  for (size_t i = 0; i < a.table.size(); ++i) EXPECT_EQ(testing::count_bit_differences(a.set.views[i], b.set.views[i]), 0) << a.table[i].name;
  expect_holds(a.set.views);
  EXPECT_EQ(load_model_config(dir + "/config.json").value(), config);
}

TEST_F(CheckpointIo, StackedTransformersExpertsAreSplit) {
  Masters a(config), b(config);
  initialize_masters(config, a.table, a.set, 12);
  SafetensorsWriter writer;
  std::vector<testing::Tensor> stacks;
  for (const TensorSpec& t : a.table) {
    if (t.role != TensorRole::expert) {
      writer.add(t.name, a.set.views[static_cast<size_t>(t.id)]);
      continue;
    }
    const std::string stem = t.name.substr(0, t.name.find('*'));
    if (t.name.ends_with("w2.weight")) writer.add("model." + stem + "down_proj", a.set.views[static_cast<size_t>(t.id)]);
    if (!t.name.ends_with("w1.weight")) continue;
    const TensorView w1 = a.set.views[static_cast<size_t>(t.id)], w3 = a.set.views[static_cast<size_t>(t.id) + 1];
    stacks.emplace_back(DType::f32, Shape{t.shape[0], 2 * t.shape[1], t.shape[2]});
    for (int64_t e = 0; e < t.shape[0]; ++e) {
      float* out = stacks.back().view().row<float>(e);
      std::memcpy(out, w1.at(e).data, w1.at(e).bytes());
      std::memcpy(out + t.shape[1] * t.shape[2], w3.at(e).data, w3.at(e).bytes());
    }
    writer.add("model." + stem + "gate_up_proj", stacks.back());
  }
  ASSERT_TRUE(writer.write(dir + "/model.safetensors"));
  const Status s = load_checkpoint(dir, config, b.table, b.set);
  ASSERT_TRUE(s) << s.message();
  for (size_t i = 0; i < a.table.size(); ++i) EXPECT_EQ(testing::count_bit_differences(a.set.views[i], b.set.views[i]), 0) << a.table[i].name;
  expect_holds(a.set.views);

  const TensorSpec& w2 = *std::find_if(a.table.begin(), a.table.end(), [](const TensorSpec& t) { return t.name.ends_with("experts.*.w2.weight"); });
  writer.add("layers.0.ffn.experts.1.w2.weight", a.set.views[static_cast<size_t>(w2.id)].at(1));
  ASSERT_TRUE(writer.write(dir + "/model.safetensors"));
  const Status twice = load_checkpoint(dir, config, b.table, b.set);
  ASSERT_FALSE(twice);
  EXPECT_NE(twice.message().find("gives layers.0.ffn.experts.*.w2.weight a second time"), std::string::npos) << twice.message();
}

TEST_F(CheckpointIo, BfloatsAndWideIdsAreConverted) {
  Masters a(config);
  initialize_masters(config, a.table, a.set, 14);
  SafetensorsWriter writer;
  std::vector<testing::Tensor> stored;
  for_each_released(a.table, a.set, [&](const std::string& name, ConstTensorView v) {
    const int64_t n = v.shape.elements();
    if (v.dtype == DType::i32) {
      stored.emplace_back(DType::i64, v.shape);
      std::copy_n(v.ptr<int32_t>(), n, stored.back().view().ptr<int64_t>());
    } else {
      stored.emplace_back(DType::bf16, v.shape);
      for (int64_t i = 0; i < n; ++i) {
        stored.back().view().ptr<bf16>()[i] = to_bf16(v.ptr<float>()[i]);
        const_cast<float*>(v.ptr<float>())[i] = to_f32(to_bf16(v.ptr<float>()[i]));  // what reading must give
      }
    }
    writer.add(name, stored.back());
  });
  ASSERT_TRUE(writer.write(dir + "/model.safetensors"));
  expect_holds(a.set.views);
}

TEST_F(CheckpointIo, WrongFilesAreRefusedByName) {
  Masters a(config), b(config);
  initialize_masters(config, a.table, a.set, 13);
  const auto write = [&](const std::function<void(SafetensorsWriter&, const std::string&, ConstTensorView)>& put) {
    SafetensorsWriter writer;
    for_each_released(a.table, a.set, [&](const std::string& name, ConstTensorView v) { put(writer, name, v); });
    ASSERT_TRUE(writer.write(dir + "/model.safetensors"));
  };
  const auto expect_refused = [&](const std::string& message) {
    const Status s = load_checkpoint(dir, config, b.table, b.set);
    ASSERT_FALSE(s);
    EXPECT_NE(s.message().find(message), std::string::npos) << s.message();
  };
  write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) {
    if (name != "layers.1.ffn.experts.2.w3.weight") w.add(name, v);
  });
  expect_refused("layers.1.ffn.experts.*.w3.weight (expert 2)");
  write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) {
    w.add(name, v);
    if (name == "norm.weight") w.add("surplus.weight", v);
  });
  expect_refused("surplus.weight");
  write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) {
    w.add(name, v);
    if (name == "norm.weight") w.add("model.norm.weight", v);
  });
  expect_refused("a second time");
  write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) { w.add(name, name == "norm.weight" ? v.slice(0, 8) : v); });
  expect_refused("norm.weight has shape [8], the config asks for [16]");
  float& weight = a.set.views[0].ptr<float>()[7];
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const float good = std::exchange(weight, bad);
    write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) { w.add(name, v); });
    expect_refused(fmt::format("tensor embed.weight holds {}", bad));
    weight = good;
  }
  a.set.views[static_cast<size_t>(std::find_if(a.table.begin(), a.table.end(), [](const auto& t) { return t.role == TensorRole::hash_table; })->id)].ptr<int32_t>()[3] = 3;
  write([](SafetensorsWriter& w, const std::string& name, ConstTensorView v) { w.add(name, v); });
  expect_refused("names expert 3 at element 3, expected 0 to 2");
  std::filesystem::remove(dir + "/model.safetensors");
  expect_refused("holds no .safetensors file");
}

}  // namespace
}  // namespace lockstep
