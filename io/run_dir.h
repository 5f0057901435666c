#pragma once
// A run directory: everything a run leaves behind. One writer, any number of readers; readers need no lock, since every
// file is either replaced whole or grows by whole lines.
//
//   run.lock                      marks the directory as a run's; locked (flock) while a writer lives, names that writer
//   config.resolved.toml          the settings in force
//   metrics.jsonl                 one object a line with the member "step"; only appended to
//   rollouts/step_000012.jsonl    the records of step 12
//   rollout_log/step_000012/      what the rollout of step 12 had finished (rl/token_log.h), until a checkpoint of it is complete
//   checkpoints/step_000012/      complete if it holds the file COMPLETE; anything else is a leftover, step_000012.partial as well
//
// A resumed run cuts metrics and rollouts back to its checkpoint's step, so in the end its files equal those of a run
// that was never interrupted.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "io/file.h"

namespace lockstep {

struct Checkpoint {
  int64_t step = 0;
  std::string path;
};

// Complete checkpoints of the run at `run`, by rising step. None if there is no such directory.
Result<std::vector<Checkpoint>> complete_checkpoints(const std::string& run);
Result<std::optional<Checkpoint>> newest_complete_checkpoint(const std::string& run);

// "step_000012"; wider beyond 999,999.
std::string step_name(int64_t step);

// Where the ranks of the run at `run` log the rollout of a step.
std::string rollout_log_path(const std::string& run, int64_t step);

class RunDir {
 public:
  // start: makes the directory if it is missing; refuses one that holds anything but a run, or a run that has begun. Rollout logs of a
  // start that came no further are removed.
  // resume: refuses what is not a run directory.
  enum class Mode { start, resume };

  // Takes the lock, makes the folders and removes temporary files that a killed writer left.
  static Result<RunDir> open(const std::string& path, Mode mode);

  const std::string& path() const { return path_; }
  std::string config_path() const { return path_ + "/config.resolved.toml"; }
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }
  std::string rollouts_path(int64_t step) const { return path_ + "/rollouts/" + step_name(step) + ".jsonl"; }
  std::string checkpoint_path(int64_t step) const { return path_ + "/checkpoints/" + step_name(step); }

  Status write_config(std::string_view toml);

  // Appends one line and hands it to the system, so a reader sees it at once. `json` has no newline and a member "step",
  // an integer. If the disk is full, the part that was written is taken back.
  Status append_metrics(std::string_view json);

  // The records of a step, as JSON lines; replaces what was there. Durable from the next finish_checkpoint() on.
  Status write_rollouts(int64_t step, std::string_view jsonl);

  // A checkpoint is written in three moves: begin (an empty directory, leftovers removed), files by this process or others, finish.
  // finish makes the files, the metrics and the rollouts so far durable, gives the directory its name and only then sets the marker; after
  // that the rollout logs up to this step are removed. begin refuses a step whose checkpoint is complete. abandon removes what is not.
  Result<std::string> begin_checkpoint(int64_t step);
  Status finish_checkpoint(int64_t step);
  Status abandon_checkpoint(int64_t step);

  // Drops metrics lines, rollouts and evaluations of later steps, and incomplete checkpoints. -1 drops all of them. Lines that are cut
  // off or unreadable (a crash can leave both) go too; rollout logs of later steps stay, those up to `step` go. Refuses while a complete
  // checkpoint of a later step stands: after that the run would jump.
  struct Truncation {
    int64_t metrics_kept = 0, metrics_dropped = 0, metrics_unreadable = 0;
    int64_t rollouts_dropped = 0, evals_dropped = 0, checkpoints_dropped = 0;
    int64_t last_metrics_step = -1;  // of the lines that were kept
    int64_t last_logged_step = -1;   // of rollout logs that were kept
  };
  Result<Truncation> truncate_after(int64_t step);

 private:
  RunDir(std::string path, FileDescriptor lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  Status open_metrics();
  std::string partial_path(int64_t step) const { return checkpoint_path(step) + ".partial"; }
  // Removes rollout logs of steps up to `step`; the last one that is left, or -1.
  Result<int64_t> drop_rollout_logs(int64_t step);

  std::string path_;
  FileDescriptor lock_;  // the lock lives as long as this is open
  FileDescriptor metrics_;
  std::vector<std::string> unsynced_;  // rollouts since the last checkpoint
};

}  // namespace lockstep
