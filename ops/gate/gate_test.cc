#include "ops/gate/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/gate/gate_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;
using testing::random_tensor;

constexpr size_t kSmallWorkspace = 1 << 20;
constexpr double kEps = 0x1p-23;

double score(double z) { return std::sqrt(z > 20 ? z : std::log1p(std::exp(z))); }

struct Routes {
  Tensor ids, weight;
  Routes(int64_t rows, int64_t k) : ids(DType::i32, {rows, k}), weight(DType::f32, {rows, k}) {}
};

TEST(Gate, SpecVector) {
  CpuContext c(1, kSmallWorkspace);
  Tensor z(DType::f32, {1, 4});
  const double values[] = {0.5, -1, 2, 0};
  for (int i = 0; i < 4; ++i) z.set(i, values[i]);
  Routes r(1, 2);
  route_scored(c, r.ids, r.weight, z, {}, 1.5f);
  EXPECT_EQ(r.ids.ptr<int32_t>()[0], 0);
  EXPECT_EQ(r.ids.ptr<int32_t>()[1], 2);
  EXPECT_NEAR(r.weight.get(0), 0.60540559, 2e-7);
  EXPECT_NEAR(r.weight.get(1), 0.89459441, 2e-7);
}

// The whole op against a sort in f64. A score carries at most 3.5 eps (softplus 6 eps, halved by the root, and the root's own
// rounding), the sum of K adds K / 2, division and factor one each: (9 + K) eps relative. Rows where the K-th and the next key
// lie closer than the f32 keys can tell apart are left out.
TEST(Gate, ScoredMatchesSortingInF64) {
  struct Case { int64_t rows, experts, k; bool bias; };
  for (const Case& p : {Case{0, 8, 2, true}, Case{1, 1, 1, false}, Case{33, 7, 7, true}, Case{200, 8, 2, false},
                        Case{200, 32, 4, true}, Case{64, 256, 6, true}, Case{64, 384, 8, true}, Case{40, 31, 16, true}}) {
    CpuContext c(2, kSmallWorkspace);
    const Tensor z = random_tensor(11 + p.experts, DType::f32, {p.rows, p.experts}, 6.0f);
    const Tensor bias = random_tensor(5, DType::f32, {p.experts}, 0.5f);
    Routes r(p.rows, p.k);
    route_scored(c, r.ids, r.weight, z, p.bias ? ConstTensorView(bias) : ConstTensorView(), 2.5f);
    int64_t skipped = 0;
    for (int64_t t = 0; t < p.rows; ++t) {
      std::vector<double> key(p.experts);
      for (int64_t e = 0; e < p.experts; ++e) key[e] = score(z.get(t * p.experts + e)) + (p.bias ? bias.get(e) : 0.0);
      std::vector<int32_t> order(p.experts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key[a] > key[b]; });
      if (p.k < p.experts && key[order[p.k - 1]] - key[order[p.k]] < 1e-5) {
        ++skipped;
        continue;
      }
      std::sort(order.begin(), order.begin() + p.k);
      double sum = 0;
      for (int64_t i = 0; i < p.k; ++i) sum += score(z.get(t * p.experts + order[i]));
      for (int64_t i = 0; i < p.k; ++i) {
        ASSERT_EQ(r.ids.ptr<int32_t>()[t * p.k + i], order[i]) << "row " << t << " slot " << i << " E " << p.experts;
        const double want = 2.5 * score(z.get(t * p.experts + order[i])) / sum;
        ASSERT_NEAR(r.weight.get(t * p.k + i), want, want * (9 + p.k) * kEps);
      }
    }
    EXPECT_LE(skipped, 2) << p.experts;
  }
}

TEST(Gate, TiesGoToTheLowerId) {
  CpuContext c(1, kSmallWorkspace);
  const int64_t experts = 24, k = 5;
  Tensor z(DType::f32, {2, experts});
  for (int64_t e = 0; e < experts; ++e) {
    z.set(e, 0.25);
    z.set(experts + e, e % 3 == 0 ? 1.0 : 0.5);  // eight experts tie for five places
  }
  Routes r(2, k);
  route_scored(c, r.ids, r.weight, z, {}, 1.0f);
  for (int32_t i = 0; i < k; ++i) {
    EXPECT_EQ(r.ids.ptr<int32_t>()[i], i);
    EXPECT_EQ(r.ids.ptr<int32_t>()[k + i], 3 * i);
    EXPECT_NEAR(r.weight.get(i), 0.2, 0.2 * (9 + k) * kEps);
  }
  // The bias decides the choice and not the weight.
  Tensor bias(DType::f32, {experts});
  for (int64_t e = 20; e < 24; ++e) bias.set(e, 1.0);
  route_scored(c, r.ids, r.weight, z, bias, 1.0f);
  for (int32_t i = 0; i < k; ++i) {
    EXPECT_EQ(r.ids.ptr<int32_t>()[i], i == 0 ? 0 : 19 + i);
    EXPECT_NEAR(r.weight.get(i), 0.2, 0.2 * (9 + k) * kEps);
  }
}

