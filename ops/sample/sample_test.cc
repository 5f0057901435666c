#include "ops/sample/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/logprob/logprob.h"
#include "ops/sample/sample_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;
using testing::random_tensor;

constexpr size_t kWorkspace = size_t{64} << 20;
constexpr double kUnit = 0x1p-24;

struct Drawn {
  Tensor token, logprob;
  Drawn(Context& c, ConstTensorView logits, const SampleParams* params)
      : token(DType::i32, {logits.rows()}), logprob(DType::f32, {logits.rows()}) {
    sample(c, token, logprob, logits, params);
  }
  int32_t id(int64_t r) const { return token.ptr<int32_t>()[r]; }
};

// Every row its own setting, every setting present.
std::vector<SampleParams> varied_params(int64_t rows, int64_t vocab, uint64_t seed) {
  Philox rng(seed, RngPurpose::test);
  std::vector<SampleParams> all(static_cast<size_t>(rows));
  for (SampleParams& p : all) {
    p = {.seed = seed + rng.below(3), .prompt_id = rng.next(), .sample_idx = rng.below(8), .position = rng.below(1000)};
    p.temperature = rng.below(8) == 0 ? 0.0f : 0.5f + rng.uniform();
    if (rng.below(3) == 0) p.top_k = static_cast<int32_t>(1 + rng.below(static_cast<uint32_t>(vocab)));
    if (rng.below(3) == 0) p.top_p = rng.uniform();
    if (rng.below(3) == 0) p.min_p = 0.3f * rng.uniform();
    if (rng.below(4) == 0 && vocab > 1) p.forbid = static_cast<int32_t>(rng.below(static_cast<uint32_t>(vocab)));
  }
  return all;
}

// The same definitions written with full sorts in f64: what is kept, with what probability. `doubtful` when a boundary is closer
// than f32 can resolve.
struct Kept {
  std::vector<int32_t> ids;
  std::vector<double> p;  // beside ids, sums to 1
  bool doubtful = false;
};

Kept keep_in_f64(const float* logits, int64_t vocab, const SampleParams& s) {
  const double t = s.temperature == 0 ? 1.0 : s.temperature;
  std::vector<int32_t> order;
  for (int32_t v = 0; v < vocab; ++v)
    if (v != s.forbid) order.push_back(v);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const auto weight = [&](int32_t v) { return std::exp(logits[v] / t - logits[order[0]] / t); };
  Kept k;
  if (s.temperature > 0) {
    if (s.top_k > 0 && s.top_k < static_cast<int32_t>(order.size())) order.resize(static_cast<size_t>(s.top_k));
    double total = 0, mass = 0;
    for (int32_t v : order) total += weight(v);
    if (s.top_p < 1) {
      size_t n = 0;
      do {
        mass += weight(order[n++]) / total;
        k.doubtful |= std::abs(mass - s.top_p) < 1e-5;
      } while (n < order.size() && mass < s.top_p);
      order.resize(n);
    }
    if (s.min_p > 0) {
      for (int32_t v : order) k.doubtful |= std::abs(weight(v) - s.min_p) < 1e-5;
      std::erase_if(order, [&](int32_t v) { return weight(v) < s.min_p; });
    }
  }
  std::sort(order.begin(), order.end());
  k.ids = order;
  double total = 0;
  for (int32_t v : order) total += std::exp(logits[v] / t);
  for (int32_t v : order) k.p.push_back(std::exp(logits[v] / t) / total);
  return k;
}

