// Device memory: copies, arenas that grow, and (under the executor) the host's mistakes.

#include "core/device.h"

#include <gtest/gtest.h>

#include <numeric>
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

TEST(DeviceDeath, HostReadsOfDeviceMemoryStop) {
  if (!device_info().emulated) GTEST_SKIP() << "the driver maps device memory as it likes";
  Arena arena("test", size_t{1} << 20, Device::gpu);
  const TensorView v = arena.zeros(DType::f32, {4}, "a");
  EXPECT_EXIT(static_cast<void>(*static_cast<volatile float*>(v.data)), ::testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace lockstep
