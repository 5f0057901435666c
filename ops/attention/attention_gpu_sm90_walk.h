#pragma once
// The walk that Hopper's attention kernels share. A block of three warpgroups takes items, each a query and a tile of heads, one after the other. Warpgroup 0 feeds:
// the heads' rows, then pieces of 64 rows of the query's list. Of the other two, 1 has the logits and weights of the even pieces, 2 those of the odd, which they give
// each other through shared memory; each multiplies all pieces' rows, in order, for half of the channels. So one's elementwise work runs beside the other's products.
//
// Memory (shared): kStages, rows, and the barriers, as below, and list_size. Problem: num_items, query(item), tile(item), keys. Work, one warpgroup's part:
//   begin(t, tile)                     an item's heads are there
//   multiply_logits(rows, half)        starts the products over half of the channels
//   weigh(begin, count)                weights of the piece's first `count` rows, for the other warpgroup too; ends with announce()
//   take()                             the other's statistics
//   carry(), multiply_rows<own>(rows, first)   the outputs so far, and with a piece more
//   leave(begin, count)                what else an own piece is good for
//   finish(t, tile, alternate)         outputs; calls sync_both() once. alternate: 0, 1, 0, ...

#include <type_traits>

#include "ops/attention/attention_gpu_sm90_tiles.h"

namespace lockstep::gpu::sm90_attention {

template <int kStages>
struct WalkBarriers {
  sm90::Barrier q_full, q_empty, full[kStages][2], empty[kStages][2];  // stages in halves of the channels
  GPU_INLINE void init() {
    q_full.init(kFeeders + 1);
    q_empty.init(kConsumerWarps);
    for (int i = 0; i < kStages * 2; ++i) {
      full[i / 2][i % 2].init(kFeeders);
      empty[i / 2][i % 2].init(kConsumerWarps / 2);
    }
    sm90::publish_barriers();
  }
};

// Where a piece is in shared memory, and the parity of its barriers.
template <int kStages>
struct Place {
  int stage = 0;
  unsigned phase = 0;
  GPU_INLINE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Weights and statistics of a piece of this parity are there for both warpgroups.
template <int kParity>
GPU_INLINE void announce() { sm90::arrive_at(3 + kParity, 256); }
template <int kParity>
GPU_INLINE void await() { sm90::sync_at(3 + kParity, 256); }
GPU_INLINE void sync_both() { sm90::sync_at(5, 256); }

// f(chunk, k, accumulate) for each product that logits sum over half of the channels: of chunk `chunk` of 64, channels 16 k to 16 k + 15.
template <int D, typename F>
GPU_INLINE void for_channels(int half, const F& f) {
#pragma unroll
  for (int i = 0; i < D / 128; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) f(half * (D / 128) + i, k, (half | i | k) != 0);
}

// copy_heads(t, tile, list): the heads' rows, on their way.
template <int D, typename Memory, typename Problem, typename CopyHeads>
GPU_INLINE void feed(Memory& s, const Problem& p, CopyHeads copy_heads) {
  const int mine = Sources<>::mine();
  Place<Memory::kStages> place;
  unsigned q_phase = 1;
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1) {
    const int64_t t = p.query(item);
    const List<bf16> list = p.keys.list(t);
    const int n = list.size();
    s.barriers.q_empty.wait(q_phase);
    copy_heads(t, p.tile(item), list);
    arrive_when_copied(s.barriers.q_full);
    if (threadIdx.x == 0) {
      s.list_size = n;
      s.barriers.q_full.arrive();
    }
    for (int begin = 0; begin < n; begin += kRows) {
      const Sources<> rows(begin + mine < n ? p.keys.row(list, begin + mine) : zeros());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s.barriers.empty[place.stage][half].wait(place.phase ^ 1);
        rows.template copy<D / 128>(s.rows[place.stage], half * (D / 128));
        arrive_when_copied(s.barriers.full[place.stage][half]);
      }
      place.advance();
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // no thread leaves copies behind
}

template <int kHalf, typename Work, typename Memory, typename Problem>
GPU_INLINE void attend(Memory& s, const Problem& p) {
  Work work(s, p);
  using At = Place<Memory::kStages>;
  At place;
  unsigned q_phase = 0;
  const auto arrive = [&](sm90::Barrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  };
  // O takes in a piece whose weights are known; its rows are then free.
  const auto add = [&](auto own, const At& at, bool first) {
    if (!first) work.carry();
    sm90::wgmma_fence();
    work.template multiply_rows<decltype(own)::value>(s.rows[at.stage], first);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    arrive(s.barriers.empty[at.stage][kHalf]);
  };
  const auto multiply_logits = [&](const At& at) {
    sm90::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      s.barriers.full[at.stage][half].wait(at.phase);
      sm90::publish_stores();
      work.multiply_logits(s.rows[at.stage], half);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
  };
  const auto add_own = [&](const At& at, int begin, int n) {
    const bool last = begin + 2 * kRows >= n;
    if (last && !Work::kKeepsHeads) arrive(s.barriers.q_empty);  // they have been read for the last time
    work.weigh(begin, n - begin);
    add(std::true_type{}, at, begin == 0);
    work.leave(begin, n - begin);
    if (last && Work::kKeepsHeads) arrive(s.barriers.q_empty);
  };
  const auto add_others = [&](const At& at, bool first) {
    await<kHalf ^ 1>();
    work.take();
    s.barriers.full[at.stage][kHalf].wait(at.phase);
    sm90::publish_stores();
    add(std::false_type{}, at, first);
  };
  for (int item = block_x(); item < p.num_items; item += grid_dim(), q_phase ^= 1) {
    s.barriers.q_full.wait(q_phase);
    const int n = s.list_size;
    work.begin(p.query(item), p.tile(item));
    if (kHalf == 1 && n <= kRows) arrive(s.barriers.q_empty);
    for (int begin = 0; begin < n; begin += 2 * kRows) {
      const int odd = begin + kRows;
      const At even_at = place;
      place.advance();
      const At odd_at = place;
      if (odd < n) place.advance();
      if constexpr (kHalf == 0) {
        multiply_logits(even_at);
        add_own(even_at, begin, n);
        if (odd < n) add_others(odd_at, false);
      } else {
        if (odd < n) multiply_logits(odd_at);
        add_others(even_at, begin == 0);
        if (odd < n) add_own(odd_at, odd, n);
      }
    }
    work.finish(p.query(item), p.tile(item), q_phase);
  }
}

}  // namespace lockstep::gpu::sm90_attention
