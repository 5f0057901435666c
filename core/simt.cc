#include "core/simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>

#include "core/sanitizer.h"
#include "core/status.h"

#if LOCKSTEP_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace lockstep::simt {

namespace {

namespace ctx = boost::context;

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr size_t kSharedBytesMax = size_t{228} << 10;
constexpr unsigned kThreadsMax = 1024;
constexpr int kWaveMax = 64;

std::string str(const Place& p) { return fmt::format("{}:{}", p.file, p.line); }

// Stacks are made once a host thread and used again by every block.
class Stacks {
 public:
  char* stack(size_t i) {
    while (i >= stacks_.size()) {
      void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      CHECK(p != MAP_FAILED, "no memory for the stack of thread {}", stacks_.size());
      stacks_.push_back(static_cast<char*>(p));
    }
    return stacks_[i];
  }
  ~Stacks() {
    for (char* s : stacks_) munmap(s, kStackBytes);
  }

 private:
  std::vector<char*> stacks_;
};
thread_local Stacks stacks;

// The stacks outlive the fibers.
struct KeepStack {
  void deallocate(ctx::stack_context&) noexcept {}
};

// When a thread touched a byte: accesses of different threads are ordered by a block barrier, or by a wave barrier if they are of one wave.
struct Access {
  uint32_t block_epoch = 0, wave_epoch = 0;
  int thread = -1;
  bool atomic = false;
};
struct ByteShadow {
  Access write, read, other_read;  // the last write; the last read, and the last one by a thread other than that
  bool written = false;
  bool arriving = false;  // an asynchronous copy is on its way
};

struct Copy {
  char* dst;
  const char* src;
  size_t bytes;
};

enum class State : uint8_t { ready, at_barrier, at_exchange, done };

struct Fiber {
  Thread thread;
  ctx::fiber context, scheduler;
  State state = State::ready;
  Place place{"", 0};
  std::deque<std::vector<Copy>> copies;  // groups in order; the last one is open
  void* fake_stack = nullptr;            // of the address sanitizer
};

struct Wave {
  int size = 0, arrived = 0;
  bool words_differ = false;
  uint32_t generation = 0, epoch = 0;
  Place place{"", 0};
  uint64_t words[2][kWaveMax * kExchangeWordsMax];  // of this exchange and the one before, which slow lanes may still read
};

}  // namespace

static thread_local Findings* findings = nullptr;

void report(std::string message) {
  if (findings == nullptr) CHECK(false, "{}", message);
  findings->messages_.push_back(std::move(message));
}

Findings::Findings() {
  CHECK(findings == nullptr, "one Findings at a time");
  findings = this;
}
Findings::~Findings() { findings = nullptr; }

namespace {

class Block {
 public:
  Block(const Launch& launch, Body body)
      : launch_(launch), body_(body), fibers_(launch.block.count()),
        waves_((launch.block.count() + static_cast<unsigned>(launch.wave) - 1) / static_cast<unsigned>(launch.wave)),
        shared_(launch.shared_bytes + 128), shadow_(launch.shared_bytes), turn_(launch.block.count()) {
    std::iota(turn_.begin(), turn_.end(), 0);
  }

  void run(Dim3 block_idx);

  Fiber& current() { return *current_; }
  void barrier(Place place);
  void meet(Place place, const char* what);
  const uint64_t* exchange(const uint64_t* mine, int words, Place place);
  int wave_width() const { return launch_.wave; }
  Wave& wave() { return waves_[static_cast<size_t>(current_->thread.wave)]; }
  char* shared() { return shared_.data() + (128 - reinterpret_cast<uintptr_t>(shared_.data()) % 128) % 128; }
  void touch(const void* p, size_t bytes, bool write, Place place);
  void touch_atomic(const void* p, size_t bytes, Place place);
  ByteShadow* shadow(const void* p, size_t bytes, Place place, const char* what);
  std::string name(int thread) const { return fmt::format("{} block {}: thread {}", launch_.kernel, block_name_, thread); }
  std::string name() const { return name(current_->thread.id); }

 private:
  void start(Fiber& f);
  void resume(Fiber& f);
  void yield();
  void report_deadlock();
  bool ordered(const Access& before) const;
  Access now() const { return {block_epoch_, waves_[static_cast<size_t>(current_->thread.wave)].epoch, current_->thread.id}; }

