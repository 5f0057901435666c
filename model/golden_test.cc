// The reference models: logits, log-probs, hidden states, every gradient, decoding; and that the comparison itself can fail.

#include "model/golden.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

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

// E4M3 has 4 significant bits where bf16 has 8: each of the two roundings that fp8 adds to a product is 2^4 of bf16's, which rounds the same operands and
// the result. To first order the error of a mean is linear in the unit of rounding, so fp8's is at most 16 times bf16's (less: not all layers are
// quantised). Asserted for the largest case; the others, a few dozen tokens each, are printed. A mode that quantised nothing would be no worse than bf16.
TEST_P(Golden, QuantizedDecodesBitEqualAndStaysWithinItsUnitOfRounding) {
  CpuContext c(1);
  const std::string path = kGoldenDir + GetParam() + ".safetensors";
  const auto bf16 = verify_golden(c, path, Numerics::bf16);
  ASSERT_TRUE(bf16) << bf16.message();
  for (const Numerics n : {Numerics::fp8, Numerics::fp4}) {
    const auto r = verify_golden(c, path, n);
    ASSERT_TRUE(r) << r.message();
    EXPECT_EQ(golden_failures(r.value(), n, {}), "");
    std::printf("%s %s: logits max abs error %.3f, log-prob mean %.4f, max %.3f; bf16 %.4f\n", GetParam(), numerics_name(n), r.value().logits_max_abs, r.value().logprob_mean_abs,
                r.value().logprob_max_abs, bf16.value().logprob_mean_abs);
    EXPECT_GT(r.value().logprob_mean_abs, bf16.value().logprob_mean_abs);
    if (n == Numerics::fp8 && GetParam() == std::string("hybrid")) {
      EXPECT_LE(r.value().logprob_mean_abs, 16 * bf16.value().logprob_mean_abs);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::Values("swa_score", "csa_hash", "hca_yarn", "hybrid", "clamp", "two_streams", "one_stream", "odd_widths", "short"),
                         [](const auto& info) { return std::string(info.param); });

// A copy of a golden file in which the first number of one tensor is changed.
class Control {
 public:
  Control(const std::string& source, const std::string& tensor)
      : path(::testing::TempDir() + "lockstep_golden_control.safetensors") {
    std::filesystem::copy_file(source, path, std::filesystem::copy_options::overwrite_existing);
    const auto file = SafetensorsFile::open(source);
    CHECK(file.is_ok() && file.value().find(tensor) != nullptr, "{} in {}", tensor, source);
    io_.open(path, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    io_.read(reinterpret_cast<char*>(&header), 8);
    offset_ = static_cast<std::streamoff>(8 + header + file.value().find(tensor)->begin);
  }
  ~Control() { std::filesystem::remove(path); }
  template <typename T>
  void change(const std::function<T(T)>& f) {
    T value{};
    io_.seekg(offset_);
    io_.read(reinterpret_cast<char*>(&value), sizeof value);
    value = f(value);
    io_.seekp(offset_);
    io_.write(reinterpret_cast<const char*>(&value), sizeof value);
    io_.flush();
  }
  const std::string path;

 private:
  std::fstream io_;
  std::streamoff offset_ = 0;
};

// Every comparison must notice one wrong weight.
TEST(GoldenControl, OneWrongWeightFails) {
  Control control(kGoldenDir + "hybrid.safetensors", "weight.model.layers.2.self_attn.compressor.kv_proj.weight");
  control.change<float>([](float v) { return v * 1.5f + 0.01f; });
  CpuContext c(1);
  const auto r = verify_golden(c, control.path, Numerics::f32);
  ASSERT_TRUE(r) << r.message();
  const std::string failures = golden_failures(r.value(), Numerics::f32, {});
  for (const char* what : {"logits_max_abs", "logprob_max_abs", "hidden_max_abs", "grad_rel_l2_max"}) EXPECT_NE(failures.find(what), std::string::npos) << failures;
}

// Every comparison must notice one wrong number of the reference, and none may pass over what is no number.
TEST(GoldenControl, OneWrongReferenceFails) {
  CpuContext c(1);
  const std::string source = kGoldenDir + "short.safetensors";
  const std::string grad = "grad.model.norm.weight";
  const std::pair<std::string, const char*> cases[] = {{"logits.f64", "logits_max_abs"}, {"logprob.f64", "logprob_max_abs"}};
  for (const auto& [tensor, what] : cases) {
    Control control(source, tensor);
    control.change<double>([](double v) { return v + 0.01; });
    const auto r = verify_golden(c, control.path, Numerics::f32);
    ASSERT_TRUE(r) << r.message();
    EXPECT_NE(golden_failures(r.value(), Numerics::f32, {}).find(what), std::string::npos) << tensor;
    control.change<double>([](double) { return std::numeric_limits<double>::quiet_NaN(); });
    const auto nan = verify_golden(c, control.path, Numerics::f32);
    ASSERT_FALSE(nan) << tensor;
    EXPECT_NE(nan.message().find("tensor " + tensor + " holds nan at element 0"), std::string::npos) << nan.message();
  }
  for (const std::string& tensor : {std::string("hidden.0"), std::string("hidden.2"), grad}) {
    Control control(source, tensor);
    control.change<float>([](float) { return std::numeric_limits<float>::infinity(); });
    EXPECT_FALSE(verify_golden(c, control.path, Numerics::f32)) << tensor;
  }
}

// A NaN of ours must not be forgotten when the numbers after it are fine, and nothing compared is nothing verified.
TEST(GoldenControl, FailuresCountWhatIsNotFiniteAndWhatIsAbsent) {
  GoldenReport r;
  r.decode_bit_equal = true;
  EXPECT_NE(golden_failures(r, Numerics::bf16, {}).find("no reference"), std::string::npos);
  r.has_logprobs = true;
  EXPECT_EQ(golden_failures(r, Numerics::bf16, {}), "");
  r.logprob_max_abs = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(golden_failures(r, Numerics::bf16, {}).find("not finite"), std::string::npos);
}

TEST(GoldenControl, NotAGoldenFileIsAnError) {
  CpuContext c(1);
  const auto source = SafetensorsFile::open(kGoldenDir + "short.safetensors");
  ASSERT_TRUE(source) << source.message();
  std::string config = source.value().metadata().at("config");
  const std::string key = "\"hidden_size\": ";
  config.insert(config.find(key) + key.size(), "9999");
  SafetensorsWriter writer;
  const std::vector<int64_t> ids(4, 1);
  writer.add("input_ids", ConstTensorView(ids.data(), DType::i64, {2, 2}));
  writer.add_metadata("config", config);
  const std::string path = ::testing::TempDir() + "lockstep_golden_large.safetensors";
  ASSERT_TRUE(writer.write(path));
  const auto large = verify_golden(c, path, Numerics::f32);
  std::filesystem::remove(path);
  ASSERT_FALSE(large);
  EXPECT_NE(large.message().find("config describes a model of"), std::string::npos) << large.message();
  EXPECT_FALSE(verify_golden(c, "/nonexistent.safetensors", Numerics::f32));
}

}  // namespace
}  // namespace lockstep
