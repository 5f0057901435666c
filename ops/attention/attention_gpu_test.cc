// The portable kernels have the CPU's bits: every kind of list, calls in pieces with rings and pages, strided rows, heads and channels of any number, and
// backward with as little scratch as it takes. The tensor cores' kernel is near the formula, and a query has the same bits in every call that brings it.

#include "ops/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/attention/attention_cpu.h"
#include "ops/sequence/sequence_gpu_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::count_bit_differences;
using testing::Gpu;
using testing::random_tensor;
using testing::SequenceSet;
using testing::Tensor;

struct Config {
  std::vector<int64_t> length;
  int64_t heads, width, window, ratio = 0, k = 0;  // k == 0: all visible entries
};

struct Problem {
  Problem(const Config& config, DType dtype) : config(config), dtype(dtype) {
    set = testing::make_sequence_set(1, config.length, config.ratio == 0 ? 8 : 3 * config.ratio);
    shape = {.window = config.window, .ratio = config.ratio, .per_page = config.ratio == 0 ? 0 : 3, .scale = 1.0f / std::sqrt(static_cast<float>(config.width))};
    q = random_tensor(2, dtype, {set.num_rows, config.heads, config.width}, 2.0f);
    kv = random_tensor(3, dtype, {set.num_rows, config.width}, 2.0f);
    sink = random_tensor(4, DType::f32, {config.heads}, 1.5f);
    d_o = random_tensor(5, DType::f32, {set.num_rows, config.heads, config.width});
    if (config.ratio == 0) return;
    store = random_tensor(6, dtype, {set.num_pages * shape.per_page, config.width}, 2.0f);
    if (config.k == 0) return;
    selected = Tensor(DType::i32, {set.num_rows, config.k});
    Philox rng(7, RngPurpose::test);
    for (size_t id = 0; id < set.length.size(); ++id)
      for (int64_t p = 0; p < set.length[id]; ++p) {
        std::vector<int32_t> chosen(static_cast<size_t>((p + 1) / config.ratio));
        std::iota(chosen.begin(), chosen.end(), 0);
        testing::shuffle(rng, chosen);
        // Sometimes fewer than there is room for.
        chosen.resize(std::min<size_t>(chosen.size(), static_cast<size_t>(config.k - (p % 5 == 4 ? 1 : 0))));
        std::sort(chosen.begin(), chosen.end());
        chosen.resize(static_cast<size_t>(config.k), -1);
        std::copy(chosen.begin(), chosen.end(), selected.ptr<int32_t>() + (set.offset[id] + p) * config.k);
      }
  }
  AttentionKeys keys() const { return {.kv = kv, .ring = {}, .entries = store, .selected = selected}; }
  std::string name() const { return std::string(dtype_name(dtype)) + " " + std::to_string(config.heads) + "x" + std::to_string(config.width); }

  Config config;
  DType dtype;
  SequenceSet set;
  AttentionShape shape;
  Tensor q, kv, sink, d_o, store, selected;
};

AttentionKeys put(Gpu& gpu, const AttentionKeys& k) { return {.kv = gpu.put(k.kv), .ring = gpu.put(k.ring), .entries = gpu.put(k.entries), .selected = gpu.put(k.selected)}; }

std::vector<Config> configs() {
  return {
      {.length = {1}, .heads = 1, .width = 1, .window = 1},
      {.length = {7, 1, 12}, .heads = 4, .width = 16, .window = 5},
      {.length = {25, 13}, .heads = 3, .width = 9, .window = 8, .ratio = 4},
      {.length = {40, 3, 4, 5}, .heads = 2, .width = 20, .window = 3, .ratio = 2, .k = 3},
      {.length = {45}, .heads = 17, .width = 33, .window = 64, .ratio = 2, .k = 9},
      {.length = {40, 2}, .heads = 9, .width = 24, .window = 16, .ratio = 1},
      {.length = {3}, .heads = 34, .width = 512, .window = 128, .ratio = 1},
  };
}

class AttentionGpuTest : public ::testing::TestWithParam<DType> {};

