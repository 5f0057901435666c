// Attention against a plain f64 evaluation of spec 2.3 and 6.4, vectors against the reference bit for bit, and the row contract
// over random cuttings with rings and pages kept between the calls as the model keeps them.

#include "ops/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/attention/attention_cpu.h"
#include "ops/sequence/sequence_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::SequenceSet;
using testing::Tensor;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1 in f32

struct Config {
  std::vector<int64_t> length;
  int64_t heads, width, window, ratio = 0, k = 0;  // k == 0: all visible entries
  uint64_t seed = 1;
};

// Sequences with all their rows and entries, before any cutting.
struct Problem {
  Problem(const Config& config, DType dtype) : config(config), dtype(dtype) {
    const int64_t page_tokens = config.ratio == 0 ? 8 : 3 * config.ratio;
    set = testing::make_sequence_set(config.seed, config.length, page_tokens);
    shape = {.window = config.window,
             .ratio = config.ratio,
             .per_page = config.ratio == 0 ? 0 : 3,
             .scale = 1.0f / std::sqrt(static_cast<float>(config.width))};
    q = testing::random_tensor(config.seed + 1, dtype, {set.num_rows, config.heads, config.width}, 2.0f);
    kv = testing::random_tensor(config.seed + 2, dtype, {set.num_rows, config.width}, 2.0f);
    sink = testing::random_tensor(config.seed + 3, DType::f32, {config.heads}, 1.5f);
    d_o = testing::random_tensor(config.seed + 4, DType::f32, {set.num_rows, config.heads, config.width});
    if (config.ratio == 0) return;
    store = testing::random_tensor(config.seed + 5, dtype, {set.num_pages * shape.per_page, config.width}, 2.0f);
    if (config.k == 0) return;
    selected = Tensor(DType::i32, {set.num_rows, config.k});
    Philox rng(config.seed + 6, RngPurpose::test);
    for (size_t id = 0; id < set.length.size(); ++id)
      for (int64_t p = 0; p < set.length[id]; ++p) {
        std::vector<int32_t> chosen((p + 1) / config.ratio);
        std::iota(chosen.begin(), chosen.end(), 0);
        testing::shuffle(rng, chosen);
        chosen.resize(std::min<size_t>(chosen.size(), static_cast<size_t>(config.k)));
        std::sort(chosen.begin(), chosen.end());
        chosen.resize(static_cast<size_t>(config.k), -1);
        std::copy(chosen.begin(), chosen.end(), selected.ptr<int32_t>() + (set.offset[id] + p) * config.k);
      }
  }
  int64_t store_row(size_t id, int64_t idx) const {
    return set.pages[id][static_cast<size_t>(idx / shape.per_page)] * shape.per_page + idx % shape.per_page;
  }

  Config config;
  DType dtype;
  SequenceSet set;
  AttentionShape shape;
  Tensor q, kv, sink, d_o, store, selected;
};

struct Outputs {
  Tensor o, lse;
};

using ForwardFunction = decltype(&attention);

Outputs run_packed(Context& c, const Problem& p, ForwardFunction f = attention) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Outputs out = {Tensor(p.dtype, p.q.view().shape), Tensor(DType::f32, {p.set.num_rows, p.config.heads})};
  f(c, out.o, out.lse, p.q, {.kv = p.kv, .ring = {}, .entries = p.store, .selected = p.selected}, p.sink, call.view(), p.shape);
  return out;
}

struct Gradients {
  Tensor dq, dkv, dentries, dsink;
};

using BackwardFunction = decltype(&attention_backward);

// Accumulators start at `start`.
Gradients run_backward(Context& c, const Problem& p, const Outputs& out, float start, BackwardFunction f = attention_backward) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Gradients g = {testing::random_tensor(1, DType::f32, p.q.view().shape),
                 testing::random_tensor(1, DType::f32, p.kv.view().shape), Tensor(), Tensor(DType::f32, {p.config.heads})};
  if (p.config.ratio > 0) g.dentries = Tensor(DType::f32, p.store.view().shape);
  for (int64_t i = 0; i < g.dentries.elements(); ++i) g.dentries.set(i, start);
  for (int64_t i = 0; i < g.dsink.elements(); ++i) g.dsink.set(i, start);
  f(c, g.dq, g.dkv, g.dentries, g.dsink, p.d_o, out.o, out.lse, p.q,
    {.kv = p.kv, .ring = {}, .entries = p.store, .selected = p.selected}, p.sink, call.view(), p.shape);
  return g;
}

