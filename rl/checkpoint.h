#pragma once
// What a run needs to continue as if it had never stopped, and the start and resume of a run directory.
//
// A checkpoint directory holds masters and optimizer (model/checkpoint_boxes.h: one file each of every rank, with the actor's counters), config.json, the
// tokenizer, the resolved settings, state.json, the samples that were drawn ahead (rl/loop.h), prompts that wait (rl/long_tail.h), and checksums.json (XXH64 of all of these, checked on
// resume); the file COMPLETE makes it count. Draws have no state: they are keyed by what they are for.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "io/run_dir.h"
#include "rl/hooks.h"
#include "rl/order.h"
#include "rl/peers.h"
#include "rl/policy.h"

namespace lockstep {

struct RunState {
  std::string kind;  // "train" or "sft"
  int64_t step = 0;  // steps done
  int64_t seed = 0;
  int64_t num_rows = 0;  // of the data file: a resumed run must see the same ones
  std::string rows;      // their fingerprint
  OrderCursor cursor;
  bool operator==(const RunState&) const = default;
};

std::string run_state_json(const RunState& state);
Result<RunState> parse_run_state(std::string_view json, const std::string& file);

// A checkpoint directory, or the newest complete one of a run directory.
Result<std::string> find_checkpoint(const std::string& path);

// What weights are taken from must be what was written. Ok for a directory without checksums.json, which no run of ours wrote, and
// for files that it does not list. The optimizer's state is passed over: only a resumed run reads it, and checks it then. Of several
// ranks, each reads its share of the files.
Status check_checkpoint(const std::string& directory, int rank = 0, int ranks = 1);

// Writes a rank's own files into the directory given: the box files of the rank (model/checkpoint_boxes.h); rank 0 any others, too.
using WriteFiles = std::function<Status(const std::string& directory)>;

// Writes the checkpoint of state.step, then deletes all but the newest `keep`. Fine if it exists already. Called by all ranks: each writes
// its files and computes their checksums; then rank 0, whose `dir` it is (null on others), writes what is left and sets the marker. An error
// of one rank is an error of all, and leaves nothing of this checkpoint behind.
Status save_run(RunDir* dir, const Peers& peers, const WriteFiles& write_files, const RunState& state, const std::string& resolved, int64_t keep);

// Opens `path` for writing, by rank 0; called by all ranks. A fresh run must find no run there. On resume the policies and `state` become
// those of the newest complete checkpoint, whatever layout wrote it, and what the run wrote after it is dropped; without a checkpoint the
// run begins again. `state` comes in as a fresh run's. Nothing changes before everything was read.
struct OpenedRun {
  std::unique_ptr<RunDir> dir;    // of rank 0
  std::string checkpoint;         // that the run goes on from; empty: from nothing
  int64_t last_logged_step = -1;  // of which a rollout log is there
};
Result<OpenedRun> open_run(const std::string& path, bool resume, const std::string& resolved, const Peers& peers, Policy& policy, RunState& state,
                           const Hooks& hooks);

}  // namespace lockstep
