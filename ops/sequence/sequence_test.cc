// Rows land where the contract says, for any cutting of sequences into calls, and nothing else is touched.

#include "ops/sequence/sequence.h"

#include <gtest/gtest.h>

#include "ops/sequence/sequence_testing.h"

namespace lockstep {
namespace {

using testing::Call;
using testing::SequenceSet;
using testing::Tensor;

class SequenceTest : public ::testing::TestWithParam<DType> {};

TEST_P(SequenceTest, RingHoldsTheLastPositionsHoweverTheyCame) {
  const SequenceSet set = testing::make_sequence_set(1, {1, 4, 5, 6, 23, 40}, 8);
  constexpr int64_t kRing = 5, kWidth = 7;
  const Tensor x = testing::random_tensor(2, GetParam(), {set.num_rows, kWidth + 3});
  const ConstTensorView columns = x.view().cols(2, kWidth);  // row stride wider than the rows
  for (int threads = 1; threads <= 3; ++threads) {
    CpuContext context(threads);
    for (const int64_t max_rows : {1, 3, 11, 100}) {
      Philox rng(static_cast<uint64_t>(max_rows), RngPurpose::test);
      Tensor ring = testing::random_tensor(3, GetParam(), {set.num_slots, kRing, kWidth});
      const Tensor before = testing::random_tensor(3, GetParam(), {set.num_slots, kRing, kWidth});
      for (const auto& parts : testing::random_schedule(rng, set, max_rows)) {
        Call call(set, parts);
        ring_update(context, ring, call.take(columns), call.view());
      }
      Tensor want = testing::to_dtype(before, GetParam());
      for (size_t s = 0; s < set.length.size(); ++s)
        for (int64_t p = std::max<int64_t>(0, set.length[s] - kRing); p < set.length[s]; ++p)
          for (int64_t i = 0; i < kWidth; ++i)
            want.set((set.slot[s] * kRing + p % kRing) * kWidth + i, x.get((set.offset[s] + p) * (kWidth + 3) + 2 + i));
      EXPECT_EQ(testing::count_bit_differences(ring, want), 0) << threads << " threads, " << max_rows << " rows a call";
    }
  }
}

TEST_P(SequenceTest, StridedRowsAndSequencesWithoutSlot) {
  const SequenceSet set = testing::make_sequence_set(4, {9, 3}, 8);
  const Tensor x = testing::random_tensor(5, GetParam(), {set.num_rows, 10});
  const ConstTensorView columns = x.view().cols(1, 6);
  CpuContext context(1);
  Tensor ring(GetParam(), {set.num_slots, 4, 6}), copied(GetParam(), {set.num_slots, 4, 6});
  Call call(set, testing::packed_parts(set));
  ring_update(context, ring, columns, call.view());
  ring_update(context, copied, call.take(columns), call.view());
  EXPECT_EQ(testing::count_bit_differences(ring, copied), 0);

  Call without(set, testing::packed_parts(set), /*with_slots=*/false);
  Tensor untouched(GetParam(), {set.num_slots, 4, 6});
  ring_update(context, untouched, columns, without.view());
  EXPECT_EQ(testing::count_bit_differences(untouched, Tensor(GetParam(), {set.num_slots, 4, 6})), 0);
}

TEST_P(SequenceTest, EntriesGoToTheirPagesAndComeBack) {
  constexpr int64_t kPageTokens = 12, kWidth = 5;
  const SequenceSet set = testing::make_sequence_set(6, {2, 3, 12, 13, 50, 31}, kPageTokens);
  for (const int64_t ratio : {1, 3, 4, 12}) {
    const int64_t per_page = kPageTokens / ratio;
    CpuContext context(2);
    Philox rng(static_cast<uint64_t>(ratio), RngPurpose::test);
    Tensor store(GetParam(), {set.num_pages * per_page, kWidth});
    Tensor want(GetParam(), {set.num_pages * per_page, kWidth});
    int64_t num_seen = 0;
    for (const auto& parts : testing::random_schedule(rng, set, 9)) {
      Call call(set, parts);
      const EntryView entries = call.entries(ratio);
      const Tensor x = testing::random_tensor(rng.next(), GetParam(), {entries.num_entries, kWidth});
      entries_scatter(context, store, x, entries, call.view(), per_page);
      for (int64_t e = 0; e < entries.num_entries; ++e) {
        const auto& pages = set.pages[static_cast<size_t>(parts[static_cast<size_t>(entries.seq.ptr<int32_t>()[e])].id)];
        const int64_t idx = entries.idx.ptr<int32_t>()[e];
        for (int64_t i = 0; i < kWidth; ++i)
          want.set((pages[static_cast<size_t>(idx / per_page)] * per_page + idx % per_page) * kWidth + i, x.get(e * kWidth + i));
      }
      Tensor back(GetParam(), {entries.num_entries, kWidth});
      entries_gather(context, back, store, entries, call.view(), per_page);
      EXPECT_EQ(testing::count_bit_differences(back, x), 0);
      num_seen += entries.num_entries;
    }
    int64_t num_wanted = 0;
    for (const int64_t n : set.length) num_wanted += n / ratio;
    EXPECT_EQ(num_seen, num_wanted);
    EXPECT_EQ(testing::count_bit_differences(store, want), 0) << "ratio " << ratio;
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, SequenceTest, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& param) { return dtype_name(param.param); });

TEST(Sequence, NoRows) {
  const SequenceSet set = testing::make_sequence_set(7, {3}, 4);
  CpuContext context(1);
  Call call(set, {});
  Tensor ring(DType::f32, {set.num_slots, 2, 3}), store(DType::f32, {set.num_pages, 3});
  ring_update(context, ring, Tensor(DType::f32, {0, 3}), call.view());
  entries_scatter(context, store, Tensor(DType::f32, {0, 3}), call.entries(4), call.view(), 1);
}

// Every run of rows of a call is a call: the same rows at the same positions, with their sequences' pages.
TEST(Sequence, RowsOfACallAreACall) {
  const SequenceSet set = testing::make_sequence_set(9, {1, 9, 3, 6}, 4);
  CpuContext context(1);
  Call call(set, testing::packed_parts(set));
  const SequenceView all = call.view();
  for (int64_t begin = 0; begin <= all.num_tokens; ++begin)
    for (int64_t count = 0; begin + count <= all.num_tokens; ++count) {
      ArenaScope scope(context.workspace());
      const SequenceView rows = slice_rows(context, all, begin, count, context.workspace());
      check_sequences(rows);
      ASSERT_EQ(rows.num_tokens, count);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t here = rows.token_seq.ptr<int32_t>()[t], there = all.token_seq.ptr<int32_t>()[begin + t];
        ASSERT_EQ(rows.token_pos.ptr<int32_t>()[t], all.token_pos.ptr<int32_t>()[begin + t]);
        ASSERT_EQ(rows.seq_slot.ptr<int32_t>()[here], all.seq_slot.ptr<int32_t>()[there]);
        ASSERT_EQ(rows.page_table.row<int32_t>(here), all.page_table.row<int32_t>(there));
      }
    }
}

TEST(SequenceDeath, WrongArguments) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const SequenceSet set = testing::make_sequence_set(8, {9, 3}, 4);
  CpuContext context(1);
  Call call(set, testing::packed_parts(set));
  Tensor ring(DType::f32, {set.num_slots, 2, 3}), x(DType::f32, {12, 3});
  EXPECT_DEATH(ring_update(context, ring, Tensor(DType::f32, {11, 3}), call.view()), "x \\[11, 3\\] for 12 tokens");
  EXPECT_DEATH(ring_update(context, ring, Tensor(DType::bf16, {12, 3}), call.view()), "ring f32");
  EXPECT_DEATH(ring_update(context, ring.view().slice(0, 1), x, call.view()), "in a ring of 1 slots");
  SequenceView wrong = call.view();
  wrong.num_tokens = 11;
  EXPECT_DEATH(ring_update(context, ring, x, wrong), "token_seq is i32 \\[12\\]");
  const Tensor swapped = testing::int_tensor({0, 3, 12});
  wrong = call.view();
  wrong.seq_row = swapped;
  EXPECT_DEATH(ring_update(context, ring, x, wrong), "name sequences");

  const EntryView entries = call.entries(2);  // 4 and 1
  Tensor store(DType::f32, {set.num_pages * 2, 3}), e(DType::f32, {5, 3});
  EXPECT_DEATH(entries_scatter(context, store, e, entries, call.view(), 4), "completes 9 entries of ratio 1");
  EXPECT_DEATH(entries_scatter(context, store, e, entries, call.view(), 3), "3 entries a page");
  EXPECT_DEATH(entries_scatter(context, store.view().slice(0, 2), e, entries, call.view(), 2), "the store has 2 rows");
  EXPECT_DEATH(entries_gather(context, Tensor(DType::f32, {4, 3}), store, entries, call.view(), 2), "for 5 entries");
}

}  // namespace
}  // namespace lockstep
