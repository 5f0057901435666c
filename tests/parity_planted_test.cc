// Negative control of parity_test: this program is linked so that the model's matmul is replaced (linker option --wrap) by one that splits K in two when
// few rows are in the call, as a library GEMM tuned for decoding would. Parity must notice, or it proves nothing.

#include <gtest/gtest.h>

#include "ops/cast/cast.h"
#include "ops/matmul/matmul.h"
#include "tests/parity_cases.h"

// lockstep::matmul(Context&, TensorView, ConstTensorView, const WeightView&, int64_t), in its mangled name, before and after wrapping.
#define MATMUL_SYMBOL _ZN8lockstep6matmulERNS_7ContextENS_15BasicTensorViewIvEENS2_IKvEERKNS_10WeightViewEl
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

namespace lockstep {
namespace {
bool planted = false;
}
}  // namespace lockstep

extern "C" void JOIN(__real_, MATMUL_SYMBOL)(lockstep::Context& c, lockstep::TensorView y, lockstep::ConstTensorView x, const lockstep::WeightView& w,
                                             int64_t k_segment);
extern "C" void JOIN(__wrap_, MATMUL_SYMBOL)(lockstep::Context& c, lockstep::TensorView y, lockstep::ConstTensorView x, const lockstep::WeightView& w,
                                             int64_t k_segment) {
  const int64_t k = x.dim(1);
  const bool split = lockstep::planted && x.rows() <= 4 && k_segment == 0 && k % 2 == 0;
  JOIN(__real_, MATMUL_SYMBOL)(c, y, x, w, split ? k / 2 : k_segment);
}

namespace lockstep {
namespace {

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

}  // namespace
}  // namespace lockstep