  const Launch& launch_;
  Body body_;
  std::vector<Fiber> fibers_;
  std::vector<Wave> waves_;
  std::vector<char> shared_;
  std::vector<ByteShadow> shadow_;
  std::vector<int> turn_;
  std::string block_name_;
  Fiber* current_ = nullptr;
  unsigned arrived_ = 0;  // at the block barrier
  Place barrier_place_{"", 0};
  uint32_t block_epoch_ = 1;
  bool race_reported_ = false;
  bool abandoned_ = false;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
};

thread_local Block* block = nullptr;

struct Abandon {};  // unwinds the fibers of a block that cannot go on

void Block::start(Fiber& f) {
  char* stack = stacks.stack(static_cast<size_t>(f.thread.id));
  ctx::stack_context sc;
  sc.size = kStackBytes;
  sc.sp = stack + kStackBytes;
  f.state = State::ready;
  f.context = ctx::fiber(std::allocator_arg, ctx::preallocated(sc.sp, sc.size, sc), KeepStack(), [this, &f](ctx::fiber&& scheduler) {
#if LOCKSTEP_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
    f.scheduler = std::move(scheduler);
    try {
      body_();
    } catch (const Abandon&) {
    }
    f.state = State::done;
#if LOCKSTEP_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(nullptr, scheduler_stack_, scheduler_stack_bytes_);
#endif
    return std::move(f.scheduler);
  });
}

void Block::resume(Fiber& f) {
  current_ = &f;
#if LOCKSTEP_ADDRESS_SANITIZER
  void* own = nullptr;
  __sanitizer_start_switch_fiber(&own, stacks.stack(static_cast<size_t>(f.thread.id)), kStackBytes);
#endif
  f.context = std::move(f.context).resume();
#if LOCKSTEP_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#endif
}

void Block::yield() {
  Fiber& f = *current_;
#if LOCKSTEP_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&f.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  f.scheduler = std::move(f.scheduler).resume();
#if LOCKSTEP_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(f.fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
  if (abandoned_) throw Abandon();
}

void Block::run(Dim3 block_idx) {
  block_name_ = fmt::format("({}, {}, {})", block_idx.x, block_idx.y, block_idx.z);
  std::fill(shadow_.begin(), shadow_.end(), ByteShadow());
  std::memset(shared_.data(), 0xff, shared_.size());
  const int threads = static_cast<int>(fibers_.size());
  for (Wave& w : waves_) w.size = w.arrived = 0, w.epoch = 1;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers_[static_cast<size_t>(i)];
    const unsigned u = static_cast<unsigned>(i);
    f.thread = {.thread_idx = {u % launch_.block.x, u / launch_.block.x % launch_.block.y, u / (launch_.block.x * launch_.block.y)},
                .block_idx = block_idx,
                .block_dim = launch_.block,
                .grid_dim = launch_.grid,
                .id = i,
                .lane = i % launch_.wave,
                .wave = i / launch_.wave};
    f.copies.assign(1, {});
    ++waves_[static_cast<size_t>(f.thread.wave)].size;
    start(f);
  }
  if (launch_.order != 0) {  // any permutation that differs from order to order
    for (size_t i = turn_.size(); i > 1; --i) std::swap(turn_[i - 1], turn_[(launch_.order * 2654435761u + i * 40503u) % i]);
  }
  for (int left = threads; left > 0;) {
    bool progress = false;
    for (const int i : turn_) {
      Fiber& f = fibers_[static_cast<size_t>(i)];
      if (f.state != State::ready) continue;
      progress = true;
      resume(f);
      if (f.state == State::done) --left;
    }
    if (progress || left == 0) continue;
    report_deadlock();
    abandoned_ = true;
    for (Fiber& f : fibers_) {
      if (f.state == State::done) continue;
      resume(f);
      --left;
    }
  }
  for (const Fiber& f : fibers_) {
    const bool open = std::any_of(f.copies.begin(), f.copies.end(), [](const std::vector<Copy>& g) { return !g.empty(); });
    if (open && !abandoned_) {
      current_ = const_cast<Fiber*>(&f);
      report(name() + " returned without waiting for its asynchronous copies");
      break;
    }
  }
  abandoned_ = false;
  arrived_ = 0;
}

