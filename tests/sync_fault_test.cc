// A policy whose sampler has weights of its own, in another layout and in fp8, beside one that nothing happens to. Its updates fail at every stage; each time
// the sampler must draw what it drew before, token by token and log-prob by log-prob, and after the next update what the other one draws. Run by one rank
// or several.

#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>

#include "parallel/testing.h"
#include "rl/peers.h"
#include "rl/policy.h"
#include "tests/tiny_run.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

RankWorld* world = nullptr;

class SyncFault : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("lockstep_sync_fault_{}", ::getpid());
    fs::create_directories(root_);
    make_tiny_task(root_);
    const ModelConfig config = load_model_config(root_ / "config.json").value();
    if (world->size() == 1) return;
    const ParallelOptions parallel = world->size() == 2 ? ParallelOptions{.ep = 2, .rollout_ep = 1} : ParallelOptions{.pp = 2, .rollout_tp = 2};
    const Result<Layouts> layouts = resolve_layouts(parallel, config, 24, world->size());
    ASSERT_TRUE(layouts.is_ok()) << layouts.message();
    groups_.emplace(make_run_groups(*world, layouts.value(), config, Numerics::bf16, Numerics::fp8));
  }
  void TearDown() override { fs::remove_all(root_); }

  std::unique_ptr<Policy> make(TransferHooks hooks) {
    const PolicyOptions options{.config = root_ / "config.json", .init = "random", .tokenizer = root_, .numerics = Numerics::bf16, .sampler = SamplerNumerics::fp8};
    PolicyUse use{.seed = 3, .threads = 1, .train = true};
    use.engine.max_context = 24;
    use.optimizer.lr = 3e-3f;
    use.sync = {.delta = true, .full_every = 5, .hooks = std::move(hooks)};
    use.ranks = groups_ ? &*groups_ : nullptr;
    Result<std::unique_ptr<Policy>> policy = Policy::make(options, use);
    EXPECT_TRUE(policy.is_ok()) << policy.message();
    return policy.take();
  }
  std::vector<Completion> draw(Policy& policy) {
    std::vector<Request> requests(3);
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].prompt_id = i;
      requests[i].prompt = {1, static_cast<int32_t>(5 + i), 7};
      requests[i].num_samples = 2;
      requests[i].seed = 9;
      requests[i].sampling.temperature = 1;
      requests[i].sampling.max_new_tokens = 8;
    }
    Result<std::vector<Completion>> done = Peers(world, groups_ ? &*groups_ : nullptr).run(&policy.engine(), policy.context(), requests, Hooks(), "test");
    EXPECT_TRUE(done.is_ok());
    return done.take();
  }
  void step(Policy& policy, const std::vector<Completion>& drawn) {
    std::vector<TrainSample> samples;
    for (const Completion& done : drawn) {
      TrainSample& s = samples.emplace_back();
      s.index = static_cast<int64_t>(samples.size());
      s.tokens = {1, static_cast<int32_t>(5 + done.prompt_id), 7};
      s.prompt_length = 3;
      s.tokens.insert(s.tokens.end(), done.tokens.begin(), done.tokens.end());
      s.mask.assign(done.tokens.size(), 1);
      s.advantage.assign(done.tokens.size(), samples.size() % 2 == 0 ? 1.0f : -1.0f);
      s.rollout_logprob = s.old_logprob = done.logprobs;
    }
    const Result<StepMetrics> stepped = policy.actor().step(samples, {}, nullptr, {});
    EXPECT_TRUE(stepped.is_ok()) << stepped.message();
  }
  static bool same(const std::vector<Completion>& a, const std::vector<Completion>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i)
      if (a[i].tokens != b[i].tokens || a[i].logprobs != b[i].logprobs) return false;  // logprobs as numbers: none is NaN
    return true;
  }

  fs::path root_;
  std::optional<RunGroups> groups_;
};

TEST_F(SyncFault, TheSamplerDrawsWhatItDrewUntilAnUpdateSucceeds) {
  // What goes wrong, on the last rank, while `armed`.
  struct Trouble {
    const char* what;
    SyncStage stage;
    std::function<void(TransferHooks&, const bool&)> make;
  };
  const auto error_at = [](SyncStage stage) {
    return [stage](TransferHooks& hooks, const bool& armed) {
      hooks.enter = [stage, &armed](SyncStage at, int64_t) { return armed && at == stage ? errorf("connection lost") : Status::ok(); };
    };
  };
  const std::vector<Trouble> troubles = {
      {"error", SyncStage::quiesce, error_at(SyncStage::quiesce)},
      {"error", SyncStage::begin, error_at(SyncStage::begin)},
      {"error", SyncStage::transfer, error_at(SyncStage::transfer)},
      {"error", SyncStage::verify, error_at(SyncStage::verify)},
      {"error", SyncStage::commit, error_at(SyncStage::commit)},
      {"missing tensor", SyncStage::begin, [](TransferHooks& h, const bool& armed) { h.announce = [&armed](Manifest& m) { if (armed) m.pop_back(); }; }},
      {"other shape", SyncStage::begin, [](TransferHooks& h, const bool& armed) { h.announce = [&armed](Manifest& m) { if (armed) ++m.back().shape.dims[0]; }; }},
      {"lost rows", SyncStage::verify, [](TransferHooks& h, const bool& armed) { h.lose = [&armed](const TensorSpec&) { return armed; }; }},
      {"bit flip", SyncStage::verify, [](TransferHooks& h, const bool& armed) { h.arrive = [&armed](int64_t, TensorView b) { if (armed) b.ptr<uint8_t>()[b.rows() - 1] ^= 64; }; }},
      {"NaN", SyncStage::transfer, [](TransferHooks& h, const bool& armed) {
         h.pack = [&armed](const TensorSpec&, TensorView rows) {
           if (armed && rows.dtype == DType::f32) *static_cast<float*>(rows.data) = std::numeric_limits<float>::quiet_NaN();
         };
       }},
  };
  for (const Trouble& trouble : troubles) {
    SCOPED_TRACE(fmt::format("{} in {}", trouble.what, sync_stage_name(trouble.stage)));
    bool armed = false;
    TransferHooks hooks;
    if (world->rank() == world->size() - 1) trouble.make(hooks, armed);
    const std::unique_ptr<Policy> troubled = make(std::move(hooks)), plain = make({});
    ASSERT_TRUE(troubled->publish().is_ok() && plain->publish().is_ok());
    std::vector<Completion> before = draw(*plain);
    EXPECT_TRUE(same(draw(*troubled), before));
    for (int version = 1; version <= 2; ++version) {
      for (Policy* p : {&*troubled, &*plain}) step(*p, before);
      armed = true;
      const Result<std::optional<SyncReceipt>> refused = troubled->sync();
      armed = false;
      ASSERT_FALSE(refused.is_ok());
      EXPECT_NE(refused.message().find(fmt::format("rank {}: {}: ", world->size() - 1, sync_stage_name(trouble.stage))), std::string::npos) << refused.message();
      EXPECT_EQ(troubled->weights().version(), version - 1);
      EXPECT_TRUE(same(draw(*troubled), before));
      ASSERT_TRUE(troubled->sync().is_ok() && plain->sync().is_ok());
      EXPECT_EQ(troubled->weights().version(), version);
      const std::vector<Completion> after = draw(*plain);
      EXPECT_FALSE(same(after, before));
      EXPECT_TRUE(same(draw(*troubled), after));
      before = after;
    }
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::testing::run_on_ranks(argc, argv, &lockstep::world); }
