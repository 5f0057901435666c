// Checkpoints written in every layout and read back: totals, bounds, identities, and the damaged ones that must be refused.

#include "model/checkpoint_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include "core/formats.h"
#include "core/rng.h"
#include "io/file.h"
#include "model/checkpoint_index.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Sizes that end inside a block of 128 and of 32, all kinds of layers, a draft block.
constexpr const char* kConfig = R"({"vocab_size": 50, "hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 72,
    "qk_rope_head_dim": 8, "q_lora_rank": 40, "o_groups": 2, "o_lora_rank": 70, "sliding_window": 4, "compress_ratios": [0, 4, 8, 0],
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 2, "n_routed_experts": 3, "num_experts_per_tok": 2, "num_hash_layers": 1,
    "moe_intermediate_size": 136, "max_position_embeddings": 64, "num_nextn_predict_layers": 1, "auto_map": "kept"})";

constexpr CheckpointLayout kLayouts[] = {CheckpointLayout::released_fp4, CheckpointLayout::released_fp8, CheckpointLayout::bf16,
                                         CheckpointLayout::transformers_bf16, CheckpointLayout::f32};

// Numbers of every tensor of a table.
struct Numbers {
  std::vector<testing::Tensor> tensors;
  const testing::Tensor& operator[](int id) const { return tensors[static_cast<size_t>(id)]; }
};
Numbers read_all(const std::vector<TensorSpec>& table, const ReadBox& read) {
  Numbers all;
  for (const TensorSpec& t : table) {
    const Box whole = whole_box(t.whole);
    all.tensors.emplace_back(t.master_dtype(), Shape{whole.rows.size(), whole.columns.size()});
    const Status s = read(t, whole, all.tensors.back());
    CHECK(s.is_ok(), "{}", s.message());
  }
  return all;
}

// Files of a directory by name.
std::map<std::string, std::string> contents(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) files[entry.path().filename()] = read_file(entry.path()).value();
  return files;
}

// A tensor of a file, to be changed and written again.
struct RawTensor {
  SafetensorsEntry entry;
  std::vector<uint8_t> bytes;
};
using RawFile = std::vector<RawTensor>;
RawFile read_raw(const std::string& path) {
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  CHECK(file.is_ok(), "{}", file.message());
  RawFile raw;
  for (const SafetensorsEntry& e : file.value().tensors()) {
    const auto bytes = file.value().bytes(e);
    raw.push_back({e, {bytes.begin(), bytes.end()}});
  }
  return raw;
}
void write_raw(const std::string& path, const RawFile& raw) {
  std::vector<SafetensorsEntry> entries;
  for (const RawTensor& t : raw) entries.push_back(t.entry);
  Result<SafetensorsStream> out = SafetensorsStream::create(path, entries, {});
  CHECK(out.is_ok(), "{}", out.message());
  for (const RawTensor& t : raw) CHECK(out.value().write(t.bytes).is_ok(), "{}", path);
  CHECK(out.value().commit().is_ok(), "{}", path);
}
RawTensor& find_raw(RawFile& raw, const std::string& name) {
  const auto it = std::find_if(raw.begin(), raw.end(), [&](const RawTensor& t) { return t.entry.name == name; });
  CHECK(it != raw.end(), "{}", name);
  return *it;
}

