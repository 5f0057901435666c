// moe_plan is a counting sort whose unit is a wave with a run of consecutive (token, slot)s: it counts its run by expert, a scan over experts, then units,
// turns the counts into first rows, and the wave walks its run again and hands them out in order. Few slots are one block's, in one launch; many are
// kUnitsMax waves' and take three. Everything is integers, so how slots are cut into units changes nothing.
//
// The rest copies and sums rows, 8 elements a thread, bound by memory: gather 2 R D elements, combine (K + 2) T D, its backward (K + 2) T D f32.

#include "ops/elements_gpu.h"
#include "ops/moe_permute/moe_permute_cpu.h"

namespace lockstep::device {

namespace {

using namespace gpu;

constexpr int kPlanThreads = 512, kPlanWaves = kPlanThreads / kWave;
constexpr int64_t kOneBlockSlots = 8192, kUnitsMax = 256;

struct Plan {
  int32_t *offsets, *row_token, *slot_row;
  const int32_t* ids;
  int64_t slot_row_stride, ids_stride;
  int slots, k, experts;  // slots: T * K
  int run;                // slots of a unit
};

// Lanes of this wave that are `active` and have the same expert.
GPU_INLINE uint64_t lanes_alike(int expert, int experts, bool active) {
  uint64_t alike = ballot(active);
  for (int bit = 0; 1 << bit < experts; ++bit) {
    const bool set = (expert >> bit & 1) != 0;
    const uint64_t votes = ballot(set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}
// This wave walks its run; `next` are its counters, by expert. visit(slot, its place among the wave's rows of that expert, counting from what next held).
template <typename Visit>
GPU_INLINE void walk_run(const Plan& p, int unit, Shared<int32_t> next, const Visit& visit) {
  const int begin = unit * p.run, end = begin + p.run < p.slots ? begin + p.run : p.slots;
  for (int first = begin; first < end; first += kWave) {
    const int slot = first + lane();
    const bool active = slot < end;
    const int e = active ? p.ids[slot / p.k * p.ids_stride + slot % p.k] : 0;
    const uint64_t alike = lanes_alike(e, p.experts, active);
    const int before = count_bits(alike & ((uint64_t{1} << lane()) - 1));
    const int from = active ? next.load(e) : 0;
    sync_wave();
    if (active) visit(slot, from + before);
    if (active && before == 0) next.store(e, from + count_bits(alike));
    sync_wave();
  }
}
GPU_INLINE void clear_counters(const Plan& p, Shared<int32_t> next) {
  for (int e = lane(); e < p.experts; e += kWave) next.store(e, 0);
  sync_wave();
}
GPU_INLINE void place_run(const Plan& p, int unit, Shared<int32_t> next) {
  walk_run(p, unit, next, [&](int slot, int row) {
    const int t = slot / p.k;
    p.slot_row[t * p.slot_row_stride + slot % p.k] = row;
    p.row_token[row] = t;
  });
}

// Counts by unit and expert become first rows, in the order of experts, then units; offsets too. One block of kPlanThreads; get and set reach the counts.
template <typename Get, typename Set>
GPU_INLINE void scan_counts(const Plan& p, int units, Shared<int32_t> wave_sums, const Get& get, const Set& set) {
  const int each = (p.experts + kPlanThreads - 1) / kPlanThreads, first = thread_x() * each;  // consecutive experts of this thread
  int sum = 0;
  for (int e = first; e < first + each && e < p.experts; ++e) {
#pragma unroll 16
    for (int u = 0; u < units; ++u) sum += get(u, e);
  }
  int through = sum;  // of this lane and those before it
  for (int distance = 1; distance < kWave; distance *= 2) {
    const int other = shuffle(through, lane() - distance < 0 ? 0 : lane() - distance);
    if (lane() >= distance) through += other;
  }
  if (lane() == kWave - 1) wave_sums.store(wave(), through);
  sync_block();
  int row = through - sum;
  for (int w = 0; w < wave(); ++w) row += wave_sums.load(w);
  for (int e = first; e < first + each && e < p.experts; ++e) {
    p.offsets[e] = row;
#pragma unroll 16
    for (int u = 0; u < units; ++u) {
      const int count = get(u, e);
      set(u, e, row);
      row += count;
    }
  }
  if (thread_x() == 0) p.offsets[p.experts] = p.slots;
}

GPU_KERNEL plan_kernel(const Plan p) {
  SharedMemory memory;
  const Shared<int32_t> counts = memory.take<int32_t>(kPlanWaves * p.experts), wave_sums = memory.take<int32_t>(kPlanWaves);
  const Shared<int32_t> next = counts.from(wave() * p.experts);
  clear_counters(p, next);
  walk_run(p, wave(), next, [](int, int) {});
  sync_block();
  scan_counts(p, kPlanWaves, wave_sums, [&](int u, int e) { return counts.load(u * p.experts + e); }, [&](int u, int e, int v) { counts.store(u * p.experts + e, v); });
  sync_block();
  place_run(p, wave(), next);
}

constexpr int kRunThreads = 64, kRunWaves = kRunThreads / kWave;  // of a block that counts or places

GPU_KERNEL plan_count_kernel(const Plan p, int32_t* counts) {
  SharedMemory memory;
  const Shared<int32_t> next = memory.take<int32_t>(kRunWaves * p.experts).from(wave() * p.experts);
  const int unit = block_x() * kRunWaves + wave();
  clear_counters(p, next);
  walk_run(p, unit, next, [](int, int) {});
  for (int e = lane(); e < p.experts; e += kWave) counts[static_cast<int64_t>(unit) * p.experts + e] = next.load(e);
}
GPU_KERNEL plan_scan_kernel(const Plan p, int32_t* counts, int units) {
  SharedMemory memory;
  scan_counts(p, units, memory.take<int32_t>(kPlanWaves), [&](int u, int e) { return counts[static_cast<int64_t>(u) * p.experts + e]; },
              [&](int u, int e, int v) { counts[static_cast<int64_t>(u) * p.experts + e] = v; });
}
GPU_KERNEL plan_place_kernel(const Plan p, const int32_t* counts) {
  SharedMemory memory;
  const Shared<int32_t> next = memory.take<int32_t>(kRunWaves * p.experts).from(wave() * p.experts);
  const int unit = block_x() * kRunWaves + wave();
  for (int e = lane(); e < p.experts; e += kWave) next.store(e, counts[static_cast<int64_t>(unit) * p.experts + e]);
  sync_wave();
  place_run(p, unit, next);
}

constexpr int kGatherRows = 4;  // of a thread, one below the other: their loads are on their way at once

template <typename T>
GPU_KERNEL gather_kernel(T* rows, int64_t rows_stride, const T* x, int64_t x_stride, const int32_t* row_token, int64_t row_token_stride, bool aligned,
                         int64_t num_rows, int64_t width) {
  const Piece p = piece_of_thread((num_rows + kGatherRows - 1) / kGatherRows, width);
  if (p.count == 0) return;
  const int64_t first = p.row * kGatherRows;
  const int n = num_rows - first < kGatherRows ? static_cast<int>(num_rows - first) : kGatherRows;
  T* const to = rows + first * rows_stride + p.at;
  if (aligned && p.count == kPiece && n == kGatherRows) {
    using Words = Vector<uint32_t, 4>;
    constexpr int kVectors = static_cast<int>(sizeof(Elements<T>) / sizeof(Words));
    Words part[kGatherRows][kVectors];
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j) {
      const auto* const from = reinterpret_cast<const Words*>(x + row_token[(first + j) * row_token_stride] * x_stride + p.at);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) part[j][v] = from[v];
    }
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) store_vector(reinterpret_cast<uint32_t*>(to + j * rows_stride) + 4 * v, part[j][v]);
    return;
  }
  for (int j = 0; j < n; ++j)
    store(to + j * rows_stride, load(x + row_token[(first + j) * row_token_stride] * x_stride + p.at, p.count, aligned), p.count, aligned);
}

// 0 + rows[slot[0]] + rows[slot[1]] + ..., several rows on their way at once.
template <typename T>
GPU_INLINE void sum_slots(float (&sum)[kPiece], const T* rows, int64_t stride, const int32_t* slot, int k, const Piece& p, bool aligned) {
  constexpr int kBatch = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kPiece; ++i) sum[i] = 0;
  for (int begin = 0; begin < k; begin += kBatch) {
    Elements<T> part[kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (begin + j < k) part[j] = load(rows + slot[begin + j] * stride + p.at, p.count, aligned);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (begin + j < k)
#pragma unroll
        for (int i = 0; i < kPiece; ++i) sum[i] = sum[i] + to_f32(part[j].v[i]);
  }
}

template <typename T>
GPU_KERNEL combine_kernel(T* y, int64_t y_stride, const T* rows, int64_t rows_stride, const int32_t* slot_row, int64_t slot_row_stride, const T* shared,
                          int64_t shared_stride, int k, bool aligned, int64_t tokens, int64_t width) {
  const Piece p = piece_of_thread(tokens, width);
  if (p.count == 0) return;
  const Elements<T> own = load(shared + p.row * shared_stride + p.at, p.count, aligned);
  float sum[kPiece];
  sum_slots(sum, rows, rows_stride, slot_row + p.row * slot_row_stride, k, p, aligned);
  Elements<T> out;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) out.v[i] = from_f32<T>(sum[i] + to_f32(own.v[i]));
  store(y + p.row * y_stride + p.at, out, p.count, aligned);
}

