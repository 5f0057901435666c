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

// The first has many segments, the last of them a part, and a row that shared memory does not hold in f32; the second has more tokens than a piece of the sums
// over tokens and takes the large tile of the product; segments end in the last by accident of neither.
const Case kCases[] = {{1, 4, 4616, 2}, {260, 4, 8, 3}, {67, 8, 9, 2}, {5, 1, 40}, {9, 2, 33}, {3, 3, 16, 1}, {2, 4, 128}, {2, 4, 300, 2}};
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

TEST_F(HyperConnGpu, Feed) {
  for (const Case& s : kCases)
    for (const DType t : kFloats)
      for (const bool head : {false, true}) {
        SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(t) << (head ? " head" : ""));
        const int64_t n = s.streams, logits = head ? n : (2 + n) * n, elements = n * s.width, gap = elements % 8 == 0 ? 8 : 3;
        const HyperShape shape = {.streams = n, .sinkhorn_iters = s.iters};
        const Tensor x = random_tensor(1, t, {s.tokens, elements + gap}, 2.0f), fn = random_tensor(2, DType::f32, {logits, elements}), base = random_tensor(3, DType::f32, {logits}),
                     scale = random_tensor(4, DType::f32, {head ? 1 : 3}), norm = random_tensor(5, DType::f32, {s.width});
        const auto weights = [&](const auto& in) { return HyperWeights{{in[1], {}}, in[2], in[3]}; };
        // Views of wider tensors, so that what is beside them must stay.
        const auto feed_of = [&](const auto& out) {
          HyperFeed f;
          f.pre = out[0].cols(1, n), f.raw = out[3], f.inv_rms = out[4], f.norm_inv = out[5], f.h = out[6].cols(0, s.width), f.u = out[7].cols(8, s.width);
          if (!head) f.post = out[1].cols(2, n), f.comb = out[2].cols(0, n * n);
          return f;
        };
        std::vector<Tensor> outputs;
        for (const int64_t width : {n + 1, n + 2, n * n + 3, logits}) outputs.push_back(random_tensor(6, DType::f32, {s.tokens, width}));
        for (int i = 0; i < 2; ++i) outputs.push_back(random_tensor(7, DType::f32, {s.tokens}));
        for (int i = 0; i < 2; ++i) outputs.push_back(random_tensor(8, t, {s.tokens, s.width + 8}));
        expect_same(outputs, {x, fn, base, scale, norm}, [&](Context& c, const auto& out, const auto& in) {
          hyper_feed(c, feed_of(out), tokens_of(in[0], n, s.width), weights(in), shape, in[4]);
        });

        const Tensor dh = random_tensor(9, DType::f32, {s.tokens, s.width + 8}), dpost = random_tensor(10, DType::f32, {s.tokens, n + 2}),
                     dcomb = random_tensor(11, DType::f32, {s.tokens, n * n + 3}), dxout = random_tensor(12, DType::f32, {s.tokens, elements + gap});
        for (const bool wanted : {true, false}) {
          std::vector<Tensor> gradients;
          gradients.push_back(random_tensor(13, DType::f32, {s.tokens, elements + gap}));
          gradients.push_back(random_tensor(14, DType::f32, {logits, elements}));
          gradients.push_back(random_tensor(15, DType::f32, {logits}));
          gradients.push_back(random_tensor(16, DType::f32, {head ? 1 : 3}));
          std::vector<ConstTensorView> inputs = {x, fn, base, scale, dh, dpost, dcomb, dxout};
          inputs.insert(inputs.end(), outputs.begin(), outputs.end());
          expect_same(gradients, inputs, [&](Context& c, const auto& out, const auto& in) {
            const HyperGradients dw = wanted ? HyperGradients{out[1], out[2], out[3]} : HyperGradients{};
            std::vector<TensorView> kept;
            for (size_t i = 8; i < in.size(); ++i) kept.emplace_back(const_cast<void*>(in[i].data), in[i].dtype, in[i].shape, in[i].row_stride);
            const auto of_site = [&](ConstTensorView v) { return head ? ConstTensorView() : v; };
            hyper_feed_backward(c, tokens_of(out[0], n, s.width), dw, in[4].cols(8, s.width), of_site(in[5].cols(1, n)), of_site(in[6].cols(2, n * n)),
                                of_site(tokens_of(in[7], n, s.width)), tokens_of(in[0], n, s.width), feed_of(kept), weights(in), shape);
          });
        }
      }
}

TEST_F(HyperConnGpu, Post) {
  for (const Case& s : kCases)
    for (const DType t : kFloats) {
      SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(t));
      const int64_t n = s.streams, elements = n * s.width, gap = elements % 8 == 0 ? 8 : 3;
      const Tensor x = random_tensor(1, t, {s.tokens, elements + gap}), y = random_tensor(2, t, {s.tokens, s.width + 8}), post = random_tensor(3, DType::f32, {s.tokens, n + 1}),
                   comb = random_tensor(4, DType::f32, {s.tokens, n * n + 1}), dxout = random_tensor(5, DType::f32, {s.tokens, elements + gap});
      std::vector<Tensor> outputs;
      outputs.push_back(random_tensor(6, t, {s.tokens, elements + gap}));
      outputs.push_back(random_tensor(7, DType::f32, {s.tokens, s.width + 8}));
      outputs.push_back(random_tensor(8, DType::f32, {s.tokens, n + 1}));
      outputs.push_back(random_tensor(9, DType::f32, {s.tokens, n * n + 3}));
      expect_same(outputs, {x, y, post, comb, dxout}, [&](Context& c, const auto& out, const auto& in) {
        const ConstTensorView streams = tokens_of(in[0], n, s.width), branch = in[1].cols(8, s.width), weights = in[2].cols(1, n);
        hyper_post(c, tokens_of(out[0], n, s.width), streams, branch, weights, in[3].cols(1, n * n));
        hyper_post_backward(c, out[1].cols(8, s.width), out[2].cols(1, n), out[3].cols(2, n * n), tokens_of(in[4], n, s.width), streams, branch, weights);
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
