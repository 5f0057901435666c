// The kernels have the CPU's bits: for every number of streams, channels in whole 16-byte pieces and others, strided, and with more tokens than a block takes.

#include "ops/hyperconn/hyperconn.h"

#include <gtest/gtest.h>

#include <vector>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_tensor;
using testing::Tensor;

struct Case {
  int64_t tokens, streams, width;
  int iters = 20;
};
std::ostream& operator<<(std::ostream& o, const Case& s) { return o << s.tokens << " tokens, " << s.streams << " x " << s.width; }

// The first is longer than all stages of the mean of squares, the second has more tokens than a piece of the sums over tokens.
const Case kCases[] = {{1, 4, 2616}, {230, 4, 8, 3}, {67, 8, 9, 2}, {5, 1, 40}, {9, 2, 33}, {3, 3, 16, 1}, {2, 4, 128}};
constexpr DType kFloats[] = {DType::f32, DType::bf16};

class HyperConnGpu : public ::testing::Test {
 protected:
  // run(c, outputs, inputs) on both; outputs start from the same random numbers and are compared whole.
  template <typename F>
  void expect_same(const std::vector<Tensor>& outputs, const std::vector<ConstTensorView>& inputs, const F& run) {
    std::vector<TensorView> on_gpu, on_cpu;
    std::vector<ConstTensorView> gpu_inputs;
    for (const Tensor& t : outputs) on_gpu.push_back(gpu_.put(t)), on_cpu.push_back(t);
    for (const ConstTensorView v : inputs) gpu_inputs.push_back(gpu_.put(v));
    run(static_cast<Context&>(gpu_), on_gpu, gpu_inputs);
    run(static_cast<Context&>(cpu_), on_cpu, inputs);
    for (size_t i = 0; i < outputs.size(); ++i) EXPECT_EQ(count_bit_differences(gpu_.get(on_gpu[i]), outputs[i]), 0) << "output " << i;
  }
  CpuContext cpu_;
  testing::Gpu gpu_;
};

// Tokens of [tokens, n, D] `gap` elements apart.
template <typename View>
View tokens_of(View v, int64_t n, int64_t width) {
  return View(v.data, v.dtype, {v.dim(0), n, width}, v.row_stride);
}

TEST_F(HyperConnGpu, Mix) {
  for (const Case& s : kCases)
    for (const DType t : kFloats)
      for (const bool head : {false, true}) {
        SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(t) << (head ? " head" : ""));
        const int64_t n = s.streams, logits = head ? n : (2 + n) * n, elements = n * s.width, gap = elements % 8 == 0 ? 8 : 3;
        const HyperShape shape = {.streams = n, .sinkhorn_iters = s.iters};
        const Tensor x = random_tensor(1, t, {s.tokens, elements + gap}, 2.0f), fn = random_tensor(2, DType::f32, {logits, elements}), base = random_tensor(3, DType::f32, {logits}),
                     scale = random_tensor(4, DType::f32, {head ? 1 : 3});
        const auto weights = [&](const auto& in) { return HyperWeights{{in[1], {}}, in[2], in[3]}; };
        // Views of wider tensors, so that what is beside them must stay.
        const std::vector<Tensor> outputs = [&] {
          std::vector<Tensor> o;
          for (const int64_t width : {n + 1, n + 2, n * n + 3, logits}) o.push_back(random_tensor(5, DType::f32, {s.tokens, width}));
          o.push_back(random_tensor(6, DType::f32, {s.tokens}));
          return o;
        }();
        expect_same(outputs, {x, fn, base, scale}, [&](Context& c, const auto& out, const auto& in) {
          const ConstTensorView streams = tokens_of(in[0], n, s.width);
          if (head) hyper_head_mix(c, out[0].cols(1, n), out[3], out[4], streams, weights(in), shape);
          else hyper_mix(c, out[0].cols(1, n), out[1].cols(2, n), out[2].cols(0, n * n), out[3], out[4], streams, weights(in), shape);
        });

        const Tensor dpre = random_tensor(7, DType::f32, {s.tokens, n + 1}), dpost = random_tensor(8, DType::f32, {s.tokens, n + 2}),
                     dcomb = random_tensor(9, DType::f32, {s.tokens, n * n + 3});
        for (const bool wanted : {true, false}) {
          std::vector<Tensor> gradients;
          gradients.push_back(random_tensor(10, DType::f32, {s.tokens, elements + gap}));
          gradients.push_back(random_tensor(11, DType::f32, {logits, elements}));
          gradients.push_back(random_tensor(12, DType::f32, {logits}));
          gradients.push_back(random_tensor(13, DType::f32, {head ? 1 : 3}));
          expect_same(gradients, {x, fn, base, scale, dpre, dpost, dcomb, outputs[3], outputs[4]}, [&](Context& c, const auto& out, const auto& in) {
            const HyperGradients dw = wanted ? HyperGradients{out[1], out[2], out[3]} : HyperGradients{};
            const TensorView dx = tokens_of(out[0], n, s.width);
            const ConstTensorView streams = tokens_of(in[0], n, s.width);
            if (head) hyper_head_mix_backward(c, dx, dw, in[4].cols(0, n), in[7], in[8], streams, weights(in), shape);
            else hyper_mix_backward(c, dx, dw, in[4].cols(0, n), in[5].cols(1, n), in[6].cols(2, n * n), in[7], in[8], streams, weights(in), shape);
          });
        }
      }
}

