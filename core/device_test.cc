// Device memory: copies, arenas that grow, and (under the executor) the host's mistakes.

#include "core/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

TEST(Device, BytesGoThereAndBack) {
  ASSERT_TRUE(device_available().is_ok());
  DeviceContext gpu(Device::gpu);
  Context& c = gpu;
  Arena arena("test", size_t{8} << 30, Device::gpu);
  std::vector<TensorView> pieces;
  std::vector<int32_t> numbers(1 << 20);
  for (int32_t i = 0; i < 40; ++i) {  // 160 MiB: the arena grows under pieces in use
    std::iota(numbers.begin(), numbers.end(), i);
    pieces.push_back(arena.tensor(DType::i32, {1 << 20}, "piece"));
    upload(c, pieces.back(), ConstTensorView(numbers.data(), DType::i32, {1 << 20}));
  }
  copy(c, pieces[1], pieces[7]);
  set_zero(c, pieces[2]);
  std::vector<int32_t> back(1 << 20);
  const TensorView to(back.data(), DType::i32, {1 << 20});
  for (int32_t i = 0; i < 40; ++i) {
    download(c, to, pieces[static_cast<size_t>(i)]);
    EXPECT_EQ(back[5], i == 2 ? 0 : (i == 1 ? 7 : i) + 5);
    EXPECT_EQ(back.back(), i == 2 ? 0 : (i == 1 ? 7 : i) + (1 << 20) - 1);
  }
  const TensorView zeros = arena.zeros(DType::f32, {1000}, "zeros");
  download(c, TensorView(back.data(), DType::f32, {1000}), zeros);
  EXPECT_EQ(back[0], 0);
  EXPECT_EQ(back[999], 0);
  ArenaScope scope(*c.host);
  EXPECT_EQ(on_host(c, pieces[3]).ptr<int32_t>()[0], 3);
}

// Enough work that the host is ahead of a GPU when it asks.
TEST(Device, StreamsTellWhereTheyAre) {
  DeviceContext first(Device::gpu), second(Device::gpu);
  Context &a = first, &b = second;
  Arena arena("test", size_t{8} << 30, Device::gpu);
  uint64_t* const word = device_memory::host_words(2);
  void* const event = device_event::make();
  const TensorView from = arena.zeros(DType::i32, {16 << 20}, "from"), to = arena.zeros(DType::i32, {16 << 20}, "to");
  const int32_t wanted = 7;
  upload(a, from.slice(from.rows() - 1, 1), ConstTensorView(&wanted, DType::i32, {1}));
  for (int i = 0; i < 100; ++i) copy(a, to, from);
  device_memory::write_word(a.stream, word, 1);
  device_event::record(event, a.stream);
  device_event::wait(b.stream, event);
  int32_t seen = 0;
  download(b, TensorView(&seen, DType::i32, {1}), to.slice(to.rows() - 1, 1));  // waits for b's stream, and so for a's copies
  EXPECT_EQ(seen, 7);
  EXPECT_TRUE(device_event::done(event));
  device_event::destroy(event);
  EXPECT_EQ(__atomic_load_n(word, __ATOMIC_ACQUIRE), 1u);
  EXPECT_EQ(word[1], 0u);
}

TEST(Device, CpuContextsCopyInPlace) {
  CpuContext cpu;
  Context& c = cpu;
  Arena arena("test", size_t{1} << 20);
  const TensorView a = arena.zeros(DType::f32, {4}, "a"), b = arena.tensor(DType::f32, {4}, "b");
  a.ptr<float>()[3] = 5;
  copy(c, b, a);
  EXPECT_EQ(b.ptr<float>()[3], 5);
  EXPECT_EQ(on_host(c, b).data, b.data);
  EXPECT_EQ(on_device(c, b, arena).data, b.data);
}