// ---- The formula in f64.

struct Doubles {
  std::vector<double> q, kv, sink, store, d_o;
};

std::vector<double> doubles(const Tensor& t) {
  std::vector<double> v(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = t.get(static_cast<int64_t>(i));
  return v;
}
Doubles doubles_of(const Problem& p) { return {doubles(p.q), doubles(p.kv), doubles(p.sink), doubles(p.store), doubles(p.d_o)}; }

// A row of the list: offset into kv or, if `entry`, into store.
struct ListRow {
  bool entry;
  int64_t offset;
};

std::vector<ListRow> rows_of(const Problem& p, size_t id, int64_t pos) {
  std::vector<ListRow> rows;
  for (int64_t i = 0; i <= pos; ++i)
    if (pos - i < p.config.window) rows.push_back({false, (p.set.offset[id] + i) * p.config.width});
  if (p.config.ratio == 0) return rows;
  for (int64_t s = 0; (s + 1) * p.config.ratio - 1 <= pos; ++s) {
    bool listed = p.config.k == 0;
    for (int64_t i = 0; i < p.config.k; ++i) listed |= p.selected.ptr<int32_t>()[(p.set.offset[id] + pos) * p.config.k + i] == s;
    if (listed) rows.push_back({true, p.store_row(id, s) * p.config.width});
  }
  return rows;
}

struct Want {
  std::vector<double> o, o_bound, lse, lse_bound;  // bounds on the error of the f32 result
  std::vector<double> dq, dkv, dstore, dsink;
  std::vector<double> dq_bound, dkv_bound, dstore_bound, dsink_bound;
  double loss = 0;  // sum of o * d_o
};

// Rounding, in units of kUnit and to first order. A chain of n fused steps errs by at most n * sum |terms|, so a logit by
//   L = (d + 1) * scale * sum |q_i row_i| (one more for the scaling, maximised over the list), plus |l| + |M| for l - M;
// e = exp(l - M) then has relative error E = L + Lmax + 2 |l - M| + 4 (2 ulp = 4 units); the denominator adds n + 1;
// o = (chain over n) / denominator: relative to sum P |row|:  2 E + 2 n + 2; storage adds |o| * (1 or, in bf16, 2^16 = half an
// ulp of bf16). lse: relative error of the denominator, 4 units * |log| for log_f32, |M| and one rounding. Backward: lse and o
// come from forward, so P errs by E + Elog = 2 E + n + ..., taken as R = 3 E + 2 n + 16 relative. dP errs by
//   d * sum |do row|, delta by (d + its o's own error) ..., so dl = scale P (dP - delta) errs by scale P ((R + d + 4) * A + O)
//   with A = sum |do row| + sum |do o| and O = sum |do| * error of o. Sums over n terms add n * sum |terms|, products one each.
Want formula(const Problem& p, const Doubles& x, bool backward) {
  const int64_t heads = p.config.heads, d = p.config.width;
  const double scale = p.shape.scale, storage = p.dtype == DType::bf16 ? 0x1p16 : 1.0;
  Want w;
  const size_t rows = static_cast<size_t>(p.set.num_rows), hd = static_cast<size_t>(heads * d);
  for (auto* v : {&w.o, &w.o_bound, &w.dq, &w.dq_bound}) v->assign(rows * hd, 0.0);
  for (auto* v : {&w.lse, &w.lse_bound}) v->assign(rows * static_cast<size_t>(heads), 0.0);
  for (auto* v : {&w.dkv, &w.dkv_bound}) v->assign(x.kv.size(), 0.0);
  for (auto* v : {&w.dstore, &w.dstore_bound}) v->assign(x.store.size(), 0.0);
  for (auto* v : {&w.dsink, &w.dsink_bound}) v->assign(static_cast<size_t>(heads), 0.0);
  std::vector<double> key_terms(x.kv.size()), store_terms(x.store.size());  // how many fused steps each gradient took
  std::vector<double> key_sum(x.kv.size()), store_sum(x.store.size());      // sum |terms|
  std::vector<double> sink_sum(static_cast<size_t>(heads));
  for (size_t id = 0; id < p.set.length.size(); ++id)
    for (int64_t pos = 0; pos < p.set.length[id]; ++pos) {
      const int64_t t = p.set.offset[id] + pos;
      const std::vector<ListRow> list = rows_of(p, id, pos);
      const double n = static_cast<double>(list.size());
      const auto value = [&](const ListRow& r, int64_t i) {
        return (r.entry ? x.store : x.kv)[static_cast<size_t>(r.offset + i)];
      };
      for (int64_t h = 0; h < heads; ++h) {
        const double* q = &x.q[static_cast<size_t>((t * heads + h) * d)];
        const double* g = &x.d_o[static_cast<size_t>((t * heads + h) * d)];
        const double z = x.sink[static_cast<size_t>(h)];
        std::vector<double> l;
        double logit_error = 0, highest = z, lowest = z;
        for (const ListRow& r : list) {
          double dot = 0, terms = 0;
          for (int64_t i = 0; i < d; ++i) dot += q[i] * value(r, i), terms += std::abs(q[i] * value(r, i));
          l.push_back(scale * dot);
          logit_error = std::max(logit_error, (static_cast<double>(d) + 1) * scale * terms);
          highest = std::max(highest, l.back());
          lowest = std::min(lowest, l.back());
        }
        const double relative = 2 * logit_error + 2 * (highest - lowest) + 4;  // E
        double denominator = std::exp(z);
        for (const double v : l) denominator += std::exp(v);
        const double lse = std::log(denominator);
        const size_t th = static_cast<size_t>(t * heads + h);
        w.lse[th] = lse;
        w.lse_bound[th] =
            kUnit * (logit_error + relative + n + 1 + 4 * std::abs(lse - highest) + std::abs(highest) + std::abs(lse) + 4);
        double* o = &w.o[th * static_cast<size_t>(d)];
        double* o_bound = &w.o_bound[th * static_cast<size_t>(d)];
        for (int64_t i = 0; i < d; ++i) {
          double sum = 0, terms = 0;
          for (size_t j = 0; j < list.size(); ++j) {
            const double term = std::exp(l[j] - lse) * value(list[j], i);
            sum += term;
            terms += std::abs(term);
          }
          o[i] = sum;
          o_bound[i] = kUnit * ((2 * relative + 2 * n + 2) * terms + storage * std::abs(sum));
          w.loss += sum * g[i];
        }
        if (!backward) continue;
        const double probability_error = 3 * relative + 2 * n + 16;  // R
        double delta = 0, delta_terms = 0, delta_inherited = 0;
        for (int64_t i = 0; i < d; ++i) {
          delta += g[i] * o[i];
          delta_terms += std::abs(g[i] * o[i]);
          delta_inherited += std::abs(g[i]) * o_bound[i] / kUnit;
        }
        const double pz = std::exp(z - lse);
        w.dsink[static_cast<size_t>(h)] -= pz * delta;
        w.dsink_bound[static_cast<size_t>(h)] +=
            kUnit * pz * ((probability_error + static_cast<double>(d) + 2) * delta_terms + delta_inherited);
        sink_sum[static_cast<size_t>(h)] += pz * std::abs(delta);
        for (size_t j = 0; j < list.size(); ++j) {
          const double probability = std::exp(l[j] - lse);
          double dp = 0, dp_terms = 0;
          for (int64_t i = 0; i < d; ++i) dp += g[i] * value(list[j], i), dp_terms += std::abs(g[i] * value(list[j], i));
          const double dl = scale * probability * (dp - delta);
          const double dl_error = scale * probability *
                                  ((probability_error + static_cast<double>(d) + 4) * (dp_terms + delta_terms) + delta_inherited);
          const size_t at = static_cast<size_t>(list[j].offset);
          for (int64_t i = 0; i < d; ++i) {
            const size_t qi = th * static_cast<size_t>(d) + static_cast<size_t>(i), ki = at + static_cast<size_t>(i);
            w.dq[qi] += dl * value(list[j], i);
            w.dq_bound[qi] += kUnit * std::abs(value(list[j], i)) * (dl_error + n * std::abs(dl));
            const double term = dl * q[i] + probability * g[i];
            (list[j].entry ? w.dstore : w.dkv)[ki] += term;
            (list[j].entry ? w.dstore_bound : w.dkv_bound)[ki] +=
                kUnit * (dl_error * std::abs(q[i]) + probability * probability_error * std::abs(g[i]));
            (list[j].entry ? store_terms : key_terms)[ki] += 2;
            (list[j].entry ? store_sum : key_sum)[ki] += std::abs(dl * q[i]) + probability * std::abs(g[i]);
          }
        }
      }
    }
  for (size_t i = 0; i < w.dkv.size(); ++i) w.dkv_bound[i] += kUnit * key_terms[i] * key_sum[i];
  for (size_t i = 0; i < w.dstore.size(); ++i) w.dstore_bound[i] += kUnit * store_terms[i] * store_sum[i];
  for (size_t h = 0; h < w.dsink.size(); ++h) w.dsink_bound[h] += kUnit * static_cast<double>(rows) * sink_sum[h];
  return w;
}

// Largest |got - want - start| / bound; exact zeros compare too.
double worst_ratio(const Tensor& got, const std::vector<double>& want, const std::vector<double>& bound, double start = 0) {
  double worst = 0;
  EXPECT_EQ(static_cast<size_t>(got.elements()), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const double ratio = std::abs(got.get(static_cast<int64_t>(i)) - want[i] - start) / (bound[i] + 1e-30);
    if (!(ratio <= worst)) worst = ratio;
  }
  return worst;
}

std::vector<Config> configs() {
  return {
      {.length = {1}, .heads = 1, .width = 1, .window = 1},
      {.length = {7, 1, 20}, .heads = 4, .width = 16, .window = 5},
      {.length = {45, 33}, .heads = 3, .width = 9, .window = 8, .ratio = 4},
      {.length = {40, 3, 4, 5}, .heads = 4, .width = 20, .window = 3, .ratio = 4, .k = 3},
      {.length = {50}, .heads = 7, .width = 33, .window = 64, .ratio = 2, .k = 9},
      {.length = {70, 2}, .heads = 16, .width = 48, .window = 16, .ratio = 4, .k = 64},
      {.length = {200}, .heads = 8, .width = 32, .window = 128, .ratio = 16},
      {.length = {9}, .heads = 64, .width = 512, .window = 128, .ratio = 4, .k = 512},
      {.length = {300}, .heads = 2, .width = 16, .window = 200, .ratio = 1},
  };
}

class AttentionTest : public ::testing::TestWithParam<DType> {};

TEST_P(AttentionTest, ForwardIsTheFormula) {
  CpuContext context(2);
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    const Outputs out = run_packed(context, p);
    const Want want = formula(p, doubles_of(p), /*backward=*/false);
    EXPECT_LE(worst_ratio(out.o, want.o, want.o_bound), 1.0) << config.heads << "x" << config.width;
    EXPECT_LE(worst_ratio(out.lse, want.lse, want.lse_bound), 1.0) << config.heads << "x" << config.width;
  }
}

