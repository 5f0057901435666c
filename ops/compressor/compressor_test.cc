// Pooled entries against a plain f64 evaluation of spec 2.4 and 6.4, vectors against the reference bit for bit, and the row
// contract over random cuttings with the ring kept between the calls.

#include "ops/compressor/compressor.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/compressor/compressor_cpu.h"
#include "ops/sequence/sequence_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::SequenceSet;
using testing::Tensor;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in f32

struct Config {
  std::vector<int64_t> length;
  CompressorShape shape;
};

std::vector<Config> configs() {
  return {
      {{3}, {.ratio = 4, .overlap = true, .width = 5}},  // no entry
      {{3, 4, 5, 7, 8, 9}, {.ratio = 4, .overlap = true, .width = 20}},
      {{7, 1, 8, 9, 40}, {.ratio = 8, .overlap = false, .width = 33}},
      {{50, 2, 31}, {.ratio = 4, .overlap = true, .width = 64}},
      {{127, 128, 129, 300}, {.ratio = 128, .overlap = false, .width = 16}},
      {{5, 6}, {.ratio = 1, .overlap = false, .width = 3}},
      {{5, 6}, {.ratio = 1, .overlap = true, .width = 17}},
      {{33}, {.ratio = 4, .overlap = true, .width = 512}},
  };
}

// A set with its projections; entry e of the packed call is also entry e of every tensor of entries.
struct Problem {
  explicit Problem(const Config& config)
      : shape(config.shape), set(testing::make_sequence_set(1, config.length, 3 * config.shape.ratio)),
        proj(testing::random_tensor(2, DType::f32, {set.num_rows, shape.proj_width()}, 3.0f)),
        ape(testing::random_tensor(3, DType::f32, {shape.ratio, shape.halves() * shape.width})) {
    for (const int64_t n : set.length) {
      first_entry.push_back(num_entries);
      num_entries += n / shape.ratio;
    }
    dpooled = testing::random_tensor(4, DType::f32, {num_entries, shape.width});
  }
  CompressorShape shape;
  SequenceSet set;
  Tensor proj, ape, dpooled;
  std::vector<int64_t> first_entry;
  int64_t num_entries = 0;
};

Tensor run_packed(Context& c, const Problem& p, DType dtype, decltype(&compress) f = compress) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Tensor pooled(dtype, {p.num_entries, p.shape.width});
  f(c, pooled, p.proj, p.ape, {}, call.entries(p.shape.ratio), call.view(), p.shape);
  return pooled;
}

struct Gradients {
  Tensor dproj, dape;
};

Gradients run_backward(Context& c, const Problem& p, float start, decltype(&compress_backward) f = compress_backward) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Gradients g = {testing::random_tensor(9, DType::f32, p.proj.view().shape), Tensor(DType::f32, p.ape.view().shape)};
  for (int64_t i = 0; i < g.dape.elements(); ++i) g.dape.set(i, start);
  f(c, g.dproj, g.dape, p.dpooled, p.proj, p.ape, call.entries(p.shape.ratio), call.view(), p.shape);
  return g;
}

struct Want {
  std::vector<double> pooled, bound, dproj, dproj_bound, dape, dape_bound;
  double loss = 0;  // sum of pooled * dpooled
};

