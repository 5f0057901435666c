#pragma once
// What a run needs to continue as if it had never stopped, and the start and resume of a run directory.
//
// A checkpoint directory holds masters.safetensors, optimizer.safetensors (both with the actor's counters), config.json, the
// tokenizer, the resolved settings, state.json and checksums.json (XXH64 of all of these, checked on resume); the file COMPLETE
// makes it count. Draws have no state: they are keyed by what they are for.

#include <cstdint>
#include <string>

#include "io/run_dir.h"
#include "rl/hooks.h"
#include "rl/order.h"
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

// What weights are taken from must be what was written. Ok for a directory without checksums.json, which no run of ours wrote, and
// for files that it does not list. The optimizer's state is passed over: only a resumed run reads it, and checks it then.
Status check_checkpoint(const std::string& directory);

// Writes the checkpoint of state.step, then deletes all but the newest `keep`. Fine if it exists already.
Status save_run(RunDir& dir, const Policy& policy, const RunState& state, const std::string& resolved, int64_t keep);

// Opens `path` for writing. A fresh run must find no run there. On resume the policy and `state` become those of the newest
// complete checkpoint, and what the run wrote after it is dropped; without a checkpoint the run begins again. `state` comes in as
// a fresh run's. *last_logged_step, if asked for, is the last step of which a rollout log is there, or -1.
Result<RunDir> open_run(const std::string& path, bool resume, const std::string& resolved, Policy& policy, RunState& state,
                        const Hooks& hooks, int64_t* last_logged_step = nullptr);

// What open_run did, on a rank that does not write: `checkpoint` and `state_json` are what the writing rank resumed from, the
// first empty if from nothing.
Status follow_run(const std::string& checkpoint, const std::string& state_json, Policy& policy, RunState& state);

}  // namespace lockstep
