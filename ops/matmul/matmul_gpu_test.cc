// The portable kernels have the CPU's bits: in every form and tile shape, with operands that can be read in chunks and others, strided, accumulating,
// quantised, by experts. Whatever kernels the op takes on this GPU, a row's bits do not depend on the call, and values are the CPU's up to roundings.

#include <gtest/gtest.h>

#include <cmath>
#include <list>
#include <utility>
#include <vector>

#include "ops/gpu_testing.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_cpu.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/swiglu/swiglu.h"

namespace lockstep {
namespace {

using testing::count_bit_differences;
using testing::int_tensor;
using testing::random_tensor;
using testing::Tensor;

constexpr DType kFloats[] = {DType::f32, DType::bf16};

struct Sizes {
  int64_t m, n, k, segment = 0;
};
std::ostream& operator<<(std::ostream& o, const Sizes& s) { return o << s.m << " x " << s.n << " x " << s.k << " segment " << s.segment; }

// What the GPU makes of the same call, `gap` columns of `out` aside, which must stay as they are.
class MatmulGpu : public ::testing::Test {
 protected:
  template <typename F>
  void expect_same(const Tensor& out, const F& run) {
    const TensorView on_gpu = gpu_.put(out);
    run(gpu_, on_gpu, [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); });
    run(cpu_, out.view(), [](ConstTensorView v) { return v; });
    EXPECT_EQ(count_bit_differences(gpu_.get(on_gpu), out), 0);
  }
  // The portable kernels on the GPU, the op on the CPU.
  static void matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, int64_t k_segment = 0) {
    c.on_gpu() ? device::portable::matmul(c, y, x, w, k_segment) : lockstep::matmul(c, y, x, w, k_segment);
  }
  static void matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, bool accumulate = false) {
    c.on_gpu() ? device::portable::matmul_backward_input(c, dx, dy, w, accumulate) : lockstep::matmul_backward_input(c, dx, dy, w, accumulate);
  }
  static void matmul_backward_weight(Context& c, TensorView dw, ConstTensorView dy, ConstTensorView x) {
    c.on_gpu() ? device::portable::matmul_backward_weight(c, dw, dy, x) : lockstep::matmul_backward_weight(c, dw, dy, x);
  }
  static void grouped_matmul(Context& c, TensorView y, ConstTensorView x, const WeightView& w, ConstTensorView offsets) {
    c.on_gpu() ? device::portable::grouped_matmul(c, y, x, w, offsets) : lockstep::grouped_matmul(c, y, x, w, offsets);
  }
  static void grouped_matmul_backward_input(Context& c, TensorView dx, ConstTensorView dy, const WeightView& w, ConstTensorView offsets, bool accumulate) {
    c.on_gpu() ? device::portable::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate)
               : lockstep::grouped_matmul_backward_input(c, dx, dy, w, offsets, accumulate);
  }
  static void grouped_matmul_backward_weight(Context& c, TensorView dw, ConstTensorView dy, ConstTensorView x, ConstTensorView offsets) {
    c.on_gpu() ? device::portable::grouped_matmul_backward_weight(c, dw, dy, x, offsets) : lockstep::grouped_matmul_backward_weight(c, dw, dy, x, offsets);
  }

  CpuContext cpu_;
  testing::Gpu gpu_;
};

TEST_F(MatmulGpu, Forward) {
  // The last two fill the device with tiles of 16 x 32 and of 128 x 64. The thin ones of f32 before are longer than all stages of their kernels.
  for (const Sizes& s : {Sizes{0, 5, 3}, Sizes{3, 0, 4}, Sizes{2, 3, 0}, Sizes{1, 1, 1}, Sizes{1, 130, 33}, Sizes{5, 40, 600}, Sizes{9, 24, 264}, Sizes{3, 33, 100, 30},
                         Sizes{6, 40, 96, 24}, Sizes{5, 24, 1840}, Sizes{2051, 23, 400},
                         Sizes{40, 1400, 72}, Sizes{39, 1370, 270, 65}, Sizes{700, 1400, 40}, Sizes{650, 1370, 37, 11}})
    for (const DType xt : kFloats)
      for (const DType wt : kFloats) {
        if (s.m > 2000 ? xt != DType::bf16 || wt != DType::f32 : s.m > 30 && xt != wt) continue;
        SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(xt) << " " << dtype_name(wt));
        const int64_t gap = s.k % 8 == 0 ? 8 : 5;
        const Tensor x = random_tensor(1, xt, {s.m, s.k + gap}), w = random_tensor(2, wt, {s.n, s.k + gap});
        expect_same(random_tensor(3, s.m % 2 == 0 ? xt : wt, {s.m, s.n + 3}), [&](Context& c, TensorView y, const auto& at) {
          matmul(c, y.cols(1, s.n), at(x).cols(gap == 8 ? 8 : 2, s.k), {at(w).cols(0, s.k), {}}, s.segment);
        });
      }
}

