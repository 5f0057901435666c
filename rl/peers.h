#pragma once
// The ranks of one run as the loop sees them: each samples and trains its share, and all know all results. Every operation here
// is called by all of them in the same order. Alone, nothing is communicated.
//
// Where trainers and samplers are different ranks, everyone meets for the samplers' completions and at the end of a step; between that the two sides work
// at the same time, each among its own, as peers of their own (side).
//
// Whatever a rank computes from gathered records is the same on all, so those stages need no agreement; what touches the world
// outside (files, the engine's limits) is agreed upon before anyone goes on.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/weights.h"
#include "rl/grader/judge.h"
#include "rl/hooks.h"
#include "rl/layouts.h"
#include "rl/sampling.h"
#include "rollout/engine.h"

namespace lockstep {

class Peers {
 public:
  Peers() = default;  // alone
  // `groups`: null while there are none, or where every rank has an engine of its own.
  explicit Peers(RankWorld* world, const RunGroups* groups = nullptr)
      : world_(world != nullptr && world->size() > 1 ? world : nullptr), group_(world_ == nullptr ? nullptr : &world_->all()), groups_(groups) {}

  bool alone() const { return group_ == nullptr; }
  int rank() const { return alone() ? 0 : group_->rank(); }
  int size() const { return alone() ? 1 : group_->size(); }
  bool first() const { return rank() == 0; }  // of everyone: writes the run directory
  RankWorld* world() const { return world_; }   // null: alone
  RankGroup* group() const { return group_; }   // of all peers; null: alone

  // Trainers and samplers among these are different ranks.
  bool apart() const { return groups_ != nullptr && groups_->layouts.apart && !is_side_; }
  bool trains() const { return !apart() || groups_->train; }
  bool samples() const { return !apart() || groups_->rollout; }
  int num_trainers() const { return apart() ? groups_->layouts.train.ranks() : size(); }
  int first_sampler() const { return apart() ? groups_->layouts.train.ranks() : 0; }
  // Those who do what this rank does: everyone, unless apart().
  Peers side() const;

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
  // The text of rank `from`, to all.
  void tell(std::string* text, Purpose p, int from = 0) const;
  // Likewise its status.
  Status told(const Status& mine, Purpose p, int from) const;
  // CPU threads for this rank, of `asked`; 0 asks for one a core, of which the ranks of a host get equal parts.
  int threads(int64_t asked) const;
  // As run_requests, whose completions do not depend on what else an engine does: every engine runs its contiguous part of the samples
  // of `requests`, which are by ascending prompt id, and all ranks get all completions. Parts differ by one sample at most: a request may be
  // cut between two engines, which both run its prompt. on_finished hears of this rank's; of the ranks of one engine, the first hears of all.
  // `engine` is null where this rank does not sample.
  Result<std::vector<Completion>> run(Engine* engine, Context& c, std::span<const Request> requests, const Hooks& hooks,
                                      const std::string& label, const OnFinished& on_finished = {}) const;
  // The same until `groups` prompts have all their samples of `requests`; the rest ends as aborted, with the tokens that it has. Engines go in step and agree
  // before each, so that who is first follows from the requests, the layout and the engines' options, never from a clock. `complete`: these prompts, by step,
  // then id.
  struct FirstGroups {
    std::vector<Completion> completions;
    std::vector<int64_t> complete;
  };
  Result<FirstGroups> run_first(Engine* engine, Context& c, std::span<const Request> requests, int64_t groups, const Hooks& hooks,
                                const std::string& label) const;
  // What the samplers have drawn together, or their error, to everyone. `drawn` says nothing on other ranks.
  Result<std::vector<Completion>> share(Result<std::vector<Completion>> drawn) const;
  // Of the ranks that are one engine, and so have the same completions, the first.
  bool leads_engine() const { return samples() && (rank() == first_sampler() || engine_of(rank() - 1) != engine_of(rank())); }
  // The verdicts on `rows`, which all ranks have. A judge that is not pure is asked by rank 0, so that all see the same.
  Result<std::vector<RewardResult>> grade(Judge& judge, std::span<const GradeRow> rows) const;
  // Those of rank `from`, to all.
  void broadcast(std::vector<Completion>& completions, const char* what, int from = 0) const;

 private:
  // Every engine's completions, to all its peers.
  Result<std::vector<Completion>> gather(Context& c, std::span<const Completion> mine) const;
  int num_engines() const { return groups_ == nullptr ? size() : groups_->layouts.rollout.dp; }
  int engine_of(int rank) const { return groups_ == nullptr ? rank : Grid(groups_->layouts.rollout).coordinates(rank - first_sampler()).dp; }
  RankWorld* world_ = nullptr;
  RankGroup* group_ = nullptr;
  const RunGroups* groups_ = nullptr;
  bool is_side_ = false;
};

uint64_t checksum(const std::string& text);

}  // namespace lockstep