TEST_P(AttentionGpuTest, ForwardHasTheCpusBits) {
  for (const Config& config : configs()) {
    const Problem p(config, GetParam());
    CpuContext cpu;
    Gpu gpu;
    Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
    const Tensor o(p.dtype, p.q.view().shape), lse(DType::f32, {p.set.num_rows, config.heads});
    const TensorView go = gpu.put(o), glse = gpu.put(lse);
    attention(cpu, o, lse, p.q, p.keys(), p.sink, call.view(), p.shape);
    device::portable_attention(gpu, go, glse, gpu.put(p.q), put(gpu, p.keys()), gpu.put(p.sink), testing::put_sequences(gpu, call.view()), p.shape);
    EXPECT_EQ(count_bit_differences(gpu.get(go), o), 0) << p.name();
    EXPECT_EQ(count_bit_differences(gpu.get(glse), lse), 0) << p.name();
  }
}

TEST_P(AttentionGpuTest, BackwardHasTheCpusBitsWithAnyScratch) {
  for (const Config& config : configs())
    for (const int64_t scratch : {device::kAttentionScratchBytes, int64_t{1}, int64_t{config.heads * 8 * 100}}) {
      const Problem p(config, GetParam());
      CpuContext cpu;
      Gpu gpu;
      Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
      const Tensor o(p.dtype, p.q.view().shape), lse(DType::f32, {p.set.num_rows, config.heads});
      attention(cpu, o, lse, p.q, p.keys(), p.sink, call.view(), p.shape);
      const Tensor dq = random_tensor(8, DType::f32, p.q.view().shape), dkv = random_tensor(9, DType::f32, p.kv.view().shape),
                   dsink = random_tensor(10, DType::f32, {config.heads});
      const Tensor dentries = config.ratio == 0 ? Tensor() : random_tensor(11, DType::f32, p.store.view().shape);
      const TensorView gdq = gpu.put(dq), gdkv = gpu.put(dkv), gdsink = gpu.put(dsink), gdentries = gpu.put(dentries);
      attention_backward(cpu, dq, dkv, dentries, dsink, p.d_o, o, lse, p.q, p.keys(), p.sink, call.view(), p.shape);
      device::portable_attention_backward(gpu, gdq, gdkv, gdentries, gdsink, gpu.put(p.d_o), gpu.put(o), gpu.put(lse), gpu.put(p.q), put(gpu, p.keys()), gpu.put(p.sink),
                                 testing::put_sequences(gpu, call.view()), p.shape, scratch);
      EXPECT_EQ(count_bit_differences(gpu.get(gdq), dq), 0) << p.name() << " " << scratch;
      EXPECT_EQ(count_bit_differences(gpu.get(gdkv), dkv), 0) << p.name() << " " << scratch;
      EXPECT_EQ(count_bit_differences(gpu.get(gdsink), dsink), 0) << p.name() << " " << scratch;
      if (config.ratio > 0) {
        EXPECT_EQ(count_bit_differences(gpu.get(gdentries), dentries), 0) << p.name() << " " << scratch;
      }
    }
}