TEST_F(MatmulGpu, Backward) {
  for (const Sizes& s : {Sizes{0, 5, 3}, Sizes{3, 0, 4}, Sizes{1, 1, 1}, Sizes{5, 24, 130}, Sizes{40, 24, 136},
                         Sizes{330, 28, 72}, Sizes{3, 4, 64}, Sizes{33, 64, 48}, Sizes{150, 40, 72}, Sizes{67, 131, 37}})
    for (const DType t : kFloats)
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(::testing::Message() << s << " " << dtype_name(t) << accumulate);
        const int64_t gap = s.k % 8 == 0 ? 8 : 5;
        const Tensor x = random_tensor(1, t, {s.m, s.k + gap}), w = random_tensor(2, t, {s.n, s.k + gap}), dy = random_tensor(3, DType::f32, {s.m, s.n + gap});
        expect_same(random_tensor(4, DType::f32, {s.m, s.k + 3}), [&](Context& c, TensorView dx, const auto& at) {
          matmul_backward_input(c, dx.cols(1, s.k), at(dy).cols(0, s.n), {at(w).cols(0, s.k), {}}, accumulate);
        });
        expect_same(random_tensor(5, DType::f32, {s.n, s.k + 3}), [&](Context& c, TensorView dw, const auto& at) {
          matmul_backward_weight(c, dw.cols(1, s.k), at(dy).cols(0, s.n), at(x).cols(0, s.k));
        });
      }
}

TEST_F(MatmulGpu, Experts) {
  const std::vector<std::vector<int32_t>> splits = {{0, 0}, {0, 3, 3, 4, 9}, {0, 0, 130, 133, 290, 290, 291}, {0, 20, 41, 41, 60}};
  for (const auto& split : splits)
    for (const auto& [n, k] : {std::pair{40, 64}, {33, 21}, {640, 16}})
      for (const DType t : kFloats) {
        SCOPED_TRACE(::testing::Message() << split.size() - 1 << " experts, " << n << " x " << k << " " << dtype_name(t));
        const Tensor offsets = int_tensor(split);
        const int64_t experts = offsets.elements() - 1, rows = split.back();
        const Tensor x = random_tensor(1, t, {rows, k}), w = random_tensor(2, t, {experts, n, k}), dy = random_tensor(3, DType::f32, {rows, n});
        expect_same(random_tensor(4, t, {rows, n + 3}),
                    [&](Context& c, TensorView y, const auto& at) { grouped_matmul(c, y.cols(1, n), at(x), {at(w), {}}, at(offsets)); });
        for (const bool accumulate : {false, true})
          expect_same(random_tensor(5, DType::f32, {rows, k}),
                      [&](Context& c, TensorView dx, const auto& at) { grouped_matmul_backward_input(c, dx, at(dy), {at(w), {}}, at(offsets), accumulate); });
        expect_same(random_tensor(6, DType::f32, {experts, n, k}),
                    [&](Context& c, TensorView dw, const auto& at) { grouped_matmul_backward_weight(c, dw, at(dy), at(x), at(offsets)); });
      }
}

// Rows of very different sizes, zeros among them.
Tensor wide_range(uint64_t seed, DType dtype, Shape shape) {
  Tensor t = random_tensor(seed, dtype, shape);
  const int64_t k = shape[shape.rank - 1];
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, t.get(i) * std::ldexp(1.0, static_cast<int>(i / k * 7 % 24) - 12) * (i % 5 == 0 ? 0.01 : i % 11 == 0 ? 0.0 : 1.0));
  return t;
}