GPU_KERNEL gather_backward_kernel(float* dx, int64_t dx_stride, const float* drows, int64_t drows_stride, const int32_t* slot_row, int64_t slot_row_stride, int k,
                                  bool aligned, int64_t tokens, int64_t width) {
  const Piece p = piece_of_thread(tokens, width);
  if (p.count == 0) return;
  float* const to = dx + p.row * dx_stride + p.at;
  Elements<float> out = load(to, p.count, aligned);
  float sum[kPiece];
  sum_slots(sum, drows, drows_stride, slot_row + p.row * slot_row_stride, k, p, aligned);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) out.v[i] = out.v[i] + sum[i];
  store(to, out, p.count, aligned);
}

// row_value[slot_row[t, k]] = value[t, k], or back.
template <bool kBack, typename Values, typename RowValues>
GPU_KERNEL move_values_kernel(RowValues* row_value, Values* value, int64_t value_stride, const int32_t* slot_row, int64_t slot_row_stride, int64_t slots, int k) {
  const int64_t i = static_cast<int64_t>(block_x()) * block_dim() + thread_x();
  if (i >= slots) return;
  const int64_t t = i / k, j = i % k;
  const int32_t row = slot_row[t * slot_row_stride + j];
  if constexpr (kBack) value[t * value_stride + j] = row_value[row];
  else row_value[row] = value[t * value_stride + j];
}