TEST_P(AttentionTest, BackwardIsTheFormulaAndAccumulates) {
  CpuContext context(2);
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    const Outputs out = run_packed(context, p);
    const Want want = formula(p, doubles_of(p), /*backward=*/true);
    for (const float start : {0.0f, 0.5f}) {
      // Starting from 1/2, every addition rounds relative to a value up to 1/2 larger.
      const auto widened = [&](std::vector<double> bound, double steps) {
        for (double& b : bound) b += kUnit * steps * start;
        return bound;
      };
      const double steps = 2.0 * static_cast<double>(p.set.num_rows * config.heads) + 1;
      const Gradients g = run_backward(context, p, out, start);
      EXPECT_LE(worst_ratio(g.dq, want.dq, want.dq_bound), 1.0) << config.heads << "x" << config.width;
      EXPECT_LE(worst_ratio(g.dkv, want.dkv, want.dkv_bound), 1.0) << config.heads << "x" << config.width;
      EXPECT_LE(worst_ratio(g.dsink, want.dsink, widened(want.dsink_bound, steps), start), 1.0)
          << config.heads << "x" << config.width;
      if (config.ratio == 0) continue;
      EXPECT_LE(worst_ratio(g.dentries, want.dstore, widened(want.dstore_bound, steps), start), 1.0)
          << config.heads << "x" << config.width;
    }
  }
}