void Block::report_deadlock() {
  std::string waiting;
  int returned = 0;
  Place last{"", 0};
  for (const Fiber& f : fibers_) {
    if (f.state == State::done) {
      ++returned;
    } else if (waiting.empty() || f.place.line != last.line) {
      waiting += fmt::format("{}thread {} at {}", waiting.empty() ? "" : ", ", f.thread.id, str(f.place));
      last = f.place;
    }
  }
  report(fmt::format("{} block {}: divergent barrier: {} of {} threads returned while others wait: {}", launch_.kernel, block_name_, returned,
                     fibers_.size(), waiting));
}

void Block::barrier(Place place) {
  Fiber& me = *current_;
  if (arrived_ == 0) {
    barrier_place_ = place;
  } else if (barrier_place_.line != place.line || std::strcmp(barrier_place_.file, place.file) != 0) {
    report(fmt::format("{}: divergent barrier: it is at {}, others of the block at {}", name(), str(place), str(barrier_place_)));
  }
  if (++arrived_ == fibers_.size()) {
    arrived_ = 0;
    ++block_epoch_;
    for (Fiber& f : fibers_)
      if (f.state == State::at_barrier) f.state = State::ready;
    return;
  }
  me.state = State::at_barrier;
  me.place = place;
  yield();
}

// Returns when all lanes of the wave have come.
void Block::meet(Place place, const char* what) {
  Fiber& me = *current_;
  Wave& w = wave();
  if (w.arrived == 0) {
    w.place = place;
  } else if (w.place.line != place.line || std::strcmp(w.place.file, place.file) != 0) {
    report(fmt::format("{}: divergent {}: it is at {}, others of the wave at {}", name(), what, str(place), str(w.place)));
  }
  if (++w.arrived == w.size) {
    w.arrived = 0;
    ++w.generation;
    for (Fiber& f : fibers_)
      if (f.thread.wave == me.thread.wave && f.state == State::at_exchange) f.state = State::ready;
    return;
  }
  me.state = State::at_exchange;
  me.place = place;
  yield();
}

const uint64_t* Block::exchange(const uint64_t* mine, int words, Place place) {
  CHECK(words >= 1 && words <= kExchangeWordsMax, "{} words", words);
  Wave& w = wave();
  uint64_t* const all = w.words[w.generation % 2];
  std::copy_n(mine, words, all + current_->thread.lane * words);
  meet(place, "wave operation");
  return all;
}

bool Block::ordered(const Access& before) const {
  if (before.thread < 0 || before.thread == current_->thread.id || before.block_epoch != block_epoch_) return true;
  return before.thread / launch_.wave == current_->thread.wave && before.wave_epoch != waves_[static_cast<size_t>(current_->thread.wave)].epoch;
}

ByteShadow* Block::shadow(const void* p, size_t bytes, Place place, const char* what) {
  const auto offset = static_cast<const char*>(p) - shared();
  if (offset < 0 || static_cast<size_t>(offset) + bytes > launch_.shared_bytes) {
    report(fmt::format("{}: {} of {} bytes at offset {} of {} bytes of shared memory, at {}", name(), what, bytes, offset, launch_.shared_bytes, str(place)));
    return nullptr;
  }
  return shadow_.data() + offset;
}

// As a write, but for the writes of its kind. A plain write of the same thread still counts for others.
void Block::touch_atomic(const void* p, size_t bytes, Place place) {
  ByteShadow* const shadow_bytes = shadow(p, bytes, place, "an atomic operation");
  if (shadow_bytes == nullptr) return;
  for (size_t i = 0; i < bytes; ++i) {
    ByteShadow& s = shadow_bytes[i];
    const Access before = s.write;
    const bool own = before.thread == current_->thread.id && before.block_epoch == block_epoch_;
    if (before.atomic) s.write = {};
    if (!s.written) report(fmt::format("{}: it adds to shared memory at {} that nothing wrote", name(), str(place)));
    touch(static_cast<const char*>(p) + i, 1, true, place);
    if (own && !before.atomic) s.write = before;
    else s.write.atomic = true;
  }
}