TEST_F(HyperConnGpu, PreAndPost) {
  for (const Case& s : kCases)
    for (const DType t : kFloats) {
      SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(t));
      const int64_t n = s.streams, elements = n * s.width, gap = elements % 8 == 0 ? 8 : 3;
      const auto inputs = [&] {
        std::vector<Tensor> in;
        in.push_back(random_tensor(1, t, {s.tokens, elements + gap}));
        in.push_back(random_tensor(2, t, {s.tokens, s.width + 8}));
        in.push_back(random_tensor(3, DType::f32, {s.tokens, n + 1}));
        in.push_back(random_tensor(4, DType::f32, {s.tokens, n * n + 1}));
        in.push_back(random_tensor(5, DType::f32, {s.tokens, elements + gap}));
        in.push_back(random_tensor(6, DType::f32, {s.tokens, s.width + 8}));
        return in;
      }();
      const auto outputs = [&] {
        std::vector<Tensor> out;
        out.push_back(random_tensor(7, t, {s.tokens, elements + gap}));
        out.push_back(random_tensor(8, t, {s.tokens, s.width + 8}));
        for (uint64_t i = 0; i < 2; ++i) out.push_back(random_tensor(9 + i, DType::f32, {s.tokens, elements + gap}));
        out.push_back(random_tensor(11, DType::f32, {s.tokens, s.width + 8}));
        out.push_back(random_tensor(12, DType::f32, {s.tokens, n + 1}));
        out.push_back(random_tensor(13, DType::f32, {s.tokens, n + 2}));
        out.push_back(random_tensor(14, DType::f32, {s.tokens, n * n + 3}));
        return out;
      }();
      expect_same(outputs, {inputs.begin(), inputs.end()}, [&](Context& c, const auto& out, const auto& in) {
        const ConstTensorView x = tokens_of(in[0], n, s.width), y = in[1].cols(8, s.width), pre = in[2].cols(1, n), comb = in[3].cols(1, n * n),
                              dxout = tokens_of(in[4], n, s.width), dh = in[5].cols(0, s.width);
        hyper_post(c, tokens_of(out[0], n, s.width), x, y, pre, comb);
        hyper_pre(c, out[1].cols(0, s.width), x, pre);
        hyper_post_backward(c, tokens_of(out[2], n, s.width), out[4].cols(8, s.width), out[5].cols(1, n), out[7].cols(2, n * n), dxout, x, y, pre, comb);
        hyper_pre_backward(c, tokens_of(out[3], n, s.width), out[6].cols(1, n), dh, x, pre);
      });
    }
}

// The streams after a sublayer may take the place of those before.
TEST_F(HyperConnGpu, PostWorksInPlace) {
  const Tensor x = random_tensor(1, DType::bf16, {3, 4, 24}), y = random_tensor(2, DType::bf16, {3, 24}), post = random_tensor(3, DType::f32, {3, 4}),
               comb = random_tensor(4, DType::f32, {3, 16});
  const TensorView streams = gpu_.put(x);
  hyper_post(gpu_, streams, streams, gpu_.put(y), gpu_.put(post), gpu_.put(comb));
  const Tensor expected(DType::bf16, {3, 4, 24});
  hyper_post(cpu_, expected, x, y, post, comb);
  EXPECT_EQ(count_bit_differences(gpu_.get(streams), expected), 0);
}

}  // namespace
}  // namespace lockstep