// The drawn token is where the f64 running sum of the kept probabilities passes u, unless u is within 1e-5 of a step:
// exponentials are good to 2 ulp plus |y| half ulps, far below. The log-probability loses |y| three times over (y, y - max,
// subtraction), exp's 4 half ulps, the tree's V / 16 + 4 and log's 4 of at most log V.
TEST(Sample, FiltersAndDrawMatchSortingInF64) {
  for (const int64_t vocab : {1, 2, 7, 64, 100, 256, 1000}) {
    const int64_t rows = 400;
    const Tensor logits = random_tensor(static_cast<uint64_t>(vocab), DType::f32, {rows, vocab}, 4.0f);
    const std::vector<SampleParams> params = varied_params(rows, vocab, 40 + static_cast<uint64_t>(vocab));
    CpuContext c(2, kWorkspace);
    const Drawn drawn(c, logits, params.data());
    int64_t left_out = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const SampleParams& s = params[static_cast<size_t>(r)];
      const float* x = logits.view().row<float>(r);
      const Kept kept = keep_in_f64(x, vocab, s);
      const double u = uniform_open(philox(s.seed, RngPurpose::sample, s.prompt_id, s.sample_idx, s.position)[0]);
      size_t want = 0;
      bool doubtful = kept.doubtful;
      if (s.temperature == 0) {
        want = static_cast<size_t>(std::max_element(kept.p.begin(), kept.p.end()) - kept.p.begin());
      } else {
        double sum = 0;
        for (want = 0; want + 1 < kept.ids.size(); ++want) {
          sum += kept.p[want];
          doubtful |= std::abs(sum - u) < 1e-5;
          if (sum > u) break;
        }
      }
      if (doubtful) {
        ++left_out;
        continue;
      }
      ASSERT_EQ(drawn.id(r), kept.ids[want]) << "V " << vocab << " row " << r;
      const double y = 4.0 / (s.temperature == 0 ? 1.0 : s.temperature);
      ASSERT_NEAR(drawn.logprob.get(r), std::log(kept.p[want]), kUnit * (10 * y + vocab / 16.0 + 80 + 8 * std::log(vocab))) << r;
    }
    EXPECT_LE(left_out, rows / 20);
  }
}

// Chi-square of 30000 draws against its 1 - 1e-6 quantile, by Wilson and Hilferty (4.753 normal deviations). Fixed seeds: no
// flakes.
TEST(Sample, FrequenciesFollowTheDistribution) {
  const int64_t vocab = 11, draws = 30000;
  const Tensor row = random_tensor(77, DType::f32, {1, vocab}, 2.0f);
  Tensor logits(DType::f32, {draws, vocab});
  for (int64_t i = 0; i < logits.elements(); ++i) logits.set(i, row.get(i % vocab));
  SampleParams plain{.seed = 5}, hot{.temperature = 2.0f, .seed = 5}, top_k{.top_k = 5, .seed = 5},
      top_p{.top_p = 0.8f, .seed = 5}, min_p{.min_p = 0.1f, .seed = 5}, forbid{.forbid = 3, .seed = 5};
  CpuContext c(2, kWorkspace);
  // What varies: the position, the sample or the prompt; each must give independent numbers.
  for (int varied = 0; varied < 3; ++varied)
    for (const SampleParams& base : {plain, hot, top_k, top_p, min_p, forbid}) {
      std::vector<SampleParams> params(draws, base);
      for (int64_t i = 0; i < draws; ++i) {
        if (varied == 0) params[i].position = static_cast<uint32_t>(i);
        if (varied == 1) params[i].sample_idx = static_cast<uint32_t>(i);
        if (varied == 2) params[i].prompt_id = static_cast<uint64_t>(i) << 20;
      }
      const Drawn drawn(c, logits, params.data());
      std::vector<int64_t> count(vocab);
      for (int64_t i = 0; i < draws; ++i) ++count[drawn.id(i)];
      const Kept kept = keep_in_f64(row.ptr<float>(), vocab, base);
      EXPECT_GE(kept.ids.size(), 3u);
      double chi = 0;
      int64_t inside = 0;
      for (size_t k = 0; k < kept.ids.size(); ++k) {
        const double expected = draws * kept.p[k], seen = static_cast<double>(count[kept.ids[k]]);
        chi += (seen - expected) * (seen - expected) / expected;
        inside += count[kept.ids[k]];
      }
      EXPECT_EQ(inside, draws);  // nothing outside the kept set
      const double degrees = static_cast<double>(kept.ids.size() - 1), scale = 2 / (9 * degrees);
      EXPECT_LT(chi, degrees * std::pow(1 - scale + 4.753 * std::sqrt(scale), 3));
    }
}

// Unfiltered draws carry exactly the log-probability the trainer computes for the same token.
TEST(Sample, LogprobIsSelectLogprobsBits) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int64_t vocab : {5, 65, 256, 1100}) {
      const int64_t rows = 60, width = 32;
      const Tensor hidden = random_tensor(1, type, {rows, width}, 2.0f), head = random_tensor(2, type, {vocab, width});
      const WeightView weight = {head, {}};
      CpuContext c(2, kWorkspace);
      Tensor logits(DType::f32, {rows, vocab}), temperature(DType::f32, {rows}), logprob(DType::f32, {rows});
      matmul(c, logits, hidden, weight);
      std::vector<SampleParams> params(rows);
      for (int64_t r = 0; r < rows; ++r) {
        const float t = r % 2 == 0 ? 1.0f : 0.8f;
        params[r] = {.temperature = r % 10 == 4 ? 0.0f : t, .seed = 9, .position = static_cast<uint32_t>(r)};
        if (r % 7 == 0) params[r].top_k = static_cast<int32_t>(vocab);  // off
        temperature.set(r, t);
      }
      testing::for_each_simd_target([&](const std::string& target) {
        const Drawn drawn(c, logits, params.data());
        select_logprob(c, logprob, {}, {}, hidden, weight, drawn.token, temperature);
        EXPECT_EQ(testing::count_bit_differences(drawn.logprob, logprob), 0) << target << " V " << vocab;
      });
    }
}

