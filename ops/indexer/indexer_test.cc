// Selections against a plain f64 evaluation of spec 2.6 wherever rounding cannot decide, vectors against the reference exactly,
// ties, and the row contract over random cuttings with pages kept between the calls.

#include "ops/indexer/indexer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/indexer/indexer_cpu.h"
#include "ops/sequence/sequence_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::SequenceSet;
using testing::Tensor;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in f32

struct Config {
  std::vector<int64_t> length;
  int64_t heads, width, ratio, k;
};

std::vector<Config> configs() {
  return {
      {{3}, 2, 4, 4, 2},  // nothing to see
      {{16, 17, 40}, 1, 1, 4, 1}, {{40, 3, 4, 5, 77}, 4, 16, 4, 3},
      {{200, 33}, 5, 19, 2, 17},  {{130, 9}, 16, 32, 4, 100},  // k larger than the entries
      {{90}, 33, 8, 1, 31},       {{700}, 3, 20, 1, 64},       // several blocks of keys
      {{48}, 64, 128, 4, 8},
  };
}

struct Problem {
  Problem(const Config& config, DType dtype, uint64_t seed = 1)
      : config(config), dtype(dtype), shape{.ratio = config.ratio, .per_page = 3} {
    set = testing::make_sequence_set(seed, config.length, 3 * config.ratio);
    q = testing::random_tensor(seed + 1, dtype, {set.num_rows, config.heads, config.width});
    weight = testing::random_tensor(seed + 2, DType::f32, {set.num_rows, config.heads});
    keys = testing::random_tensor(seed + 3, dtype, {set.num_pages * shape.per_page, config.width});
  }
  int64_t store_row(size_t id, int64_t idx) const {
    return set.pages[id][static_cast<size_t>(idx / shape.per_page)] * shape.per_page + idx % shape.per_page;
  }
  Config config;
  DType dtype;
  IndexerShape shape;
  SequenceSet set;
  Tensor q, weight, keys;
};

Tensor run_packed(Context& c, const Problem& p, decltype(&index_select) f = index_select) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Tensor selected = testing::random_ints(3, {p.set.num_rows, p.config.k}, 1000);
  f(c, selected, p.q, p.weight, p.keys, call.view(), p.shape);
  return selected;
}

class IndexerTest : public ::testing::TestWithParam<DType> {};

// The list is ascending, min(k, visible) long and padded with -1, and no entry outside it beats one inside it by more than the
// rounding of both scores: d fused steps a dot, at most ceil(heads / 16) + 4 additions over heads (counted as heads + 5), of sum
// |w| sum |q key|.
TEST_P(IndexerTest, TakesTheBestOfTheFormula) {
  CpuContext context(2);
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    const Tensor selected = run_packed(context, p);
    int64_t wrong = 0, decided = 0;
    for (size_t id = 0; id < p.set.length.size(); ++id)
      for (int64_t pos = 0; pos < p.set.length[id]; ++pos) {
        const int64_t t = p.set.offset[id] + pos;
        const int32_t* list = selected.ptr<int32_t>() + t * config.k;
        int64_t visible = 0;
        while ((visible + 1) * config.ratio - 1 <= pos) ++visible;
        const int64_t n = std::min(visible, config.k);
        std::vector<bool> in(static_cast<size_t>(visible));
        for (int64_t i = 0; i < config.k; ++i) {
          if (i >= n) {
            wrong += list[i] != -1;
          } else if (list[i] < 0 || list[i] >= visible || (i > 0 && list[i] <= list[i - 1])) {
            ++wrong;
          } else {
            in[static_cast<size_t>(list[i])] = true;
          }
        }
        std::vector<double> score, error;
        for (int64_t s = 0; s < visible; ++s) {
          double sum = 0, bound = 0;
          for (int64_t h = 0; h < config.heads; ++h) {
            double dot = 0, terms = 0;
            for (int64_t i = 0; i < config.width; ++i) {
              const double term = static_cast<double>(p.q.get((t * config.heads + h) * config.width + i)) *
                                  p.keys.get(p.store_row(id, s) * config.width + i);
              dot += term;
              terms += std::abs(term);
            }
            const double w = p.weight.get(t * config.heads + h);
            sum += w * std::max(0.0, dot);
            bound += std::abs(w) * terms;
          }
          score.push_back(sum);
          error.push_back(kUnit * static_cast<double>(config.width + config.heads + 5) * bound);
        }
        for (size_t a = 0; a < score.size(); ++a)
          for (size_t b = 0; b < score.size(); ++b) {
            if (!in[a] || in[b]) continue;
            wrong += score[b] > score[a] + error[a] + error[b];
            decided += score[a] > score[b] + error[a] + error[b];
          }
      }
    EXPECT_EQ(wrong, 0) << config.heads << "x" << config.width << " k " << config.k;
    EXPECT_GE(decided, config.k == 17 ? 1000 : 0);  // the test decides something
  }
}

TEST_P(IndexerTest, VectorsAndThreadsGiveTheReferencesChoice) {
  CpuContext one(1);
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    const Tensor want = run_packed(one, p, reference::index_select);
    testing::for_each_simd_target([&](const std::string& target) {
      for (int threads = 1; threads <= 4; ++threads) {
        CpuContext context(threads);
        const Tensor got = run_packed(context, p, simd::index_select);
        EXPECT_EQ(testing::count_bit_differences(got, want), 0)
            << target << " " << threads << " " << config.heads << "x" << config.width;
      }
    });
  }
}

