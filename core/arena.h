#pragma once
// Named bump arenas: one per lifetime (weights, gradients, optimizer, step scratch, sequence state).
//
// An arena reserves address space once and hands out 128-byte aligned pieces. Marks release everything taken after
// them, which is how step scratch is reused. Every allocation has a name; the largest users and the high mark can be
// printed. After warm-up an arena is sealed: going over the sealed high mark is a bug that names itself.
// An arena of the GPU hands out device memory: only kernels and the copies of core/device.h may touch it.
// Not thread-safe: one owner allocates, ops never do so from inside a parallel loop.
//
// Under the address sanitizer every piece is followed by a guard, what is not allocated may not be touched, and a new piece is filled
// with 0xff bytes, which are NaN or -1 in every dtype that has one: a read of what nobody wrote shows in the result. Pieces of the executor's device memory
// are guarded alike; they are filled when they are first committed.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/sanitizer.h"
#include "core/tensor.h"

namespace lockstep {

enum class Device : uint8_t { cpu, gpu };
constexpr const char* device_name(Device d) { return d == Device::cpu ? "cpu" : "gpu"; }

class Arena {
 public:
  // Reserves `reserve_bytes` of address space; host pages are committed by first touch, device memory when the high mark rises.
  Arena(std::string name, size_t reserve_bytes, Device device = Device::cpu);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Contents are undefined. `name` must outlive the arena when it is not a literal.
  void* allocate(size_t bytes, std::string_view name);
  TensorView tensor(DType dtype, Shape shape, std::string_view name) {
    return TensorView(allocate(static_cast<size_t>(shape.elements()) * dtype_bytes(dtype), name), dtype, shape);
  }
  TensorView zeros(DType dtype, Shape shape, std::string_view name);

  // What an allocation of `bytes` takes of the reserve.
  static constexpr size_t footprint(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign + kGuard; }

  size_t mark() const { return used_; }
  void release(size_t mark);
  size_t used_bytes() const { return used_; }
  size_t high_bytes() const { return high_; }
  size_t reserve_bytes() const { return reserve_; }
  const std::string& name() const { return name_; }
  Device device() const { return device_; }

  // From now on the high mark may not rise (a CHECK names the arena and the allocation). unseal() before planned growth.
  void seal() { sealed_ = true; }
  void unseal() { sealed_ = false; }
  bool sealed() const { return sealed_; }

 private:
  static constexpr size_t kAlign = 128;  // what tensor maps and the widest vector loads ask for; two cache lines
  static constexpr size_t kGuard = kAddressSanitizer ? 64 : 0;

  std::string name_;
  Device device_;
  char* base_ = nullptr;
  size_t reserve_ = 0;
  size_t used_ = 0;
  size_t high_ = 0;
  bool sealed_ = false;
  bool guarded_ = false;  // by the address sanitizer
};

// Releases what was taken from the arena during its own life.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace lockstep