// The same row with the same params gives the same bits alone or anywhere in a larger, strided call, for all threads and vectors.
TEST(Sample, IsAFunctionOfTheRowAlone) {
  const int64_t rows = 200, vocab = 300;
  const Tensor logits = random_tensor(3, DType::f32, {rows, vocab}, 5.0f);
  const std::vector<SampleParams> params = varied_params(rows, vocab, 6);
  CpuContext one(1, kWorkspace);
  Drawn want(one, logits, params.data());
  reference::sample(one, want.token, want.logprob, logits, params.data());
  std::vector<int64_t> order(rows);
  std::iota(order.begin(), order.end(), 0);
  Philox rng(8, RngPurpose::test);
  for (int threads = 1; threads <= 4; ++threads) {
    CpuContext c(threads, kWorkspace);
    testing::for_each_simd_target([&](const std::string& target) {
      for (int64_t i = rows - 1; i > 0; --i) std::swap(order[i], order[rng.below(static_cast<uint32_t>(i + 1))]);
      const int64_t some = 1 + rng.below(static_cast<uint32_t>(rows));
      Tensor wide(DType::f32, {some, vocab + 3});
      std::vector<SampleParams> shuffled(some);
      for (int64_t i = 0; i < some; ++i) {
        std::copy_n(logits.view().row<float>(order[i]), vocab, wide.view().row<float>(i) + 1);
        shuffled[i] = params[order[i]];
      }
      const Drawn drawn(c, ConstTensorView(wide).cols(1, vocab), shuffled.data());
      for (int64_t i = 0; i < some; ++i) {
        ASSERT_EQ(drawn.id(i), want.id(order[i])) << target << " threads " << threads;
        ASSERT_EQ(std::bit_cast<uint32_t>(drawn.logprob.get(i)), std::bit_cast<uint32_t>(want.logprob.get(order[i])));
      }
    });
  }
}

TEST(Sample, TemperatureZeroTakesTheFirstLargest) {
  CpuContext c(1, kWorkspace);
  Tensor logits(DType::f32, {3, 6});
  const float rows[3][6] = {{1, 3, 3, 2, 3, 0}, {-1, -1, -1, -1, -1, -1}, {1, 3, 3, 2, 3, 0}};
  for (int i = 0; i < 18; ++i) logits.set(i, rows[i / 6][i % 6]);
  // Filters do not apply; a forbidden id does.
  const SampleParams params[] = {
      {.temperature = 0, .top_p = 0.1f, .min_p = 0.9f, .top_k = 1}, {.temperature = 0}, {.temperature = 0, .forbid = 1}};
  const Drawn drawn(c, logits, params);
  EXPECT_EQ(drawn.id(0), 1);
  EXPECT_EQ(drawn.logprob.get(0), 3.0f - row_stats(logits.view().row<float>(0), 6, 1.0f).lse);
  EXPECT_EQ(drawn.id(1), 0);
  EXPECT_NEAR(drawn.logprob.get(1), -std::log(6.0), 4e-7);
  EXPECT_EQ(drawn.id(2), 2);
  EXPECT_NEAR(drawn.logprob.get(2), -std::log(2 + std::exp(-1.0) + std::exp(-2.0) + std::exp(-3.0)), 4e-7);
}

