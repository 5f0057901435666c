#include "rl/weights_check.h"

#include <gtest/gtest.h>

#include <cstring>

#include "model/testing.h"

namespace lockstep {
namespace {

constexpr uint64_t kSeed = 5;

struct Served {
  Served(Numerics n, const Shard& shard) : weights(testing::tiny_config(), n, shard, arena) {
    CHECK(weights.load(context, random_boxes(weights.config(), kSeed), 1).is_ok());
  }
  WeightsComparison compare() {
    const Result<WeightsComparison> r = compare_weights(context, weights, random_boxes(weights.config(), kSeed));
    CHECK(r.is_ok(), "{}", r.message());
    return r.value();
  }
  const TensorSpec& spec(const std::string& name) const {
    for (const TensorSpec& s : weights.table())
      if (s.name == name) return s;
    CHECK(false, "no tensor {}", name);
  }
  // Bit 0 of the number at a place of this rank's part, as it is stored.
  void flip(const std::string& name, int64_t row, int64_t column) {
    const TensorView rows = matrix_view(weights.rows(spec(name).id));
    const int64_t element = rows.dtype == DType::e2m1x2 ? column / 2 : column, row_elements = rows.dim(1);
    static_cast<unsigned char*>(rows.data)[static_cast<size_t>(row * row_elements + element) * dtype_bytes(rows.dtype)] ^=
        rows.dtype == DType::e2m1x2 && column % 2 == 1 ? 16 : 1;
  }
  Arena arena{"test", size_t{1} << 30};
  CpuContext context{2};
  Weights weights;
};

TEST(WeightsCheck, LoadedWeightsAreTheExport) {
  const ModelConfig m = testing::tiny_config();
  for (const Numerics n : kAllNumerics) {
    Served s(n, whole_shard(m));
    const WeightsComparison r = s.compare();
    EXPECT_EQ(r.different, 0) << numerics_name(n) << " " << (r.first ? r.first->str() : "");
    EXPECT_EQ(r.tensors, static_cast<int64_t>(s.weights.table().size()));
    int64_t numbers = 0;
    for (const TensorSpec& t : s.weights.table()) numbers += t.whole.elements();
    EXPECT_EQ(r.numbers, numbers);
  }
}

TEST(WeightsCheck, OneFlippedBitIsNamed) {
  const ModelConfig m = testing::tiny_config();
  struct Plant {
    const char *tensor, *named;
    int64_t row, column, named_row;
  };
  for (const Numerics n : kAllNumerics)
    for (const Plant& p : {Plant{"embed.weight", "embed.weight", 7, 3, 7}, {"layers.1.attn.wkv.weight", "layers.1.attn.wkv.weight", 15, 31, 15},
                           {"layers.2.attn.wo_a.weight", "layers.2.attn.wo_a.weight", 17, 9, 17},
                           {"layers.0.ffn.experts.*.w2.weight", "layers.0.ffn.experts.3.w2.weight", 3 * 32 + 20, 5, 20},
                           {"layers.1.attn_norm.weight", "layers.1.attn_norm.weight", 30, 0, 30},
                           {"layers.0.ffn.gate.tid2eid", "layers.0.ffn.gate.tid2eid", 39, 1, 39}}) {
      SCOPED_TRACE(fmt::format("{} {}", numerics_name(n), p.tensor));
      Served s(n, whole_shard(m));
      s.flip(p.tensor, p.row, p.column);
      // The forward reads panels, where there are any; rows alone do not serve.
      EXPECT_EQ(s.compare().different, s.spec(p.tensor).has_panels() ? 0 : 1);
      s.weights.commit(s.context, 2);
      const WeightsComparison r = s.compare();
      ASSERT_EQ(r.different, 1);
      EXPECT_EQ(r.first->tensor, p.named);
      EXPECT_EQ(r.first->row, p.named_row);
      EXPECT_EQ(r.first->column, p.column);
      EXPECT_NE(r.first->str().find(fmt::format("row {}, column {}", p.named_row, p.column)), std::string::npos);
    }
}

TEST(WeightsCheck, APartIsNamedByItsPlaceInTheWhole) {
  const ModelConfig m = testing::tiny_config();
  const Shard shard = testing::shard_in(m, {.tp = 2, .pp = 1, .ep = 2, .dp = 2}, 3);  // second half of heads and of experts
  Served s(Numerics::fp8, shard);
  EXPECT_EQ(s.compare().different, 0);
  s.flip("layers.1.attn.wo_b.weight", 4, 2);
  s.flip("layers.2.ffn.experts.*.w1.weight", 0, 6);
  s.weights.commit(s.context, 2);
  const WeightsComparison r = s.compare();
  EXPECT_EQ(r.different, 2);
  const TensorSpec& wo_b = s.spec("layers.1.attn.wo_b.weight");
  ASSERT_GT(wo_b.box.columns.begin, 0);
  EXPECT_EQ(r.first->tensor, wo_b.name);
  EXPECT_EQ(r.first->row, 4);
  EXPECT_EQ(r.first->column, wo_b.box.columns.begin + 2);
}

}  // namespace
}  // namespace lockstep
