#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/device.h"

#if defined(LOCKSTEP_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace lockstep {

namespace {

#if defined(LOCKSTEP_ADDRESS_SANITIZER)
void forbid(const char* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
void permit(const char* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
void forbid(const char*, size_t) {}
void permit(const char*, size_t) {}
#endif

// Reserves are too large to be forbidden whole: of what was never in use, this much after the high mark is. Device memory that is not committed cannot be
// touched anyway.
constexpr size_t kForbiddenAhead = size_t{1} << 16;

}  // namespace

Arena::Arena(std::string name, size_t reserve_bytes, Device device) : name_(std::move(name)), device_(device) {
  reserve_ = (reserve_bytes + 4095) / 4096 * 4096;
  if (reserve_ == 0) reserve_ = 4096;
  if (device_ == Device::gpu) {
    base_ = static_cast<char*>(device_memory::reserve(reserve_));
    guarded_ = kAddressSanitizer && device_info().emulated;
    return;
  }
  guarded_ = kAddressSanitizer;
  void* p = mmap(nullptr, reserve_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(p != MAP_FAILED, "arena {}: cannot reserve {} bytes of address space, which take no memory; is it limited (ulimit -v)? set that to unlimited", name_, reserve_);
  base_ = static_cast<char*>(p);
  forbid(base_, std::min(kForbiddenAhead, reserve_));
}

Arena::~Arena() {
  if (device_ == Device::gpu) {
    CHECK(!capturing(), "arena {} is released while a graph is captured", name_);
    if (guarded_) permit(base_, high_);
    device_memory::release(base_, reserve_);
  } else {
    permit(base_, std::min(high_ + kForbiddenAhead, reserve_));
    munmap(base_, reserve_);
  }
}

void* Arena::allocate(size_t bytes, std::string_view name) {
  CHECK(bytes <= reserve_ && footprint(bytes) <= reserve_ - used_, "arena {}: {} bytes for '{}' do not fit, {} of {} are in use",
        name_, bytes, name, used_, reserve_);
  const size_t begin = used_;
  char* p = base_ + begin;
  used_ += footprint(bytes);
  if (used_ > high_) {
    CHECK(!sealed_, "arena {} is sealed at {} bytes, '{}' would raise it to {}", name_, high_, name, used_);
    if (device_ == Device::gpu) {
      CHECK(!capturing(), "arena {}: '{}' raises its high mark from {} to {} bytes while a graph is captured; run the work once before", name_, name, high_, used_);
      device_memory::commit(base_, used_);
    }
    high_ = used_;
    if (guarded_) forbid(p, device_ == Device::gpu ? used_ - begin : std::min(high_ + kForbiddenAhead, reserve_) - begin);
  }
  if (!guarded_) return p;
  permit(p, bytes);
  if (device_ == Device::cpu) std::memset(p, 0xff, bytes);
  return p;
}

TensorView Arena::zeros(DType dtype, Shape shape, std::string_view name) {
  TensorView v = tensor(dtype, shape, name);
  if (device_ == Device::gpu) {
    CHECK(!capturing(), "arena {}: '{}' is cleared, for which the host waits, while a graph is captured", name_, name);
    device_memory::clear(v.data, v.bytes());
  } else {
    std::memset(v.data, 0, v.bytes());
  }
  return v;
}

void Arena::release(size_t mark) {
  CHECK(mark <= used_, "arena {}: mark {} lies above {} in use", name_, mark, used_);
  if (guarded_) forbid(base_ + mark, used_ - mark);
  used_ = mark;
}

}  // namespace lockstep