template <typename F>
void with_dtype(DType t, const F& f) {
  if (t == DType::f32) f(float());
  else f(bf16());
}

}  // namespace

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids) {
  const int64_t slots = ids.shape.elements(), experts = offsets.rows() - 1;
  Plan p = {.offsets = offsets.ptr<int32_t>(), .row_token = row_token.ptr<int32_t>(), .slot_row = slot_row.ptr<int32_t>(), .ids = ids.ptr<int32_t>(),
            .slot_row_stride = slot_row.row_stride, .ids_stride = ids.row_stride, .slots = static_cast<int>(slots), .k = static_cast<int>(ids.dim(1)),
            .experts = static_cast<int>(experts), .run = 0};
  const auto counters = [&](int waves) { return sizeof(int32_t) * static_cast<size_t>(waves * experts + kPlanWaves) + 16; };
  const auto run_of = [&](int64_t units) { return static_cast<int>(blocks_for(blocks_for(slots, units), kWave) * kWave); };
  if (slots <= kOneBlockSlots) {
    p.run = run_of(kPlanWaves);
    return launch(c, "moe_plan", {.blocks = 1, .threads = kPlanThreads, .shared_bytes = counters(kPlanWaves)}, plan_kernel, p);
  }
  p.run = run_of(kUnitsMax);
  const ArenaScope scope(*c.workspace);
  const TensorView counts = c.workspace->tensor(DType::i32, {kUnitsMax, experts}, "moe_plan counters");
  const Grid runs = {.blocks = kUnitsMax / kRunWaves, .threads = kRunThreads, .shared_bytes = counters(kRunWaves)};
  launch(c, "moe_plan_count", runs, plan_count_kernel, p, counts.ptr<int32_t>());
  launch(c, "moe_plan_scan", {.blocks = 1, .threads = kPlanThreads, .shared_bytes = counters(0)}, plan_scan_kernel, p, counts.ptr<int32_t>(), static_cast<int>(kUnitsMax));
  launch(c, "moe_plan_place", runs, plan_place_kernel, p, counts.ptr<int32_t>());
}