TEST_P(AttentionTest, VectorsAndThreadsGiveTheReferencesBits) {
  CpuContext one(1);
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    const Outputs want = run_packed(one, p, reference::attention);
    const Gradients want_g = run_backward(one, p, want, 0.25f, reference::attention_backward);
    testing::for_each_simd_target([&](const std::string& target) {
      for (int threads = 1; threads <= 4; ++threads) {
        CpuContext context(threads);
        const Outputs got = run_packed(context, p, simd::attention);
        EXPECT_EQ(testing::count_bit_differences(got.o, want.o), 0)
            << target << " " << threads << " " << config.heads << "x" << config.width;
        EXPECT_EQ(testing::count_bit_differences(got.lse, want.lse), 0) << target << " " << threads;
        const Gradients g = run_backward(context, p, want, 0.25f, simd::attention_backward);
        EXPECT_EQ(testing::count_bit_differences(g.dq, want_g.dq), 0)
            << target << " " << threads << " " << config.heads << "x" << config.width;
        EXPECT_EQ(testing::count_bit_differences(g.dkv, want_g.dkv), 0) << target << " " << threads;
        EXPECT_EQ(testing::count_bit_differences(g.dsink, want_g.dsink), 0) << target << " " << threads;
        EXPECT_EQ(testing::count_bit_differences(g.dentries, want_g.dentries), 0) << target << " " << threads;
      }
    });
  }
}

