// The plan of few and of many slots is the CPU's, and rows move and add up with its bits.

#include "ops/moe_permute/moe_permute.h"

#include <gtest/gtest.h>

#include "ops/gpu_testing.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::random_ints;
using testing::random_tensor;
using testing::Tensor;

struct Case {
  int64_t tokens, experts, k;
  int32_t used;  // experts that tokens go to
};
std::ostream& operator<<(std::ostream& o, const Case& s) { return o << s.tokens << " tokens, " << s.k << " of " << s.experts << ", " << s.used << " used"; }

TEST(MoePermuteGpu, Plan) {
  CpuContext cpu;
  testing::Gpu gpu;
  // The last two have more slots than one block takes; the very last sends all to one expert.
  for (const Case& s : {Case{0, 9, 3, 8}, Case{1, 1, 1, 1}, Case{1, 384, 8, 384}, Case{7, 9, 3, 8}, Case{300, 9, 3, 8}, Case{64, 1024, 6, 1000}, Case{2000, 384, 4, 384},
                        Case{1500, 256, 6, 256}, Case{1100, 600, 8, 599}, Case{8300, 3, 1, 1}}) {
    const Tensor wide = random_ints(1, {s.tokens, s.k + 2}, s.used), offsets = random_ints(2, {s.experts + 1}, 5), row_token = random_ints(3, {s.tokens * s.k}, 5),
                 slot_row = random_ints(4, {s.tokens, s.k + 1}, 5);
    const TensorView gpu_offsets = gpu.put(offsets), gpu_row_token = gpu.put(row_token), gpu_slot_row = gpu.put(slot_row);
    moe_plan(gpu, gpu_offsets, gpu_row_token, gpu_slot_row.cols(1, s.k), gpu.put(wide).cols(2, s.k));
    moe_plan(cpu, offsets, row_token, slot_row.view().cols(1, s.k), wide.view().cols(2, s.k));
    EXPECT_EQ(count_bit_differences(gpu.get(gpu_offsets), offsets), 0) << s;
    EXPECT_EQ(count_bit_differences(gpu.get(gpu_row_token), row_token), 0) << s;
    EXPECT_EQ(count_bit_differences(gpu.get(gpu_slot_row), slot_row), 0) << s;
  }
}

TEST(MoePermuteGpu, RowsMoveAndAdd) {
  CpuContext cpu;
  testing::Gpu gpu;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Case& s : {Case{0, 8, 2, 8}, Case{1, 8, 1, 8}, Case{33, 8, 4, 8}, Case{20, 30, 6, 9}, Case{9, 30, 16, 30}})
      for (const int64_t width : {1, 63, 64, 200}) {
        const int64_t rows = s.tokens * s.k, gap = width % 8 == 0 ? 8 : 3;
        const Tensor ids = random_ints(1, {s.tokens, s.k}, s.used), x = random_tensor(2, dtype, {s.tokens, width + gap}), shared = random_tensor(3, dtype, {s.tokens, width + gap}),
                     drows = random_tensor(4, DType::f32, {rows, width + gap}), value = random_tensor(5, DType::f32, {s.tokens, s.k + 1});
        const Tensor gathered = random_tensor(6, dtype, {rows, width + gap}), y = random_tensor(7, dtype, {s.tokens, width + gap}),
                     dx = random_tensor(8, DType::f32, {s.tokens, width + gap}), row_value = random_tensor(9, DType::f32, {rows}), back = random_tensor(10, DType::f32, {s.tokens, s.k + 2});
        const TensorView gpu_gathered = gpu.put(gathered), gpu_y = gpu.put(y), gpu_dx = gpu.put(dx), gpu_row_value = gpu.put(row_value), gpu_back = gpu.put(back);
        const auto run = [&](Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, TensorView gathered, TensorView y, TensorView dx, TensorView row_value,
                             TensorView back, const auto& at) {
          moe_plan(c, offsets, row_token, slot_row, at(ids));
          moe_gather(c, gathered.cols(gap, width), at(x).cols(0, width), row_token);
          moe_combine(c, y.cols(0, width), gathered.cols(gap, width), slot_row, at(shared).cols(gap, width));
          moe_gather_backward(c, dx.cols(gap, width), at(drows).cols(0, width), slot_row);
          moe_spread(c, row_value, at(value).cols(1, s.k), slot_row);
          moe_collect(c, back.cols(1, s.k), row_value, slot_row);
        };
        const Tensor offsets(DType::i32, {s.experts + 1}), row_token(DType::i32, {rows}), slot_row(DType::i32, {s.tokens, s.k});
        run(gpu, gpu.put(offsets), gpu.put(row_token), gpu.put(slot_row), gpu_gathered, gpu_y, gpu_dx, gpu_row_value, gpu_back, [&](ConstTensorView v) -> ConstTensorView { return gpu.put(v); });
        run(cpu, offsets, row_token, slot_row, gathered, y, dx, row_value, back, [](ConstTensorView v) { return v; });
        EXPECT_EQ(count_bit_differences(gpu.get(gpu_gathered), gathered), 0) << s << " width " << width;
        EXPECT_EQ(count_bit_differences(gpu.get(gpu_y), y), 0) << s << " width " << width;
        EXPECT_EQ(count_bit_differences(gpu.get(gpu_dx), dx), 0) << s << " width " << width;
        EXPECT_EQ(count_bit_differences(gpu.get(gpu_row_value), row_value), 0) << s << " width " << width;
        EXPECT_EQ(count_bit_differences(gpu.get(gpu_back), back), 0) << s << " width " << width;
      }
}

}  // namespace
}  // namespace lockstep
