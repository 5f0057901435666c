// The exactness gates on a model as small as its parts allow, by any number of ranks.

#include <gtest/gtest.h>

#include <map>

#include "io/json.h"
#include "model/testing.h"
#include "parallel/testing.h"
#include "rl/gates.h"

namespace lockstep {
namespace {

RankWorld* world = nullptr;

TEST(Gates, AllPassAndControlsFail) {
  GatesOptions o;
  o.model.init = "random";
  o.model.shape = testing::tiny_config();
  o.model.shape->max_positions = 600;
  o.tokens = world->size() == 1 ? 2500 : 600;
  o.threads = 1;
  o.optimizer.freeze_router = false;
  int heard = 0;
  const Result<std::vector<GateResult>> results = run_gates(o, Hooks(), world, [&](const GateResult&) { ++heard; });
  ASSERT_TRUE(results.is_ok()) << results.message();
  EXPECT_EQ(heard, static_cast<int>(results.value().size()));
  std::map<std::string, int> lines;
  for (const GateResult& r : results.value()) {
    const bool not_here = r.gate == "G6" || (r.gate == "G7" && world->size() == 1);
    EXPECT_EQ(r.verdict, not_here ? Verdict::not_run : Verdict::pass) << r.str();
    if (!not_here && r.gate != "G10") {
      EXPECT_GE(r.tokens, o.tokens) << r.str();
      EXPECT_EQ(r.different, 0);
    }
    if (r.gate == "G10") {
      EXPECT_GT(r.different, 0);
    }
    ++lines[r.gate];
    const Result<JsonValue> json = parse_json(r.json());
    ASSERT_TRUE(json.is_ok()) << r.json();
    EXPECT_EQ(json.value().find("gate")->text, r.gate);
  }
  const std::map<std::string, int> wanted = {{"G1", 3}, {"G2", 6}, {"G3", 6}, {"G4", 3}, {"G5", 3}, {"G6", 3}, {"G7", 3}, {"G8", 2}, {"G9", 3}, {"G10", 6}};
  EXPECT_EQ(lines, wanted);
}

// The engine's steps as graphs; few tokens, because the executor runs every thread of every kernel.
TEST(Gates, GraphsOnAndOffAgreeOnAGpu) {
  if (world->size() > 1) GTEST_SKIP() << "ranks that share a step have no graphs";
  GatesOptions o;
  o.model.init = "random";
  o.model.shape = testing::tiny_config();
  o.model.shape->max_positions = 40;
  o.model.device = Device::gpu;
  o.numerics = {Numerics::bf16};
  o.only = {"G6"};
  o.tokens = 80;
  const Result<std::vector<GateResult>> results = run_gates(o, Hooks(), nullptr, {});
  ASSERT_TRUE(results.is_ok()) << results.message();
  ASSERT_EQ(results.value().size(), 1u);
  EXPECT_EQ(results.value()[0].verdict, Verdict::pass) << results.value()[0].str();
  EXPECT_GE(results.value()[0].tokens, o.tokens);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world); }