TEST(DeviceGraph, RunsOnWhatMemoryHoldsThen) {
  DeviceContext gpu(Device::gpu);
  Context& c = gpu;
  Arena arena("test", size_t{1} << 20, Device::gpu);
  const TensorView a = arena.zeros(DType::i32, {1000}, "a"), b = arena.zeros(DType::i32, {1000}, "b"), cleared = arena.zeros(DType::i32, {1000}, "cleared");
  std::vector<int32_t> numbers(1000), back(1000);
  const TensorView host(numbers.data(), DType::i32, {1000}), to(back.data(), DType::i32, {1000});
  const auto put = [&](TensorView v, int32_t first) {
    std::iota(numbers.begin(), numbers.end(), first);
    upload(c, v, host);
  };
  const auto last = [&](TensorView v) {
    download(c, to, v);
    return back.back();
  };
  put(a, 1);
  put(cleared, 1);
  DeviceGraph captured = DeviceGraph::capture(c, [&] {
    EXPECT_TRUE(capturing());
    const ArenaScope scope(*c.workspace);
    copy(c, b, a);
    set_zero(c, cleared);
  });
  EXPECT_FALSE(capturing());
  EXPECT_EQ(last(b), 0);  // nothing has run
  EXPECT_EQ(last(cleared), 1000);
  const DeviceGraph graph = std::move(captured);
  EXPECT_TRUE(captured.empty());
  for (const int32_t first : {1, 50, 7}) {
    put(a, first);
    put(cleared, first);
    graph.run(c);
    EXPECT_EQ(last(b), first + 999);
    EXPECT_EQ(last(cleared), 0);
  }
  put(a, 3);
  EXPECT_EQ(last(b), 7 + 999);  // not again by itself
}

// A server loads weights beside an engine that captures.
TEST(DeviceGraph, OtherThreadsMapClearAndCopyMeanwhile) {
  std::atomic<bool> stop = false;
  std::thread other([&] {
    DeviceContext gpu(Device::gpu);
    Context& c = gpu;
    for (int32_t i = 1; !stop; ++i) {
      Arena arena("other", size_t{1} << 20, Device::gpu);
      const TensorView a = arena.zeros(DType::i32, {1}, "a"), b = arena.zeros(DType::i32, {1}, "b");
      int32_t got = 0;
      upload(c, a, ConstTensorView(&i, DType::i32, {1}));
      copy(c, b, a);
      download(c, TensorView(&got, DType::i32, {1}), b);
      ASSERT_EQ(got, i);
    }
  });
  DeviceContext gpu(Device::gpu);
  Context& c = gpu;
  Arena arena("test", size_t{1} << 20, Device::gpu);
  const TensorView a = arena.zeros(DType::i32, {1}, "a"), b = arena.zeros(DType::i32, {1}, "b");
  for (int32_t i = 1; i < 200; ++i) {
    int32_t got = 0;
    const DeviceGraph graph = DeviceGraph::capture(c, [&] { copy(c, b, a); });
    upload(c, a, ConstTensorView(&i, DType::i32, {1}));
    graph.run(c);
    download(c, TensorView(&got, DType::i32, {1}), b);
    EXPECT_EQ(got, i);
  }
  stop = true;
  other.join();
}

TEST(DeviceGraphDeath, WhatAGraphCannotHoldIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  DeviceContext gpu(Device::gpu);
  CpuContext cpu;
  Context& c = gpu;
  Arena arena("test", size_t{1} << 30, Device::gpu);
  const TensorView v = arena.zeros(DType::i32, {10}, "v");
  std::vector<int32_t> numbers(10);
  const TensorView host(numbers.data(), DType::i32, {10});
  const auto while_captured = [&](const auto& work) { return DeviceGraph::capture(c, work); };
  EXPECT_DEATH(while_captured([&] { synchronize(c); }), "the host waits for the stream while a graph is captured");
  EXPECT_DEATH(while_captured([&] { upload(c, v, host); }), "uploaded while a graph is captured");
  EXPECT_DEATH(while_captured([&] { download(c, host, v); }), "downloaded while a graph is captured");
  EXPECT_DEATH(while_captured([&] { arena.tensor(DType::i32, {1 << 20}, "more"); }), "arena test: 'more' raises its high mark");
  EXPECT_DEATH(while_captured([&] {
                 arena.release(0);
                 arena.zeros(DType::i32, {10}, "again");
               }),
               "arena test: 'again' is cleared");
  EXPECT_DEATH(while_captured([&] { while_captured([] {}); }), "another graph is captured");
  EXPECT_DEATH(DeviceGraph::capture(cpu, [] {}), "captured on a context of the cpu");
  EXPECT_DEATH(DeviceGraph().run(c), "not captured is run");
}

TEST(DeviceDeath, HostReadsOfDeviceMemoryStop) {
  if (!device_info().emulated) GTEST_SKIP() << "the driver maps device memory as it likes";
  Arena arena("test", size_t{1} << 20, Device::gpu);
  const TensorView v = arena.zeros(DType::f32, {4}, "a");
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(v.data)), "");  // SIGSEGV, which the address sanitizer reports in its own way
}

}  // namespace
}  // namespace lockstep
