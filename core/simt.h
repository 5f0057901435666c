#pragma once
// Runs GPU kernels on the host: blocks one after the other, the threads of a block as fibers that take turns at barriers and wave operations.
// Kernel sources see it through core/gpu.h alone; tests set the wave to 32 and 64.
//
// It does not imitate timing. It finds what a GPU would leave to luck, and says where:
//   a read of shared memory that nothing wrote, or that an asynchronous copy has not yet been waited for
//   two threads of a block that touch the same byte of shared memory between two barriers, one of them writing (within a wave, wave_barrier orders too)
//   a barrier or wave operation that not all threads of the block or wave reach: every thread that starts must come to each of them, so a kernel
//   may not return early and leave the others waiting
//   an access outside the block's shared memory
// The order in which threads get their turn changes with Launch::order, so that results which depend on it differ between two runs.
//
// Threading: a launch runs on the caller's thread. Launches of different host threads do not disturb each other.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

struct Launch {
  const char* kernel = "";
  Dim3 grid = {}, block = {};
  size_t shared_bytes = 0;
  int wave = 32;          // 32 or 64 threads
  unsigned order = 0;     // 0: by thread id; otherwise another order for every value
};

// A borrowed callable void().
class Body {
 public:
  template <typename F>
  explicit Body(const F& f) : object_(&f), call_([](const void* o) { (*static_cast<const F*>(o))(); }) {}
  void operator()() const { call_(object_); }

 private:
  const void* object_;
  void (*call_)(const void*);
};

// Runs `body` in every thread of every block. What is found wrong aborts the program with the message, unless a Findings is alive on this host thread.
void run(const Launch& launch, Body body);

// A queue of work, which runs at once, or while a graph is captured (core/device.h) is kept and not run.
struct Stream {
  bool captures = false;
  std::vector<std::function<void()>> kept;
};
template <typename Work>
void enqueue(void* stream, const Work& work) {
  auto* const s = static_cast<Stream*>(stream);
  if (s != nullptr && s->captures) s->kept.emplace_back(work);
  else work();
}

// While one lives, on any host thread, device memory (core/device.h) may be touched.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

// Collects what is found instead of aborting, for tests that plant it. A block is left at its first deadlock; other findings let it go on.
class Findings {
 public:
  Findings();
  ~Findings();
  Findings(const Findings&) = delete;
  Findings& operator=(const Findings&) = delete;
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  friend void report(std::string message);
  std::vector<std::string> messages_;
};

// The rest is for core/gpu.h: operations of the thread that calls, which must be inside run().

struct Place {
  const char* file;
  int line;
};

struct Thread {
  Dim3 thread_idx = {}, block_idx = {}, block_dim = {}, grid_dim = {};
  int id = 0;    // in the block
  int lane = 0;  // in the wave
  int wave = 0;  // which one
};
const Thread& self();
int wave_width();

void block_barrier(Place place);
void wave_barrier(Place place);
// Every lane of the wave gives `words` 64-bit words; returns the wave's, lane by lane. Valid until the lane's next exchange.
constexpr int kExchangeWordsMax = 16;
const uint64_t* exchange(const uint64_t* mine, int words, Place place);

char* shared_base();
void shared_read(const void* p, size_t bytes, Place place);
void shared_write(void* p, size_t bytes, Place place);
// A read and a write in one, which others of its kind may interleave with.
void shared_atomic(void* p, size_t bytes, Place place);
// dst, in shared memory, is written when the copy is waited for; until then it must not be read.
void copy_async(void* dst, const void* src, size_t bytes, Place place);
void copy_commit();
// All but the last `groups` committed groups of this thread are complete.
void copy_wait(int groups, Place place);

}  // namespace lockstep::simt