struct QuantWeight {
  Tensor codes, scales;
  BlockGrid rows, cols;

  QuantWeight(Context& c, ConstTensorView w, const QuantFormat& f, int64_t row_period, int64_t col_period) : rows{f.block_rows, row_period}, cols{f.block_cols, col_period} {
    const int e = w.shape.rank - 2;
    const int64_t n = w.shape[e], k = w.shape[e + 1], bytes = f.codes == DType::e2m1x2 ? (k + 1) / 2 : k;
    codes = Tensor(f.codes, e == 0 ? Shape{n, bytes} : Shape{w.shape[0], n, bytes});
    scales = Tensor(DType::ue8m0, e == 0 ? Shape{rows.blocks_in(n), cols.blocks_in(k)} : Shape{w.shape[0], rows.blocks_in(n), cols.blocks_in(k)});
    quantize_by_grid(c, codes, scales, rows, cols, w);
  }
  template <typename At>
  WeightView view(const At& at) const { return {at(codes), {}, at(scales), {}, rows, cols}; }
};

struct QuantCase {
  int64_t m, n, k;
  bool fp4 = false;
  int64_t row_period = 0, col_period = 0, k_segment = 0;
};

TEST_F(MatmulGpu, Quantised) {
  const QuantCase cases[] = {{0, 5, 3},
                             {1, 1, 1},
                             {1, 130, 640},
                             {1, 33, 129},
                             {5, 24, 352, true},
                             {5, 24, 127, true},
                             {13, 200, 104, false, 24},
                             {25, 40, 96, false, 0, 24},
                             {30, 70, 96, false, 0, 24, 24},
                             {3, 20, 510, false, 0, 255, 255},
                             {9, 20, 20, false, 0, 5, 5},
                             {14, 20, 1280, false, 10, 640, 640},
                             {40, 1400, 160},
                             {39, 1370, 100, true},
                             {650, 1380, 48, false, 0, 24, 24},
                             {700, 1400, 72, true}};
  for (const QuantCase& s : cases)
    for (const DType t : kFloats) {
      if (s.m > 100 && t == DType::f32) continue;
      SCOPED_TRACE(::testing::Message() << s.m << " x " << s.n << " x " << s.k << (s.fp4 ? " fp4" : "") << " periods " << s.row_period << " " << s.col_period << " segment "
                                        << s.k_segment << " " << dtype_name(t));
      const QuantWeight w(cpu_, wide_range(1, DType::f32, {s.n, s.k}), s.fp4 ? kFp4 : kFp8Weight, s.row_period, s.col_period);
      const Tensor x = wide_range(2, t, {s.m, s.k + 3}), dy = random_tensor(3, DType::f32, {s.m, s.n});
      expect_same(random_tensor(4, t, {s.m, s.n}), [&](Context& c, TensorView y, const auto& at) { matmul(c, y, at(x).cols(1, s.k), w.view(at), s.k_segment); });
      if (s.m > 100) continue;
      for (const bool accumulate : {false, true})
        expect_same(random_tensor(5, DType::f32, {s.m, s.k}),
                    [&](Context& c, TensorView dx, const auto& at) { matmul_backward_input(c, dx, at(dy), w.view(at), accumulate); });
    }
}

TEST_F(MatmulGpu, QuantisedExperts) {
  const Tensor offsets = int_tensor({0, 0, 130, 133, 170});
  const int64_t experts = 4, rows = 170;
  for (const bool fp4 : {false, true})
    for (const auto& [n, k] : {std::pair{40, 256}, {20, 98}, {600, 32}}) {
      SCOPED_TRACE(::testing::Message() << n << " x " << k << (fp4 ? " fp4" : ""));
      const QuantWeight w(cpu_, wide_range(1, DType::f32, {experts, n, k}), fp4 ? kFp4 : kFp8Weight, n, 0);
      const Tensor x = wide_range(2, DType::bf16, {rows, k}), dy = random_tensor(3, DType::f32, {rows, n});
      expect_same(random_tensor(4, DType::bf16, {rows, n}), [&](Context& c, TensorView y, const auto& at) { grouped_matmul(c, y, at(x), w.view(at), at(offsets)); });
      expect_same(random_tensor(5, DType::f32, {rows, k}),
                  [&](Context& c, TensorView dx, const auto& at) { grouped_matmul_backward_input(c, dx, at(dy), w.view(at), at(offsets), true); });
    }
}

