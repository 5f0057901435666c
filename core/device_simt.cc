// Device memory of the host executor: host memory that nobody may touch but kernels and copies, so that code which would read device memory from the
// host fails here as it would on a GPU.

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/simt.h"

namespace lockstep {

namespace {

struct Regions {
  std::mutex mutex;
  int open = 0;  // accesses that are alive
  std::map<char*, size_t> committed;
};
Regions& regions() {
  static Regions* r = new Regions;  // outlives every arena
  return *r;
}

void protect(char* p, size_t bytes, int how) { CHECK(bytes == 0 || mprotect(p, bytes, how) == 0, "cannot protect {} bytes of device memory", bytes); }

}  // namespace

namespace simt {
DeviceAccess::DeviceAccess() {
  Regions& r = regions();
  const std::lock_guard lock(r.mutex);
  if (r.open++ == 0)
    for (const auto& [p, bytes] : r.committed) protect(p, bytes, PROT_READ | PROT_WRITE);
}
DeviceAccess::~DeviceAccess() {
  Regions& r = regions();
  const std::lock_guard lock(r.mutex);
  if (--r.open == 0)
    for (const auto& [p, bytes] : r.committed) protect(p, bytes, PROT_NONE);
}
}  // namespace simt

Status device_available() { return Status::ok(); }
DeviceInfo device_info() { return {.name = "host executor", .memory_bytes = 0, .free_bytes = 0, .multiprocessors = 1, .software = {}, .emulated = true, .id = {}}; }
void device_load_early() {}
void device_select(int) {}
int device_count() { return 1; }

namespace device_memory {

constexpr size_t kPage = 4096;

void* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(p != MAP_FAILED, "cannot reserve {} bytes of address space, which take no memory; is it limited (ulimit -v)? set that to unlimited", bytes);
  Regions& r = regions();
  const std::lock_guard lock(r.mutex);
  r.committed[static_cast<char*>(p)] = 0;
  return p;
}
void commit(void* base, size_t end) {
  Regions& r = regions();
  const std::lock_guard lock(r.mutex);
  size_t& committed = r.committed.at(static_cast<char*>(base));
  const size_t wanted = (end + kPage - 1) / kPage * kPage;
  if (wanted <= committed) return;
  char* const fresh = static_cast<char*>(base) + committed;
  protect(fresh, wanted - committed, PROT_READ | PROT_WRITE);
  std::memset(fresh, 0xff, wanted - committed);  // NaN, or -1: a read of what nobody wrote shows in the result
  if (r.open == 0) protect(fresh, wanted - committed, PROT_NONE);
  committed = wanted;
}
void release(void* base, size_t bytes) {
  Regions& r = regions();
  const std::lock_guard lock(r.mutex);
  r.committed.erase(static_cast<char*>(base));
  munmap(base, bytes);
}
void copy(void* stream, void* to, const void* from, size_t bytes) {
  simt::enqueue(stream, [=] {
    const simt::DeviceAccess access;
    std::memcpy(to, from, bytes);
  });
}
void upload(void* stream, void* to, const void* from_host, size_t bytes) { copy(stream, to, from_host, bytes); }
void download(void* stream, void* to_host, const void* from, size_t bytes) { copy(stream, to_host, from, bytes); }
void clear(void* p, size_t bytes) {
  const simt::DeviceAccess access;
  std::memset(p, 0, bytes);
}
void clear(void* stream, void* p, size_t bytes) {
  simt::enqueue(stream, [=] { clear(p, bytes); });
}
void synchronize(void*) {}
uint64_t* host_words(size_t count) {
  static auto* const all = new std::vector<std::unique_ptr<uint64_t[]>>;
  return all->emplace_back(new uint64_t[count]{}).get();
}
void write_word(void* stream, uint64_t* word, uint64_t value) {
  simt::enqueue(stream, [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
}

using Graph = std::vector<std::function<void()>>;
void begin_capture(void* stream) { static_cast<simt::Stream*>(stream)->captures = true; }
void* end_capture(void* stream) {
  auto* const s = static_cast<simt::Stream*>(stream);
  s->captures = false;
  return new Graph(std::exchange(s->kept, {}));
}
void run_graph(void*, void* graph) {
  for (const auto& work : *static_cast<Graph*>(graph)) work();
}
void destroy_graph(void* graph) { delete static_cast<Graph*>(graph); }

}  // namespace device_memory

// Nothing is in a stream when a call returns.
namespace device_event {

using Time = std::chrono::steady_clock::time_point;

void* make(bool) { return new Time; }
void destroy(void* event) { delete static_cast<Time*>(event); }
void record(void* event, void*) { *static_cast<Time*>(event) = std::chrono::steady_clock::now(); }
void wait(void*, void*) {}
bool done(void*) { return true; }
double seconds(void* from, void* to) { return std::chrono::duration<double>(*static_cast<Time*>(to) - *static_cast<Time*>(from)).count(); }

}  // namespace device_event

void* make_stream() { return new simt::Stream; }
void destroy_stream(void* stream) { delete static_cast<simt::Stream*>(stream); }

}  // namespace lockstep
