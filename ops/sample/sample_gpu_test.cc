// The kernels draw the CPU's tokens with the CPU's log-probability bits, for every mixture of settings.

#include "ops/sample/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

void compare(Context& cpu, testing::Gpu& gpu, ConstTensorView logits, ConstTensorView glogits, const std::vector<SampleParams>& params,
             const std::string& what) {
  const int64_t rows = logits.rows();
  const Tensor token(DType::i32, {rows}), logprob(DType::f32, {rows});
  const TensorView gtoken = gpu.put(token), glogprob = gpu.put(logprob);
  sample(cpu, token, logprob, logits, params.data());
  sample(gpu, gtoken, glogprob, glogits, params.data());
  EXPECT_EQ(count_bit_differences(gpu.get(gtoken), token), 0) << what;
  EXPECT_EQ(count_bit_differences(gpu.get(glogprob), logprob), 0) << what;
}

std::vector<SampleParams> params_of(int64_t rows, int64_t vocab, uint64_t seed, bool filters) {
  Philox rng(seed, RngPurpose::test);
  std::vector<SampleParams> all(static_cast<size_t>(rows));
  for (SampleParams& p : all) {
    p = {.seed = seed, .prompt_id = rng.next(), .sample_idx = rng.below(8), .position = rng.below(1000)};
    p.temperature = rng.below(6) == 0 ? 0.0f : 0.5f + rng.uniform();
    if (!filters) continue;
    if (rng.below(3) == 0) p.top_k = static_cast<int32_t>(1 + rng.below(static_cast<uint32_t>(vocab)));
    if (rng.below(3) == 0) p.top_p = rng.below(6) == 0 ? 0.0f : rng.uniform();
    if (rng.below(4) == 0) p.min_p = 0.3f * rng.uniform();
    if (rng.below(4) == 0 && vocab > 1) p.forbid = static_cast<int32_t>(rng.below(static_cast<uint32_t>(vocab)));
  }
  return all;
}

TEST(SampleGpu, DrawsTheCpusTokens) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const bool filters : {false, true})
    for (const int64_t vocab : {1, 2, 7, 64, 100, 1000, 5000}) {
      const int64_t rows = !filters ? 40 : vocab < 500 ? 30 : 6;
      for (const bool ties : {false, true}) {  // few values, so that boundaries fall among equals; -0 beside 0
        const Tensor wide = random_tensor(static_cast<uint64_t>(vocab), DType::f32, {rows, vocab + 3}, 4.0f);
        if (ties)
          for (int64_t i = 0; i < wide.elements(); ++i) wide.ptr<float>()[i] = std::nearbyint(wide.get(i)) * 0.5f;
        const TensorView gwide = gpu.put(wide);
        compare(cpu, gpu, wide.view().cols(2, vocab), gwide.cols(2, vocab), params_of(rows, vocab, 40 + static_cast<uint64_t>(vocab), filters),
                "V " + std::to_string(vocab) + (ties ? " with ties" : "") + (filters ? " filtered" : ""));
      }
    }
}

// Kernels for `some` serve rows of which none or all have a filter.
TEST(SampleGpu, PackedParamsOfAnyMixture) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t rows = 7, vocab = 300;
  const Tensor logits = random_tensor(8, DType::f32, {rows, vocab}, 4.0f);
  const TensorView glogits = gpu.put(logits);
  const auto with_filters = [&](int64_t first) {
    std::vector<SampleParams> params(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) params[static_cast<size_t>(r)] = {.top_k = r >= first ? 20 : 0, .seed = 5, .position = static_cast<uint32_t>(r)};
    return params;
  };
  for (const auto& [first, filters] : {std::pair{rows, SampleFilters::none}, {3, SampleFilters::some}, {0, SampleFilters::all}}) {
    const std::vector<SampleParams> params = with_filters(first);
    const Tensor token(DType::i32, {rows}), logprob(DType::f32, {rows}), packed(DType::i32, {rows * kSampleParamWords});
    sample(cpu, token, logprob, logits, params.data());
    EXPECT_EQ(pack_sample_params(packed, params.data(), vocab), filters);
    for (const SampleFilters launched : {filters, SampleFilters::some}) {
      const TensorView gtoken = gpu.make(DType::i32, {rows}), glogprob = gpu.make(DType::f32, {rows});
      sample(gpu, gtoken, glogprob, glogits, gpu.put(packed), launched);
      EXPECT_EQ(count_bit_differences(gpu.get(gtoken), token), 0);
      EXPECT_EQ(count_bit_differences(gpu.get(glogprob), logprob), 0);
    }
  }
}

// Threads a row change with the vocabulary.
TEST(SampleGpu, FiltersALongVocabulary) {
  CpuContext cpu;
  testing::Gpu gpu;
  const int64_t vocab = 9000;
  const Tensor logits = random_tensor(3, DType::f32, {2, vocab}, 6.0f);
  const TensorView glogits = gpu.put(logits);
  compare(cpu, gpu, logits, glogits, {{.top_p = 0.9f, .top_k = 300, .seed = 1}, {.min_p = 0.01f, .forbid = 17, .seed = 2}}, "long");
  for (const float scale : {0.0f, 0.01f, 1.0f, 6.0f}) {  // all equal, all in one bin of the first histogram, most of them kept, few
    const Tensor scaled = random_tensor(4, DType::f32, {3, vocab}, scale);
    compare(cpu, gpu, scaled, gpu.put(scaled), {{.top_p = 0.95f, .seed = 3}, {.temperature = 0.6f, .top_p = 0.95f, .top_k = 5000, .seed = 4}, {.top_p = 0.3f, .min_p = 0.2f, .forbid = 3, .seed = 5}},
            "long, of scale " + std::to_string(scale));
  }
}

TEST(SampleGpu, BadLogitsGiveAValidId) {
  testing::Gpu gpu;
  const int64_t vocab = 70, rows = 6;
  for (const bool all : {false, true}) {
    const Tensor logits = random_tensor(5, DType::f32, {rows, vocab});
    for (int64_t i = 0; i < logits.elements(); ++i)
      if (all || i % 9 == 4) logits.ptr<float>()[i] = std::numeric_limits<float>::quiet_NaN();
    const SampleParams params[] = {{}, {.top_k = 20}, {.top_p = 0.99f}, {.min_p = 0.5f}, {.temperature = 0}, {.forbid = 3}};
    const TensorView token = gpu.make(DType::i32, {rows}), logprob = gpu.make(DType::f32, {rows});
    sample(gpu, token, logprob, gpu.put(logits), params);
    const Tensor tokens = gpu.get(token);
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_GE(tokens.ptr<int32_t>()[r], 0) << r << all;
      EXPECT_LT(tokens.ptr<int32_t>()[r], vocab) << r << all;
    }
    EXPECT_NE(tokens.ptr<int32_t>()[5], 3);
    EXPECT_TRUE(std::isnan(gpu.get(logprob).get(0)));
  }
}

TEST(SampleGpu, NoRows) {
  testing::Gpu gpu;
  const TensorView token = gpu.make(DType::i32, {0}), logprob = gpu.make(DType::f32, {0});
  sample(gpu, token, logprob, gpu.make(DType::f32, {0, 9}), nullptr);
  EXPECT_EQ(gpu.get(token).elements(), 0);
}

}  // namespace
}  // namespace lockstep
