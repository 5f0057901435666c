#include "rl/checkpoint.h"

#include <bit>
#include <filesystem>
#include <map>
#include <span>
#include <sstream>

#include <xxhash.h>

#include "core/log.h"
#include "io/file.h"
#include "io/json.h"
#include "model/checkpoint_boxes.h"

namespace lockstep {

namespace {

constexpr const char* kStateFile = "state.json";
constexpr const char* kSettingsFile = "config.resolved.toml";
constexpr const char* kChecksumFile = "checksums.json";

Result<uint64_t> file_checksum(const std::string& path) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file) return file.status();
  return uint64_t{XXH64(file.value().data(), file.value().size(), 0)};
}

constexpr const char* kStems[] = {kMastersStem, kOptimizerStem};
constexpr int64_t kSumsOfRank = 2 * std::size(kStems);  // whether there is a file, and its checksum

// Of the box files of a rank: each rank reads back its own.
Status add_own_checksums(const std::string& directory, int rank, int ranks, std::span<int64_t> sums) {
  for (size_t i = 0; i < std::size(kStems); ++i) {
    const std::string path = directory + "/" + box_file(kStems[i], rank, ranks);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    Result<uint64_t> sum = file_checksum(path);
    if (!sum) return sum.status();
    sums[2 * i] = 1;
    sums[2 * i + 1] = std::bit_cast<int64_t>(sum.value());
  }
  return Status::ok();
}

// checksums.json, in the order of names: `sums` [ranks, kSumsOfRank] of the box files, and those of all other files.
Status write_checksums(const std::string& directory, int ranks, std::span<const int64_t> sums) {
  std::map<std::string, uint64_t> all;
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < std::size(kStems); ++i) {
      const auto at = static_cast<size_t>(r * kSumsOfRank) + 2 * i;
      if (sums[at] != 0) all[box_file(kStems[i], r, ranks)] = std::bit_cast<uint64_t>(sums[at + 1]);
    }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (all.contains(name)) continue;
    Result<uint64_t> sum = file_checksum(directory + "/" + name);
    if (!sum) return sum.status();
    all[name] = sum.value();
  }
  if (error) return errorf("cannot list {}: {}", directory, error.message());
  JsonLine line;
  for (const auto& [name, sum] : all) line.add(name, hex_digits(sum));
  return atomic_write(directory + "/" + kChecksumFile, line.str() + "\n");
}

// A list that lost its names would verify nothing.
Status check_names_all(const std::string& directory, const JsonValue& sums, bool with_optimizer, std::string_view advice) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    const bool holds_numbers = name.starts_with(kMastersStem) || (with_optimizer && name.starts_with(kOptimizerStem));
    if (holds_numbers && sums.find(name) == nullptr) return errorf("{}/{} has no checksum of {}; {}", directory, kChecksumFile, name, advice);
  }
  return error ? errorf("cannot list {}: {}", directory, error.message()) : Status::ok();
}

// Every `ranks`-th file of the list, beginning with that of the rank's number.
Status verify_checksums(const std::string& directory, bool with_optimizer, int rank, int ranks, std::string_view advice) {
  const std::string path = directory + "/" + kChecksumFile;
  Result<std::string> text = read_file(path);
  if (!text) return errorf("{}; {}", text.message(), advice);
  Result<JsonValue> sums = parse_json(text.value());
  if (!sums) return errorf("{}: {}; {}", path, sums.message(), advice);
  if (rank == 0) LOCKSTEP_RETURN_IF_ERROR(check_names_all(directory, sums.value(), with_optimizer, advice));
  int place = 0;
  for (const auto& [name, wanted] : sums.value().members) {
    if (!with_optimizer && name.starts_with(kOptimizerStem)) continue;
    if (place++ % ranks != rank) continue;
    Result<uint64_t> sum = file_checksum(directory + "/" + name);
    if (!sum) return errorf("{}; {}", sum.message(), advice);
    if (hex_digits(sum.value()) != wanted.text)
      return errorf("{}/{} is damaged: its checksum is {}, {} was written; {}", directory, name, hex_digits(sum.value()), wanted.text, advice);
  }
  return Status::ok();
}

// Lines of two resolved configs, which list the same settings in the same order, that differ.
void report_changed_settings(const std::string& before, const std::string& after, const Hooks& hooks) {
  std::istringstream old_lines(before), new_lines(after);
  std::string section;
  for (std::string a, b; std::getline(old_lines, a) && std::getline(new_lines, b);) {
    if (b.starts_with('[')) section = b;
    if (a != b) hooks.say(fmt::format("setting changed since the run began: {} {} (was {})", section, b, a));
  }
}

Status delete_checkpoint(const std::string& path) {
  // The marker goes first: a half deleted checkpoint must not count.
  std::error_code error;
  std::filesystem::remove(path + "/COMPLETE", error);
  if (!error) std::filesystem::remove_all(path, error);
  return error ? errorf("cannot remove {}: {}", path, error.message()) : Status::ok();
}

}  // namespace