// What columns_of takes of a weight: 64-column periods of a wider matrix.
TEST_F(MatmulGpu, ColumnsOfAQuantisedWeight) {
  const QuantWeight w(cpu_, wide_range(1, DType::f32, {30, 192}), kFp8Weight, 0, 64);
  const Tensor x = wide_range(2, DType::bf16, {7, 64}), dy = random_tensor(3, DType::f32, {7, 30});
  expect_same(random_tensor(4, DType::bf16, {7, 30}), [&](Context& c, TensorView y, const auto& at) { matmul(c, y, at(x), columns_of(w.view(at), 64, 64)); });
  expect_same(random_tensor(5, DType::f32, {7, 64}), [&](Context& c, TensorView dx, const auto& at) { matmul_backward_input(c, dx, at(dy), columns_of(w.view(at), 64, 64)); });
}

// The op's own choice of kernels. n = 192 is no multiple of their tiles, k = 256 has two blocks of scales and segments of 128.
struct Chosen {
  const char* name;
  DType x, y;
  bool quantised;
};
const Chosen kChosen[] = {{"f32", DType::f32, DType::f32, false}, {"bf16", DType::bf16, DType::bf16, false}, {"bf16 to f32", DType::bf16, DType::f32, false},
                          {"fp8", DType::bf16, DType::bf16, true}};
constexpr int64_t kRows = 70, kN = 192, kK = 256;

TEST_F(MatmulGpu, ARowsBitsDoNotDependOnTheCall) {
  for (const Chosen& s : kChosen)
    for (const int64_t segment : {0, 128}) {
      const QuantWeight q(cpu_, random_tensor(1, DType::f32, {kN, kK}), kFp8Weight, 0, segment);
      const Tensor w = random_tensor(1, s.x, {kN, kK}), x = random_tensor(2, s.x, {kRows, kK});
      const auto put = [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); };
      const WeightView weight = s.quantised ? q.view(put) : WeightView{put(w), {}};
      const ConstTensorView rows = gpu_.put(x);
      const TensorView all = gpu_.make(s.y, {kRows, kN});
      lockstep::matmul(gpu_, all, rows, weight, segment);
      const Tensor expected = gpu_.get(all);
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {47, 1}, {3, 5}, {20, 40}}) {
        const TensorView part = gpu_.make(s.y, {count, kN});
        lockstep::matmul(gpu_, part, rows.slice(begin, count), weight, segment);
        EXPECT_EQ(count_bit_differences(gpu_.get(part), expected.view().slice(begin, count)), 0) << s.name << " rows " << begin << " + " << count;
      }
      // Storage rounds by at most 2^-9 of a value; sums of 256 products by far less.
      const Tensor on_cpu(s.y, {kRows, kN});
      lockstep::matmul(cpu_, on_cpu, x, s.quantised ? q.view([](ConstTensorView v) { return v; }) : WeightView{w, {}}, segment);
      EXPECT_LT(testing::relative_l2(expected, on_cpu), 0x1p-8) << s.name;
    }
}

