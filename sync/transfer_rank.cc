// transfer_rank DIR STAGE VICTIM: what transfer_death_test starts on some ranks. Two updates; each rank writes the version and the sum of what it serves after
// each to DIR/RANK. In the second one rank VICTIM is killed when it enters STAGE; of "none", nobody is.

#include <signal.h>

#include <cstdlib>
#include <fstream>

#include <xxhash.h>

#include "sync/testing.h"
#include "sync/transfer.h"

namespace lockstep {
namespace {

uint64_t served(const Weights& w) {
  uint64_t sum = 0;
  for (const TensorSpec& spec : w.table()) {
    const WeightView& v = w.view(spec.id);
    const ConstTensorView& read = spec.has_panels() ? v.panels : v.rows;
    if (!read.empty()) sum = XXH64(read.data, read.bytes(), sum);
  }
  return sum;
}

int run(const std::string& directory, const std::string& stage, int victim) {
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start({.deadline_s = 60});
  CHECK(started.is_ok(), "{}", started.message());
  RankWorld& world = *started.value();
  CHECK(world.record_in(directory).is_ok(), "{}", directory);
  const ModelConfig m = testing::small_config();
  const Placement source = placement_of(m, Grid({.pp = 2, .dp = world.size() / 2}), {{0, 2}, {2, 4}}, Numerics::f32);
  const Placement destination = placement_of(m, Grid({.dp = world.size()}), {{0, 4}}, Numerics::bf16);
  Arena arena("weights", size_t{1} << 30);
  CpuContext c(1);
  const auto rank = static_cast<size_t>(world.rank());
  Weights from(m, Numerics::f32, source.shards[rank], arena), to(m, Numerics::bf16, destination.shards[rank], arena);
  SyncOptions options;
  bool second = false;
  options.hooks.enter = [&](SyncStage at, int64_t bucket) {
    if (second && world.rank() == victim && stage == sync_stage_name(at) && bucket <= 0) raise(SIGKILL);
    return Status::ok();
  };
  Transfer transfer(&world.all(), from, to, source, destination, [](const TensorSpec&) { return true; }, arena, options, 4096);
  for (int64_t version = 1; version <= 2; ++version) {
    second = version == 2;
    CHECK(from.load(c, random_boxes(m, static_cast<uint64_t>(version)), version).is_ok(), "random weights");
    const Result<SyncReceipt> receipt = transfer.update(c);
    CHECK(receipt.is_ok(), "{}", receipt.message());
    std::ofstream(directory + "/" + std::to_string(rank)) << to.version() << ' ' << served(to) << '\n';
    world.all().barrier("written");
  }
  world.finish();
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return argc == 4 ? lockstep::run(argv[1], argv[2], std::atoi(argv[3])) : 2; }