class CheckpointWriter : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "lockstep_checkpoint_writer_" + ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
    fs::create_directories(root_);
    std::ofstream(root_ + "/config.json") << kConfig;
    Result<WriteSource> source = random_write_source(root_ + "/config.json", 7);
    ASSERT_TRUE(source) << source.message();
    random_ = source.take();
    // Constant tensors would hide a mistake in their order.
    random_.read = [read = random_.read](const TensorSpec& spec, const Box& box, TensorView out) {
      LOCKSTEP_RETURN_IF_ERROR(read(spec, box, out));
      if (spec.role == TensorRole::hash_table) return Status::ok();
      const Box whole = whole_box(spec.whole);
      for (int64_t r = 0; r < out.rows(); ++r)
        for (int64_t i = 0; i < out.dim(1); ++i)
          out.row<float>(r)[i] += 1e-4f * static_cast<float>(1 + (box.rows.begin + r) * whole.columns.size() + box.columns.begin + i) / static_cast<float>(whole.elements());
      return Status::ok();
    };
    table_ = checkpoint_table(random_.config);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path(const std::string& name) const { return root_ + "/" + name; }
  WriteReport write(const std::string& name, const WriteSource& source, CheckpointLayout layout, uint64_t shard_bytes = 100000) {
    Result<WriteReport> report = write_checkpoint(context_, path(name), source, {.layout = layout, .shard_bytes = shard_bytes, .on_shard = {}});
    CHECK(report.is_ok(), "{}", report.message());
    return report.take();
  }
  WriteSource open(const std::string& name) const {
    Result<WriteSource> source = open_write_source(path(name));
    CHECK(source.is_ok(), "{}", source.message());
    return source.take();
  }
  void expect_same(const std::vector<TensorSpec>& table, const Numbers& a, const Numbers& b) const {
    for (const TensorSpec& t : table) EXPECT_EQ(testing::count_bit_differences(a[t.id], b[t.id]), 0) << t.name;
  }
  void expect_refused(const std::string& name, const std::string& message) const {
    const Result<ReadBox> source = checkpoint_source(path(name), random_.config);
    ASSERT_FALSE(source) << "wanted: " << message;
    EXPECT_NE(source.message().find(message), std::string::npos) << source.message() << "\nwanted: " << message;
  }

  std::string root_;
  CpuContext context_{2};
  WriteSource random_;
  std::vector<TensorSpec> table_;
};

