// The kernels have the CPU's bits: whole vocabularies and parts of them, rows that are short and long, entropy and its gradient or not.

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"
#include "ops/logprob/logprob_cpu.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

Tensor temperatures(int64_t rows) {
  Tensor t = random_tensor(9, DType::f32, {rows});
  for (int64_t r = 0; r < rows; ++r) t.set(r, r % 3 == 0 ? 1.0 : 1.3 + t.get(r));
  return t;
}

TEST(LogprobGpu, ForwardHasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const int64_t vocab : {1, 5, 64, 65, 700, 1100, 5000}) {
    const int64_t rows = vocab > 1000 ? 2 : 9;
    const Tensor wide = random_tensor(1, DType::f32, {rows, vocab + 3}, 8.0f), target = testing::random_ints(2, {rows}, static_cast<int32_t>(vocab));
    const Tensor temperature = temperatures(rows);
    const TensorView gwide = gpu.put(wide), gtarget = gpu.put(target), gtemperature = gpu.put(temperature);
    const ConstTensorView logits = wide.view().cols(2, vocab), glogits = gwide.cols(2, vocab);

    const TensorView glogprob = gpu.make(DType::f32, {rows}), glse = gpu.make(DType::f32, {rows}), gentropy = gpu.make(DType::f32, {rows}),
                     gmax = gpu.make(DType::f32, {rows});
    device::select_logprob(gpu, glogprob, glse, gentropy, glogits, gtarget, gtemperature);
    Tensor logprob(DType::f32, {rows}), lse(DType::f32, {rows}), entropy(DType::f32, {rows}), max(DType::f32, {rows});
    for (int64_t r = 0; r < rows; ++r) {
      const float* x = logits.row<float>(r);
      const float t = temperature.get(r);
      const RowStats stats = row_stats(x, vocab, t);
      max.set(r, stats.max);
      lse.set(r, stats.lse);
      logprob.set(r, x[target.ptr<int32_t>()[r]] / t - stats.lse);
      entropy.set(r, simd::row_entropy(x, vocab, t, stats.lse));
    }
    EXPECT_EQ(count_bit_differences(gpu.get(glogprob), logprob), 0) << vocab;
    EXPECT_EQ(count_bit_differences(gpu.get(glse), lse), 0) << vocab;
    EXPECT_EQ(count_bit_differences(gpu.get(gentropy), entropy), 0) << vocab;
    device::select_logprob(gpu, glogprob, {}, {}, glogits, gtarget, gtemperature);
    EXPECT_EQ(count_bit_differences(gpu.get(glogprob), logprob), 0) << vocab;
    device::row_stats(gpu, gmax, glse, glogits, gtemperature);
    EXPECT_EQ(count_bit_differences(gpu.get(gmax), max), 0) << vocab;
    EXPECT_EQ(count_bit_differences(gpu.get(glse), lse), 0) << vocab;

    // Two ranks' parts.
    const int64_t chunk = vocab_chunk(vocab), chunks = vocab_chunks(vocab), cut = std::min(vocab, chunks / 3 * chunk);
    const TensorView partials = gpu.make(DType::f32, {rows, kChunkPartials * chunks}), means = gpu.make(DType::f32, {rows, chunks});
    for (const auto& [first, end] : {std::pair{int64_t{0}, cut}, {cut, vocab}}) {
      const int64_t from = first / chunk, count = (end - first + chunk - 1) / chunk;
      const VocabPart part{.first = first, .vocab = vocab};
      logprob_partials(gpu, partials.cols(kChunkPartials * from, kChunkPartials * count), glogits.cols(first, end - first), gtarget, gtemperature, part);
      entropy_partials(gpu, means.cols(from, count), glogits.cols(first, end - first), gtemperature, glse, part);
    }
    logprob_merge(gpu, glogprob, glse, partials, gtarget, vocab);
    entropy_merge(gpu, gentropy, means, glse);
    EXPECT_EQ(count_bit_differences(gpu.get(glogprob), logprob), 0) << vocab;
    EXPECT_EQ(count_bit_differences(gpu.get(glse), lse), 0) << vocab;
    EXPECT_EQ(count_bit_differences(gpu.get(gentropy), entropy), 0) << vocab;
  }
}

