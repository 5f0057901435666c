#pragma once
// The main program of tests that any number of ranks run together, under mpirun or alone.

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "parallel/collective.h"

namespace lockstep::testing {

// Says what failed on a rank whose usual printer is silent.
class FailuresOfRank : public ::testing::EmptyTestEventListener {
 public:
  explicit FailuresOfRank(int rank) : rank_(rank) {}
  void OnTestPartResult(const ::testing::TestPartResult& r) override {
    if (r.failed()) std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank_, r.file_name(), r.line_number(), r.message());
  }

 private:
  int rank_;
};

// Joins the world, which `*world` is from then on, and runs all tests on all of its ranks. Rank 0 reports, the others name what failed; a failure of one
// is one of all.
inline int run_on_ranks(int argc, char** argv, RankWorld** world, double deadline_s = 120) {
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start({.deadline_s = deadline_s});
  if (!started) {
    std::fprintf(stderr, "%s\n", started.message().c_str());
    return 1;
  }
  const std::unique_ptr<RankWorld> own = started.take();
  *world = own.get();
  const Status ready = own->use_devices(Transport::automatic);
  if (own->rank() == 0) std::printf("between GPUs: %s\n", ready ? own->device_way().c_str() : ready.message().c_str());
  ::testing::InitGoogleTest(&argc, argv);  // parameters of tests may ask how many ranks there are
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (own->rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOfRank(own->rank()));
  }
  const int result = RUN_ALL_TESTS();
  const bool failed = own->all().any(result != 0, "result");
  own->finish();
  return failed ? 1 : 0;
}

}  // namespace lockstep::testing
