// Every rank's boxes together are the whole model, as often as the layout replicates, and random weights do not depend on the layout.

#include "model/shard.h"

#include <gtest/gtest.h>

#include "core/context.h"
#include "model/testing.h"
#include "model/weights.h"

namespace lockstep {
namespace {

ModelConfig small_config() {
  Result<ModelConfig> config = load_model_config(std::string(LOCKSTEP_SOURCE_DIR) + "/configs/demo.config.json");
  CHECK(config.is_ok(), "{}", config.message());
  return config.take();
}

const Layout kLayouts[] = {{1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {1, 1, 2, 2}, {1, 1, 3, 3}, {2, 2, 2, 4}, {1, 4, 4, 4}};

TEST(Shard, BoxesOfAllRanksCoverEveryNumber) {
  const ModelConfig m = small_config();
  const std::vector<TensorSpec> whole = tensor_table(m);
  for (const Layout& layout : kLayouts) {
    if (layout.pp > m.num_layers()) continue;
    std::vector<std::vector<int>> seen(whole.size());
    for (size_t i = 0; i < whole.size(); ++i) seen[i].resize(static_cast<size_t>(whole[i].shape.elements()));
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const std::vector<TensorSpec> table = tensor_table(m, testing::shard_in(m, layout, rank));
      ASSERT_EQ(table.size(), whole.size());
      for (const TensorSpec& t : table) {
        ASSERT_EQ(t.box.elements(), t.shape.elements()) << t.name;
        const Box all = whole_box(t.whole);
        ASSERT_EQ(intersect(t.box, all), t.box) << t.name;
        for (int64_t r = t.box.rows.begin; r < t.box.rows.end; ++r)
          for (int64_t k = t.box.columns.begin; k < t.box.columns.end; ++k)
            ++seen[static_cast<size_t>(t.id)][static_cast<size_t>(r * all.columns.size() + k)];
      }
    }
    for (const TensorSpec& t : whole) {
      // Replicas: the dp ranks, or one in each block of ep ranks; and the tp ranks, unless these cut the tensor.
      const bool cut_by_tp = t.cut != Cut::none && t.cut != Cut::experts;
      const int replicas = (t.cut == Cut::experts ? layout.dp / layout.ep : layout.dp) * (cut_by_tp ? 1 : layout.tp);
      for (const int times : seen[static_cast<size_t>(t.id)]) ASSERT_EQ(times, replicas) << t.name << " with " << layout.str();
    }
  }
}

TEST(Shard, RandomWeightsAreThoseOfTheWholeModel) {
  const ModelConfig m = small_config();
  Arena arena("weights", size_t{1} << 30);
  const std::vector<TensorSpec> whole = tensor_table(m);
  TensorSet all = make_tensor_set(whole, arena, [](const TensorSpec&) { return true; });
  initialize_masters(m, whole, all, 7);
  for (const Layout& layout : kLayouts) {
    const std::vector<TensorSpec> table = tensor_table(m, testing::shard_in(m, layout, layout.ranks() - 1));
    TensorSet part = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
    initialize_masters(m, table, part, 7);
    for (const TensorSpec& t : table) {
      if (!t.held()) continue;
      const TensorView mine = matrix_view(part.views[static_cast<size_t>(t.id)]), from = matrix_view(all.views[static_cast<size_t>(t.id)]);
      const TensorView there = from.slice(t.box.rows.begin, t.box.rows.size()).cols(t.box.columns.begin, t.box.columns.size());
      for (int64_t r = 0; r < mine.rows(); ++r) {
        const size_t bytes = static_cast<size_t>(mine.dim(1)) * dtype_bytes(mine.dtype);
        ASSERT_EQ(std::memcmp(mine.slice(r, 1).data, there.slice(r, 1).data, bytes), 0) << t.name << " row " << r << " with " << layout.str();
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