TEST(LogprobGpu, BackwardHasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const int64_t vocab : {1, 8, 65, 703})
    for (const int64_t first : {0, 40})
      for (const bool with_entropy : {true, false}) {
        const int64_t rows = 6;
        const Tensor logits = random_tensor(1, DType::f32, {rows, vocab}, 8.0f), target = testing::random_ints(2, {rows}, static_cast<int32_t>(vocab + first));
        const Tensor temperature = temperatures(rows), lse = random_tensor(3, DType::f32, {rows}), entropy = random_tensor(4, DType::f32, {rows}),
                     dlogprob = random_tensor(5, DType::f32, {rows}), dentropy = random_tensor(6, DType::f32, {rows});
        const TensorView glogits = gpu.put(logits);
        const auto optional = [&](const Tensor& t) { return with_entropy ? gpu.put(t) : TensorView(); };
        device::row_backward(gpu, glogits, gpu.put(dlogprob), optional(dentropy), gpu.put(target), gpu.put(temperature), gpu.put(lse), optional(entropy),
                             first);
        for (int64_t r = 0; r < rows; ++r)
          simd::row_backward(logits.view().row<float>(r), vocab,
                             {.target = target.ptr<int32_t>()[r] - first,
                              .temperature = temperature.get(r),
                              .lse = lse.get(r),
                              .entropy = with_entropy ? entropy.get(r) : 0.0f,
                              .dlogprob = dlogprob.get(r),
                              .dentropy = with_entropy ? dentropy.get(r) : 0.0f});
        EXPECT_EQ(count_bit_differences(gpu.get(glogits), logits), 0) << vocab << " from " << first;
      }
}

// The whole op, with the head's product and its gradients, in f32, whose products have the CPU's bits everywhere.
TEST(LogprobGpu, SelectLogprobHasTheCpusBits) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t rows = 11, width = 24, vocab = 130;
  const Tensor hidden = random_tensor(1, DType::f32, {rows, width}, 2.0f), head = random_tensor(2, DType::f32, {vocab, width}),
               temperature = temperatures(rows);
  const Tensor target = testing::random_ints(3, {rows}, static_cast<int32_t>(vocab)), dlogprob = random_tensor(4, DType::f32, {rows}),
               dentropy = random_tensor(5, DType::f32, {rows});
  struct Results {
    TensorView logprob, lse, entropy, dhidden, dhead;
  };
  const auto run = [&](Context& c, const Results& r, ConstTensorView hidden, ConstTensorView head, ConstTensorView target, ConstTensorView temperature,
                       ConstTensorView dlogprob, ConstTensorView dentropy) {
    const WeightView weight = {head, {}};
    select_logprob(c, r.logprob, r.lse, r.entropy, hidden, weight, target, temperature);
    select_logprob_backward(c, r.dhidden, r.dhead, dlogprob, dentropy, hidden, weight, target, temperature, r.lse, r.entropy);
  };
  const Tensor logprob(DType::f32, {rows}), lse(DType::f32, {rows}), entropy(DType::f32, {rows}), dhidden(DType::f32, {rows, width}),
      dhead = random_tensor(6, DType::f32, {vocab, width});
  const Results device = {gpu.put(logprob), gpu.put(lse), gpu.put(entropy), gpu.put(dhidden), gpu.put(dhead)};
  run(cpu, {logprob, lse, entropy, dhidden, dhead}, hidden, head, target, temperature, dlogprob, dentropy);
  run(gpu, device, gpu.put(hidden), gpu.put(head), gpu.put(target), gpu.put(temperature), gpu.put(dlogprob), gpu.put(dentropy));
  EXPECT_EQ(count_bit_differences(gpu.get(device.logprob), logprob), 0);
  EXPECT_EQ(count_bit_differences(gpu.get(device.lse), lse), 0);
  EXPECT_EQ(count_bit_differences(gpu.get(device.entropy), entropy), 0);
  EXPECT_EQ(count_bit_differences(gpu.get(device.dhidden), dhidden), 0);
  EXPECT_EQ(count_bit_differences(gpu.get(device.dhead), dhead), 0);
}

}  // namespace
}  // namespace lockstep
