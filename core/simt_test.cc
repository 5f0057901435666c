// The executor runs what it is given, and finds each kind of mistake that it promises to find.

#include "core/gpu.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace lockstep {
namespace {

using simt::Findings;
using simt::Launch;

template <typename F>
void launch(Launch l, F body) {
  l.wave = gpu::kWave;
  simt::run(l, simt::Body(body));
}

bool found(const Findings& f, const std::string& what) {
  for (const std::string& m : f.messages())
    if (m.find(what) != std::string::npos) return true;
  return false;
}

constexpr int kThreads = 192;

// Sum of the threads' numbers, by a tree over shared memory: a barrier between any two levels.
void tree_sum(const float* x, float* sum, bool leave_out_a_barrier) {
  const gpu::Shared<float> tree = gpu::SharedMemory().take<float>(256);
  const int t = gpu::thread_x();
  tree.store(t, x[t]);
  if (t + kThreads < 256) tree.store(t + kThreads, 0.0f);
  for (int half = 128; half > 0; half /= 2) {
    if (!leave_out_a_barrier || half != 32) gpu::sync_block();
    if (t < half) tree.store(t, tree.load(t) + tree.load(t + half));
  }
  gpu::sync_block();
  if (t == 0) *sum = tree.load(0);
}

TEST(Simt, RunsATreeInAnyOrder) {
  std::vector<float> x(kThreads);
  std::iota(x.begin(), x.end(), 1.0f);
  for (unsigned order = 0; order < 5; ++order) {
    float sum = 0;
    launch({.kernel = "tree", .block = {kThreads}, .shared_bytes = 1024, .order = order}, [&] { tree_sum(x.data(), &sum, false); });
    EXPECT_EQ(sum, kThreads * (kThreads + 1) / 2);
  }
}

TEST(Simt, EveryBlockAndThreadRunsOnce) {
  std::vector<int> runs(3 * 2 * 70);
  launch({.kernel = "count", .grid = {3, 2}, .block = {70}},
         [&] { ++runs[static_cast<size_t>((gpu::block_y() * 3 + gpu::block_x()) * 70 + gpu::thread_x())]; });
  for (const int n : runs) EXPECT_EQ(n, 1);
}

TEST(Simt, WaveOperationsReachTheirOwnWave) {
  std::vector<int> got(2 * gpu::kWave);
  std::vector<uint64_t> votes(got.size());
  launch({.kernel = "shuffle", .block = {static_cast<unsigned>(got.size())}, .order = 3}, [&] {
    const size_t t = static_cast<size_t>(gpu::thread_x());
    int v = gpu::thread_x();
    for (int i = 0; i < 3; ++i) v = gpu::shuffle_xor(v, 1 << i);
    got[t] = v;
    votes[t] = gpu::ballot(gpu::thread_x() % 3 == 0);
  });
  for (int t = 0; t < static_cast<int>(got.size()); ++t) {
    EXPECT_EQ(got[static_cast<size_t>(t)], t ^ 7);
    for (int lane = 0; lane < gpu::kWave; ++lane)
      EXPECT_EQ(votes[static_cast<size_t>(t)] >> lane & 1, static_cast<uint64_t>((t / gpu::kWave * gpu::kWave + lane) % 3 == 0));
  }
}

TEST(Simt, AsynchronousCopiesArriveWhenWaitedFor) {
  alignas(16) float from[4] = {1, 2, 3, 4};
  float got = 0;
  launch({.kernel = "copy", .block = {1}, .shared_bytes = 64}, [&] {
    const gpu::Shared<float> to = gpu::SharedMemory().take<float>(4);
    gpu::copy_async(to, 0, from);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::sync_block();
    got = to.load(3);
  });
  EXPECT_EQ(got, 4);
}

TEST(SimtFindings, ARace) {
  Findings f;
  std::vector<float> x(kThreads, 1.0f);
  float sum;
  launch({.kernel = "tree", .block = {kThreads}, .shared_bytes = 1024}, [&] { tree_sum(x.data(), &sum, true); });
  EXPECT_TRUE(found(f, "race"));
}

TEST(Simt, AtomicSumsOfAllThreads) {
  uint32_t sum = 0;
  launch({.kernel = "count", .block = {kThreads}, .shared_bytes = 128}, [&] {
    const auto word = gpu::SharedMemory().take<uint32_t>(1);
    if (gpu::thread_x() == 0) word.store(0, 5);
    gpu::sync_block();
    gpu::atomic_add(word, 0, 2);
    gpu::sync_block();
    if (gpu::thread_x() == 0) sum = word.load(0);
  });
  EXPECT_EQ(sum, 5u + 2 * kThreads);
}

TEST(SimtFindings, AtomicSumsDoNotOrderOtherAccesses) {
  for (const bool write_before : {false, true}) {
    Findings f;
    launch({.kernel = "count", .block = {kThreads}, .shared_bytes = 128}, [&] {
      const auto word = gpu::SharedMemory().take<uint32_t>(1);
      if (gpu::thread_x() == 0) word.store(0, 0);
      if (!write_before) gpu::sync_block();
      gpu::atomic_add(word, 0, 1);
      if (write_before) gpu::sync_block();
      word.load(0);
    });
    EXPECT_TRUE(found(f, "race")) << write_before;
  }
}

TEST(SimtFindings, WaveBarriersOrderAWaveAndNoMore) {
  const auto neighbour = [](int threads, bool in_wave) {
    Findings f;
    launch({.kernel = "neighbour", .block = {static_cast<unsigned>(threads)}, .shared_bytes = 1024}, [&] {
      const gpu::Shared<int> a = gpu::SharedMemory().take<int>(threads);
      const int t = gpu::thread_x();
      a.store(t, t);
      gpu::sync_wave();
      (void)a.load(in_wave ? t ^ 1 : (t + gpu::kWave) % threads);
    });
    return found(f, "race");
  };
  EXPECT_FALSE(neighbour(2 * gpu::kWave, true));
  EXPECT_TRUE(neighbour(2 * gpu::kWave, false));
}

TEST(SimtFindings, AReadOfWhatNothingWrote) {
  Findings f;
  launch({.kernel = "unwritten", .block = {2}, .shared_bytes = 64}, [] {
    const gpu::Shared<float> a = gpu::SharedMemory().take<float>(4);
    if (gpu::thread_x() == 0) a.store(0, 1.0f);
    gpu::sync_block();
    (void)a.load(gpu::thread_x());
  });
  EXPECT_TRUE(found(f, "nothing wrote"));
  EXPECT_EQ(f.messages().size(), 4u) << "one for each byte of the second number";
}

TEST(SimtFindings, AReadOfACopyThatIsUnderWay) {
  Findings f;
  alignas(16) float from[4] = {1, 2, 3, 4};
  launch({.kernel = "early", .block = {1}, .shared_bytes = 64}, [&] {
    const gpu::Shared<float> to = gpu::SharedMemory().take<float>(4);
    gpu::copy_async(to, 0, from);
    gpu::copy_commit();
    (void)to.load(3);
  });
  EXPECT_TRUE(found(f, "under way"));
  EXPECT_TRUE(found(f, "without waiting"));
}

TEST(SimtFindings, ABarrierThatSomeNeverReach) {
  Findings f;
  launch({.kernel = "early return", .block = {kThreads}}, [] {
    if (gpu::thread_x() == 5) return;
    gpu::sync_block();
  });
  EXPECT_TRUE(found(f, "1 of 192 threads returned"));
}

void add_kernel(int* to, const int* from, int amount) { to[gpu::thread_x()] = from[gpu::thread_x()] + amount; }

TEST(Simt, ACapturedLaunchKeepsItsArgumentsAndReadsMemoryWhenItRuns) {
  simt::Stream stream;
  Context c{.stream = &stream};
  int from[4] = {1, 2, 3, 4}, to[4] = {};
  const auto add = [&](int amount) { gpu::launch(c, "add", {.blocks = 1, .threads = 4}, add_kernel, &to[0], &from[0], amount); };
  stream.captures = true;
  int amount = 10;
  add(amount);
  amount = 100;
  stream.captures = false;
  EXPECT_EQ(to[3], 0);
  from[3] = 7;
  ASSERT_EQ(stream.kept.size(), 1u);
  stream.kept[0]();
  EXPECT_EQ(to[3], 17);
  add(amount);
  EXPECT_EQ(to[3], 107);
}

TEST(SimtFindings, TwoBarriersAtOnce) {
  Findings f;
  launch({.kernel = "branches", .block = {4}}, [] {
    if (gpu::thread_x() < 2) {
      gpu::sync_block();
    } else {
      gpu::sync_block();
    }
  });
  EXPECT_TRUE(found(f, "divergent barrier"));
}

TEST(SimtFindings, AWaveOperationInABranch) {
  Findings f;
  launch({.kernel = "shuffle in a branch", .block = {static_cast<unsigned>(gpu::kWave)}}, [] {
    if (gpu::lane() < 7) (void)gpu::shuffle(1, 0);
  });
  EXPECT_TRUE(found(f, "divergent"));
}

TEST(SimtFindings, AnAccessBeyondTheEnd) {
  Findings f;
  launch({.kernel = "beyond", .block = {1}, .shared_bytes = 32}, [] { gpu::SharedMemory().take<char>(64).store(32, 'x'); });
  EXPECT_TRUE(found(f, "offset 32 of 32 bytes"));
}

TEST(SimtDeath, TheAddressSanitizerGuardsDeviceMemory) {
  if (!kAddressSanitizer) GTEST_SKIP() << "not a build under the address sanitizer";
  Arena arena("test", 1 << 20, Device::gpu);
  float* const five = arena.tensor(DType::f32, {5}, "five").ptr<float>();
  const simt::DeviceAccess access;
  const auto write = [&](int i) { launch({.kernel = "beyond", .block = {1}}, [=] { five[i] = 1; }); };
  write(4);
  EXPECT_DEATH(write(5), "use-after-poison");
}

}  // namespace
}  // namespace lockstep
