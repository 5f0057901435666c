// The reference models: logits, log-probs, hidden states, every gradient, decoding; and that the comparison itself can fail.

#include "model/golden.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "io/safetensors.h"

namespace lockstep {
namespace {

const std::string kGoldenDir = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/golden/";

class Golden : public ::testing::TestWithParam<const char*> {};

TEST_P(Golden, F32WithinTheStatedLimits) {
  CpuContext c(2);
  const auto r = verify_golden(c, kGoldenDir + GetParam() + ".safetensors", Numerics::f32);
  ASSERT_TRUE(r) << r.message();
  const GoldenReport& g = r.value();
  EXPECT_TRUE(g.has_logits && g.has_logprobs && g.has_hidden && g.has_gradients && g.has_decode_logits);
  EXPECT_EQ(golden_failures(g, Numerics::f32, {}), "");
  EXPECT_LE(g.decode_logits_max_abs, 2e-5);
  EXPECT_GT(g.gradients.size(), 40u);
  std::printf("%s f32: logits %.2e logprob %.2e hidden %.2e grad %.2e (%s)\n", GetParam(), g.logits_max_abs, g.logprob_max_abs, g.hidden_max_abs_all,
              g.grad_rel_l2_max, g.gradients.front().name.c_str());
}

TEST_P(Golden, Bf16DecodesBitEqualAndStaysNear) {
  CpuContext c(1);
  const auto r = verify_golden(c, kGoldenDir + GetParam() + ".safetensors", Numerics::bf16);
  ASSERT_TRUE(r) << r.message();
  EXPECT_EQ(golden_failures(r.value(), Numerics::bf16, {}), "");
  std::printf("%s bf16: mean abs log-prob error %.4f, max %.3f\n", GetParam(), r.value().logprob_mean_abs, r.value().logprob_max_abs);
  // transformers' own bf16 forward is off by 0.03 on average on `hybrid`; ours keeps more in f32 and must not be worse. For the other cases no such
  // number is known: theirs are printed.
  if (GetParam() == std::string("hybrid")) {
    EXPECT_LT(r.value().logprob_mean_abs, 0.03);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::Values("swa_score", "csa_hash", "hca_yarn", "hybrid", "clamp", "two_streams", "one_stream", "odd_widths", "short"),
                         [](const auto& info) { return std::string(info.param); });

// A copy of a golden file with one f32 weight changed by a factor: every comparison must notice.
TEST(GoldenControl, OneWrongWeightFails) {
  const std::string source = kGoldenDir + "hybrid.safetensors", copy = ::testing::TempDir() + "lockstep_golden_control.safetensors";
  std::filesystem::copy_file(source, copy, std::filesystem::copy_options::overwrite_existing);
  uint64_t offset = 0;
  {
    auto file = SafetensorsFile::open(source);
    ASSERT_TRUE(file) << file.message();
    const SafetensorsEntry* e = file.value().find("weight.model.layers.2.self_attn.compressor.kv_proj.weight");
    ASSERT_NE(e, nullptr);
    std::ifstream in(source, std::ios::binary);
    uint64_t header = 0;
    in.read(reinterpret_cast<char*>(&header), 8);
    offset = 8 + header + e->begin;
  }
  std::fstream io(copy, std::ios::in | std::ios::out | std::ios::binary);
  float value = 0;
  io.seekg(static_cast<std::streamoff>(offset));
  io.read(reinterpret_cast<char*>(&value), 4);
  value = value * 1.5f + 0.01f;
  io.seekp(static_cast<std::streamoff>(offset));
  io.write(reinterpret_cast<const char*>(&value), 4);
  io.close();
  CpuContext c(1);
  const auto r = verify_golden(c, copy, Numerics::f32);
  ASSERT_TRUE(r) << r.message();
  const std::string failures = golden_failures(r.value(), Numerics::f32, {});
  for (const char* what : {"logits_max_abs", "logprob_max_abs", "hidden_max_abs", "grad_rel_l2_max"}) EXPECT_NE(failures.find(what), std::string::npos) << failures;
  std::filesystem::remove(copy);
}

TEST(GoldenControl, NotAGoldenFileIsAnError) {
  CpuContext c(1);
  EXPECT_FALSE(verify_golden(c, "/nonexistent.safetensors", Numerics::f32));
}

}  // namespace
}  // namespace lockstep
