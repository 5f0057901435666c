#pragma once
// The ranks of one run as the loop sees them: each samples and trains its share, and all know all results. Every operation here
// is called by all of them in the same order. Alone, nothing is communicated.
//
// Whatever a rank computes from gathered records is the same on all, so those stages need no agreement; what touches the world
// outside (files, the engine's limits) is agreed upon before anyone goes on.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/weights.h"
#include "parallel/groups.h"
#include "rl/grader/judge.h"
#include "rl/hooks.h"
#include "rl/sampling.h"
#include "rollout/engine.h"

namespace lockstep {

class Peers {
 public:
  Peers() = default;  // alone
  // `rollout`: the sampler's layout; null while there is none, or where every rank has an engine of its own.
  explicit Peers(RankWorld* world, const Groups* rollout = nullptr)
      : world_(world != nullptr && world->size() > 1 ? world : nullptr), rollout_(rollout) {}

  bool alone() const { return world_ == nullptr; }
  int rank() const { return alone() ? 0 : world_->rank(); }
  int size() const { return alone() ? 1 : world_->size(); }
  bool first() const { return rank() == 0; }  // writes the run directory
  RankWorld* world() const { return world_; }                            // null: alone
  RankGroup* group() const { return alone() ? nullptr : &world_->all(); }  // null: alone

  Status agree(const Status& mine, Purpose p) const;
  // What only rank 0 does; its error is that of all.
  template <typename Work>
  Status by_first(Purpose p, Work work) const {
    return agree(first() ? work() : Status::ok(), p);
  }
  // An error that names the first rank whose `value` is not that of the first rank of its kind. `what` is a plural, and a literal: "weights".
  Status same(uint64_t value, const char* what, int64_t kind = 0) const;
  // An error that names the first rank whose settings, as TOML, are not those of rank 0, and the first line that differs.
  Status same_settings(const std::string& mine) const;
  // All ranks' values added, modulo 2^64.
  uint64_t sum(uint64_t mine, const char* what) const;
  // Rank 0's text, to all.
  void tell(std::string* text, Purpose p) const;
  // CPU threads for this rank, of `asked`; 0 asks for one a core, of which the ranks of a host get equal parts.
  int threads(int64_t asked) const;
  // As run_requests, whose completions do not depend on what else an engine does: every engine runs its contiguous part of the samples
  // of `requests`, which are by ascending prompt id, and all ranks get all completions. Parts differ by one sample at most: a request may be
  // cut between two engines, which both run its prompt. on_finished hears of this rank's; of the ranks of one engine, the first hears of all.
  Result<std::vector<Completion>> run(Engine& engine, Context& c, std::span<const Request> requests, const Hooks& hooks,
                                      const std::string& label, const OnFinished& on_finished = {}) const;
  // Of the ranks that are one engine, and so have the same completions, the first.
  bool leads_engine() const { return rank() == 0 || engine_of(rank() - 1) != engine_of(rank()); }
  // The verdicts on `rows`, which all ranks have. A judge that is not pure is asked by rank 0, so that all see the same.
  Result<std::vector<RewardResult>> grade(Judge& judge, std::span<const GradeRow> rows) const;
  // Those of rank 0, to all.
  void broadcast(std::vector<Completion>& completions, const char* what) const;

 private:
  int num_engines() const { return rollout_ == nullptr ? size() : rollout_->grid.layout().dp; }
  int engine_of(int rank) const { return rollout_ == nullptr ? rank : rollout_->grid.coordinates(rank).dp; }
  RankWorld* world_ = nullptr;
  const Groups* rollout_ = nullptr;
};

uint64_t checksum(const std::string& text);

}  // namespace lockstep
