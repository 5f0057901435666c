// Boxes written by any number of ranks, read in other boxes; and the files that must be refused.

#include "model/checkpoint_boxes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>

#include "io/testing.h"
#include "model/checkpoint_io.h"
#include "model/testing.h"
#include "model/weights.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;

ModelConfig small_config() {
  Result<ModelConfig> config = load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/demo.config.json");
  CHECK(config.is_ok(), "{}", config.message());
  return config.take();
}

struct Masters {
  explicit Masters(std::vector<TensorSpec> specs) : table(std::move(specs)) {
    set = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
  }
  std::vector<TensorSpec> table;
  Arena arena{"masters", size_t{1} << 30};
  TensorSet set;
};

ConstTensorView part(const ConstTensorView& whole, const Box& box) {
  return matrix_view(whole).slice(box.rows.begin, box.rows.size()).cols(box.columns.begin, box.columns.size());
}

bool same_numbers(const ConstTensorView& a, const ConstTensorView& b) {
  for (int64_t r = 0; r < a.rows(); ++r)
    if (std::memcmp(a.slice(r, 1).data, b.slice(r, 1).data, static_cast<size_t>(a.dim(1)) * dtype_bytes(a.dtype)) != 0) return false;
  return true;
}

// Every rank of `ranks` writes its share of each tensor, whole tensors cut by rows, small ones left to the last rank.
void save_in_pieces(const std::string& directory, const Masters& m, int ranks, const std::map<std::string, std::string>& metadata) {
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<BoxView> boxes;
    for (const TensorSpec& t : m.table) {
      Box box = whole_box(t.whole);
      if (box.rows.end >= ranks) {
        box.rows = part_of(box.rows.end, ranks, rank);
      } else if (rank != ranks - 1) {
        box = Box();
      }
      const ConstTensorView view = m.set.views[static_cast<size_t>(t.id)];
      boxes.push_back({t.name, t.whole, box, box.empty() ? ConstTensorView() : box == whole_box(t.whole) ? view : part(view, box)});
    }
    ASSERT_TRUE(succeeds(write_boxes(directory + "/" + box_file(kMastersStem, rank, ranks), boxes, metadata)));
  }
}

TEST(BoxFiles, SavedByAnyNumberOfRanksReadByEveryShard) {
  const ModelConfig m = small_config();
  Masters all(tensor_table(m));
  initialize_masters(m, all.table, all.set, 5);
  for (const int ranks : {1, 3, 16}) {
    const testing::TemporaryDirectory dir;
    save_in_pieces(dir.path(), all, ranks, {{"steps", "4"}});
    EXPECT_EQ(dir.count(), static_cast<size_t>(ranks)) << "a temporary stayed behind";
    Result<ReadBox> source = checkpoint_source(dir.path(), m);
    ASSERT_TRUE(succeeds(source));
    for (const Layout& layout : {Layout{1, 1, 1, 1}, Layout{2, 2, 2, 4}, Layout{1, 4, 4, 4}}) {
      for (int rank = 0; rank < layout.ranks(); ++rank) {
        Masters mine(tensor_table(m, testing::shard_in(m, layout, rank)));
        ASSERT_TRUE(succeeds(read_masters(mine.table, source.value(), mine.set)));
        for (const TensorSpec& t : mine.table) {
          if (!t.held()) continue;
          const TensorView view = mine.set.views[static_cast<size_t>(t.id)];
          ASSERT_TRUE(same_numbers(matrix_view(view), part(all.set.views[static_cast<size_t>(t.id)], t.box)))
              << t.name << " rank " << rank << " of " << layout.str() << ", saved by " << ranks;
        }
      }
    }
  }
}

TEST(BoxFiles, OneRankWritesAPlainFile) {
  const testing::TemporaryDirectory dir;
  const testing::Tensor t(DType::f32, {2, 3, 4});
  std::iota(t.view().ptr<float>(), t.view().ptr<float>() + 24, 0.0f);
  const BoxView box = {"stack", {2, 3, 4}, whole_box({2, 3, 4}), t.view()};
  ASSERT_TRUE(succeeds(write_boxes(dir.file("masters.safetensors"), {&box, 1}, {})));
  Result<SafetensorsFile> file = SafetensorsFile::open(dir.file("masters.safetensors"));
  ASSERT_TRUE(succeeds(file));
  EXPECT_EQ(testing::count_bit_differences(file.value().view("stack").value(), t.view()), 0);
}