TEST(Sample, TiesGoToTheLowerId) {
  const int64_t draws = 3000, vocab = 8;
  CpuContext c(1, kWorkspace);
  Tensor logits(DType::f32, {draws, vocab});
  for (int64_t i = 0; i < logits.elements(); ++i) logits.set(i, i % 2 == 1 ? 2.0 : 1.0);  // ids 1, 3, 5, 7 tie at the top
  const auto ids_seen = [&](const SampleParams& base) {
    std::vector<SampleParams> params(draws, base);
    for (int64_t i = 0; i < draws; ++i) params[i].position = static_cast<uint32_t>(i);
    const Drawn drawn(c, logits, params.data());
    std::vector<int32_t> seen(drawn.token.ptr<int32_t>(), drawn.token.ptr<int32_t>() + draws);
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    return seen;
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ids_seen({.top_k = 3}), Ids({1, 3, 5}));
  EXPECT_EQ(ids_seen({.top_k = 5}), Ids({0, 1, 3, 5, 7}));
  EXPECT_EQ(ids_seen({.top_p = 0.4f}), Ids({1, 3, 5}));     // each of the four holds 0.183
  EXPECT_EQ(ids_seen({.top_p = 0.0f}), Ids({1}));           // at least one
  EXPECT_EQ(ids_seen({.min_p = 1.0f}), Ids({1, 3, 5, 7}));  // equal to the largest is kept
  EXPECT_EQ(ids_seen({.top_k = 2, .forbid = 1}), Ids({3, 5}));
  EXPECT_EQ(ids_seen({.top_p = 0.6f, .top_k = 4}), Ids({1, 3, 5}));  // a quarter each after top-k: the mass is measured there
}

// Turning a filter to its "off" value changes no bit, and top_p just below 1 is not off.
TEST(Sample, OffMeansOff) {
  const int64_t rows = 100, vocab = 130;
  const Tensor logits = random_tensor(4, DType::f32, {rows, vocab}, 6.0f);
  CpuContext c(1, kWorkspace);
  std::vector<SampleParams> plain(rows), off(rows);
  for (int64_t r = 0; r < rows; ++r) {
    plain[r] = {.temperature = 0.7f, .seed = 3, .position = static_cast<uint32_t>(r)};
    off[r] = plain[r];
    off[r].top_k = r % 2 == 0 ? static_cast<int32_t>(vocab) : -1;
    off[r].top_p = 1.0f;
    off[r].min_p = 0.0f;
  }
  const Drawn a(c, logits, plain.data()), b(c, logits, off.data());
  EXPECT_EQ(testing::count_bit_differences(a.token, b.token), 0);
  EXPECT_EQ(testing::count_bit_differences(a.logprob, b.logprob), 0);
  for (SampleParams& p : off) p.top_p = 0.9f;
  const Drawn truncated(c, logits, off.data());
  EXPECT_GT(testing::count_bit_differences(a.logprob, truncated.logprob), rows / 2);
}

TEST(Sample, BadLogitsGiveAValidIdAndNaN) {
  CpuContext c(1, kWorkspace);
  const int64_t vocab = 70;
  for (const bool all : {false, true}) {
    Tensor logits = random_tensor(5, DType::f32, {5, vocab});
    for (int64_t i = 0; i < logits.elements(); ++i)
      if (all || i % 9 == 4) logits.set(i, std::numeric_limits<float>::quiet_NaN());
    const SampleParams params[] = {{}, {.top_k = 20}, {.top_p = 0.99f}, {.min_p = 0.5f}, {.temperature = 0}};
    const Drawn drawn(c, logits, params);
    for (int64_t r = 0; r < 5; ++r) {
      EXPECT_GE(drawn.id(r), 0);
      EXPECT_LT(drawn.id(r), vocab);
    }
    EXPECT_TRUE(std::isnan(drawn.logprob.get(0)));
  }
}

TEST(Sample, NoRows) {
  CpuContext c(2, kWorkspace);
  const Tensor logits(DType::f32, {0, 9});
  const Drawn drawn(c, logits, nullptr);
  EXPECT_EQ(drawn.token.elements(), 0);
}

TEST(SampleDeathTest, NamesWhatIsWrong) {
  CpuContext c(1, kWorkspace);
  const Tensor logits(DType::f32, {2, 4}), half(DType::bf16, {2, 4});
  Tensor token(DType::i32, {2}), logprob(DType::f32, {2}), three(DType::i32, {3});
  SampleParams params[2];
  EXPECT_DEATH(sample(c, token, logprob, half, params), "logits are bf16 \\[2, 4\\]");
  EXPECT_DEATH(sample(c, three, logprob, logits, params), "token is i32 \\[3\\], wanted i32 \\[2\\]");
  params[1].temperature = -1;
  EXPECT_DEATH(sample(c, token, logprob, logits, params), "row 1 has temperature -1, top_p 1, min_p 0");
  params[1].temperature = 1;
  params[1].forbid = 4;
  EXPECT_DEATH(sample(c, token, logprob, logits, params), "row 1 forbids id 4 of 4");
}

}  // namespace
}  // namespace lockstep
