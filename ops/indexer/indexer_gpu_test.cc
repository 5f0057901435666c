// The kernels choose what the CPU chooses: lists of every length, ties in great numbers, and calls in pieces.

#include "ops/indexer/indexer.h"

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
  int64_t heads, width, ratio, k;
};

// `steps`: elements are whole numbers from -steps to steps, which makes scores exact and often equal; 0: any numbers.
void compare(const Config& config, DType dtype, int steps, int64_t max_rows) {
  CpuContext cpu;
  testing::Gpu gpu;
  const IndexerShape shape = {.ratio = config.ratio, .per_page = 3};
  const SequenceSet set = testing::make_sequence_set(1, config.length, 3 * config.ratio);
  Tensor q = random_tensor(2, dtype, {set.num_rows, config.heads, config.width}), weight = random_tensor(3, DType::f32, {set.num_rows, config.heads}),
         keys = random_tensor(4, dtype, {set.num_pages * shape.per_page, config.width + 4});
  Philox rng(5, RngPurpose::test);
  if (steps > 0)
    for (Tensor* x : {&q, &weight, &keys})
      for (int64_t i = 0; i < x->elements(); ++i) x->set(i, static_cast<int>(rng.below(static_cast<uint32_t>(2 * steps + 1))) - steps);
  const TensorView gkeys = gpu.put(keys);
  const auto calls = max_rows == 0 ? std::vector<std::vector<testing::SequencePart>>{testing::packed_parts(set)} : testing::random_schedule(rng, set, max_rows);
  for (const auto& parts : calls) {
    Call call(set, parts);
    const Tensor part_q = call.take(q), part_weight = call.take(weight), selected = testing::random_ints(6, {call.view().num_tokens, config.k}, 1000);
    const TensorView gselected = gpu.put(selected);
    index_select(cpu, selected, part_q, part_weight, keys.view().cols(4, config.width), call.view(), shape);
    index_select(gpu, gselected, gpu.put(part_q), gpu.put(part_weight), gkeys.cols(4, config.width), testing::put_sequences(gpu, call.view()), shape);
    EXPECT_EQ(count_bit_differences(gpu.get(gselected), selected), 0)
        << dtype_name(dtype) << " " << config.heads << "x" << config.width << " k " << config.k << " steps " << steps;
  }
}

TEST(IndexerGpu, ChoosesWhatTheCpuChooses) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Config& config : {Config{{3}, 2, 4, 4, 2}, Config{{16, 17, 40}, 1, 1, 4, 1}, Config{{40, 3, 4, 5, 77}, 4, 16, 4, 3}, Config{{60, 33}, 17, 19, 2, 17},
                                 Config{{130}, 3, 8, 1, 64}, Config{{20}, 70, 8, 1, 5}})
      compare(config, dtype, 0, 0);
}

// More entries than a block scores, in few queries: the rows of a sequence's end.
TEST(IndexerGpu, LongListsAndPieces) {
  compare({{19, 40, 2}, 4, 12, 2, 4}, DType::f32, 0, 5);
  CpuContext cpu;
  testing::Gpu gpu;
  const IndexerShape shape = {.ratio = 1, .per_page = 3};
  for (const auto& [length, k] : {std::pair<int64_t, int64_t>{900, 1}, {900, 30}, {900, 896}, {8300, 100}}) {  // 8300: more than the choice holds in shared memory
    const SequenceSet set = testing::make_sequence_set(1, {length}, 3);
    Call call(set, {{.id = 0, .pos = length - 3, .rows = 3}});
    const Tensor q = random_tensor(2, DType::bf16, {3, 2, 8}), weight = random_tensor(3, DType::f32, {3, 2}), keys = random_tensor(4, DType::bf16, {set.num_pages * 3, 8});
    const Tensor selected(DType::i32, {3, k});
    const TensorView gselected = gpu.put(selected);
    index_select(cpu, selected, q, weight, keys, call.view(), shape);
    index_select(gpu, gselected, gpu.put(q), gpu.put(weight), gpu.put(keys), testing::put_sequences(gpu, call.view()), shape);
    EXPECT_EQ(count_bit_differences(gpu.get(gselected), selected), 0) << k;
  }
}

TEST(IndexerGpu, EqualScoresGoToTheLowerIndex) {
  for (const int64_t k : {1, 7, 40}) compare({{90}, 3, 2, 1, k}, DType::f32, 1, 0);
}

}  // namespace
}  // namespace lockstep