// Of several dtypes and widths in one call, with an x of its own here and there, of one matrix each and by experts.
TEST_F(MatmulGpu, ManyHaveTheBitsOfEach) {
  const auto put = [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); };
  constexpr int64_t kExperts = 3;
  for (const bool grouped : {false, true}) {
    const auto shape = [&](int64_t n) { return grouped ? Shape{kExperts, n, kK} : Shape{n, kK}; };
    const QuantWeight q1(cpu_, random_tensor(1, DType::f32, shape(128)), kFp8Weight, grouped ? 128 : 0, 0),
        q2(cpu_, random_tensor(2, DType::f32, shape(256)), kFp8Weight, grouped ? 256 : 0, 0);
    const Tensor offsets = int_tensor({0, 3, 3, 40});
    for (const int64_t rows : {1, 40}) {
      if (grouped && rows == 1) continue;
      const ConstTensorView x = gpu_.put(random_tensor(3, DType::bf16, {rows, kK})), other = gpu_.put(random_tensor(4, DType::bf16, {rows, kK})),
                            x32 = gpu_.put(random_tensor(5, DType::f32, {rows, kK})), at = gpu_.put(offsets);
      const auto y = [&](DType dtype, int64_t n) { return gpu_.make(dtype, {rows, n}); };
      const auto w = [&](uint64_t seed, DType dtype, int64_t n) { return WeightView{gpu_.put(random_tensor(seed, dtype, shape(n))), {}}; };
      std::vector<MatmulCall> calls = {{y(DType::bf16, 72), x, w(6, DType::bf16, 72)},   {y(DType::f32, 8), x, w(7, DType::bf16, 8)},
                                       {y(DType::bf16, 128), x, q1.view(put)},           {y(DType::bf16, 24), x32, w(8, DType::f32, 24)},
                                       {y(DType::bf16, 200), other, w(9, DType::bf16, 200)}, {y(DType::f32, 256), x, q2.view(put)},
                                       {y(DType::f32, 128), other, q1.view(put)}};
      for (uint64_t i = 0; i < 6; ++i) calls.push_back({y(DType::bf16, 40), x, w(10 + i, DType::bf16, 40)});  // more than a launch takes
      grouped ? grouped_matmul_many(gpu_, calls, at) : matmul_many(gpu_, calls);
      for (size_t i = 0; i < calls.size(); ++i) {
        const Tensor together = gpu_.get(calls[i].y);
        const TensorView alone = gpu_.make(calls[i].y.dtype, calls[i].y.shape);
        grouped ? lockstep::grouped_matmul(gpu_, alone, calls[i].x, calls[i].w, at) : lockstep::matmul(gpu_, alone, calls[i].x, calls[i].w);
        EXPECT_EQ(count_bit_differences(gpu_.get(alone), together), 0) << "call " << i << " of " << rows << " rows, grouped " << grouped;
      }
    }
  }
}

// Rows that the products bring to their experts themselves, twice and in any order, on either device.
TEST_F(MatmulGpu, GatheredRowsHaveTheBitsOfRowsInPlace) {
  const Tensor offsets = int_tensor({0, 3, 3, 40}), row_of = testing::random_ints(8, {40}, 15);
  for (const Chosen& s : kChosen) {
    const QuantWeight q1(cpu_, random_tensor(1, DType::f32, {3, 128, kK}), kFp8Weight, 128, 0), q2(cpu_, random_tensor(2, DType::f32, {3, 256, kK}), kFp8Weight, 256, 0);
    const Tensor x = random_tensor(3, s.x, {15, kK}), w1 = random_tensor(1, s.x, {3, 128, kK}), w2 = random_tensor(2, s.x, {3, 256, kK});
    const auto check = [&](Context& c, const auto& put, const auto& make, const auto& get) {
      const ConstTensorView tokens = put(x), of = put(row_of), at = put(offsets);
      const WeightView v1 = s.quantised ? q1.view(put) : WeightView{put(w1), {}}, v2 = s.quantised ? q2.view(put) : WeightView{put(w2), {}};
      const TensorView rows = make(s.x, Shape{40, kK}), scratch = make(s.x, Shape{40, kK});
      moe_gather(c, rows, tokens, of);
      const TensorView y1 = make(s.y, Shape{40, 128}), y2 = make(s.y, Shape{40, 256}), in_place1 = make(s.y, Shape{40, 128}), in_place2 = make(s.y, Shape{40, 256});
      const MatmulCall gathering[] = {{y1, tokens, v1}, {y2, tokens, v2}}, in_place[] = {{in_place1, rows, v1}, {in_place2, rows, v2}};
      grouped_matmul_many(c, gathering, at, {of, scratch});
      grouped_matmul_many(c, in_place, at);
      EXPECT_EQ(count_bit_differences(get(y1), get(in_place1)), 0) << s.name;
      EXPECT_EQ(count_bit_differences(get(y2), get(in_place2)), 0) << s.name;
    };
    check(gpu_, [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); }, [&](DType dtype, const Shape& shape) { return gpu_.make(dtype, shape); },
          [&](TensorView v) { return gpu_.get(v); });
    std::list<Tensor> made;
    check(cpu_, [](ConstTensorView v) { return v; }, [&](DType dtype, const Shape& shape) { return made.emplace_back(dtype, shape).view(); }, [](TensorView v) { return v; });
  }
}

