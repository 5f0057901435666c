// How long the operations of a group take when nobody is late. Run under mpirun with any number of ranks; rank 0 prints one JSON
// line an operation:
//   mpirun --oversubscribe --bind-to none -n 16 build/parallel/collective_bench
//   mpirun -n 2 build-cuda/parallel/collective_bench gpu [host]   # of what lies on GPUs, until it is complete there; host: by way of the host

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string_view>

#include "core/device.h"
#include "io/json.h"
#include "parallel/collective.h"

namespace {

using namespace lockstep;

double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void measure(RankWorld& world, const char* name, int64_t bytes, int repeats, const std::function<void()>& operation) {
  for (int i = 0; i < 3; ++i) operation();
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = now_s();
    operation();
    seconds.push_back(now_s() - start);
  }
  world.all().barrier("bench");
  if (world.rank() != 0) return;
  std::sort(seconds.begin(), seconds.end());
  double sum = 0;
  for (double s : seconds) sum += s;
  const auto us = [](double s) { return static_cast<int64_t>(s * 1e6); };
  std::printf("%s\n", JsonLine()
                          .add("op", name)
                          .add("ranks", world.size())
                          .add("bytes", bytes)
                          .add("mean_us", us(sum / repeats))
                          .add("p50_us", us(seconds[repeats / 2]))
                          .add("p99_us", us(seconds[repeats * 99 / 100]))
                          .str()
                          .c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const bool on_gpu = argc > 1 && std::string_view(argv[1]) == "gpu";
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start({.deadline_s = 60});
  if (!started) {
    std::fprintf(stderr, "%s\n", started.message().c_str());
    return 1;
  }
  RankWorld& world = *started.value();
  RankGroup& all = world.all();
  if (on_gpu) {
    const Status ready = world.use_devices(argc > 2 ? Transport::host : Transport::automatic);
    if (!ready) {
      std::fprintf(stderr, "%s\n", ready.message().c_str());
      return 1;
    }
    if (world.rank() == 0) std::printf("%s\n", JsonLine().add("between", world.device_way()).str().c_str());
  }
  DeviceContext device(on_gpu ? Device::gpu : Device::cpu, 1, size_t{2} << 30);
  Context& context = device;
  const int n = world.size();
  // A GPU does not wait: neither does what follows in its stream, and `back to back` says what one costs there.
  const auto measure_data = [&](const char* name, int64_t bytes, int repeats, const std::function<void()>& operation) {
    measure(world, name, bytes, repeats, [&] {
      operation();
      synchronize(context);
    });
  };

  measure(world, "barrier", 0, 300, [&] { all.barrier("barrier"); });
  int64_t count = 1;
  measure(world, "all_reduce of an integer", 8, 300, [&] { all.all_reduce(std::span(&count, 1), Reduction::max, "vote"); });
  const int64_t most = on_gpu ? int64_t{64} << 20 : int64_t{4} << 20;
  const TensorView x = zeros(context, DType::f32, {most}, "x"), y = zeros(context, DType::f32, {most}, "y");
  for (int64_t rows : {int64_t{1}, int64_t{64}, int64_t{4096}, most / 64 / n}) {
    // Rows of 64 floats, as many to each rank.
    if (rows * n * 64 > most) continue;
    const std::vector<int64_t> counts(n, rows);
    const TensorView from = x.slice(0, rows * n * 64).reshape({rows * n, 64}), to = y.slice(0, rows * n * 64).reshape({rows * n, 64});
    measure_data("all_to_all", rows * 256 * n, rows > 1000 ? 30 : 200, [&] { all.all_to_all(context, to, counts, from, counts, "rows"); });
  }
  if (on_gpu) {
    constexpr int kCalls = 50;
    const std::vector<int64_t> counts(n, 1);
    const TensorView from = x.slice(0, n * 64).reshape({n, 64}), to = y.slice(0, n * 64).reshape({n, 64});
    measure_data("all_to_all, 50 back to back", n * 256, 20, [&] {
      for (int i = 0; i < kCalls; ++i) all.all_to_all(context, to, counts, from, counts, "rows");
    });
  }
  std::vector<int64_t> lengths = {256, 65536, int64_t{4} << 20};
  if (on_gpu) lengths.push_back(most);
  for (const int64_t elements : lengths) {
    const TensorView v = x.slice(0, elements);
    measure_data("all_reduce", elements * 4, elements > 100000 ? 10 : 200, [&] { all.all_reduce(context, v, "sum"); });
  }
  if (n > 1) {
    for (int64_t elements : {int64_t{64}, int64_t{1} << 20, most}) {
      const TensorView v = x.slice(0, elements), w = y.slice(0, elements);
      measure_data("there and back", elements * 4, elements == most ? 20 : 100, [&] {
        if (world.rank() == 0) all.send(context, v, 1, 0, "there");
        if (world.rank() == 1) all.recv(context, v, 0, 0, "there");
        if (world.rank() == 1) all.send(context, v, 0, 0, "back");
        if (world.rank() == 0) all.recv(context, v, 1, 0, "back");
      });
      measure_data("both ways at once", elements * 4, elements == most ? 20 : 100, [&] {
        if (world.rank() > 1) return;
        const int peer = 1 - world.rank();
        const RankGroup::Request sent = all.start_send(context, v, peer, 1, "both ways");
        all.recv(context, w, peer, 1, "both ways");
        all.wait(sent);
      });
    }
  }
  world.finish();
}
