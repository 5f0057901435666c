// The kernels have the CPU's bits: whole sequences, calls in pieces with rings, strided rows, and backward.

#include "ops/compressor/compressor.h"

#include <gtest/gtest.h>

#include "ops/sequence/sequence_gpu_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::count_bit_differences;
using testing::random_tensor;
using testing::SequenceSet;
using testing::Tensor;

struct Config {
  std::vector<int64_t> length;
  CompressorShape shape;
};
std::vector<Config> configs() {
  return {
      {{3}, {.ratio = 4, .overlap = true, .width = 5}},  // no entry
      {{3, 4, 5, 7, 8, 9}, {.ratio = 4, .overlap = true, .width = 20}},
      {{7, 1, 8, 9, 40}, {.ratio = 8, .overlap = false, .width = 33}},
      {{127, 128, 130}, {.ratio = 128, .overlap = false, .width = 16}},
      {{5, 6}, {.ratio = 1, .overlap = true, .width = 17}},
      {{13}, {.ratio = 4, .overlap = true, .width = 300}},
  };
}

TEST(CompressorGpu, HasTheCpusBitsHoweverRowsCome) {
  for (const Config& config : configs())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t max_rows : {2, 1000}) {
        CpuContext cpu;
        testing::Gpu gpu;
        const CompressorShape& shape = config.shape;
        const int64_t n = shape.proj_width();
        const SequenceSet set = testing::make_sequence_set(1, config.length, 3 * shape.ratio);
        const Tensor proj = random_tensor(2, DType::f32, {set.num_rows, n + 3}, 3.0f), ape = random_tensor(3, DType::f32, {shape.ratio, shape.halves() * shape.width});
        const Tensor ring = random_tensor(4, DType::f32, {set.num_slots, shape.ring_rows(), n}, 50.0f);
        const TensorView gring = gpu.put(ring), gape = gpu.put(ape);
        Philox rng(5, RngPurpose::test);
        for (const auto& parts : testing::random_schedule(rng, set, max_rows)) {
          Call call(set, parts);
          const EntryView entries = call.entries(shape.ratio);
          const Tensor rows = call.take(proj), pooled = random_tensor(6, dtype, {entries.num_entries, shape.width + 2});
          const SequenceView gseq = testing::put_sequences(gpu, call.view());
          const TensorView grows = gpu.put(rows), gpooled = gpu.put(pooled);
          compress(cpu, pooled.view().cols(1, shape.width), rows.view().cols(2, n), ape, ring, entries, call.view(), shape);
          compress(gpu, gpooled.cols(1, shape.width), grows.cols(2, n), gape, gring, testing::put_entries(gpu, entries), gseq, shape);
          ring_update(cpu, ring, rows.view().cols(2, n), call.view());
          ring_update(gpu, gring, grows.cols(2, n), gseq);
          EXPECT_EQ(count_bit_differences(gpu.get(gpooled), pooled), 0) << shape.ratio << " " << shape.width << " " << max_rows;
        }
      }
}

TEST(CompressorGpu, PaddingIsZero) {
  CpuContext cpu;
  testing::Gpu gpu;
  constexpr int64_t kPadding = 3;
  const CompressorShape shape = {.ratio = 4, .overlap = true, .width = 20};
  const SequenceSet set = testing::make_sequence_set(1, {3, 9, 16}, 12);
  Call call(set, testing::packed_parts(set), /*with_slots=*/false);
  const EntryView entries = call.entries(shape.ratio);
  const Tensor proj = random_tensor(2, DType::f32, {set.num_rows, shape.proj_width()}), ape = random_tensor(3, DType::f32, {shape.ratio, shape.halves() * shape.width});
  const Tensor want(DType::bf16, {entries.num_entries + kPadding, shape.width});
  const TensorView got = gpu.make(DType::bf16, want.view().shape);
  std::memset(want.view().data, 0, want.view().bytes());
  compress(cpu, want.view().slice(0, entries.num_entries), proj, ape, ConstTensorView(), entries, call.view(), shape);
  compress(gpu, got, gpu.put(proj), gpu.put(ape), ConstTensorView(), testing::put_padded_entries(gpu, entries, kPadding), testing::put_sequences(gpu, call.view()), shape);
  EXPECT_EQ(count_bit_differences(gpu.get(got), want), 0);
}

TEST(CompressorGpu, BackwardHasTheCpusBits) {
  for (const Config& config : configs()) {
    CpuContext cpu;
    testing::Gpu gpu;
    const CompressorShape& shape = config.shape;
    const int64_t n = shape.proj_width();
    const SequenceSet set = testing::make_sequence_set(1, config.length, 3 * shape.ratio);
    Call call(set, testing::packed_parts(set), /*with_slots=*/false);
    const EntryView entries = call.entries(shape.ratio);
    const Tensor proj = random_tensor(2, DType::f32, {set.num_rows, n}, 3.0f), ape = random_tensor(3, DType::f32, {shape.ratio, shape.halves() * shape.width});
    const Tensor dpooled = random_tensor(4, DType::f32, {entries.num_entries, shape.width}), dproj = random_tensor(5, DType::f32, {set.num_rows, n + 4}),
                 dape = random_tensor(6, DType::f32, {shape.ratio, shape.halves() * shape.width});
    const TensorView gdproj = gpu.put(dproj), gdape = gpu.put(dape);
    compress_backward(cpu, dproj.view().cols(1, n), dape, dpooled, proj, ape, entries, call.view(), shape);
    compress_backward(gpu, gdproj.cols(1, n), gdape, gpu.put(dpooled), gpu.put(proj), gpu.put(ape), testing::put_entries(gpu, entries),
                      testing::put_sequences(gpu, call.view()), shape);
    EXPECT_EQ(count_bit_differences(gpu.get(gdproj), dproj), 0) << shape.ratio << " " << shape.width;
    EXPECT_EQ(count_bit_differences(gpu.get(gdape), dape), 0) << shape.ratio << " " << shape.width;
  }
}

}  // namespace
}  // namespace lockstep