// The model's order in a call: entries that complete are scattered, attention, then the ring takes the call's rows.
TEST_P(AttentionTest, RowContractOverRandomCuttings) {
  std::vector<Config> many = configs();
  many.push_back({.length = {1, 2, 3, 17, 64, 65, 30, 9}, .heads = 4, .width = 24, .window = 16, .ratio = 4, .k = 5, .seed = 9});
  many.push_back({.length = {128, 40, 129}, .heads = 4, .width = 16, .window = 8, .ratio = 32, .seed = 10});
  for (const Config& config : many) {
    const Problem p(config, GetParam());
    CpuContext whole(1);
    const Outputs want = run_packed(whole, p);
    for (int round = 0; round < 6; ++round) {
      CpuContext context(1 + round % 3);
      Philox rng(static_cast<uint64_t>(round) + 40, RngPurpose::test);
      const int64_t max_rows = std::vector<int64_t>{1, 2, 5, 37, 1000, 3}[static_cast<size_t>(round)];
      // Anything may lie in storage that no row of a sequence was written to.
      Tensor ring = testing::random_tensor(rng.next(), p.dtype, {p.set.num_slots, config.window, config.width}, 30.0f);
      Tensor store;
      if (config.ratio > 0) store = testing::random_tensor(rng.next(), p.dtype, p.store.view().shape, 30.0f);
      Tensor o(p.dtype, p.q.view().shape), lse(DType::f32, {p.set.num_rows, config.heads});
      for (const auto& parts : testing::random_schedule(rng, p.set, max_rows)) {
        Call call(p.set, parts);
        if (config.ratio > 0) {
          const EntryView entries = call.entries(config.ratio);
          Tensor rows(p.dtype, {entries.num_entries, config.width});
          entries_gather(context, rows, p.store, entries, call.view(), p.shape.per_page);
          entries_scatter(context, store, rows, entries, call.view(), p.shape.per_page);
        }
        const Tensor q = call.take(p.q), kv = call.take(p.kv), selected = config.k > 0 ? call.take(p.selected) : Tensor();
        Tensor part_o(p.dtype, q.view().shape), part_lse(DType::f32, {q.view().rows(), config.heads});
        attention(context, part_o, part_lse, q, {.kv = kv, .ring = ring, .entries = store, .selected = selected}, p.sink,
                  call.view(), p.shape);
        ring_update(context, ring, kv, call.view());
        call.put(o, part_o);
        call.put(lse, part_lse);
      }
      EXPECT_EQ(testing::count_bit_differences(o, want.o), 0) << config.heads << "x" << config.width << " round " << round;
      EXPECT_EQ(testing::count_bit_differences(lse, want.lse), 0) << config.heads << "x" << config.width << " round " << round;
    }
  }
}