std::vector<double> doubles(const Tensor& t) {
  std::vector<double> v(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = t.get(static_cast<int64_t>(i));
  return v;
}

// Bounds in units of kUnit, first order. A gate g = proj + ape errs by |g|, its maximum likewise, g - max by |g - max|, and exp
// by 2 ulp = 4 units: e has relative error E = 4 max|g| + 4 over the slots (|g - max| <= 2 max|g|). n additions: the denominator
// has E + n, the chain of products E + n, so pooled errs by (2 E + 2 n + 1) * sum a |kv|, storage adds half an ulp. Backward: a =
// e / denominator has R = 2 E + n + 1; dkv = a g one more; dgate = dkv (kv - C) two more and |dkv| times the error of C; dape
// adds one rounding of the running sum a term.
Want formula(const Problem& p, const std::vector<double>& proj, const std::vector<double>& ape, double storage_units) {
  const int64_t m = p.shape.ratio, width = p.shape.width, columns = p.shape.halves() * width;
  Want w;
  for (auto* v : {&w.pooled, &w.bound}) v->assign(static_cast<size_t>(p.num_entries * width), 0.0);
  for (auto* v : {&w.dproj, &w.dproj_bound}) v->assign(proj.size(), 0.0);
  for (auto* v : {&w.dape, &w.dape_bound}) v->assign(ape.size(), 0.0);
  std::vector<double> terms(ape.size()), sums(ape.size());
  for (size_t id = 0; id < p.set.length.size(); ++id)
    for (int64_t s = 0; s < p.set.length[id] / m; ++s)
      for (int64_t i = 0; i < width; ++i) {
        struct Member {
          size_t kv, gate, ape;
        };
        std::vector<Member> members;
        const auto add = [&](int64_t token, int64_t column) {
          const int64_t row = (p.set.offset[id] + token) * 2 * columns;
          members.push_back({static_cast<size_t>(row + column), static_cast<size_t>(row + columns + column),
                             static_cast<size_t>(token % m * columns + column)});
        };
        if (p.shape.overlap) {
          for (int64_t token = (s - 1) * m; s > 0 && token < s * m; ++token) add(token, i);
          for (int64_t token = s * m; token < (s + 1) * m; ++token) add(token, width + i);
        } else {
          for (int64_t token = s * m; token < (s + 1) * m; ++token) add(token, i);
        }
        double sum = 0, numerator = 0, magnitude = 0, largest = 0;
        for (const Member& k : members) {
          const double gate = proj[k.gate] + ape[k.ape], e = std::exp(gate);
          sum += e;
          numerator += e * proj[k.kv];
          magnitude += e * std::abs(proj[k.kv]);
          largest = std::max(largest, std::abs(gate));
        }
        const double pooled = numerator / sum, n = static_cast<double>(members.size());
        const double e_error = 4 * largest + 4, pooled_error = (2 * e_error + 2 * n + 1) * magnitude / sum;
        const size_t at = static_cast<size_t>((p.first_entry[id] + s) * width + i);
        const double g = p.dpooled.get(static_cast<int64_t>(at));
        w.pooled[at] = pooled;
        w.bound[at] = kUnit * (pooled_error + storage_units * std::abs(pooled));
        w.loss += pooled * g;
        for (const Member& k : members) {
          const double a = std::exp(proj[k.gate] + ape[k.ape]) / sum, r = 2 * e_error + n + 2;
          const double dkv = a * g, dgate = dkv * (proj[k.kv] - pooled);
          const double dgate_error =
              (r + 3) * std::abs(dkv) * (std::abs(proj[k.kv]) + std::abs(pooled)) + std::abs(dkv) * pooled_error;
          w.dproj[k.kv] = dkv;
          w.dproj[k.gate] = dgate;
          w.dproj_bound[k.kv] = kUnit * r * std::abs(dkv);
          w.dproj_bound[k.gate] = kUnit * dgate_error;
          w.dape[k.ape] += dgate;
          w.dape_bound[k.ape] += kUnit * dgate_error;
          terms[k.ape] += 1;
          sums[k.ape] += std::abs(dgate);
        }
      }
  for (size_t i = 0; i < ape.size(); ++i)
    w.dape_bound[i] += kUnit * terms[i] * (sums[i] + 1);  // + 1: what the accumulator starts from
  return w;
}

double worst_ratio(const Tensor& got, const std::vector<double>& want, const std::vector<double>& bound, double start = 0) {
  double worst = 0;
  EXPECT_EQ(static_cast<size_t>(got.elements()), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const double ratio = std::abs(got.get(static_cast<int64_t>(i)) - want[i] - start) / (bound[i] + 1e-30);
    if (!(ratio <= worst)) worst = ratio;
  }
  return worst;
}

TEST(Compressor, ForwardIsTheFormula) {
  CpuContext context(2);
  for (const Config& config : configs()) {
    const Problem p(config);
    const std::vector<double> proj = doubles(p.proj), ape = doubles(p.ape);
    Want want = formula(p, proj, ape, 1);
    EXPECT_LE(worst_ratio(run_packed(context, p, DType::f32), want.pooled, want.bound), 1.0)
        << config.shape.ratio << " " << config.shape.width;
    want = formula(p, proj, ape, 0x1p16);
    EXPECT_LE(worst_ratio(run_packed(context, p, DType::bf16), want.pooled, want.bound), 1.0)
        << config.shape.ratio << " " << config.shape.width;
  }
}

TEST(Compressor, BackwardIsTheFormulaAndAccumulates) {
  CpuContext context(2);
  for (const Config& config : configs()) {
    const Problem p(config);
    const Want want = formula(p, doubles(p.proj), doubles(p.ape), 1);
    for (const float start : {0.0f, 1.0f}) {
      const Gradients g = run_backward(context, p, start);
      EXPECT_LE(worst_ratio(g.dproj, want.dproj, want.dproj_bound), 1.0) << config.shape.ratio << " " << config.shape.width;
      EXPECT_LE(worst_ratio(g.dape, want.dape, want.dape_bound, start), 1.0) << config.shape.ratio << " " << config.shape.width;
    }
  }
}

// Five-point differences of the f64 forward: h^4 |f'''''| / 30 and 1e-16 |loss| / h are both below 1e-8 at h = 2^-9.
TEST(Compressor, FormulaGradientsAreSlopes) {
  for (const bool overlap : {false, true}) {
    const Problem p({{11, 3, 6}, {.ratio = 3, .overlap = overlap, .width = 2}});
    std::vector<double> proj = doubles(p.proj), ape = doubles(p.ape);
    const Want want = formula(p, proj, ape, 1);
    const auto slope = [&](double& v) {
      const double kept = v, h = 0x1p-9;
      const auto at = [&](double offset) {
        v = kept + offset;
        const double loss = formula(p, proj, ape, 1).loss;
        v = kept;
        return loss;
      };
      return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
    };
    double worst = 0;
    for (size_t i = 0; i < proj.size(); ++i) worst = std::max(worst, std::abs(slope(proj[i]) - want.dproj[i]));
    for (size_t i = 0; i < ape.size(); ++i) worst = std::max(worst, std::abs(slope(ape[i]) - want.dape[i]));
    EXPECT_LT(worst, 1e-8);
  }
}

TEST(Compressor, VectorsAndThreadsGiveTheReferencesBits) {
  CpuContext one(1);
  for (const Config& config : configs()) {
    const Problem p(config);
    const Tensor want = run_packed(one, p, DType::f32, reference::compress),
                 want16 = run_packed(one, p, DType::bf16, reference::compress);
    const Gradients want_g = run_backward(one, p, 0.25f, reference::compress_backward);
    testing::for_each_simd_target([&](const std::string& target) {
      for (int threads = 1; threads <= 4; ++threads) {
        CpuContext context(threads);
        EXPECT_EQ(testing::count_bit_differences(run_packed(context, p, DType::f32, simd::compress), want), 0)
            << target << " " << threads;
        EXPECT_EQ(testing::count_bit_differences(run_packed(context, p, DType::bf16, simd::compress), want16), 0)
            << target << " " << threads;
        const Gradients g = run_backward(context, p, 0.25f, simd::compress_backward);
        EXPECT_EQ(testing::count_bit_differences(g.dproj, want_g.dproj), 0)
            << target << " " << threads << " " << config.shape.width;
        EXPECT_EQ(testing::count_bit_differences(g.dape, want_g.dape), 0)
            << target << " " << threads << " " << config.shape.width;
      }
    });
  }
}

TEST(Compressor, RowContractOverRandomCuttings) {
  std::vector<Config> many = configs();
  many.push_back({{1, 2, 3, 4, 17, 64, 65, 30, 9}, {.ratio = 4, .overlap = true, .width = 24}});
  many.push_back({{100, 40, 31, 32}, {.ratio = 32, .overlap = false, .width = 24}});
  for (const Config& config : many) {
    const Problem p(config);
    CpuContext whole(1);
    const Tensor want = run_packed(whole, p, DType::f32);
    for (int round = 0; round < 6; ++round) {
      CpuContext context(1 + round % 3);
      Philox rng(static_cast<uint64_t>(round) + 50, RngPurpose::test);
      const int64_t max_rows = std::vector<int64_t>{1, 2, 5, 37, 1000, 3}[static_cast<size_t>(round)];
      Tensor ring =
          testing::random_tensor(rng.next(), DType::f32, {p.set.num_slots, p.shape.ring_rows(), p.shape.proj_width()}, 50.0f);
      Tensor got(DType::f32, {p.num_entries, p.shape.width});
      for (const auto& parts : testing::random_schedule(rng, p.set, max_rows)) {
        Call call(p.set, parts);
        const EntryView entries = call.entries(p.shape.ratio);
        const Tensor proj = call.take(p.proj);
        Tensor pooled(DType::f32, {entries.num_entries, p.shape.width});
        compress(context, pooled, proj, p.ape, ring, entries, call.view(), p.shape);
        ring_update(context, ring, proj, call.view());
        for (int64_t e = 0; e < entries.num_entries; ++e) {
          const size_t id = static_cast<size_t>(parts[static_cast<size_t>(entries.seq.ptr<int32_t>()[e])].id);
          const int64_t row = p.first_entry[id] + entries.idx.ptr<int32_t>()[e];
          for (int64_t i = 0; i < p.shape.width; ++i) got.set(row * p.shape.width + i, pooled.get(e * p.shape.width + i));
        }
      }
      EXPECT_EQ(testing::count_bit_differences(got, want), 0)
          << config.shape.ratio << " " << config.shape.width << " round " << round;
    }
  }
}

TEST(Compressor, StridedRows) {
  const Problem p({{21, 9}, {.ratio = 4, .overlap = true, .width = 12}});
  CpuContext context(1);
  const Tensor want = run_packed(context, p, DType::f32);
  const int64_t n = p.shape.proj_width();
  Tensor wide(DType::f32, {p.set.num_rows, n + 5}), out(DType::f32, {p.num_entries, 20});
  for (int64_t r = 0; r < p.set.num_rows; ++r)
    for (int64_t i = 0; i < n; ++i) wide.set(r * (n + 5) + 2 + i, p.proj.get(r * n + i));
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  compress(context, out.view().cols(3, 12), wide.view().cols(2, n), p.ape, {}, call.entries(4), call.view(), p.shape);
  EXPECT_EQ(testing::count_bit_differences(out.view().cols(3, 12), want), 0);
  for (int64_t e = 0; e < p.num_entries; ++e)
    for (const int64_t i : {0, 1, 2, 15, 16, 19}) EXPECT_EQ(out.get(e * 20 + i), 0.0f);
}

TEST(CompressorDeath, WrongArguments) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const Problem p({{9, 5}, {.ratio = 4, .overlap = true, .width = 4}});
  CpuContext context(1);
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  const EntryView entries = call.entries(4);
  Tensor pooled(DType::f32, {3, 4}), short_pooled(DType::f32, {2, 4});
  EXPECT_DEATH(compress(context, short_pooled, p.proj, p.ape, {}, entries, call.view(), p.shape), "pooled is f32 \\[2, 4\\]");
  EXPECT_DEATH(compress(context, pooled, p.proj, p.ape, {}, call.entries(2), call.view(), p.shape),
               "completes 2 entries of ratio 4, the list has 4");
  EXPECT_DEATH(compress(context, pooled, p.proj.view().cols(0, 8), p.ape, {}, entries, call.view(), p.shape),
               "proj is f32 \\[14, 8\\]");
  EXPECT_DEATH(compress(context, pooled, p.proj, p.ape.view().cols(0, 4), {}, entries, call.view(), p.shape),
               "ape is f32 \\[4, 4\\]");
  Call later(p.set, {{.id = 0, .pos = 4, .rows = 5}, {.id = 1, .pos = 0, .rows = 5}});
  const Tensor proj = later.take(p.proj);
  Tensor two(DType::f32, {2, 4}), dproj(DType::f32, {10, 16}), dape(DType::f32, {4, 8});
  EXPECT_DEATH(compress(context, two, proj, p.ape, {}, later.entries(4), later.view(), p.shape), "in a ring of 0 slots");
  EXPECT_DEATH(compress_backward(context, dproj, dape, two, proj, p.ape, later.entries(4), later.view(), p.shape),
               "gradients need whole sequences");
}

}  // namespace
}  // namespace lockstep