std::string run_state_json(const RunState& s) {
  return JsonLine()
      .add("kind", s.kind)
      .add("step", s.step)
      .add("seed", s.seed)
      .add("num_rows", s.num_rows)
      .add("rows", s.rows)
      .add("epoch", s.cursor.epoch)
      .add("offset", s.cursor.offset)
      .add("issued", s.cursor.issued)
      .str();
}

Result<RunState> parse_run_state(std::string_view json, const std::string& file) {
  Result<JsonValue> parsed = parse_json(json);
  if (!parsed) return errorf("{}: {}", file, parsed.message());
  RunState s;
  const JsonValue* kind = parsed.value().find("kind");
  if (kind == nullptr || !kind->is(JsonValue::Kind::string)) return errorf("{}: \"kind\" is missing", file);
  s.kind = kind->text;
  const JsonValue* rows = parsed.value().find("rows");
  if (rows == nullptr || !rows->is(JsonValue::Kind::string)) return errorf("{}: \"rows\" is missing", file);
  s.rows = rows->text;
  const std::pair<const char*, int64_t*> fields[] = {{"step", &s.step},
                                                     {"seed", &s.seed},
                                                     {"num_rows", &s.num_rows},
                                                     {"epoch", &s.cursor.epoch},
                                                     {"offset", &s.cursor.offset},
                                                     {"issued", &s.cursor.issued}};
  for (const auto& [name, field] : fields) {
    const JsonValue* v = parsed.value().find(name);
    if (v == nullptr || !v->as_int64(field) || *field < 0) return errorf("{}: \"{}\" is missing or no count", file, name);
  }
  if (s.cursor.offset > s.num_rows) return errorf("{}: offset {} lies beyond the {} rows", file, s.cursor.offset, s.num_rows);
  return s;
}

Result<std::string> find_checkpoint(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return errorf("{}: there is no such checkpoint or run", path);
  if (!std::filesystem::exists(path + "/checkpoints", error)) {
    if (std::filesystem::is_directory(path, error) && !std::filesystem::exists(path + "/config.json", error))
      return errorf("{}: neither a run (it has no checkpoints/) nor a checkpoint (it has no config.json)", path);
    return path;
  }
  Result<std::optional<Checkpoint>> newest = newest_complete_checkpoint(path);
  if (!newest) return newest.status();
  if (!newest.value()) return errorf("{}: the run has no complete checkpoint yet", path);
  return newest.value()->path;
}

Status check_checkpoint(const std::string& directory, int rank, int ranks) {
  std::error_code error;
  if (!std::filesystem::exists(directory + "/" + kChecksumFile, error)) return Status::ok();
  return verify_checksums(directory, /*with_optimizer=*/false, rank, ranks,
                          fmt::format("use another checkpoint, or remove {} if the files were changed on purpose", kChecksumFile));
}

namespace {

// All ranks' files of the checkpoint that was begun at `directory`, up to its marker.
Status write_checkpoint(RunDir* dir, const Peers& peers, const std::string& directory, const WriteFiles& write_files, const RunState& state,
                        const std::string& resolved) {
  LOCKSTEP_RETURN_IF_ERROR(peers.agree(write_files(directory), "checkpoint"));
  std::vector<int64_t> mine(kSumsOfRank), all(static_cast<size_t>(kSumsOfRank * peers.size()));
  const int writers = peers.num_trainers();
  LOCKSTEP_RETURN_IF_ERROR(peers.agree(peers.trains() ? add_own_checksums(directory, peers.rank(), writers, mine) : Status::ok(), "checksums"));
  if (peers.alone()) {
    all = mine;
  } else {
    peers.group()->all_gather(std::span(all), std::span<const int64_t>(mine), "checksums");
  }
  return peers.by_first("checkpoint", [&] {
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kSettingsFile, resolved));
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kStateFile, run_state_json(state) + "\n"));
    LOCKSTEP_RETURN_IF_ERROR(write_checksums(directory, writers, all));
    return dir->finish_checkpoint(state.step);
  });
}

}  // namespace

Status save_run(RunDir* dir, const Peers& peers, const WriteFiles& write_files, const RunState& state, const std::string& resolved, int64_t keep) {
  CHECK((dir != nullptr) == peers.first(), "the run directory is that of rank 0, this is rank {}", peers.rank());
  std::string directory;  // empty: the checkpoint exists
  LOCKSTEP_RETURN_IF_ERROR(peers.by_first("checkpoint", [&] {
    Result<std::vector<Checkpoint>> complete = complete_checkpoints(dir->path());
    if (!complete) return complete.status();
    for (const Checkpoint& c : complete.value())
      if (c.step == state.step) return Status::ok();
    Result<std::string> begun = dir->begin_checkpoint(state.step);
    if (begun) directory = begun.take();
    return begun ? Status::ok() : begun.status();
  }));
  peers.tell(&directory, "checkpoint");
  if (!directory.empty()) {
    if (const Status written = write_checkpoint(dir, peers, directory, write_files, state, resolved); !written) {
      if (peers.first())
        if (const Status s = dir->abandon_checkpoint(state.step); !s) log_warn("{}", s.message());
      return written;
    }
  }
  // Also when it existed: whoever wrote it may have been killed before this.
  return peers.by_first("checkpoint", [&] {
    Result<std::vector<Checkpoint>> complete = complete_checkpoints(dir->path());
    if (!complete) return complete.status();
    const std::vector<Checkpoint>& all = complete.value();
    for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) LOCKSTEP_RETURN_IF_ERROR(delete_checkpoint(all[i].path));
    return Status::ok();
  });
}