// Calls in pieces, rows strided, no lse: the model's order of steps.
TEST_P(AttentionGpuTest, PiecesWithRingsAndPages) {
  for (const Config& config : {Config{.length = {1, 2, 17, 30}, .heads = 4, .width = 24, .window = 7, .ratio = 4, .k = 3},
                               Config{.length = {26, 9}, .heads = 9, .width = 10, .window = 4, .ratio = 8}}) {
    const Problem p(config, GetParam());
    CpuContext cpu;
    Gpu gpu;
    const int64_t width = config.width;
    const Tensor ring = random_tensor(12, p.dtype, {p.set.num_slots, config.window, width}, 30.0f);
    const TensorView gring = gpu.put(ring), gstore = gpu.put(p.store), gsink = gpu.put(p.sink);
    const Tensor wide_kv = random_tensor(13, p.dtype, {p.set.num_rows, width + 4}, 2.0f);
    Philox rng(14, RngPurpose::test);
    for (const auto& parts : testing::random_schedule(rng, p.set, 9)) {
      Call call(p.set, parts);
      const Tensor q = call.take(p.q), kv = call.take(wide_kv), selected = config.k > 0 ? call.take(p.selected) : Tensor(), o(p.dtype, q.view().shape);
      const SequenceView gseq = testing::put_sequences(gpu, call.view());
      const TensorView go = gpu.put(o), gkv = gpu.put(kv);
      attention(cpu, o, {}, q, {.kv = kv.view().cols(4, width), .ring = ring, .entries = p.store, .selected = selected}, p.sink, call.view(), p.shape);
      device::portable_attention(gpu, go, {}, gpu.put(q), {.kv = gkv.cols(4, width), .ring = gring, .entries = gstore, .selected = gpu.put(selected)}, gsink, gseq, p.shape);
      ring_update(cpu, ring, kv.view().cols(4, width), call.view());
      ring_update(gpu, gring, gkv.cols(4, width), gseq);
      EXPECT_EQ(count_bit_differences(gpu.get(go), o), 0) << p.name();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, AttentionGpuTest, ::testing::Values(DType::f32, DType::bf16), [](const auto& param) { return dtype_name(param.param); });

// ---- The tensor cores' kernel.

std::vector<Config> tensor_core_configs() {
  return {
      {.length = {1}, .heads = 1, .width = 128, .window = 1},
      {.length = {200, 3, 77}, .heads = 5, .width = 128, .window = 100, .ratio = 2, .k = 30},
      {.length = {70, 129}, .heads = 70, .width = 256, .window = 64, .ratio = 4},
      {.length = {90}, .heads = 64, .width = 512, .window = 128, .ratio = 1, .k = 80},
      {.length = {150, 40}, .heads = 16, .width = 512, .window = 128, .ratio = 4, .k = 30},
      {.length = {130}, .heads = 27, .width = 256, .window = 40, .ratio = 1},
  };
}
bool on_tensor_cores(const Problem& p) { return device::attention_on_tensor_cores(p.q, p.q, p.keys()); }

struct Outputs {
  Tensor o, lse;
};
Outputs run_packed(Gpu& gpu, const Problem& p) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  const TensorView o = gpu.make(p.dtype, p.q.view().shape), lse = gpu.make(DType::f32, {p.set.num_rows, p.config.heads});
  device::attention(gpu, o, lse, gpu.put(p.q), put(gpu, p.keys()), gpu.put(p.sink), testing::put_sequences(gpu, call.view()), p.shape);
  return {gpu.get(o), gpu.get(lse)};
}

// The list of one query: rows in f32, where each one's gradient is, and whether that is in dentries.
struct ListRow {
  std::vector<float> value;
  int64_t row;
  bool entry;
};
std::vector<ListRow> list_rows(const Problem& p, size_t id, int64_t pos) {
  std::vector<ListRow> rows;
  const auto add = [&](const Tensor& from, int64_t row, bool entry) {
    std::vector<float> v(static_cast<size_t>(p.config.width));
    for (size_t i = 0; i < v.size(); ++i) v[i] = from.get(row * p.config.width + static_cast<int64_t>(i));
    rows.push_back({v, row, entry});
  };
  for (int64_t at = std::max<int64_t>(0, pos - p.config.window + 1); at <= pos; ++at) add(p.kv, p.set.offset[id] + at, false);
  for (int64_t i = 0; p.config.ratio > 0 && i < (p.config.k > 0 ? p.config.k : (pos + 1) / p.config.ratio); ++i) {
    const int64_t e = p.config.k > 0 ? p.selected.ptr<int32_t>()[(p.set.offset[id] + pos) * p.config.k + i] : i;
    if (e >= 0) add(p.store, p.set.pages[id][static_cast<size_t>(e / 3)] * 3 + e % 3, true);
  }
  return rows;
}

// Against f64. With L the largest error of a logit, d steps that may cut off a unit of f32's last place each, 2^-23 d scale sum |q row|, plus one of the logit and of
// its maximum: weights e and their sum err by L (and the 2 ulp of exp), their quotient by twice that; e is rounded to bf16 (2^-8) and so is the output.
TEST(AttentionGpuTensorCores, AreNearTheFormula) {
  for (const Config& config : tensor_core_configs()) {
    const Problem p(config, DType::bf16);
    if (!on_tensor_cores(p)) GTEST_SKIP() << "this build or device has no kernel for tensor cores";
    Gpu gpu;
    const Outputs got = run_packed(gpu, p);
    const size_t width = static_cast<size_t>(config.width);
    double worst = 0, worst_lse = 0;
    for (size_t id = 0; id < p.set.length.size(); ++id)
      for (int64_t pos = 0; pos < p.set.length[id]; ++pos) {
        const int64_t t = p.set.offset[id] + pos;
        const std::vector<ListRow> rows = list_rows(p, id, pos);
        for (int64_t h = 0; h < config.heads; ++h) {
          std::vector<float> q(width);
          for (size_t i = 0; i < width; ++i) q[i] = p.q.get((t * config.heads + h) * config.width + static_cast<int64_t>(i));
          std::vector<double> logit;
          double m = p.sink.get(h), error = 0, magnitude = std::abs(m);
          for (const auto& row : rows) {
            double dot = 0, terms = 0;
            for (size_t i = 0; i < width; ++i) {
              const double term = static_cast<double>(q[i]) * row.value[i];
              dot += term;
              terms += std::abs(term);
            }
            logit.push_back(dot * p.shape.scale);
            m = std::max(m, logit.back());
            magnitude = std::max(magnitude, std::abs(logit.back()));
            error = std::max(error, 0x1p-23 * static_cast<double>(config.width) * p.shape.scale * terms);
          }
          error += 0x1p-23 * 2 * magnitude + 0x1p-22;
          double denominator = std::exp(p.sink.get(h) - m);
          for (double& l : logit) denominator += l = std::exp(l - m);
          worst_lse = std::max(worst_lse, std::abs(got.lse.get(t * config.heads + h) - m - std::log(denominator)) /
                                              (2 * error + 0x1p-23 * (static_cast<double>(rows.size()) + std::abs(m) + 10)));
          for (size_t i = 0; i < width; ++i) {
            double want = 0, all = 0;
            for (size_t j = 0; j < rows.size(); ++j) {
              want += logit[j] / denominator * rows[j].value[i];
              all += logit[j] / denominator * std::abs(rows[j].value[i]);
            }
            const double bound = all * (0x1p-8 + 3 * error + 0x1p-23 * 2 * static_cast<double>(rows.size())) + 0x1p-8 * std::abs(want) + 0x1p-20 * all;
            const double ratio = std::abs(got.o.get((t * config.heads + h) * config.width + static_cast<int64_t>(i)) - want) / bound;
            if (!(ratio <= worst)) worst = ratio;
          }
        }
      }
    EXPECT_LE(worst, 1.0) << p.name();
    EXPECT_LE(worst_lse, 1.0) << p.name();
  }
}

TEST(AttentionGpuTensorCores, RowContractOverRandomCuttings) {
  for (const Config& config : tensor_core_configs()) {
    const Problem p(config, DType::bf16);
    if (!on_tensor_cores(p)) GTEST_SKIP() << "this build or device has no kernel for tensor cores";
    for (const int64_t max_rows : {1, 7, 1000}) {
      Gpu gpu;
      const Outputs want = run_packed(gpu, p);
      const Tensor o(p.dtype, p.q.view().shape), lse(DType::f32, {p.set.num_rows, config.heads});
      const TensorView ring = gpu.put(random_tensor(15, p.dtype, {p.set.num_slots, config.window, config.width}, 30.0f)), store = gpu.put(p.store),
                       sink = gpu.put(p.sink);
      Philox rng(static_cast<uint64_t>(max_rows), RngPurpose::test);
      for (const auto& parts : testing::random_schedule(rng, p.set, max_rows)) {
        Call call(p.set, parts);
        const Tensor q = call.take(p.q), selected = config.k > 0 ? call.take(p.selected) : Tensor();
        const SequenceView seq = testing::put_sequences(gpu, call.view());
        const TensorView kv = gpu.put(call.take(p.kv)), part_o = gpu.make(p.dtype, q.view().shape), part_lse = gpu.make(DType::f32, {call.view().num_tokens, config.heads});
        device::attention(gpu, part_o, part_lse, gpu.put(q), {.kv = kv, .ring = ring, .entries = store, .selected = gpu.put(selected)}, sink, seq, p.shape);
        ring_update(gpu, ring, kv, seq);
        call.put(o, gpu.get(part_o));
        call.put(lse, gpu.get(part_lse));
      }
      EXPECT_EQ(count_bit_differences(o, want.o), 0) << p.name() << " " << max_rows << " rows a call";
      EXPECT_EQ(count_bit_differences(lse, want.lse), 0) << p.name() << " " << max_rows << " rows a call";
    }
  }
}

// A rank of a tensor parallel group has some of the heads: fewer heads may go another way through the kernels, to the same bits.
TEST(AttentionGpuTensorCores, AHeadDoesNotDependOnHowManyThereAre) {
  for (const int64_t width : {128, 256, 512}) {
    Config config = {.length = {150, 9}, .heads = 70, .width = width, .window = 100, .ratio = 2, .k = 60};
    const Problem all(config, DType::bf16);
    if (!on_tensor_cores(all)) GTEST_SKIP() << "this build or device has no kernel for tensor cores";
    Gpu gpu;
    const Outputs want = run_packed(gpu, all);
    for (const int64_t heads : {1, 16, 17, 32, 33, 64}) {
      config.heads = heads;
      const Problem some(config, DType::bf16);  // the same keys
      const Outputs part = {Tensor(DType::bf16, some.q.view().shape), Tensor(DType::f32, {all.set.num_rows, heads})};
      const int64_t first = 70 - heads;
      std::copy_n(all.sink.ptr<float>() + first, heads, some.sink.ptr<float>());
      for (int64_t t = 0; t < all.set.num_rows; ++t) {
        std::copy_n(all.q.ptr<bf16>() + (t * 70 + first) * width, heads * width, some.q.ptr<bf16>() + t * heads * width);
        std::copy_n(want.o.ptr<bf16>() + (t * 70 + first) * width, heads * width, part.o.ptr<bf16>() + t * heads * width);
        std::copy_n(want.lse.ptr<float>() + t * 70 + first, heads, part.lse.ptr<float>() + t * heads);
      }
      const Outputs got = run_packed(gpu, some);
      EXPECT_EQ(count_bit_differences(got.o, part.o), 0) << heads << " of 70 heads of " << width;
      EXPECT_EQ(count_bit_differences(got.lse, part.lse), 0) << heads << " of 70 heads of " << width;
    }
  }
}

struct Gradients {
  Tensor dq, dkv, dentries, dsink;
};
Gradients run_backward(Gpu& gpu, const Problem& p, const Outputs& out, int64_t scratch) {
  Call call(p.set, testing::packed_parts(p.set), /*with_slots=*/false);
  const TensorView dq = gpu.make(DType::f32, p.q.view().shape), dkv = gpu.make(DType::f32, p.kv.view().shape), dsink = gpu.put(Tensor(DType::f32, {p.config.heads}));
  const TensorView dentries = p.config.ratio == 0 ? TensorView() : gpu.put(Tensor(DType::f32, p.store.view().shape));
  device::attention_backward(gpu, dq, dkv, dentries, dsink, gpu.put(p.d_o), gpu.put(out.o), gpu.put(out.lse), gpu.put(p.q), put(gpu, p.keys()), gpu.put(p.sink),
                             testing::put_sequences(gpu, call.view()), p.shape, scratch);
  return {gpu.get(dq), gpu.get(dkv), p.config.ratio == 0 ? Tensor() : gpu.get(dentries), gpu.get(dsink)};
}

// Against f64, from the o and lse that the op itself is given. Products of bf16 are exact; chains of n steps that may cut off a unit err by 2^-23 n sum |terms|.
// P errs by its exponent's error (logit, lse, 2 ulp); G in bf16 by 2^-9, hence dP by 2^-9 sum |G row|; dl = P (dP - delta) scale by the sum of these, and P and dl
// are rounded to bf16 once more.
TEST(AttentionGpuTensorCores, BackwardIsNearTheFormula) {
  for (const Config& config : tensor_core_configs()) {
    const Problem p(config, DType::bf16);
    if (!on_tensor_cores(p)) GTEST_SKIP() << "this build or device has no kernel for tensor cores";
    Gpu gpu;
    const Outputs out = run_packed(gpu, p);
    const Gradients got = run_backward(gpu, p, out, device::kAttentionScratchBytes);
    const size_t width = static_cast<size_t>(config.width);
    std::vector<double> dkv(static_cast<size_t>(got.dkv.elements())), dkv_bound(dkv.size()), dentries(static_cast<size_t>(config.ratio == 0 ? 0 : got.dentries.elements())),
        dentries_bound(dentries.size());
    double worst = 0;
    const auto compare = [&](double value, double want, double bound) {
      const double ratio = std::abs(value - want) / (bound + 1e-30);
      if (!(ratio <= worst)) worst = ratio;
    };
    for (size_t id = 0; id < p.set.length.size(); ++id)
      for (int64_t pos = 0; pos < p.set.length[id]; ++pos) {
        const int64_t t = p.set.offset[id] + pos;
        const std::vector<ListRow> rows = list_rows(p, id, pos);
        for (int64_t h = 0; h < config.heads; ++h) {
          const int64_t at = (t * config.heads + h) * config.width;
          double delta = 0, delta_terms = 0;
          for (int64_t i = 0; i < config.width; ++i) {
            delta += static_cast<double>(out.o.get(at + i)) * p.d_o.get(at + i);
            delta_terms += std::abs(out.o.get(at + i) * p.d_o.get(at + i));
          }
          std::vector<double> dq(width), dq_bound(width);
          const double lse = out.lse.get(t * config.heads + h);
          for (const ListRow& row : rows) {
            double dot = 0, dot_terms = 0, dp = 0, dp_terms = 0;
            for (size_t i = 0; i < width; ++i) {
              const double q = p.q.get(at + static_cast<int64_t>(i)), g = p.d_o.get(at + static_cast<int64_t>(i));
              dot += q * row.value[i], dot_terms += std::abs(q * row.value[i]);
              dp += g * row.value[i], dp_terms += std::abs(g * row.value[i]);
            }
            const double steps = 0x1p-23 * static_cast<double>(config.width + 4);
            const double weight = std::exp(dot * p.shape.scale - lse), weight_error = weight * (steps * dot_terms * p.shape.scale + 0x1p-22 * (std::abs(lse) + 2));
            const double dl = weight * (dp - delta) * p.shape.scale;
            const double dl_error = p.shape.scale * (weight_error * std::abs(dp - delta) + weight * ((0x1p-9 + steps) * dp_terms + steps * delta_terms)) + 0x1p-21 * std::abs(dl);
            const double dl_stored = dl_error + 0x1p-9 * (std::abs(dl) + dl_error), weight_stored = weight_error + 0x1p-9 * (weight + weight_error);
            std::vector<double>& grad = row.entry ? dentries : dkv;
            std::vector<double>& bound = row.entry ? dentries_bound : dkv_bound;
            // Sums over a list's rows, a tile's heads (twice) and a row's queries: no more steps than this.
            const double sum_steps = 0x1p-23 * static_cast<double>(rows.size() + 256 + static_cast<size_t>(p.set.num_rows));
            for (size_t i = 0; i < width; ++i) {
              const double q = p.q.get(at + static_cast<int64_t>(i)), g = p.d_o.get(at + static_cast<int64_t>(i)), v = row.value[i];
              const size_t to = static_cast<size_t>(row.row) * width + i;
              dq[i] += dl * v;
              dq_bound[i] += std::abs(v) * (dl_stored + sum_steps * std::abs(dl));
              grad[to] += dl * q + weight * g;
              bound[to] += std::abs(q) * (dl_stored + sum_steps * std::abs(dl)) + std::abs(g) * (weight_stored + weight * (0x1p-9 + sum_steps)) * (1 + 0x1p-9);
            }
          }
          for (size_t i = 0; i < width; ++i) compare(got.dq.get(at + static_cast<int64_t>(i)), dq[i], dq_bound[i]);
        }
      }
    EXPECT_LE(worst, 1.0) << p.name() << " dq";
    worst = 0;
    for (size_t i = 0; i < dkv.size(); ++i) compare(got.dkv.get(static_cast<int64_t>(i)), dkv[i], dkv_bound[i]);
    EXPECT_LE(worst, 1.0) << p.name() << " dkv";
    worst = 0;
    for (size_t i = 0; i < dentries.size(); ++i) compare(got.dentries.get(static_cast<int64_t>(i)), dentries[i], dentries_bound[i]);
    EXPECT_LE(worst, 1.0) << p.name() << " dentries";
  }
}

TEST(AttentionGpuTensorCores, BackwardDoesNotDependOnScratch) {
  for (const Config& config : tensor_core_configs()) {
    const Problem p(config, DType::bf16);
    if (!on_tensor_cores(p)) GTEST_SKIP() << "this build or device has no kernel for tensor cores";
    Gpu gpu;
    const Outputs out = run_packed(gpu, p);
    const Gradients want = run_backward(gpu, p, out, device::kAttentionScratchBytes);
    for (const int64_t scratch : {int64_t{1}, int64_t{1} << 21}) {
      const Gradients got = run_backward(gpu, p, out, scratch);
      EXPECT_EQ(count_bit_differences(got.dq, want.dq), 0) << p.name() << " " << scratch;
      EXPECT_EQ(count_bit_differences(got.dkv, want.dkv), 0) << p.name() << " " << scratch;
      EXPECT_EQ(count_bit_differences(got.dsink, want.dsink), 0) << p.name() << " " << scratch;
      if (config.ratio > 0) {
        EXPECT_EQ(count_bit_differences(got.dentries, want.dentries), 0) << p.name() << " " << scratch;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