// Four ranks' pieces of one f32 [6, 4] and one i32 [5] tensor, number i being i.
class TwoTensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::iota(a.view().ptr<float>(), a.view().ptr<float>() + 24, 0.0f);
    std::iota(b.view().ptr<int32_t>(), b.view().ptr<int32_t>() + 5, 0);
  }
  void write(const std::string& name, const std::vector<std::pair<const char*, Box>>& boxes, const std::map<std::string, std::string>& metadata = {}) {
    std::vector<BoxView> views;
    for (const auto& [tensor, box] : boxes) {
      const testing::Tensor& t = *tensor == 'a' ? a : b;
      views.push_back({tensor, t.view().shape, box, box == whole_box(t.view().shape) ? t.view() : part(t.view(), box)});
    }
    ASSERT_TRUE(succeeds(write_boxes(dir.file(name), views, metadata)));
  }
  void write_two_files() {
    write("x-00001-of-00002.safetensors", {{"a", {{0, 4}, {0, 2}}}, {"a", {{4, 6}, {0, 4}}}});
    write("x-00002-of-00002.safetensors", {{"a", {{0, 4}, {2, 4}}}, {"b", {{0, 5}, {0, 1}}}});
  }
  Result<BoxFiles> open() { return BoxFiles::open(dir.path(), "x"); }

  const testing::TemporaryDirectory dir;
  testing::Tensor a{DType::f32, {6, 4}}, b{DType::i32, {5}};
};

TEST_F(TwoTensors, EveryBoxComesOutOfThePartsItLiesIn) {
  write_two_files();
  Result<BoxFiles> files = open();
  ASSERT_TRUE(succeeds(files));
  EXPECT_EQ(files.value().names(), (std::vector<std::string>{"a", "b"}));
  const WholeTensor wanted[] = {{"a", {6, 4}, DType::f32}, {"b", {5}, DType::i32}};
  EXPECT_TRUE(succeeds(files.value().check(wanted)));
  for (int64_t r0 = 0; r0 < 6; ++r0)
    for (int64_t r1 = r0 + 1; r1 <= 6; ++r1)
      for (int64_t c0 = 0; c0 < 4; ++c0)
        for (int64_t c1 = c0 + 1; c1 <= 4; ++c1) {
          const Box box = {{r0, r1}, {c0, c1}};
          testing::Tensor wide(DType::f32, {r1 - r0, 9});  // read into the middle of wider rows
          std::fill_n(wide.view().ptr<float>(), (r1 - r0) * 9, -1.0f);
          const TensorView out = wide.view().cols(3, c1 - c0);
          ASSERT_TRUE(succeeds(files.value().read("a", box, out)));
          ASSERT_TRUE(same_numbers(out, part(a.view(), box)));
          for (int64_t r = 0; r < r1 - r0; ++r) {
            ASSERT_EQ(wide.view().row<float>(r)[2], -1.0f);
            ASSERT_EQ(wide.view().row<float>(r)[3 + c1 - c0], -1.0f);
          }
        }
}

TEST_F(TwoTensors, WhatTheFilesDoNotHoldIsNamed) {
  write_two_files();
  Result<BoxFiles> files = open();
  ASSERT_TRUE(succeeds(files));
  testing::Tensor out(DType::f32, {8, 4});
  EXPECT_TRUE(fails_with(files.value().read("a", {{0, 8}, {0, 4}}, out), "of a[0:8,0:4] the files hold 24 of 32 numbers"));
  EXPECT_TRUE(fails_with(files.value().read("c", {{0, 8}, {0, 4}}, out), "tensor c is missing"));
  EXPECT_TRUE(fails_with(files.value().read("b", {{0, 5}, {0, 1}}, out.view().slice(0, 5).cols(0, 1)), "tensor b is i32, f32 is wanted"));
  const auto check = [&](std::vector<WholeTensor> wanted) { return files.value().check(wanted); };
  const WholeTensor whole_a = {"a", {6, 4}, DType::f32}, whole_b = {"b", {5}, DType::i32};
  EXPECT_TRUE(fails_with(check({whole_a}), "tensor b is not one of this config"));
  EXPECT_TRUE(fails_with(check({whole_a, whole_b, {"c", {2}, DType::f32}}), "tensor c [2] is missing"));
  EXPECT_TRUE(fails_with(check({{"a", {7, 4}, DType::f32}, whole_b}), "of tensor a [7, 4] the files hold 24 of 28"));
  EXPECT_TRUE(fails_with(check({{"a", {6, 3}, DType::f32}, whole_b}), "tensor a reaches to row"));
  EXPECT_TRUE(fails_with(check({whole_a, {"b", {5, 1}, DType::i32}}), "tensor b has shape [5], the config asks for [5, 1]"));
  EXPECT_TRUE(fails_with(check({whole_a, {"b", {5}, DType::f32}}), "tensor b is i32, this config wants f32"));
}