TEST_P(AttentionTest, StridedRowsAndNoLse) {
  const Problem p({.length = {30, 11}, .heads = 4, .width = 24, .window = 6, .ratio = 4}, GetParam());
  CpuContext context(2);
  const Outputs want = run_packed(context, p);
  const auto widen = [&](const Tensor& x, int64_t extra) {
    const int64_t n = x.view().shape.row_elements();
    Tensor wide = testing::random_tensor(5, x.view().dtype, {x.view().rows(), n + extra});
    for (int64_t r = 0; r < x.view().rows(); ++r)
      for (int64_t i = 0; i < n; ++i) wide.set(r * (n + extra) + i, x.get(r * n + i));
    return wide;
  };
  const Tensor q = widen(p.q, 8), kv = widen(p.kv, 3), store = widen(p.store, 5);
  Tensor o = widen(Tensor(p.dtype, p.q.view().shape), 16);
  const ConstTensorView q_view(q.view().data, p.dtype, p.q.view().shape, q.view().row_stride);
  const TensorView o_view(o.view().data, p.dtype, p.q.view().shape, o.view().row_stride);
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  attention(context, o_view, {}, q_view,
            {.kv = kv.view().cols(0, 24), .ring = {}, .entries = store.view().cols(0, 24), .selected = {}}, p.sink, call.view(),
            p.shape);
  EXPECT_EQ(testing::count_bit_differences(o_view, want.o), 0);
}

INSTANTIATE_TEST_SUITE_P(DTypes, AttentionTest, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& param) { return dtype_name(param.param); });

// The f64 gradients that the op is held against are themselves the slopes of the f64 forward. Central differences at h and 2h
// combined leave h^4 |f'''''| / 30 and the rounding of the loss, 1e-16 * loss / h: both far below 1e-8 at h = 2^-9.
TEST(Attention, FormulaGradientsAreSlopes) {
  for (const Config& config : {Config{.length = {9, 5}, .heads = 2, .width = 3, .window = 4},
                               Config{.length = {9, 6}, .heads = 2, .width = 3, .window = 3, .ratio = 2},
                               Config{.length = {13, 4}, .heads = 2, .width = 3, .window = 3, .ratio = 2, .k = 2}}) {
    const Problem p(config, DType::f32);
    Doubles x = doubles_of(p);
    const Want want = formula(p, x, /*backward=*/true);
    const auto slope = [&](double& v) {
      const double kept = v, h = 0x1p-9;
      const auto at = [&](double offset) {
        v = kept + offset;
        const double loss = formula(p, x, false).loss;
        v = kept;
        return loss;
      };
      return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
    };
    double worst = 0;
    for (size_t i = 0; i < x.q.size(); ++i) worst = std::max(worst, std::abs(slope(x.q[i]) - want.dq[i]));
    for (size_t i = 0; i < x.kv.size(); ++i) worst = std::max(worst, std::abs(slope(x.kv[i]) - want.dkv[i]));
    for (size_t i = 0; i < x.store.size(); ++i) worst = std::max(worst, std::abs(slope(x.store[i]) - want.dstore[i]));
    for (size_t i = 0; i < x.sink.size(); ++i) worst = std::max(worst, std::abs(slope(x.sink[i]) - want.dsink[i]));
    EXPECT_LT(worst, 1e-8);
  }
}

TEST(Attention, HugeLogitsStayFinite) {
  Problem p({.length = {6}, .heads = 2, .width = 4, .window = 3}, DType::f32);
  for (int64_t i = 0; i < p.q.elements(); ++i) p.q.set(i, p.q.get(i) * 1e4);
  for (int64_t i = 0; i < p.sink.elements(); ++i) p.sink.set(i, i == 0 ? 1e6 : -1e6);
  CpuContext context(1);
  const Outputs out = run_packed(context, p);
  for (int64_t t = 0; t < 6; ++t)
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(out.o.get(t * 8 + i), 0.0f);  // the sink takes everything
      EXPECT_TRUE(std::isfinite(out.o.get(t * 8 + 4 + i)));
    }
}