TEST(CheckpointLayout, FlashTotalsAreThoseOfTheReleasedIndex) {
  const auto load = [](const char* name) { return load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/" + name + ".config.json").value(); };
  const auto numbers = [](const WriteReport& r) {  // parameters; hash tables are none
    int64_t sum = 0;
    for (size_t i = 0; i < std::size(r.by_storage); ++i)
      if (static_cast<Storage>(i) != Storage::i64) sum += r.by_storage[i].elements;
    return sum;
  };
  ModelConfig flash = load("flash");
  EXPECT_EQ(flash.num_drafts, 1);
  const WriteReport released = plan_checkpoint(flash, {.layout = CheckpointLayout::released_fp4, .on_shard = {}});
  EXPECT_EQ(released.tensors, 69187);
  EXPECT_EQ(released.bytes, 159609485896u);
  EXPECT_EQ((numbers(released) + 500000) / 1000000, 290942);
  flash.num_drafts = 0;
  EXPECT_EQ((numbers(plan_checkpoint(flash, {.layout = CheckpointLayout::bf16, .on_shard = {}})) + 500000) / 1000000, 284332);
  ModelConfig pro = load("pro");
  EXPECT_EQ((numbers(plan_checkpoint(pro, {.layout = CheckpointLayout::released_fp8, .on_shard = {}})) + 500000) / 1000000, 1598837);
}

TEST_F(CheckpointWriter, ThePlanIsWhatIsWritten) {
  for (const CheckpointLayout layout : kLayouts) {
    const std::string name(kCheckpointLayouts[static_cast<size_t>(layout)]);
    const WriteReport plan = plan_checkpoint(random_.config, {.layout = layout, .shard_bytes = 100000, .on_shard = {}});
    const WriteReport report = write(name, random_, layout);
    EXPECT_EQ(report.tensors, plan.tensors);
    EXPECT_EQ(report.bytes, plan.bytes);
    EXPECT_EQ(report.shards, plan.shards);
    EXPECT_GT(report.shards, 2);
    const auto files = open_checkpoint_files(path(name));
    ASSERT_TRUE(files) << files.message();
    int64_t tensors = 0;
    uint64_t bytes = 0;
    for (const SafetensorsFile& f : files.value()) {
      for (const SafetensorsEntry& e : f.tensors()) {
        ++tensors;
        bytes += e.bytes();
        EXPECT_TRUE(safetensors_dtype_bytes(e.dtype) == 1 || reinterpret_cast<uintptr_t>(f.bytes(e).data()) % safetensors_dtype_bytes(e.dtype) == 0) << e.name;
      }
    }
    EXPECT_EQ(tensors, plan.tensors);
    EXPECT_EQ(bytes, plan.bytes);
    EXPECT_TRUE(fs::exists(path(name) + "/" + kIndexFile));
    write(name + "-again", random_, layout);
    EXPECT_EQ(contents(path(name)), contents(path(name + "-again")));
  }
}

TEST_F(CheckpointWriter, WhatIsReadIsWithinTheQuantisationBound) {
  const Numbers source = read_all(table_, random_.read);
  for (const CheckpointLayout layout : kLayouts) {
    const std::string name(kCheckpointLayouts[static_cast<size_t>(layout)]);
    WriteReport report = write(name, random_, layout);
    const WriteSource loaded = open(name);
    EXPECT_EQ(loaded.config.num_drafts, layout == CheckpointLayout::transformers_bf16 ? 0 : 1);
    const std::vector<TensorSpec> table = checkpoint_table(loaded.config);
    const Numbers got = read_all(table, loaded.read);
    expect_same(table, got, read_all(table, open(name).read));  // twice the same
    int64_t inexact[5] = {};
    for (const TensorSpec& t : table) {
      const Storage storage = storage_of(t, layout);
      const ConstTensorView x = source[t.id], y = got[t.id];
      const int64_t tensor_rows = t.role == TensorRole::expert ? t.whole[1] : x.rows();
      if (t.role == TensorRole::hash_table || storage == Storage::f32) {
        EXPECT_EQ(testing::count_bit_differences(x, y), 0) << t.name;
        continue;
      }
      for (int64_t r = 0; r < x.rows(); ++r) {
        for (int64_t c = 0; c < x.dim(1); ++c) {
          const float want = x.row<float>(r)[c], seen = y.row<float>(r)[c];
          inexact[static_cast<size_t>(storage)] += std::bit_cast<uint32_t>(want) != std::bit_cast<uint32_t>(seen);
          if (!is_quantised(storage)) {
            ASSERT_EQ(seen, to_f32(to_bf16(want))) << t.name;
            continue;
          }
          // Half a unit in the last place: of the value, or of the block's sub-normal codes.
          const QuantFormat& f = quant_format(storage);
          const int64_t first = r / tensor_rows * tensor_rows, row0 = first + (r - first) / f.block_rows * f.block_rows, col0 = c / f.block_cols * f.block_cols;
          float amax = 0;
          for (int64_t i = row0; i < std::min(row0 + f.block_rows, first + tensor_rows); ++i)
            for (int64_t k = col0; k < std::min(col0 + f.block_cols, x.dim(1)); ++k) amax = std::max(amax, std::abs(x.row<float>(i)[k]));
          const bool fp8 = storage == Storage::fp8;
          const float scale = to_f32(fp8 ? ue8m0_scale<e4m3>(amax) : ue8m0_scale<e2m1x2>(amax));
          const float bound = std::max(std::abs(want) * (fp8 ? 0x1p-4f : 0x1p-2f), scale * (fp8 ? 0x1p-10f : 0x1p-2f));
          ASSERT_LE(std::abs(seen - want), bound) << t.name << " row " << r << " column " << c;
          if (c != col0 && r % 37 != 0) c = std::min(c + 29, std::max(c, x.dim(1) - 2));  // the bound of a block costs a search of it
        }
      }
    }
    for (const Storage s : {Storage::f32, Storage::i64}) EXPECT_EQ(report.by_storage[static_cast<size_t>(s)].inexact_elements, 0);
    EXPECT_EQ(report.by_storage[static_cast<size_t>(Storage::bf16)].inexact_elements, inexact[static_cast<size_t>(Storage::bf16)]);
    for (const Storage s : {Storage::fp8, Storage::fp4}) {
      const StorageReport& r = report.by_storage[static_cast<size_t>(s)];
      EXPECT_EQ(r.inexact_elements > 0, r.tensors > 0) << storage_name(s);
      EXPECT_LE(r.inexact_blocks, r.blocks);
    }
  }
}

TEST_F(CheckpointWriter, ABoxIsTheSliceOfTheWhole) {
  for (const CheckpointLayout layout : {CheckpointLayout::released_fp4, CheckpointLayout::released_fp8}) {
    const std::string name(kCheckpointLayouts[static_cast<size_t>(layout)]);
    write(name, random_, layout);
    const WriteSource loaded = open(name);
    const Numbers whole = read_all(table_, loaded.read);
    Philox rng(5, RngPurpose::init, static_cast<uint64_t>(layout));
    for (const TensorSpec& t : table_) {
      const ConstTensorView all = whole[t.id];
      for (int i = 0; i < 20; ++i) {
        const auto range = [&](int64_t n) {
          const int64_t a = rng.below(static_cast<uint32_t>(n)), b = rng.below(static_cast<uint32_t>(n));
          return Range{std::min(a, b), std::max(a, b) + 1};
        };
        const Box box = {range(all.rows()), range(all.dim(1))};
        testing::Tensor part(t.master_dtype(), {box.rows.size(), box.columns.size()});
        const Status s = loaded.read(t, box, part);
        ASSERT_TRUE(s) << s.message();
        for (int64_t r = 0; r < box.rows.size(); ++r)
          ASSERT_EQ(std::memcmp(part.view().slice(r, 1).data, all.slice(box.rows.begin + r, 1).cols(box.columns.begin, 1).data, static_cast<size_t>(box.columns.size()) * 4), 0)
              << t.name;
      }
    }
  }
}

TEST_F(CheckpointWriter, RoundTripsKeepEveryNumber) {
  const auto inexact = [](const WriteReport& r) {
    int64_t sum = 0;
    for (const StorageReport& s : r.by_storage) sum += s.inexact_elements;
    return sum;
  };
  write("fp8", random_, CheckpointLayout::released_fp8);
  write("fp4", random_, CheckpointLayout::released_fp4);
  const Numbers fp8 = read_all(table_, open("fp8").read), fp4 = read_all(table_, open("fp4").read);

  EXPECT_EQ(inexact(write("fp8-bf16", open("fp8"), CheckpointLayout::bf16)), 0);
  EXPECT_EQ(inexact(write("fp8-bf16-fp8", open("fp8-bf16"), CheckpointLayout::released_fp8)), 0);
  expect_same(table_, fp8, read_all(table_, open("fp8-bf16-fp8").read));
  write("fp8-bf16-fp8-bf16", open("fp8-bf16-fp8"), CheckpointLayout::bf16);
  EXPECT_EQ(contents(path("fp8-bf16")), contents(path("fp8-bf16-fp8-bf16")));
  write("fp8-bf16-fp8-bf16-fp8", open("fp8-bf16-fp8-bf16"), CheckpointLayout::released_fp8);
  EXPECT_EQ(contents(path("fp8-bf16-fp8")), contents(path("fp8-bf16-fp8-bf16-fp8")));

  // FP4 numbers fit E4M3 unless the scales of a block lie far apart.
  const WriteReport recoded = write("fp4-fp8", open("fp4"), CheckpointLayout::released_fp8);
  EXPECT_EQ(inexact(recoded), 0);
  EXPECT_GT(recoded.by_storage[static_cast<size_t>(Storage::fp8)].copied, 0);
  expect_same(table_, fp4, read_all(table_, open("fp4-fp8").read));
  EXPECT_EQ(inexact(write("fp4-fp8-fp4", open("fp4-fp8"), CheckpointLayout::released_fp4)), 0);
  expect_same(table_, fp4, read_all(table_, open("fp4-fp8-fp4").read));

  // The same layout in one file and in shards again: every byte.
  write("fp4-one", open("fp4"), CheckpointLayout::released_fp4, uint64_t{1} << 40);
  EXPECT_TRUE(fs::exists(path("fp4-one/model.safetensors")));
  write("fp4-again", open("fp4-one"), CheckpointLayout::released_fp4);
  EXPECT_EQ(contents(path("fp4")), contents(path("fp4-again")));
  expect_same(table_, read_all(table_, random_.read), [&] {
    write("f32", random_, CheckpointLayout::f32);
    return read_all(table_, open("f32").read);
  }());
}

TEST_F(CheckpointWriter, BlocksThatE4m3CannotHoldAreCounted) {
  write("fp4", random_, CheckpointLayout::released_fp4, uint64_t{1} << 40);
  RawFile raw = read_raw(path("fp4/model.safetensors"));
  find_raw(raw, "layers.1.ffn.experts.2.w1.scale").bytes[3] += 30;  // one sub-block a billion times the others of its block
  write_raw(path("fp4/model.safetensors"), raw);
  const WriteReport report = write("fp8", open("fp4"), CheckpointLayout::released_fp8);
  const StorageReport& r = report.by_storage[static_cast<size_t>(Storage::fp8)];
  EXPECT_EQ(r.inexact_tensors, 1);
  EXPECT_EQ(r.inexact_blocks, 1);
  EXPECT_GT(r.inexact_elements, 10000);  // most of 128 x 128
}

// SGLang's names and scales as f32.
TEST_F(CheckpointWriter, F32ScalesUnderOtherNamesAreRead) {
  write("fp8", random_, CheckpointLayout::released_fp8, uint64_t{1} << 40);
  const Numbers fp8 = read_all(table_, open("fp8").read);
  RawFile raw = read_raw(path("fp8/model.safetensors"));
  for (RawTensor& t : raw) {
    std::string& name = t.entry.name;
    if (t.entry.dtype == "F8_E8M0") {
      std::vector<uint8_t> wide(t.bytes.size() * 4);
      for (size_t i = 0; i < t.bytes.size(); ++i) {
        const float scale = to_f32(ue8m0{t.bytes[i]});
        std::memcpy(wide.data() + 4 * i, &scale, 4);
      }
      t.bytes = wide;
      t.entry.dtype = "F32";
      name = name.substr(0, name.size() - 6) + ".weight_scale_inv";
    }
    if (name.starts_with("mtp.")) continue;
    for (const auto& [from, to] : {std::pair{".attn.", ".self_attn."}, {".ffn.", ".mlp."}, {".w1.", ".gate_proj."}, {".w3.", ".up_proj."}, {".w2.", ".down_proj."}})
      if (const size_t at = name.find(from); at != std::string::npos) name.replace(at, std::string_view(from).size(), to);
    name = "model." + name;
  }
  fs::create_directories(path("sglang"));
  fs::copy(path("config.json"), path("sglang/config.json"));
  write_raw(path("sglang/model.safetensors"), raw);
  expect_same(table_, fp8, read_all(table_, open("sglang").read));
  write("back", open("sglang"), CheckpointLayout::released_fp8, uint64_t{1} << 40);
  EXPECT_EQ(contents(path("back")), contents(path("fp8")));

  // A scale that UE8M0 cannot hold: read as it is, and quantised anew.
  RawTensor& scale = find_raw(raw, "model.layers.0.self_attn.wq_a.weight_scale_inv");
  const float odd = 1.5f * 0x1p-9f;
  std::memcpy(scale.bytes.data(), &odd, 4);
  write_raw(path("sglang/model.safetensors"), raw);
  const WriteReport report = write("odd", open("sglang"), CheckpointLayout::released_fp8);
  EXPECT_EQ(report.by_storage[static_cast<size_t>(Storage::fp8)].inexact_tensors, 1);
  const int id = std::find_if(table_.begin(), table_.end(), [](const TensorSpec& t) { return t.name == "layers.0.attn.wq_a.weight"; })->id;
  const uint8_t code = find_raw(raw, "model.layers.0.self_attn.wq_a.weight").bytes[0];
  EXPECT_EQ(read_all(table_, open("sglang").read)[id].get(0), to_f32(e4m3{code}) * odd);
}

TEST_F(CheckpointWriter, ConfigsSayWhatTheFilesHold) {
  write("fp4", random_, CheckpointLayout::released_fp4);
  write("fp8", random_, CheckpointLayout::released_fp8);
  write("bf16", random_, CheckpointLayout::bf16);
  write("transformers", open("fp8"), CheckpointLayout::transformers_bf16);
  const auto config = [&](const std::string& name) { return read_file(path(name + "/config.json")).value(); };
  for (const auto& [name, experts] : {std::pair{"fp4", "\"expert_dtype\": \"fp4\""}, {"fp8", "\"expert_dtype\": \"fp8\""}}) {
    EXPECT_NE(config(name).find(experts), std::string::npos) << config(name);
    EXPECT_NE(config(name).find("\"weight_block_size\""), std::string::npos);
    EXPECT_NE(config(name).find("\"auto_map\": \"kept\""), std::string::npos);
  }
  EXPECT_EQ(config("bf16").find("quantization_config"), std::string::npos);
  for (const char* name : {"fp4", "fp8", "bf16"}) EXPECT_EQ(load_model_config(path(name) + "/config.json").value(), random_.config);
  ModelConfig without_draft = random_.config;
  without_draft.num_drafts = 0;
  EXPECT_EQ(load_model_config(path("transformers/config.json")).value(), without_draft);
  EXPECT_NE(config("transformers").find("\"layer_types\""), std::string::npos);
  // From transformers' spelling to the released one.
  write("back", open("transformers"), CheckpointLayout::released_fp8);
  EXPECT_NE(config("back").find("\"compress_ratios\""), std::string::npos);
  EXPECT_EQ(load_model_config(path("back/config.json")).value(), without_draft);
}

TEST_F(CheckpointWriter, NothingHalfWrittenIsLeft) {
  write("fp8", random_, CheckpointLayout::released_fp8);
  const auto before = contents(path("fp8"));
  Result<WriteReport> over = write_checkpoint(context_, path("fp8"), random_, {.on_shard = {}});
  ASSERT_FALSE(over);
  EXPECT_NE(over.message().find("exists and is not empty"), std::string::npos);
  EXPECT_EQ(contents(path("fp8")), before);

  WriteSource breaks = random_;
  breaks.read = [read = random_.read](const TensorSpec& spec, const Box& box, TensorView out) {
    return spec.name == "norm.weight" ? errorf("the disk is on fire") : read(spec, box, out);
  };
  const Result<WriteReport> failed = write_checkpoint(context_, path("out"), breaks, {.shard_bytes = 100000, .on_shard = {}});
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.message(), "the disk is on fire");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 2);  // config.json and fp8/
}

