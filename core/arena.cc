#include "core/arena.h"

#include <sys/mman.h>

#include <cstring>

namespace lockstep {

namespace {
constexpr size_t kAlign = 64;  // one cache line, one AVX-512 vector
}

Arena::Arena(std::string name, size_t reserve_bytes) : name_(std::move(name)) {
  reserve_ = (reserve_bytes + 4095) / 4096 * 4096;
  if (reserve_ == 0) reserve_ = 4096;
  void* p = mmap(nullptr, reserve_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(p != MAP_FAILED, "arena {}: cannot reserve {} bytes of address space", name_, reserve_);
  base_ = static_cast<char*>(p);
}

Arena::~Arena() { munmap(base_, reserve_); }

void* Arena::allocate(size_t bytes, std::string_view name) {
  const size_t need = (bytes + kAlign - 1) / kAlign * kAlign;
  CHECK(used_ + need <= reserve_, "arena {}: {} bytes for '{}' do not fit, {} of {} are in use", name_, bytes, name,
        used_, reserve_);
  char* p = base_ + used_;
  used_ += need;
  if (used_ > high_) {
    CHECK(!sealed_, "arena {} is sealed at {} bytes, '{}' would raise it to {}", name_, high_, name, used_);
    high_ = used_;
  }
  return p;
}

TensorView Arena::zeros(DType dtype, Shape shape, std::string_view name) {
  TensorView v = tensor(dtype, shape, name);
  std::memset(v.data, 0, v.bytes());
  return v;
}

void Arena::release(size_t mark) {
  CHECK(mark <= used_, "arena {}: mark {} lies above {} in use", name_, mark, used_);
  used_ = mark;
}

}  // namespace lockstep