// Small integers make scores exact and equal in great numbers, with zeros of both signs: the order of the rule decides.
TEST_P(IndexerTest, EqualScoresGoToTheLowerIndex) {
  CpuContext context(2);
  for (const int64_t k : {1, 7, 40, 128}) {
    Problem p({{300}, 3, 2, 1, k}, GetParam());
    Philox rng(static_cast<uint64_t>(k), RngPurpose::test);
    for (int64_t i = 0; i < p.q.elements(); ++i) p.q.set(i, static_cast<int>(rng.below(3)) - 1);
    for (int64_t i = 0; i < p.keys.elements(); ++i) p.keys.set(i, static_cast<int>(rng.below(3)) - 1);
    for (int64_t i = 0; i < p.weight.elements(); ++i) p.weight.set(i, static_cast<int>(rng.below(3)) - 1);
    const Tensor selected = run_packed(context, p);
    int64_t wrong = 0;
    for (int64_t t = 0; t < 300; ++t) {
      std::vector<std::pair<int, int32_t>> order;  // (-score, index) ascending
      for (int64_t s = 0; s <= t; ++s) {
        int score = 0;
        for (int64_t h = 0; h < 3; ++h) {
          int dot = 0;
          for (int64_t i = 0; i < 2; ++i)
            dot += static_cast<int>(p.q.get((t * 3 + h) * 2 + i)) * static_cast<int>(p.keys.get(p.store_row(0, s) * 2 + i));
          score += static_cast<int>(p.weight.get(t * 3 + h)) * std::max(0, dot);
        }
        order.emplace_back(-score, static_cast<int32_t>(s));
      }
      std::sort(order.begin(), order.end());
      std::vector<int32_t> want;
      for (size_t i = 0; i < order.size() && i < static_cast<size_t>(k); ++i) want.push_back(order[i].second);
      std::sort(want.begin(), want.end());
      want.resize(static_cast<size_t>(k), -1);
      for (int64_t i = 0; i < k; ++i) wrong += selected.ptr<int32_t>()[t * k + i] != want[static_cast<size_t>(i)];
    }
    EXPECT_EQ(wrong, 0) << "k " << k;
  }
}

TEST_P(IndexerTest, RowContractOverRandomCuttings) {
  std::vector<Config> many = configs();
  many.push_back({{1, 2, 3, 4, 17, 64, 65, 30, 9}, 4, 16, 4, 5});
  for (const Config& config : many) {
    const Problem p(config, GetParam());
    CpuContext whole(1);
    const Tensor want = run_packed(whole, p);
    for (int round = 0; round < 5; ++round) {
      CpuContext context(1 + round % 3);
      Philox rng(static_cast<uint64_t>(round) + 60, RngPurpose::test);
      const int64_t max_rows = std::vector<int64_t>{1, 2, 5, 37, 1000}[static_cast<size_t>(round)];
      Tensor store = testing::random_tensor(rng.next(), p.dtype, p.keys.view().shape, 30.0f);
      Tensor got(DType::i32, {p.set.num_rows, config.k});
      for (const auto& parts : testing::random_schedule(rng, p.set, max_rows)) {
        Call call(p.set, parts);
        const EntryView entries = call.entries(config.ratio);
        Tensor rows(p.dtype, {entries.num_entries, config.width});
        entries_gather(context, rows, p.keys, entries, call.view(), p.shape.per_page);
        entries_scatter(context, store, rows, entries, call.view(), p.shape.per_page);
        Tensor part(DType::i32, {call.view().num_tokens, config.k});
        index_select(context, part, call.take(p.q), call.take(p.weight), store, call.view(), p.shape);
        call.put(got, part);
      }
      EXPECT_EQ(testing::count_bit_differences(got, want), 0) << config.heads << "x" << config.width << " round " << round;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, IndexerTest, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& param) { return dtype_name(param.param); });

TEST(IndexerDeath, WrongArguments) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const Problem p({{9, 5}, 2, 4, 2, 2}, DType::f32);
  CpuContext context(1);
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Tensor selected(DType::i32, {14, 2});
  EXPECT_DEATH(index_select(context, selected.view().slice(0, 13), p.q, p.weight, p.keys, call.view(), p.shape),
               "selected i32 \\[13, 2\\]");
  EXPECT_DEATH(index_select(context, selected, p.q, p.weight.view().cols(0, 1), p.keys, call.view(), p.shape),
               "weight f32 \\[14, 1\\]");
  EXPECT_DEATH(index_select(context, selected, p.q, p.weight, p.keys.view().slice(0, 3), call.view(), p.shape),
               "the store has 3 rows");
  EXPECT_DEATH(index_select(context, selected, p.q, p.weight, p.keys.view().cols(0, 3), call.view(), p.shape), "keys f32");
  EXPECT_DEATH(index_select(context, selected, p.q, p.weight, p.keys, call.view(), {.ratio = 3, .per_page = 3}),
               "entries of ratio 3");
}

}  // namespace
}  // namespace lockstep