void Block::touch(const void* p, size_t bytes, bool write, Place place) {
  ByteShadow* const shadow_bytes = shadow(p, bytes, place, write ? "a write" : "a read");
  if (shadow_bytes == nullptr) return;
  for (size_t i = 0; i < bytes; ++i) {
    ByteShadow& s = shadow_bytes[i];
    const auto tell = [&](const char* what, const Access& before) {
      if (race_reported_) return;
      race_reported_ = true;
      report(fmt::format("{}: race: it {} shared byte {} at {}, which thread {} {} since the last barrier", name(), write ? "writes" : "reads",
                         static_cast<const char*>(p) - shared() + static_cast<ptrdiff_t>(i), str(place), before.thread, what));
    };
    if (s.arriving) {
      report(fmt::format("{}: it {} shared memory at {} while an asynchronous copy to it is under way", name(), write ? "writes" : "reads", str(place)));
      s.arriving = false;
    }
    if (!ordered(s.write)) tell("wrote", s.write);
    if (write) {
      if (!ordered(s.read)) tell("read", s.read);
      if (!ordered(s.other_read)) tell("read", s.other_read);
      s.write = now();
      s.written = true;
    } else {
      if (!s.written) {
        report(fmt::format("{}: it reads {} bytes of shared memory at {} that nothing wrote", name(), bytes, str(place)));
        s.written = true;
      }
      if (s.read.thread != current_->thread.id) s.other_read = s.read;
      s.read = now();
    }
  }
}

}  // namespace

void run(const Launch& launch, Body body) {
  CHECK(block == nullptr, "{}: a launch inside a kernel", launch.kernel);
  CHECK(launch.wave == 32 || launch.wave == kWaveMax, "{}: waves of {}", launch.kernel, launch.wave);
  CHECK(launch.block.count() >= 1 && launch.block.count() <= kThreadsMax, "{}: blocks of {} threads", launch.kernel, launch.block.count());
  CHECK(launch.shared_bytes <= kSharedBytesMax, "{}: {} bytes of shared memory", launch.kernel, launch.shared_bytes);
  Block b(launch, body);
  block = &b;
  for (unsigned z = 0; z < launch.grid.z; ++z)
    for (unsigned y = 0; y < launch.grid.y; ++y)
      for (unsigned x = 0; x < launch.grid.x; ++x) b.run({x, y, z});
  block = nullptr;
}

const Thread& self() { return block->current().thread; }
int wave_width() { return block->wave_width(); }
void block_barrier(Place place) { block->barrier(place); }
void wave_barrier(Place place) {
  const uint32_t before = block->wave().epoch;
  block->meet(place, "wave barrier");
  Wave& w = block->wave();
  if (w.epoch == before) ++w.epoch;  // the first lane through; the wave meets again before anyone can be a barrier ahead
}
const uint64_t* exchange(const uint64_t* mine, int words, Place place) { return block->exchange(mine, words, place); }
char* shared_base() { return block->shared(); }
void shared_read(const void* p, size_t bytes, Place place) { block->touch(p, bytes, false, place); }
void shared_write(void* p, size_t bytes, Place place) { block->touch(p, bytes, true, place); }
void shared_atomic(void* p, size_t bytes, Place place) { block->touch_atomic(p, bytes, place); }

void copy_async(void* dst, const void* src, size_t bytes, Place place) {
  block->touch(dst, bytes, true, place);
  ByteShadow* s = block->shadow(dst, bytes, place, "an asynchronous copy");
  if (s == nullptr) return;
  for (size_t i = 0; i < bytes; ++i) s[i].arriving = true;
  block->current().copies.back().push_back({static_cast<char*>(dst), static_cast<const char*>(src), bytes});
}

void copy_commit() { block->current().copies.emplace_back(); }

void copy_wait(int groups, Place place) {
  std::deque<std::vector<Copy>>& open = block->current().copies;
  while (static_cast<int>(open.size()) > groups + 1) {
    for (const Copy& copy : open.front()) {
      std::memcpy(copy.dst, copy.src, copy.bytes);
      ByteShadow* s = block->shadow(copy.dst, copy.bytes, place, "an asynchronous copy");
      for (size_t i = 0; i < copy.bytes; ++i) s[i].arriving = false;
      block->touch(copy.dst, copy.bytes, true, place);
    }
    open.pop_front();
  }
}

}  // namespace lockstep::simt
