// Rows land where the CPU puts them, with rows of 16, 4, 2 bytes to a word, strided, and nothing else is touched.

#include <gtest/gtest.h>

#include "ops/sequence/sequence_gpu_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::count_bit_differences;
using testing::SequenceSet;
using testing::Tensor;

TEST(SequenceGpu, RingAndStoreAreTheCpus) {
  constexpr int64_t kPageTokens = 12, kRing = 5, kRatio = 4, kPerPage = kPageTokens / kRatio;
  const SequenceSet set = testing::make_sequence_set(1, {1, 4, 5, 6, 23, 40}, kPageTokens);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t width : {1, 7, 8, 20})
      for (const int64_t extra : {0, 3, 8})
        for (const bool with_slots : {true, false}) {
          CpuContext cpu;
          testing::Gpu gpu;
          const Tensor x = testing::random_tensor(2, dtype, {set.num_rows, width + extra});
          const Tensor ring = testing::random_tensor(3, dtype, {set.num_slots, kRing, width}), store = testing::random_tensor(4, dtype, {set.num_pages * kPerPage, width + extra});
          const TensorView gring = gpu.put(ring), gstore = gpu.put(store);
          Philox rng(5, RngPurpose::test);
          const auto calls = with_slots ? testing::random_schedule(rng, set, 7) : std::vector<std::vector<testing::SequencePart>>{testing::packed_parts(set)};
          for (const auto& parts : calls) {
            Call call(set, parts, with_slots);
            const Tensor rows = call.take(x);
            const EntryView entries = call.entries(kRatio);
            const SequenceView gseq = testing::put_sequences(gpu, call.view());
            const EntryView gentries = testing::put_entries(gpu, entries);
            ring_update(cpu, ring, rows.view().cols(extra / 2, width), call.view());
            ring_update(gpu, gring, gpu.put(rows).cols(extra / 2, width), gseq);
            const Tensor made = testing::random_tensor(rng.next(), dtype, {entries.num_entries, width + extra}), back(dtype, {entries.num_entries, width + extra});
            const TensorView gback = gpu.put(back);
            entries_scatter(cpu, store.view().cols(0, width), made.view().cols(0, width), entries, call.view(), kPerPage);
            entries_scatter(gpu, gstore.cols(0, width), gpu.put(made).cols(0, width), gentries, gseq, kPerPage);
            entries_gather(cpu, back.view().cols(0, width), store.view().cols(0, width), entries, call.view(), kPerPage);
            entries_gather(gpu, gback.cols(0, width), gstore.cols(0, width), gentries, gseq, kPerPage);
            EXPECT_EQ(count_bit_differences(gpu.get(gback), back), 0) << dtype_name(dtype) << " " << width << " + " << extra;
          }
          EXPECT_EQ(count_bit_differences(gpu.get(gring), ring), 0) << dtype_name(dtype) << " " << width << " + " << extra;
          EXPECT_EQ(count_bit_differences(gpu.get(gstore), store), 0) << dtype_name(dtype) << " " << width << " + " << extra;
        }
}

TEST(SequenceGpu, PaddingOfEntriesIsStoredNowhere) {
  constexpr int64_t kPageTokens = 12, kRatio = 4, kPerPage = kPageTokens / kRatio, kWidth = 9, kPadding = 3;
  const SequenceSet set = testing::make_sequence_set(6, {23, 3, 40}, kPageTokens);
  CpuContext cpu;
  testing::Gpu gpu;
  Call call(set, testing::packed_parts(set));
  const EntryView entries = call.entries(kRatio);
  const Tensor store = testing::random_tensor(7, DType::f32, {set.num_pages * kPerPage, kWidth}), rows = testing::random_tensor(8, DType::f32, {entries.num_entries + kPadding, kWidth});
  const TensorView gstore = gpu.put(store);
  entries_scatter(cpu, store, rows.view().slice(0, entries.num_entries), entries, call.view(), kPerPage);
  entries_scatter(gpu, gstore, gpu.put(rows), testing::put_padded_entries(gpu, entries, kPadding), testing::put_sequences(gpu, call.view()), kPerPage);
  EXPECT_EQ(count_bit_differences(gpu.get(gstore), store), 0);
}

// The rows of the CPU's slice, at the same positions and with the same pages; sequences outside it have none.
TEST(SequenceGpu, SliceHasTheCpusRows) {
  const SequenceSet set = testing::make_sequence_set(9, {1, 9, 3, 6}, 4);
  CpuContext cpu;
  testing::Gpu gpu;
  Call call(set, testing::packed_parts(set));
  const SequenceView all = call.view(), gall = testing::put_sequences(gpu, all);
  for (int64_t begin = 0; begin <= all.num_tokens; begin += 2)
    for (int64_t count = 0; begin + count <= all.num_tokens; count += 3) {
      ArenaScope scope(cpu.workspace()), gpu_scope(*gpu.context().workspace);
      const SequenceView want = slice_rows(cpu, all, begin, count, cpu.workspace()), got = slice_rows(gpu, gall, begin, count, *gpu.context().workspace);
      ASSERT_EQ(got.num_tokens, count);
      ASSERT_EQ(got.longest, all.longest);
      const Tensor token_seq = gpu.get(got.token_seq), token_pos = gpu.get(got.token_pos), seq_row = gpu.get(got.seq_row), seq_pos = gpu.get(got.seq_pos);
      EXPECT_EQ(count_bit_differences(token_pos, want.token_pos), 0);
      EXPECT_EQ(seq_row.ptr<int32_t>()[got.num_sequences], count);
      for (int64_t t = 0; t < count; ++t) {
        const int32_t s = token_seq.ptr<int32_t>()[t], first = seq_row.ptr<int32_t>()[s];
        ASSERT_EQ(s, all.token_seq.ptr<int32_t>()[begin + t]);
        ASSERT_TRUE(first <= t && t < seq_row.ptr<int32_t>()[s + 1]);
        ASSERT_EQ(token_pos.ptr<int32_t>()[t] - (t - first), seq_pos.ptr<int32_t>()[s]);
      }
    }
}

}  // namespace
}  // namespace lockstep