TEST(Gate, HashRowsFollowTheTable) {
  CpuContext c(2, kSmallWorkspace);
  const int64_t rows = 50, experts = 16, k = 3, vocab = 40;
  const Tensor z = random_tensor(3, DType::f32, {rows, experts}, 4.0f);
  const Tensor tokens = testing::random_ints(4, {rows}, vocab);
  const Tensor table = testing::random_ints(5, {vocab, k}, experts);  // some rows repeat an expert
  Routes r(rows, k);
  route_hashed(c, r.ids, r.weight, z, tokens, table, 1.5f);
  int64_t repeated = 0;
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<int32_t> want(table.ptr<int32_t>() + tokens.ptr<int32_t>()[t] * k,
                              table.ptr<int32_t>() + (tokens.ptr<int32_t>()[t] + 1) * k);
    std::sort(want.begin(), want.end());
    double sum = 0;
    for (int32_t id : want) sum += score(z.get(t * experts + id));
    for (int64_t i = 0; i < k; ++i) {
      ASSERT_EQ(r.ids.ptr<int32_t>()[t * k + i], want[i]);
      const double w = 1.5 * score(z.get(t * experts + want[i])) / sum;
      ASSERT_NEAR(r.weight.get(t * k + i), w, w * (9 + k) * kEps);
      repeated += i > 0 && want[i] == want[i - 1];
    }
  }
  EXPECT_GT(repeated, 0);
}

TEST(Gate, VectorsGiveTheReferencesBits) {
  for (const int64_t experts : {1, 3, 8, 15, 16, 17, 32, 100, 256, 384}) {
    const int64_t rows = 37, k = std::min<int64_t>(experts, 6);
    Tensor z = random_tensor(experts, DType::f32, {rows, experts}, 30.0f);
    z.set(0, -200.0);  // s == 0
    const Tensor bias = random_tensor(9, DType::f32, {experts}, 0.1f);
    CpuContext one(1, kSmallWorkspace);
    Routes want(rows, k);
    reference::route_scored(one, want.ids, want.weight, z, bias, 1.5f);
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads, kSmallWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        Routes got(rows, k);
        route_scored(c, got.ids, got.weight, z, bias, 1.5f);
        EXPECT_EQ(testing::count_bit_differences(got.ids, want.ids), 0) << target << " E " << experts;
        EXPECT_EQ(testing::count_bit_differences(got.weight, want.weight), 0) << target << " E " << experts;
      });
    }
  }
}

// A row's routes are the same alone, inside a larger call, and from and to views of wider tensors.
TEST(Gate, RowContract) {
  const int64_t rows = 700, experts = 48, k = 6;
  const Tensor wide = random_tensor(21, DType::f32, {rows, experts + 5}, 5.0f);
  const ConstTensorView z = ConstTensorView(wide).cols(3, experts);
  const Tensor bias = random_tensor(22, DType::f32, {experts}, 0.2f);
  CpuContext c(3, kSmallWorkspace);
  Tensor wide_ids(DType::i32, {rows, k + 2}), wide_weight(DType::f32, {rows, k + 1});
  route_scored(c, wide_ids.view().cols(1, k), wide_weight.view().cols(0, k), z, bias, 2.0f);
  Philox rng(1, RngPurpose::test);
  for (int i = 0; i < 60; ++i) {
    const int64_t begin = rng.below(rows), count = 1 + rng.below(static_cast<uint32_t>(std::min<int64_t>(rows - begin, 9)));
    Routes part(count, k);
    route_scored(c, part.ids, part.weight, z.slice(begin, count), bias, 2.0f);
    EXPECT_EQ(testing::count_bit_differences(part.ids, wide_ids.view().cols(1, k).slice(begin, count)), 0);
    EXPECT_EQ(testing::count_bit_differences(part.weight, wide_weight.view().cols(0, k).slice(begin, count)), 0);
  }
  for (int64_t t = 0; t < rows; ++t) {
    EXPECT_EQ(wide_ids.ptr<int32_t>()[t * (k + 2)], 0);
    EXPECT_EQ(wide_weight.get(t * (k + 1) + k), 0.0f);
  }
}

