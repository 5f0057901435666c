#include "model/choices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/rng.h"
#include "model/testing.h"

namespace lockstep {
namespace {

ModelConfig three_sparse_layers() {
  ModelConfig m = testing::tiny_config();
  m.layers = {{AttentionKind::csa, 4, false}, {AttentionKind::swa, 0, true}, {AttentionKind::csa, 8, false}, {AttentionKind::csa, 4, false}};
  return m;
}

// What a forward gives for rows first .. first + n: K experts, and the top columns of the entries that a row sees, ascending.
struct Made {
  std::vector<int32_t> experts, entries;
};
Made make(const ModelConfig& m, int layer, int64_t first, int64_t n) {
  Made made;
  for (int64_t row = first; row < first + n; ++row) {
    Philox rng(static_cast<uint64_t>(row * 10 + layer), RngPurpose::test);
    const auto choose = [&](int64_t of, int64_t count, std::vector<int32_t>& to, int64_t width) {
      std::set<int32_t> chosen;
      while (static_cast<int64_t>(chosen.size()) < std::min(of, count)) chosen.insert(static_cast<int32_t>(rng.below(static_cast<uint32_t>(of))));
      to.insert(to.end(), chosen.begin(), chosen.end());
      to.insert(to.end(), static_cast<size_t>(width) - chosen.size(), -1);
    };
    choose(m.num_experts, m.experts_per_token, made.experts, m.experts_per_token);
    const LayerConfig& l = m.layers[static_cast<size_t>(layer)];
    if (l.attention != AttentionKind::csa) continue;
    const int64_t columns = m.selected_columns(l.ratio);
    choose((row + 1) / l.ratio, columns, made.entries, columns);
  }
  return made;
}

TEST(Choices, ComeBackHoweverTheRowsWereCut) {
  const ModelConfig m = three_sparse_layers();
  const int64_t K = m.experts_per_token;
  for (const ReplayKind kind : {ReplayKind::routing, ReplayKind::routing_index}) {
    const ChoiceLayout layout(m, kind);
    std::vector<ChoiceLog> logs;
    for (const int64_t chunk : {1, 7, 60}) {
      ChoiceLog& log = logs.emplace_back();
      for (int64_t first = 0; first < 60; first += chunk) {
        const int64_t n = std::min(chunk, 60 - first);
        layout.resize(log, first + n);
        EXPECT_TRUE(layout.holds(log, first + n));
        EXPECT_FALSE(layout.holds(log, first + n - 1));
        for (int layer = 3; layer >= 0; --layer) {
          Made made = make(m, layer, first, n);
          layout.put_experts(log, first, layer, TensorView(made.experts.data(), DType::i32, {n, K}));
          if (made.entries.empty() || kind == ReplayKind::routing) continue;
          layout.put_entries(log, first, layer, TensorView(made.entries.data(), DType::i32, {n, static_cast<int64_t>(made.entries.size()) / n}));
        }
      }
    }
    EXPECT_EQ(logs[0], logs[1]);
    EXPECT_EQ(logs[0], logs[2]);
    for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 60}, {9, 20}, {59, 1}}) {
      for (int layer = 0; layer < 4; ++layer) {
        const Made made = make(m, layer, first, n);
        std::vector<int32_t> experts(made.experts.size()), entries(made.entries.size(), 99);
        layout.get_experts(logs[0], first, layer, TensorView(experts.data(), DType::i32, {n, K}));
        EXPECT_EQ(experts, made.experts);
        if (entries.empty() || kind == ReplayKind::routing) continue;
        layout.get_entries(logs[0], first, layer, TensorView(entries.data(), DType::i32, {n, static_cast<int64_t>(entries.size()) / n}));
        EXPECT_EQ(entries, made.entries) << "layer " << layer << " from row " << first;
      }
    }
  }
}

// 2 entries are read: rows up to the 10th (ratio 4) and the 22nd (ratio 8) read all they see.
TEST(Choices, OnlyWhatIsNotKnownIsKept) {
  const ModelConfig m = three_sparse_layers();
  const ChoiceLayout layout(m, ReplayKind::routing_index);
  EXPECT_EQ(layout.experts_of(5), 5 * 4 * 2);
  EXPECT_EQ(layout.entries_of(11), 0);
  EXPECT_EQ(layout.entries_of(12), 2 * 2);
  EXPECT_EQ(layout.entries_of(23), 12 * 2 * 2);
  EXPECT_EQ(layout.entries_of(24), 13 * 2 * 2 + 2);
  EXPECT_EQ(ChoiceLayout(m, ReplayKind::routing).entries_of(60), 0);
  EXPECT_EQ(ChoiceLayout(m, ReplayKind::none).experts_of(60), 0);
}

}  // namespace
}  // namespace lockstep