void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token) {
  with_dtype(x.dtype, [&](auto t) {
    using T = decltype(t);
    launch(c, "moe_gather", grid_of_pieces(blocks_for(rows.rows(), kGatherRows), x.dim(1)), gather_kernel<T>, rows.ptr<T>(), rows.row_stride, x.ptr<T>(), x.row_stride, row_token.ptr<int32_t>(),
           row_token.row_stride, all_aligned(rows, x), rows.rows(), x.dim(1));
  });
}

void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared) {
  with_dtype(y.dtype, [&](auto t) {
    using T = decltype(t);
    launch(c, "moe_combine", grid_of_pieces(y.rows(), y.dim(1)), combine_kernel<T>, y.ptr<T>(), y.row_stride, rows.ptr<T>(), rows.row_stride, slot_row.ptr<int32_t>(),
           slot_row.row_stride, shared.ptr<T>(), shared.row_stride, static_cast<int>(slot_row.dim(1)), all_aligned(y, rows, shared), y.rows(), y.dim(1));
  });
}

void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row) {
  launch(c, "moe_gather_backward", grid_of_pieces(dx_accum.rows(), dx_accum.dim(1)), gather_backward_kernel, dx_accum.ptr<float>(), dx_accum.row_stride,
         drows.ptr<float>(), drows.row_stride, slot_row.ptr<int32_t>(), slot_row.row_stride, static_cast<int>(slot_row.dim(1)), all_aligned(dx_accum, drows),
         dx_accum.rows(), dx_accum.dim(1));
}

void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row) {
  const int64_t slots = slot_row.shape.elements();
  launch(c, "moe_spread", {.blocks = blocks_for(slots, kElementThreads), .threads = kElementThreads}, move_values_kernel<false, const float, float>,
         row_value.ptr<float>(), value.ptr<float>(), value.row_stride, slot_row.ptr<int32_t>(), slot_row.row_stride, slots, static_cast<int>(slot_row.dim(1)));
}

void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row) {
  const int64_t slots = slot_row.shape.elements();
  launch(c, "moe_collect", {.blocks = blocks_for(slots, kElementThreads), .threads = kElementThreads}, move_values_kernel<true, float, const float>,
         row_value.ptr<float>(), value.ptr<float>(), value.row_stride, slot_row.ptr<int32_t>(), slot_row.row_stride, slots, static_cast<int>(slot_row.dim(1)));
}

}  // namespace lockstep::device