TEST_F(CheckpointWriter, DraftBlocksAreWholeOrAbsent) {
  write("fp8", random_, CheckpointLayout::released_fp8, uint64_t{1} << 40);
  const RawFile raw = read_raw(path("fp8/model.safetensors"));
  const auto keep = [&](const std::function<bool(const std::string&)>& wanted) {
    RawFile some;
    for (const RawTensor& t : raw)
      if (wanted(t.entry.name)) some.push_back(t);
    write_raw(path("fp8/model.safetensors"), some);
  };
  keep([](const std::string& name) { return !name.starts_with("mtp."); });
  EXPECT_EQ(open("fp8").config.num_drafts, 0);
  keep([](const std::string& name) { return name != "mtp.0.e_proj.scale"; });
  EXPECT_TRUE(checkpoint_source(path("fp8"), random_.config));  // not run, so not needed
  const Result<WriteSource> partial = open_write_source(path("fp8"));
  ASSERT_FALSE(partial);
  EXPECT_NE(partial.message().find("1 tensors of the draft blocks are missing, the scales of mtp.0.e_proj.weight"), std::string::npos) << partial.message();
  write_raw(path("fp8/model.safetensors"), raw);
  ModelConfig none = random_.config;
  none.num_drafts = 0;
  std::ofstream(path("fp8/config.json")) << model_config_json(none);
  const Result<WriteSource> unknown = open_write_source(path("fp8"));
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.message().find("num_nextn_predict_layers 0"), std::string::npos) << unknown.message();
}

