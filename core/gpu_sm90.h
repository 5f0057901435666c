#pragma once
// Hopper's own instructions under names: the barriers that count bytes, the tensor copy engine, and warpgroup matrix products. CUDA for sm_90a only.
// Source: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor and wgmma; GPU spec 4.1.

#include <cuda.h>
#include <cuda_bf16.h>

#include "core/gpu.h"

namespace lockstep::gpu::sm90 {

GPU_INLINE unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// A barrier in shared memory whose phases end when all arrivals and all announced bytes have come.
struct Barrier {
  unsigned long long word;
  GPU_INLINE void init(unsigned arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals)); }
  GPU_INLINE void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory"); }
  GPU_INLINE void arrive_and_expect(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes) : "memory");
  }
  // Until the phase of this parity has ended.
  GPU_INLINE void wait(unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@ended bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};
GPU_INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// 4 bytes to shared memory in the background; `arrive_when_copied` arrives at the barrier once for this thread when all that it asked for so is there.
GPU_INLINE void copy_4(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory"); }
GPU_INLINE void arrive_when_copied(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The box of `map` at (column, row, slab) to shared memory; its bytes are counted by `barrier`.
GPU_INLINE void load_tile(void* to, const CUtensorMap* map, Barrier* barrier, int column, int row, int slab) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)), "l"(map),
               "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(slab)
               : "memory");
}
// A box from shared memory to `map` at (column, row, slab), in the background; beyond the edges nothing is written. Of one thread: commit closes a group, wait returns
// when at most the newest `Groups` have yet to read their shared memory.
GPU_INLINE void store_tile(const CUtensorMap* map, const void* from, int column, int row, int slab) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(slab)
               : "memory");
}
GPU_INLINE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Groups>
GPU_INLINE void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}
GPU_INLINE void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

template <int Registers>
GPU_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
GPU_INLINE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

GPU_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GPU_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Open>
GPU_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
}