TEST(Attention, NoRows) {
  const SequenceSet set = testing::make_sequence_set(7, {3}, 4);
  CpuContext context(1);
  Call call(set, {});
  Tensor q(DType::f32, {0, 2, 4}), kv(DType::f32, {0, 4}), sink(DType::f32, {2}), lse(DType::f32, {0, 2}), dsink(DType::f32, {2});
  attention(context, q, lse, q, {.kv = kv, .ring = {}, .entries = {}, .selected = {}}, sink, call.view(),
            {.window = 4, .scale = 0.5f});
  attention_backward(context, q, kv, {}, dsink, q, q, lse, q, {.kv = kv, .ring = {}, .entries = {}, .selected = {}}, sink,
                     call.view(), {.window = 4, .scale = 0.5f});
  EXPECT_EQ(dsink.get(0), 0.0f);
}

TEST(AttentionDeath, WrongArguments) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const Problem p({.length = {9, 4}, .heads = 2, .width = 4, .window = 3, .ratio = 2, .k = 2}, DType::f32);
  CpuContext context(1);
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  Tensor o(DType::f32, {13, 2, 4}), lse(DType::f32, {13, 2});
  const AttentionKeys keys = {.kv = p.kv, .ring = {}, .entries = p.store, .selected = p.selected};
  const auto run = [&](const AttentionKeys& k, const SequenceView& seq, const AttentionShape& shape) {
    attention(context, o, lse, p.q, k, p.sink, seq, shape);
  };
  AttentionKeys wrong = keys;
  wrong.kv = p.kv.view().slice(0, 12);
  EXPECT_DEATH(run(wrong, call.view(), p.shape), "kv is f32 \\[12, 4\\], wanted f32 \\[13, 4\\]");
  wrong = keys;
  wrong.entries = p.store.view().slice(0, 3);
  EXPECT_DEATH(run(wrong, call.view(), p.shape), "the store has 3 rows");
  wrong = keys;
  wrong.selected = p.selected.view().slice(1, 12);
  EXPECT_DEATH(run(wrong, call.view(), p.shape), "selected is i32 \\[12, 2\\]");
  Tensor unordered = testing::to_dtype(p.selected, DType::i32);
  unordered.ptr<int32_t>()[16] = 1, unordered.ptr<int32_t>()[17] = 0;
  wrong = keys;
  wrong.selected = unordered;
  EXPECT_DEATH(run(wrong, call.view(), p.shape), "selected\\[8, 1\\] is 0 after 1");
  unordered.ptr<int32_t>()[16] = 4, unordered.ptr<int32_t>()[17] = -1;
  EXPECT_DEATH(run(wrong, call.view(), p.shape), "selected\\[8, 0\\] is 4 after -1; 4 entries are visible");
  EXPECT_DEATH(run(keys, call.view(), {.window = 3, .ratio = 3, .per_page = 3, .scale = 1}), "entries of ratio 3");
  EXPECT_DEATH(run(keys, call.view(), {.window = 0, .ratio = 2, .per_page = 3, .scale = 1}), "window 0");
  Call later(p.set, {{.id = 0, .pos = 2, .rows = 7}, {.id = 1, .pos = 0, .rows = 4}}, /*with_slots=*/false);
  const Tensor q = later.take(p.q), kv = later.take(p.kv);
  Tensor part(DType::f32, {11, 2, 4});
  EXPECT_DEATH(
      attention(context, part, {}, q, {.kv = kv, .ring = {}, .entries = p.store, .selected = {}}, p.sink, later.view(), p.shape),
      "sequence 0 starts at position 2|slot -1 of sequence 0");
  Call late(p.set, {{.id = 0, .pos = 2, .rows = 7}, {.id = 1, .pos = 0, .rows = 4}});
  Tensor ring(DType::f32, {p.set.num_slots, 3, 4}), part_lse(DType::f32, {11, 2}), dsink(DType::f32, {2});
  Tensor dkv(DType::f32, {11, 4}), dstore(DType::f32, p.store.view().shape);
  EXPECT_DEATH(attention_backward(context, part, dkv, dstore, dsink, part, part, part_lse, q,
                                  {.kv = kv, .ring = ring, .entries = p.store, .selected = {}}, p.sink, late.view(), p.shape),
               "gradients need whole sequences");
}

}  // namespace
}  // namespace lockstep