namespace {

// The state of a checkpoint, which must be one of the run that `fresh` begins.
Result<RunState> read_state(const Checkpoint& checkpoint, const RunState& fresh) {
  const std::string file = checkpoint.path + "/" + kStateFile;
  Result<std::string> text = read_file(file);
  if (!text) return text.status();
  Result<RunState> saved = parse_run_state(text.value(), file);
  if (!saved) return saved;
  const RunState& s = saved.value();
  if (s.kind != fresh.kind) return errorf("{}: this is a run of `lockstep {}`, not of `lockstep {}`", file, s.kind, fresh.kind);
  if (s.step != checkpoint.step) return errorf("{}: the checkpoint is of step {}, its name says otherwise; remove it", file, s.step);
  if (s.seed != fresh.seed) return errorf("{}: the run began with run.seed {}, not {}", file, s.seed, fresh.seed);
  if (s.num_rows != fresh.num_rows)
    return errorf("{}: the run began with {} usable data rows, the file now gives {}", file, s.num_rows, fresh.num_rows);
  if (s.rows != fresh.rows)
    return errorf("{}: the run began with other data rows than the file now gives; resume with the file it began with", file);
  return saved;
}

}  // namespace

Result<OpenedRun> open_run(const std::string& path, bool resume, const std::string& resolved, const Peers& peers, Policy& policy, RunState& state,
                           const Hooks& hooks) {
  OpenedRun run;
  std::string saved;
  std::string& checkpoint = run.checkpoint;
  LOCKSTEP_RETURN_IF_ERROR(peers.by_first("checkpoint", [&] {
    Result<RunDir> opened = RunDir::open(path, resume ? RunDir::Mode::resume : RunDir::Mode::start);
    if (!opened) return errorf("run.dir: {}", opened.message());
    run.dir = std::make_unique<RunDir>(opened.take());
    if (!resume) return Status::ok();
    if (Result<std::string> before = read_file(run.dir->config_path())) report_changed_settings(before.value(), resolved, hooks);
    Result<std::optional<Checkpoint>> newest = newest_complete_checkpoint(path);
    if (!newest) return newest.status();
    if (!newest.value()) {
      hooks.say("no complete checkpoint yet: beginning again at step 0");
      return Status::ok();
    }
    Result<RunState> read = read_state(*newest.value(), state);
    if (!read) return read.status();
    checkpoint = newest.value()->path;
    saved = run_state_json(read.value());
    return Status::ok();
  }));
  peers.tell(&checkpoint, "checkpoint");
  peers.tell(&saved, "run state");
  if (!checkpoint.empty()) {
    const std::string advice = fmt::format("remove {} to resume from an older checkpoint", checkpoint);
    LOCKSTEP_RETURN_IF_ERROR(
        peers.agree(verify_checksums(checkpoint, /*with_optimizer=*/true, peers.rank(), peers.size(), advice), "checksums"));
    LOCKSTEP_RETURN_IF_ERROR(peers.agree(policy.load(checkpoint), "resume"));
    Result<RunState> parsed = parse_run_state(saved, checkpoint);
    if (!parsed) return parsed.status();
    state = parsed.take();
    hooks.say(fmt::format("resuming after step {} from {}", state.step, checkpoint));
  }
  LOCKSTEP_RETURN_IF_ERROR(peers.by_first("checkpoint", [&] {
    if (resume) {
      Result<RunDir::Truncation> cut = run.dir->truncate_after(checkpoint.empty() ? -1 : state.step);
      if (!cut) return cut.status();
      run.last_logged_step = cut.value().last_logged_step;
      if (!checkpoint.empty() && state.step > 0 && cut.value().last_metrics_step != state.step) {
        hooks.say(fmt::format("{} does not reach step {}: it was changed after the checkpoint was written, and stays incomplete",
                              run.dir->metrics_path(), state.step));
      }
      if (cut.value().metrics_dropped + cut.value().rollouts_dropped > 0) {
        hooks.say(fmt::format("dropped {} metrics lines and {} rollout files of later steps, which will be run again",
                              cut.value().metrics_dropped, cut.value().rollouts_dropped));
      }
    }
    return run.dir->write_config(resolved);
  }));
  if (!peers.alone()) peers.group()->broadcast(std::span(&run.last_logged_step, 1), 0, "rollout log");
  return run;
}

}  // namespace lockstep
