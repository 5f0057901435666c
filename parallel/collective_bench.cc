// How long the operations of a group take when nobody is late. Run under mpirun with any number of ranks; rank 0 prints one JSON
// line an operation:
//   mpirun --oversubscribe --bind-to none -n 16 build/parallel/collective_bench

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>

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

int main() {
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start({.deadline_s = 60});
  if (!started) {
    std::fprintf(stderr, "%s\n", started.message().c_str());
    return 1;
  }
  RankWorld& world = *started.value();
  RankGroup& all = world.all();
  CpuContext context(1, size_t{256} << 20);
  const int n = world.size();

  measure(world, "barrier", 0, 300, [&] { all.barrier("barrier"); });
  int64_t count = 1;
  measure(world, "all_reduce of an integer", 8, 300, [&] { all.all_reduce(std::span(&count, 1), Reduction::max, "vote"); });
  std::vector<float> x(size_t{4} << 20), y(x.size());
  for (int64_t rows : {1, 64, 4096}) {
    // Rows of 64 floats, as many to each rank.
    const std::vector<int64_t> counts(n, rows);
    const TensorView from(x.data(), DType::f32, {rows * n, 64}), to(y.data(), DType::f32, {rows * n, 64});
    measure(world, "all_to_all", rows * 256 * n, rows > 1000 ? 30 : 200,
            [&] { all.all_to_all(context, to, counts, from, counts, "rows"); });
  }
  for (int64_t elements : {256, 65536, 4 << 20}) {
    const TensorView v(x.data(), DType::f32, {elements});
    measure(world, "all_reduce", elements * 4, elements > 100000 ? 10 : 200, [&] { all.all_reduce(context, v, "sum"); });
  }
  if (n > 1) {
    for (int64_t elements : {64, 1 << 20}) {
      const TensorView v(x.data(), DType::f32, {elements});
      measure(world, "there and back", elements * 4, 100, [&] {
        if (world.rank() == 0) all.send(context, v, 1, 0, "there");
        if (world.rank() == 1) all.recv(context, v, 0, 0, "there");
        if (world.rank() == 1) all.send(context, v, 0, 0, "back");
        if (world.rank() == 0) all.recv(context, v, 1, 0, "back");
      });
    }
  }
  world.finish();
}