// Central differences of the f64 formula. The bound follows the operations: each of the two terms of ds carries the relative
// error of s (3.5 eps) a few times and the sums' K / 2, sigmoid / 2s another 10: (24 + K) eps of the terms' magnitudes.
TEST(Gate, BackwardMatchesFiniteDifferences) {
  const int64_t rows = 12, experts = 10, k = 4;
  const float factor = 1.5f;
  const Tensor z = random_tensor(31, DType::f32, {rows, experts}, 4.0f);
  const Tensor dweight = random_tensor(32, DType::f32, {rows, k}, 1.0f);
  Tensor ids(DType::i32, {rows, k});
  Philox rng(33, RngPurpose::test);
  for (int64_t t = 0; t < rows; ++t) {
    int32_t* id = ids.ptr<int32_t>() + t * k;
    for (int64_t i = 0; i < k; ++i) id[i] = static_cast<int32_t>(rng.below(experts));
    std::sort(id, id + k);
  }
  const auto loss = [&](int64_t t, int64_t moved, double h) {
    double sum = 0, dot = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t e = ids.ptr<int32_t>()[t * k + i];
      const double s = score(z.get(t * experts + e) + (e == moved ? h : 0.0));
      sum += s;
      dot += dweight.get(t * k + i) * s;
    }
    return factor * dot / sum;
  };
  for (int threads = 1; threads <= 3; ++threads) {
    CpuContext c(threads, kSmallWorkspace);
    Tensor dz = random_tensor(1, DType::f32, {rows, experts});  // overwritten
    route_backward(c, dz, dweight, ids, z, factor);
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t e = 0; e < experts; ++e) {
        double sum = 0, terms = 0;
        int64_t chosen = 0;
        for (int64_t i = 0; i < k; ++i) {
          const bool here = ids.ptr<int32_t>()[t * k + i] == e;
          chosen += here;
          sum += score(z.get(t * experts + ids.ptr<int32_t>()[t * k + i]));
          terms += std::abs(dweight.get(t * k + i)) * (here ? 2 : 1);
        }
        const double x = z.get(t * experts + e);
        const double bound =
            factor / sum * terms / (1 + std::exp(-x)) / (2 * score(x)) * (24 + k) * kEps * std::max<int64_t>(chosen, 1);
        const double want = (loss(t, e, 1e-5) - loss(t, e, -1e-5)) / 2e-5;
        if (chosen == 0) {
          EXPECT_EQ(dz.get(t * experts + e), 0.0f);
        } else {
          EXPECT_NEAR(dz.get(t * experts + e), want, bound + 1e-9) << "row " << t << " expert " << e;
        }
      }
  }
}

TEST(Gate, BackwardOfAnUnderflownScoreIsZero) {
  CpuContext c(1, kSmallWorkspace);
  Tensor z(DType::f32, {1, 2}), dweight(DType::f32, {1, 2}), dz(DType::f32, {1, 2}), ids(DType::i32, {1, 2});
  z.set(0, -200.0);
  z.set(1, -200.0);
  dweight.set(0, 1.0);
  ids.set(1, 1);
  route_backward(c, dz, dweight, ids, z, 1.5f);
  EXPECT_EQ(dz.get(0), 0.0f);
  EXPECT_EQ(dz.get(1), 0.0f);
}

TEST(GateDeathTest, NamesWhatIsWrong) {
  CpuContext c(1, kSmallWorkspace);
  Tensor z(DType::f32, {2, 4}), bias(DType::f32, {3}), wide(DType::i32, {2, 5}), wide_weight(DType::f32, {2, 5});
  Routes r(2, 2);
  Tensor tokens = testing::int_tensor({0, 9}), table(DType::i32, {9, 2});
  EXPECT_DEATH(route_scored(c, r.ids, r.weight, z, bias, 1.0f), "bias is f32 \\[3\\], wanted f32 \\[4\\]");
  EXPECT_DEATH(route_scored(c, wide, wide_weight, z, {}, 1.0f), "5 experts a token of 4 experts");
  EXPECT_DEATH(route_scored(c, r.ids, wide_weight, z, {}, 1.0f), "weight is f32 \\[2, 5\\], wanted f32 \\[2, 2\\]");
  EXPECT_DEATH(route_hashed(c, r.ids, r.weight, z, tokens, table, 1.0f), "token 9 in row 1, the table has 9 rows");
  tokens.set(1, 8);
  table.set(17, 4);
  EXPECT_DEATH(route_hashed(c, r.ids, r.weight, z, tokens, table, 1.0f), "token 8 goes to experts 0 to 4 of 4");
  EXPECT_DEATH(route_backward(c, wide_weight, r.weight, r.ids, z, 1.0f), "dz is f32 \\[2, 5\\]");
}

}  // namespace
}  // namespace lockstep
