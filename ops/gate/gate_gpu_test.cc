// The kernels have the CPU's bits: few and many experts, ties, biases of both signs, repeated ids, strided, whatever number of tokens.

#include "ops/gate/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_ints;
using testing::random_tensor;
using testing::Tensor;

struct Case {
  int64_t tokens, experts, k;
};
std::ostream& operator<<(std::ostream& o, const Case& s) { return o << s.tokens << " tokens, " << s.k << " of " << s.experts; }

const Case kCases[] = {{0, 8, 2}, {1, 1, 1}, {1, 384, 8}, {7, 5, 5}, {33, 256, 6}, {9, 31, 16}, {3, 1024, 16}, {40, 64, 3}};

class GateGpu : public ::testing::Test {
 protected:
  // run(c, ids, weight, put) on both; outputs are views of wider tensors, compared whole.
  template <typename F>
  void expect_same(const Case& s, const F& run) {
    const Tensor ids = random_ints(1, {s.tokens, s.k + 3}, 100), weight = random_tensor(2, DType::f32, {s.tokens, s.k + 2});
    const TensorView gpu_ids = gpu_.put(ids), gpu_weight = gpu_.put(weight);
    run(static_cast<Context&>(gpu_), gpu_ids.cols(1, s.k), gpu_weight.cols(2, s.k), [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); });
    run(static_cast<Context&>(cpu_), ids.view().cols(1, s.k), weight.view().cols(2, s.k), [](ConstTensorView v) { return v; });
    EXPECT_EQ(count_bit_differences(gpu_.get(gpu_ids), ids), 0) << s;
    EXPECT_EQ(count_bit_differences(gpu_.get(gpu_weight), weight), 0) << s;
  }
  CpuContext cpu_;
  testing::Gpu gpu_;
};

TEST_F(GateGpu, Scored) {
  for (const Case& s : kCases)
    for (const float bias_size : {0.0f, 0.5f, 3.0f}) {
      const Tensor z = random_tensor(3, DType::f32, {s.tokens, s.experts + 3}, 30.0f), bias = random_tensor(4, DType::f32, {s.experts}, bias_size);
      expect_same(s, [&](Context& c, TensorView ids, TensorView weight, const auto& at) {
        route_scored(c, ids, weight, at(z).cols(3, s.experts), bias_size == 0 ? ConstTensorView() : at(bias), 2.5f);
      });
    }
}

TEST_F(GateGpu, TiesAndExtremes) {
  const Case s = {4, 40, 7};
  Tensor z(DType::f32, {s.tokens, s.experts}), bias(DType::f32, {s.experts});
  for (int64_t e = 0; e < s.experts; ++e) {
    z.set(e, 0.25);                                            // all tie
    z.set(s.experts + e, e % 3 == 0 ? 1.0 : 0.5);              // 14 tie for seven places
    z.set(2 * s.experts + e, e < 36 ? -200.0 : 1.0);           // scores of zero
    z.set(3 * s.experts + e, e % 2 == 0 ? 3e38 : -std::numeric_limits<float>::infinity());
    bias.set(e, e % 5 == 0 ? -0.0 : 0.0);
  }
  expect_same(s, [&](Context& c, TensorView ids, TensorView weight, const auto& at) { route_scored(c, ids, weight, at(z), {}, 1.0f); });
  expect_same(s, [&](Context& c, TensorView ids, TensorView weight, const auto& at) { route_scored(c, ids, weight, at(z), at(bias), 1.0f); });
}

TEST_F(GateGpu, Hashed) {
  for (const Case& s : kCases) {
    const Tensor z = random_tensor(3, DType::f32, {s.tokens, s.experts}, 5.0f), tokens = random_ints(4, {s.tokens}, 50),
                 table = random_ints(5, {50, s.k + 1}, static_cast<int32_t>(std::min<int64_t>(s.experts, 20)));
    expect_same(s, [&](Context& c, TensorView ids, TensorView weight, const auto& at) {
      route_hashed(c, ids, weight, at(z), at(tokens), at(table).cols(1, s.k), 1.5f);
    });
  }
}

TEST_F(GateGpu, Backward) {
  for (const Case& s : kCases) {
    Tensor z = random_tensor(3, DType::f32, {s.tokens, s.experts + 1}, 5.0f);
    const Tensor dweight = random_tensor(4, DType::f32, {s.tokens, s.k + 1}), ids = random_ints(5, {s.tokens, s.k}, static_cast<int32_t>(std::min<int64_t>(s.experts, 20)));
    if (s.tokens > 0) z.set(1, -200.0);  // a score of zero
    const Tensor dz = random_tensor(6, DType::f32, {s.tokens, s.experts + 2});
    const TensorView on_gpu = gpu_.put(dz);
    route_backward(gpu_, on_gpu.cols(1, s.experts), gpu_.put(dweight).cols(1, s.k), gpu_.put(ids), gpu_.put(z).cols(1, s.experts), 2.5f);
    route_backward(cpu_, dz.view().cols(1, s.experts), dweight.view().cols(1, s.k), ids, z.view().cols(1, s.experts), 2.5f);
    EXPECT_EQ(count_bit_differences(gpu_.get(on_gpu), dz), 0) << s;
  }
}

}  // namespace
}  // namespace lockstep