TEST_F(CheckpointWriter, DamagedTensorsAreRefusedWithTheReason) {
  write("fp4", random_, CheckpointLayout::released_fp4, uint64_t{1} << 40);
  const std::string file = path("fp4/model.safetensors");
  const RawFile raw = read_raw(file);
  const auto change = [&](const std::function<void(RawFile&)>& f) {
    RawFile changed = raw;
    f(changed);
    write_raw(file, changed);
  };
  const auto drop = [](RawFile& r, const std::string& name) { std::erase_if(r, [&](const RawTensor& t) { return t.entry.name == name; }); };
  change([&](RawFile& r) { drop(r, "layers.0.attn.wq_b.scale"); });
  expect_refused("fp4", "1 tensors of the config are missing: the scales of layers.0.attn.wq_b.weight");
  change([&](RawFile& r) { drop(r, "layers.2.ffn.experts.1.w2.scale"); });
  expect_refused("fp4", "the scales of layers.2.ffn.experts.1.w2.weight");
  change([&](RawFile& r) { drop(r, "layers.0.attn.wq_b.weight"); });
  expect_refused("fp4", "missing: layers.0.attn.wq_b.weight");
  change([&](RawFile& r) {
    RawTensor& t = find_raw(r, "layers.0.attn.wq_b.scale");
    t.entry.shape = {1, 3};
  });
  expect_refused("fp4", "layers.0.attn.wq_b.scale has shape [1, 3], layers.0.attn.wq_b.weight of F8_E4M3 in blocks of 128x128 has scales [3, 1]");
  change([&](RawFile& r) {
    RawTensor& t = find_raw(r, "layers.1.ffn.experts.0.w1.weight");
    t.entry.shape = {80, 136};
  });
  expect_refused("fp4", "layers.1.ffn.experts.0.w1.weight has shape [80, 136], the config asks for [136, 80]");
  change([&](RawFile& r) { find_raw(r, "layers.0.attn.wq_b.scale").entry.dtype = "U8"; });
  expect_refused("fp4", "layers.0.attn.wq_b.scale is U8, scales are F8_E8M0 or F32");
  change([&](RawFile& r) {
    RawTensor t = find_raw(r, "layers.0.attn.wq_b.scale");
    t.entry.name = "model.layers.0.self_attn.wq_b.weight_scale_inv";
    r.push_back(t);
  });
  expect_refused("fp4", "gives the scales of layers.0.attn.wq_b.weight a second time");
  change([&](RawFile& r) {
    RawTensor t = find_raw(r, "layers.0.attn.wq_b.scale");
    t.entry.name = "layers.0.attn_norm.scale";
    r.push_back(t);
  });
  expect_refused("fp4", "1 tensors do not belong to the config: layers.0.attn_norm.scale");
  change([&](RawFile& r) {
    RawTensor& t = find_raw(r, "embed.weight");
    t.entry.dtype = "F8_E4M3";
    t.bytes.resize(t.bytes.size() / 2);
  });
  expect_refused("fp4", "embed.weight is F8_E4M3; only the matrix of a linear layer");
  // NaN among codes or scales shows when it is read.
  for (const auto& [name, byte] : {std::pair{"layers.0.attn.wq_b.weight", 0x7f}, {"layers.0.attn.wq_b.scale", 0xff}, {"layers.1.ffn.experts.0.w1.scale", 0xff}}) {
    change([&](RawFile& r) { find_raw(r, name).bytes[0] = static_cast<uint8_t>(byte); });
    const Result<WriteReport> report = write_checkpoint(context_, path("out"), open("fp4"), {.layout = CheckpointLayout::released_fp4, .on_shard = {}});
    ASSERT_FALSE(report);
    EXPECT_NE(report.message().find("holds nan"), std::string::npos) << report.message();
  }
}

