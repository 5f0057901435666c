// Negative control of parity_test: this program is linked so that the model's matmul is replaced (linker option --wrap) by one that splits K in two when
// few rows are in the call, as a library GEMM tuned for decoding would; in quantised modes its activations get other scales then. Parity must notice, or it
// proves nothing.

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "model/testing.h"
#include "ops/cast/cast.h"
#include "ops/matmul/matmul.h"
#include "rl/gates.h"
#include "tests/parity_cases.h"

// lockstep::matmul(Context&, TensorView, ConstTensorView, const WeightView&, int64_t), in its mangled name, before and after wrapping.
#define MATMUL_SYMBOL _ZN8lockstep6matmulERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewEl
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

namespace lockstep {
namespace {
bool planted = false, planted_scales = false;
}
}  // namespace lockstep

extern "C" void JOIN(__real_, MATMUL_SYMBOL)(lockstep::Context& c, lockstep::TensorView y, lockstep::ConstTensorView x, const lockstep::WeightView& w,
                                             int64_t k_segment);
extern "C" void JOIN(__wrap_, MATMUL_SYMBOL)(lockstep::Context& c, lockstep::TensorView y, lockstep::ConstTensorView x, const lockstep::WeightView& w,
                                             int64_t k_segment) {
  const int64_t k = x.dim(1);
  const bool split = lockstep::planted && x.rows() <= 4 && k % 2 == 0 && !w.quantized();
  JOIN(__real_, MATMUL_SYMBOL)(c, y, x, w, split ? k / 2 : k_segment);
}

// matmul_many, whose calls would otherwise stay inside its own object.
extern "C" void __wrap__ZN8lockstep11matmul_manyERNS_7ContextESt4spanIKNS_10MatmulCallELm18446744073709551615EE(lockstep::Context& c,
                                                                                                             std::span<const lockstep::MatmulCall> products) {
  for (const lockstep::MatmulCall& p : products) lockstep::matmul(c, p.y, p.x, p.w);
}

// lockstep::quantize(Context&, QuantView, ConstTensorView, float)
#define QUANTIZE_SYMBOL _ZN8lockstep8quantizeERNS_7ContextENS_14BasicQuantViewIvEENS_15BasicTensorViewIKvEEf
extern "C" lockstep::QuantStats JOIN(__real_, QUANTIZE_SYMBOL)(lockstep::Context& c, lockstep::QuantView q, lockstep::ConstTensorView x, float amax_floor);
extern "C" lockstep::QuantStats JOIN(__wrap_, QUANTIZE_SYMBOL)(lockstep::Context& c, lockstep::QuantView q, lockstep::ConstTensorView x, float amax_floor) {
  const bool other = lockstep::planted_scales && x.rows() <= 4 && q.block_rows == 1;
  return JOIN(__real_, QUANTIZE_SYMBOL)(c, q, x, other ? 100.0f : amax_floor);
}
// lockstep::round_through(Context&, TensorView, const QuantFormat&)
#define ROUND_SYMBOL _ZN8lockstep13round_throughERNS_7ContextENS_15BasicTensorViewIvEERKNS_11QuantFormatE
extern "C" void JOIN(__real_, ROUND_SYMBOL)(lockstep::Context& c, lockstep::TensorView x, const lockstep::QuantFormat& format);
extern "C" void JOIN(__wrap_, ROUND_SYMBOL)(lockstep::Context& c, lockstep::TensorView x, const lockstep::QuantFormat& format) {
  lockstep::QuantFormat f = format;
  if (lockstep::planted_scales && x.rows() <= 4) f.amax_floor = 100.0f;
  JOIN(__real_, ROUND_SYMBOL)(c, x, f);
}

namespace lockstep {
namespace {

TEST(ParityControl, OtherScalesForFewRowsAreFound) {
  const auto differences = [](Numerics numerics, CacheRounding cache) {
    int64_t different = 0;
    for (uint64_t seed = 3100; seed < 3106; ++seed) different += run_parity_case(seed, numerics, cache).different;
    return different;
  };
  constexpr CacheRounding kKeys = {.kv_fp8 = true};
  for (const auto& [numerics, cache] : {std::pair{Numerics::fp8, CacheRounding()}, {Numerics::fp4, CacheRounding()}, {Numerics::bf16, kKeys}}) {
    EXPECT_EQ(differences(numerics, cache), 0) << numerics_name(numerics);
    planted_scales = true;
    EXPECT_GT(differences(numerics, cache), 0) << numerics_name(numerics);
    planted_scales = false;
  }
}

TEST(ParityControl, SplittingKForFewRowsIsFound) {
  for (const Numerics numerics : {Numerics::f32, Numerics::bf16}) {
    int64_t different = 0, clean = 0;
    for (uint64_t seed = 3000; seed < 3010; ++seed) {
      planted = false;
      clean += run_parity_case(seed, numerics).different;
      planted = true;
      different += run_parity_case(seed, numerics).different;
    }
    planted = false;
    EXPECT_EQ(clean, 0) << numerics_name(numerics);
    EXPECT_GT(different, 0) << numerics_name(numerics);
  }
}

// `lockstep gates` must fail where the parity cases do, and say where the difference was born.
TEST(ParityControl, GatesFail) {
  GatesOptions o;
  o.model.init = "random";
  o.model.shape = testing::tiny_config();
  o.numerics = {Numerics::f32};
  o.model.shape->max_positions = 600;
  o.tokens = 2100;  // enough for two long responses, which go on alone when the others have ended
  o.threads = 1;
  planted = true;
  std::map<std::string, Verdict> worst;
  const Result<std::vector<GateResult>> results = run_gates(o, Hooks(), nullptr, [&](const GateResult& r) {
    if (r.gate == "G1") {
      EXPECT_NE(r.note.find("the forward first differs at layer"), std::string::npos) << r.note;
    }
    Verdict& v = worst.try_emplace(r.gate, r.verdict).first->second;
    if (r.verdict == Verdict::fail) v = Verdict::fail;
  });
  planted = false;
  ASSERT_TRUE(results.is_ok()) << results.message();
  for (const char* gate : {"G1", "G2", "G3", "G9", "G10"}) EXPECT_EQ(worst.at(gate), Verdict::fail) << gate;
}

}  // namespace
}  // namespace lockstep