// What an op writes for a product to read has the bits of the two steps, of one matrix and by experts.
TEST_F(MatmulGpu, InputsThatAnOpWrites) {
  const auto put = [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); };
  const ConstTensorView offsets = gpu_.put(int_tensor({0, 3, 3, 40}));
  for (const Chosen& s : kChosen)
    for (const bool grouped : {false, true}) {
      const Shape shape = grouped ? Shape{3, 128, kK} : Shape{128, kK};
      const QuantWeight q(cpu_, random_tensor(1, DType::f32, shape), kFp8Weight, grouped ? 128 : 0, 0);
      const WeightView w = s.quantised ? q.view(put) : WeightView{put(random_tensor(1, s.x, shape)), {}};
      const ConstTensorView gate = put(random_tensor(2, s.x, {40, kK})), up = put(random_tensor(3, s.x, {40, kK}));
      const TensorView y = gpu_.make(s.y, {40, 128}), in_two = gpu_.make(s.y, {40, 128}), between = gpu_.make(s.x, {40, kK});
      Context& c = gpu_;
      const ArenaScope scope(*c.workspace);
      const MatmulInput x = matmul_input(c, s.x, 40, kK, w);
      swiglu(c, x, gate, up, {}, 0);
      swiglu(c, between, gate, up, {}, 0);
      grouped ? lockstep::grouped_matmul(c, y, x, w, offsets) : lockstep::matmul(c, y, x, w);
      grouped ? lockstep::grouped_matmul(c, in_two, between, w, offsets) : lockstep::matmul(c, in_two, between, w);
      EXPECT_EQ(count_bit_differences(gpu_.get(y), gpu_.get(in_two)), 0) << s.name << " grouped " << grouped;
    }
}

TEST_F(MatmulGpu, ExpertsAndGradientsHaveTheCpusValues) {
  const Tensor offsets = int_tensor({0, 0, 40, 43, kRows});
  for (const Chosen& s : kChosen) {
    const QuantWeight q(cpu_, random_tensor(1, DType::f32, {4, kN, kK}), {DType::e4m3, DType::ue8m0, 64, 128}, kN, 0);
    const Tensor w = random_tensor(1, s.x, {4, kN, kK}), x = random_tensor(2, s.x, {kRows, kK}), dy = random_tensor(3, DType::f32, {kRows, kN});
    const auto near = [&](const Tensor& out, const auto& run) {
      const TensorView on_gpu = gpu_.put(out);
      run(static_cast<Context&>(gpu_), on_gpu, [&](ConstTensorView v) -> ConstTensorView { return gpu_.put(v); });
      run(static_cast<Context&>(cpu_), out.view(), [](ConstTensorView v) { return v; });
      // dy may be rounded to bf16, by 2^-9 of each.
      EXPECT_LT(testing::relative_l2(gpu_.get(on_gpu), out), 0x1p-8) << s.name;
    };
    const auto weight = [&](const auto& at) { return s.quantised ? q.view(at) : WeightView{at(w), {}}; };
    near(random_tensor(4, s.y, {kRows, kN}), [&](Context& c, TensorView y, const auto& at) { lockstep::grouped_matmul(c, y, at(x), weight(at), at(offsets)); });
    near(random_tensor(5, DType::f32, {kRows, kK}),
         [&](Context& c, TensorView dx, const auto& at) { lockstep::grouped_matmul_backward_input(c, dx, at(dy), weight(at), at(offsets), true); });
    near(random_tensor(5, DType::f32, {kRows, kK}), [&](Context& c, TensorView dx, const auto& at) { lockstep::matmul_backward_input(c, dx, at(dy), weight(at).at(1)); });
    near(random_tensor(6, DType::f32, {4, kN, kK}),
         [&](Context& c, TensorView dw, const auto& at) { lockstep::grouped_matmul_backward_weight(c, dw, at(dy), at(x), at(offsets)); });
    for (const int64_t n : {kN, int64_t{64}})  // 64 rows of dw: the fewest that go to the units
      near(random_tensor(6, DType::f32, {n, kK}), [&](Context& c, TensorView dw, const auto& at) { lockstep::matmul_backward_weight(c, dw, at(dy).cols(0, n), at(x)); });
  }
}

}  // namespace
}  // namespace lockstep