TEST_F(CheckpointWriter, DamagedShardsAndIndexesAreRefusedWithTheReason) {
  write("fp8", random_, CheckpointLayout::released_fp8);
  const std::string index_path = path("fp8/") + kIndexFile;
  const std::string good = read_file(index_path).value();
  const auto expect_index_refused = [&](const std::string& text, const std::string& message) {
    std::ofstream(index_path) << text;
    expect_refused("fp8", message);
    std::ofstream(index_path) << good;
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    CHECK(text.find(from) != std::string::npos, "{}", from);
    return text.replace(text.find(from), from.size(), to);
  };
  expect_index_refused(good.substr(0, good.size() / 2), "line ");
  expect_index_refused("{}", "weight_map is missing");
  expect_index_refused(R"({"weight_map": {}})", "weight_map lists no tensor");
  expect_index_refused(R"({"weight_map": {"norm.weight": "../model.safetensors"}})", "must be the name of a .safetensors file in the same directory");
  expect_index_refused(replaced("\"norm.weight\": \"model-0", "\"norm.weight\": \"model-9"), "/model-9");
  const std::string line = good.substr(good.find("\"embed.weight\""), good.find('\n', good.find("\"embed.weight\"")) - good.find("\"embed.weight\"") + 1);
  expect_index_refused(replaced(line, ""), "tensor \"embed.weight\" is not in model.safetensors.index.json");
  expect_index_refused(replaced("\"embed.weight\": \"model-00001", "\"embed.weight\": \"model-00002"), "tensor \"embed.weight\" should be in model-00002");

  const CheckpointIndex index = parse_checkpoint_index(good, "index").value();
  const std::string first = path("fp8/") + index.files.at("embed.weight"), last = path("fp8/") + index.files.at("norm.weight");
  ASSERT_NE(first, last);
  RawFile raw = read_raw(last);
  raw.push_back(find_raw(raw, "norm.weight"));
  raw.back().entry.name = "embed.weight";
  write_raw(last, raw);
  expect_refused("fp8", "tensor \"embed.weight\" is in " + index.files.at("embed.weight") + " a second time");
  fs::remove(index_path);
  expect_refused("fp8", "tensor embed.weight has shape [160], the config asks for [50, 160]");
  raw.back() = find_raw(raw, "norm.weight");
  raw.back().entry.name = "model.norm.weight";
  write_raw(last, raw);
  expect_refused("fp8", "gives norm.weight a second time");

  fs::resize_file(first, fs::file_size(first) - 1);
  expect_refused("fp8", "is the file cut off?");
  fs::remove(first);
  std::ofstream(index_path) << good;
  expect_refused("fp8", "cannot open " + first);
}

}  // namespace
}  // namespace lockstep