TEST_F(TwoTensors, FilesThatAreNotOneSaveAreRefused) {
  const Box top = {{0, 3}, {0, 4}}, bottom = {{3, 6}, {0, 4}};
  EXPECT_TRUE(fails_with(open(), "holds no x.safetensors"));
  write("x-00001-of-00003.safetensors", {{"a", top}});
  write("x-00003-of-00003.safetensors", {{"a", bottom}});
  EXPECT_TRUE(fails_with(open(), "x-00002-of-00003.safetensors is missing; 3 ranks wrote this checkpoint"));
  write("x-00002-of-00003.safetensors", {});
  EXPECT_TRUE(succeeds(open()));
  write("x-00002-of-00003.safetensors", {{"a", {{2, 4}, {3, 4}}}});
  EXPECT_TRUE(fails_with(open(), "overlap; the files are not of one save"));
  write("x-00002-of-00003.safetensors", {}, {{"steps", "2"}});
  EXPECT_TRUE(fails_with(open(), "different metadata"));
  write("x-00002-of-00003.safetensors", {});
  write("x.safetensors", {{"a", top}});
  EXPECT_TRUE(fails_with(open(), "files x of 1 ranks and of 3, which are of different saves"));
  std::filesystem::remove(dir.file("x.safetensors"));
  const std::string bytes = get(dir.file("x-00003-of-00003.safetensors"));
  put(dir.file("x-00003-of-00003.safetensors"), bytes.substr(0, bytes.size() - 1));
  EXPECT_TRUE(fails_with(open(), "x-00003-of-00003.safetensors: tensor"));
  put(dir.file("x-00003-of-00003.safetensors"), "");
  EXPECT_TRUE(fails_with(open(), "x-00003-of-00003.safetensors: 0 bytes"));
}

TEST_F(TwoTensors, EntriesThatAreNoBoxesAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"a[0:6,0:4", "no box"},      {"a[0:6]", "no box"},     {"a[0:06,0:4]", "no box"},  {"a[0:6,0:4]x", "no box"},
      {"a[-1:5,0:4]", "no box"},    {"a[0:0,0:4]", "no box"}, {"a[4:0,0:4]", "no box"},   {"a[0:99999999999999999999,0:4]", "no box"},
      {"a[0:5,0:4]", "its name says [5, 4]"},
  };
  for (const auto& [name, message] : cases) {
    SafetensorsWriter writer;
    writer.add(name, a.view());
    ASSERT_TRUE(succeeds(writer.write(dir.file("x.safetensors"))));
    EXPECT_TRUE(fails_with(open(), message)) << name;
  }
  SafetensorsWriter writer;
  const testing::Tensor wide(DType::f64, {2});
  writer.add("a", wide);
  ASSERT_TRUE(succeeds(writer.write(dir.file("x.safetensors"))));
  EXPECT_TRUE(fails_with(open(), "a is F64, boxes are F32 or I32"));
}

TEST(CheckpointSource, MastersThatNoTrainingCanUseAreRefused) {
  const ModelConfig m = small_config();
  Masters all(tensor_table(m));
  initialize_masters(m, all.table, all.set, 5);
  const testing::TemporaryDirectory dir;
  const auto read_all = [&] {
    Masters mine(tensor_table(m));
    return load_checkpoint(dir.path(), m, mine.table, mine.set);
  };
  all.set.views[0].ptr<float>()[7] = std::numeric_limits<float>::quiet_NaN();
  save_in_pieces(dir.path(), all, 2, {});
  EXPECT_TRUE(fails_with(read_all(), "tensor embed.weight holds nan"));
  all.set.views[0].ptr<float>()[7] = 0;
  save_in_pieces(dir.path(), all, 2, {});
  EXPECT_TRUE(succeeds(read_all()));
  std::filesystem::remove(dir.file("masters-00001-of-00002.safetensors"));
  EXPECT_TRUE(fails_with(read_all(), "masters-00001-of-00002.safetensors is missing"));
}

}  // namespace
}  // namespace lockstep