// Ordinary stores to shared memory come before what the copy engine and the matrix unit do there next (of this thread: a barrier must follow).
GPU_INLINE void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The 128 threads of warpgroup `group` (from 0; barrier 0 is the block's).
GPU_INLINE void sync_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
// Named barriers of `threads` threads of the block, ids 3 to 15: those who arrive go on, those who sync wait for all.
GPU_INLINE void arrive_at(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
GPU_INLINE void sync_at(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// 2^x as the unit computes it, within 2^-22 of the result: a function of x alone, on this kind of device alone.
GPU_INLINE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// An 8 x 8 tile of which lane t holds row t / 4, columns 2 (t % 4) and + 1, transposed: the pair of row t / 4 of the result.
GPU_INLINE unsigned transposed(unsigned pair) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
GPU_INLINE unsigned bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Operand tiles in shared memory, as the copy engine lays boxes of 128 bytes a row out with 128-byte swizzle: eight rows are one atom of 1024 bytes, at which
// the tile must be aligned.
//   along K: a row is 128 bytes of K; atoms of eight rows of M (or N) follow each other; `bytes` moves along K inside the row
//   across K: a row is 64 bf16 of M (or N); rows follow K; the next 64 of M (or N) lie `slab_bytes` on; `bytes` moves along K by rows of 128
GPU_INLINE unsigned long long operand(const void* tile, unsigned bytes, unsigned leading, unsigned stride) {
  const unsigned long long address = (shared_address(tile) + bytes) >> 4;
  return (address & 0x3fff) | (static_cast<unsigned long long>(leading >> 4) << 16) | (static_cast<unsigned long long>(stride >> 4) << 32) | (1ull << 62);
}
GPU_INLINE unsigned long long operand_along_k(const void* tile, unsigned bytes) { return operand(tile, bytes, 16, 1024); }
GPU_INLINE unsigned long long operand_across_k(const void* tile, unsigned bytes, unsigned slab_bytes) { return operand(tile, bytes, slab_bytes, 1024); }

#define LOCKSTEP_R4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define LOCKSTEP_R16(a, i) LOCKSTEP_R4(a, i), LOCKSTEP_R4(a, i + 4), LOCKSTEP_R4(a, i + 8), LOCKSTEP_R4(a, i + 12)
#define LOCKSTEP_R64(a, i) LOCKSTEP_R16(a, i), LOCKSTEP_R16(a, i + 16), LOCKSTEP_R16(a, i + 32), LOCKSTEP_R16(a, i + 48)
// Places of the first registers, in asm.
#define LOCKSTEP_P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LOCKSTEP_P16 LOCKSTEP_P8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define LOCKSTEP_P32 LOCKSTEP_P16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LOCKSTEP_P64 LOCKSTEP_P32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define LOCKSTEP_P96 LOCKSTEP_P64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, " \
  "%94, %95"
#define LOCKSTEP_P128 LOCKSTEP_P96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, " \
  "%121, %122, %123, %124, %125, %126, %127"

// acc (+)= A [64, 16] . B [N, 16]^T, bf16 to f32. Thread t of the warpgroup holds rows 16 (t / 32) + (t % 32) / 4 and + 8, columns 8 j + 2 (t % 4) and + 1:
// acc[4 j + 0, 1] of the upper row, acc[4 j + 2, 3] of the lower.
// ACross, BCross: 1 where the operand's tile lies across K.
template <int N, int ACross, int BCross>
struct MmaBf16;
template <int ACross, int BCross>
struct MmaBf16<16, ACross, BCross> {
  GPU_INLINE static void run(float (&d)[8], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P8 "}, %8, %9, p, 1, 1, %11, %12;\n}\n"
        : LOCKSTEP_R4(d, 0), LOCKSTEP_R4(d, 4)
        : "l"(a), "l"(b), "r"(accumulate), "n"(ACross), "n"(BCross));
  }
};
template <int ACross, int BCross>
struct MmaBf16<32, ACross, BCross> {
  GPU_INLINE static void run(float (&d)[16], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P16 "}, %16, %17, p, 1, 1, %19, %20;\n}\n"
        : LOCKSTEP_R16(d, 0)
        : "l"(a), "l"(b), "r"(accumulate), "n"(ACross), "n"(BCross));
  }
};
template <int ACross, int BCross>
struct MmaBf16<64, ACross, BCross> {
  GPU_INLINE static void run(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P32 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
        : LOCKSTEP_R16(d, 0), LOCKSTEP_R16(d, 16)
        : "l"(a), "l"(b), "r"(accumulate), "n"(ACross), "n"(BCross));
  }
};
template <int ACross, int BCross>
struct MmaBf16<128, ACross, BCross> {
  GPU_INLINE static void run(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P64 "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
        : LOCKSTEP_R64(d, 0)
        : "l"(a), "l"(b), "r"(accumulate), "n"(ACross), "n"(BCross));
  }
};
template <int ACross, int BCross>
struct MmaBf16<256, ACross, BCross> {
  GPU_INLINE static void run(float (&d)[128], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P128 "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
        : LOCKSTEP_R64(d, 0), LOCKSTEP_R64(d, 64)
        : "l"(a), "l"(b), "r"(accumulate), "n"(ACross), "n"(BCross));
  }
};
// The same with A in registers, 16 columns of an accumulator rounded in pairs: a[0], a[2] of its upper row, a[1], a[3] of its lower.
template <int N, int BCross = 1>
struct MmaBf16Registers;
template <int BCross>
struct MmaBf16Registers<16, BCross> {
  GPU_INLINE static void run(float (&d)[8], const unsigned* a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;\n}\n"
        : LOCKSTEP_R4(d, 0), LOCKSTEP_R4(d, 4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BCross));
  }
};
template <int BCross>
struct MmaBf16Registers<64, BCross> {
  GPU_INLINE static void run(float (&d)[32], const unsigned* a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : LOCKSTEP_R16(d, 0), LOCKSTEP_R16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BCross));
  }
};
template <int BCross>
struct MmaBf16Registers<128, BCross> {
  GPU_INLINE static void run(float (&d)[64], const unsigned* a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
        : LOCKSTEP_R64(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BCross));
  }
};
template <int BCross>
struct MmaBf16Registers<192, BCross> {
  GPU_INLINE static void run(float (&d)[96], const unsigned* a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P96 "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n"
        : LOCKSTEP_R64(d, 0), LOCKSTEP_R16(d, 64), LOCKSTEP_R16(d, 80)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BCross));
  }
};
template <int BCross>
struct MmaBf16Registers<256, BCross> {
  GPU_INLINE static void run(float (&d)[128], const unsigned* a, unsigned long long b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{" LOCKSTEP_P128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n"
        : LOCKSTEP_R64(d, 0), LOCKSTEP_R64(d, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(BCross));
  }
};
// The same of E4M3, A [64, 32] . B [N, 32]^T. The unit adds with about 14 bits: no more than 128 along K go into one accumulator.
GPU_INLINE void mma_e4m3_n128(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{" LOCKSTEP_P64 "}, %64, %65, p, 1, 1;\n}\n"
      : LOCKSTEP_R64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef LOCKSTEP_R4
#undef LOCKSTEP_R16
#undef LOCKSTEP_R64
#undef LOCKSTEP_P8
#undef LOCKSTEP_P16
#undef LOCKSTEP_P32
#undef LOCKSTEP_P64
#undef LOCKSTEP_P96
#undef LOCKSTEP_P128

}  // namespace lockstep::gpu::sm90
