// The whole model on the GPU: forward, backward and decoding have the CPU's bits where the kernels promise them (everywhere under the executor; on a GPU in
// f32), and every file of reference numbers is met there as on the CPU.

#include <gtest/gtest.h>

#include "core/device.h"
#include "model/golden.h"
#include "model/stack.h"
#include "model/testing.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

// One training forward and backward of two sequences, and what came out.
struct Passed {
  testing::Tensor hidden, gradients;
};
Passed pass(Device device, Numerics numerics, CacheRounding cache, Recompute recompute) {
  const ModelConfig config = testing::tiny_config();
  DeviceContext context(device);
  Context& c = context;
  Arena arena("model", size_t{4} << 30, device), step("step", size_t{4} << 30, device);
  Weights weights(config, numerics, arena);
  EXPECT_TRUE(weights.load(c, random_boxes(config, 1), 0).is_ok());
  Gradients gradients = make_gradients(config, arena, [](const TensorSpec&) { return true; });
  Model model;
  model.weights = &weights;
  model.rope = make_rope_tables(c, config, 64, arena);
  model.cache = cache;
  const int64_t page_tokens = default_page_tokens(config);
  StatePool state(config, numerics, 0, 2, page_tokens, arena);
  BatchBuilder builder(config, page_tokens);
  const std::vector<int32_t> tokens[2] = {{1, 5, 9, 2, 8, 7, 3, 30, 11, 12, 4, 17, 18, 1, 0, 3, 22}, {2, 2, 7, 39, 0, 1, 16, 20, 21}}, pages = {0, 1};
  const SequenceRows rows[2] = {{tokens[0], 0, -1, std::span(pages).subspan(0, 1)}, {tokens[1], 0, -1, std::span(pages).subspan(1, 1)}};
  Saved saved;
  saved.arena = &step;
  saved.recompute = recompute;
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  const SequenceBatch& batch = builder.build(c, *c.workspace, rows, WantedRows::all);
  const TensorView hidden = forward(c, model, batch, state, &saved);
  const testing::Tensor dhidden = testing::random_tensor(3, DType::f32, hidden.shape);
  backward(c, model, batch, state, saved, on_device(c, dhidden, *c.workspace), gradients);
  Passed out{testing::Tensor(hidden.dtype, hidden.shape), testing::Tensor(DType::f32, gradients.dense.shape)};
  download(c, out.hidden, hidden);
  download(c, out.gradients, gradients.dense);
  return out;
}

bool has_the_cpus_bits(Numerics n) { return device_info().emulated || n == Numerics::f32; }

class GpuModel : public ::testing::TestWithParam<Numerics> {};

TEST_P(GpuModel, ForwardAndBackwardAreThoseOfTheCpu) {
  for (const CacheRounding cache : {CacheRounding{}, CacheRounding{true, true}})
    for (const Recompute recompute : {Recompute::none, Recompute::layer}) {
      const Passed cpu = pass(Device::cpu, GetParam(), cache, recompute), gpu = pass(Device::gpu, GetParam(), cache, recompute);
      if (has_the_cpus_bits(GetParam())) {
        EXPECT_EQ(testing::count_bit_differences(gpu.hidden, cpu.hidden), 0);
        EXPECT_EQ(testing::count_bit_differences(gpu.gradients, cpu.gradients), 0);
      } else {
        // Sums in another order make other roundings; both must be about as far from f32, which is what the format costs.
        const Passed f32 = pass(Device::cpu, Numerics::f32, cache, recompute);
        const auto far = [&](const testing::Tensor& x, const testing::Tensor& y) { return testing::relative_l2(testing::to_dtype(x, DType::f32), y); };
        EXPECT_LT(far(gpu.hidden, f32.hidden), 1.5 * far(cpu.hidden, f32.hidden));
        EXPECT_LT(far(gpu.gradients, f32.gradients), 1.5 * far(cpu.gradients, f32.gradients));
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Modes, GpuModel, ::testing::ValuesIn(kAllNumerics), [](const auto& info) { return std::string(numerics_name(info.param)); });

TEST(GpuGolden, ReferenceNumbersAreMet) {
  DeviceContext gpu(Device::gpu);
  CpuContext cpu;
  for (const char* name : {"short", "csa_hash", "hca_yarn", "hybrid"}) {
    const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/golden/" + name + ".safetensors";
    const Result<GoldenReport> f32 = verify_golden(gpu, path, Numerics::f32);
    ASSERT_TRUE(f32.is_ok()) << f32.message();
    EXPECT_EQ(golden_failures(f32.value(), Numerics::f32, {}), "") << name;
    const Result<GoldenReport> bf16 = verify_golden(gpu, path, Numerics::bf16), on_cpu = verify_golden(cpu, path, Numerics::bf16);
    ASSERT_TRUE(bf16.is_ok() && on_cpu.is_ok());
    EXPECT_EQ(golden_failures(bf16.value(), Numerics::bf16, {}), "") << name;
    EXPECT_LE(bf16.value().logits_max_abs, 2 * on_cpu.value().logits_max_abs) << name;  // as close to f64 as the CPU, give or take which roundings fall together
  }
}

}  // namespace
}  // namespace lockstep
