#include "rl/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include <xxhash.h>

#include "io/file.h"
#include "io/json.h"

namespace lockstep {

namespace {

constexpr const char* kStateFile = "state.json";
constexpr const char* kSettingsFile = "config.resolved.toml";
constexpr const char* kChecksumFile = "checksums.json";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

Result<std::string> file_checksum(const std::string& path) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file) return file.status();
  return fmt::format("{:016x}", XXH64(file.value().data(), file.value().size(), 0));
}

Status write_checksums(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error))
    names.push_back(entry.path().filename().string());
  if (error) return errorf("cannot list {}: {}", directory, error.message());
  std::sort(names.begin(), names.end());
  JsonLine line;
  for (const std::string& name : names) {
    Result<std::string> sum = file_checksum(directory + "/" + name);
    if (!sum) return sum.status();
    line.add(name, sum.value());
  }
  return atomic_write(directory + "/" + kChecksumFile, line.str() + "\n");
}

Status verify_checksums(const std::string& directory, bool with_optimizer, std::string_view advice) {
  const std::string path = directory + "/" + kChecksumFile;
  Result<std::string> text = read_file(path);
  if (!text) return errorf("{}; {}", text.message(), advice);
  Result<JsonValue> sums = parse_json(text.value());
  if (!sums) return errorf("{}: {}; {}", path, sums.message(), advice);
  for (const auto& [name, wanted] : sums.value().members) {
    if (!with_optimizer && name == kOptimizerFile) continue;
    Result<std::string> sum = file_checksum(directory + "/" + name);
    if (!sum) return errorf("{}; {}", sum.message(), advice);
    if (sum.value() != wanted.text) {
      return errorf("{}/{} is damaged: its checksum is {}, {} was written; {}", directory, name, sum.value(), wanted.text, advice);
    }
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

Status save_run(RunDir& dir, const Policy& policy, const RunState& state, const std::string& resolved, int64_t keep) {
  Result<std::vector<Checkpoint>> complete = complete_checkpoints(dir.path());
  if (!complete) return complete.status();
  std::vector<Checkpoint>& all = complete.value();
  if (std::none_of(all.begin(), all.end(), [&](const Checkpoint& c) { return c.step == state.step; })) {
    Result<std::string> path = dir.begin_checkpoint(state.step);
    if (!path) return path.status();
    LOCKSTEP_RETURN_IF_ERROR(policy.save(path.value()));
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(path.value() + "/" + kSettingsFile, resolved));
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(path.value() + "/" + kStateFile, run_state_json(state) + "\n"));
    LOCKSTEP_RETURN_IF_ERROR(write_checksums(path.value()));
    LOCKSTEP_RETURN_IF_ERROR(dir.finish_checkpoint(state.step));
    all.push_back({state.step, path.value()});
  }
  // Also when it existed: whoever wrote it may have been killed before this.
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) LOCKSTEP_RETURN_IF_ERROR(delete_checkpoint(all[i].path));
  return Status::ok();
}

Status check_checkpoint(const std::string& directory) {
  std::error_code error;
  if (!std::filesystem::exists(directory + "/" + kChecksumFile, error)) return Status::ok();
  return verify_checksums(directory, /*with_optimizer=*/false,
                          fmt::format("use another checkpoint, or remove {} if the files were changed on purpose", kChecksumFile));
}

Result<RunDir> open_run(const std::string& path, bool resume, const std::string& resolved, Policy& policy, RunState& state,
                        const Hooks& hooks, int64_t* last_logged_step) {
  if (last_logged_step != nullptr) *last_logged_step = -1;
  Result<RunDir> opened = RunDir::open(path, resume ? RunDir::Mode::resume : RunDir::Mode::start);
  if (!opened) return opened.status();
  RunDir dir = opened.take();
  if (resume) {
    if (Result<std::string> before = read_file(dir.config_path())) report_changed_settings(before.value(), resolved, hooks);
    Result<std::optional<Checkpoint>> newest = newest_complete_checkpoint(path);
    if (!newest) return newest.status();
    if (newest.value()) {
      LOCKSTEP_RETURN_IF_ERROR(verify_checksums(newest.value()->path, /*with_optimizer=*/true,
                                                fmt::format("remove {} to resume from an older checkpoint", newest.value()->path)));
      const std::string file = newest.value()->path + "/" + kStateFile;
      Result<std::string> text = read_file(file);
      if (!text) return text.status();
      Result<RunState> saved = parse_run_state(text.value(), file);
      if (!saved) return saved.status();
      if (saved.value().kind != state.kind)
        return errorf("{}: this is a run of `lockstep {}`, not of `lockstep {}`", file, saved.value().kind, state.kind);
      if (saved.value().step != newest.value()->step)
        return errorf("{}: the checkpoint is of step {}, its name says otherwise; remove it", file, saved.value().step);
      if (saved.value().seed != state.seed)
        return errorf("{}: the run began with run.seed {}, not {}", file, saved.value().seed, state.seed);
      if (saved.value().num_rows != state.num_rows) {
        return errorf("{}: the run began with {} usable data rows, the file now gives {}", file, saved.value().num_rows,
                      state.num_rows);
      }
      if (saved.value().rows != state.rows)
        return errorf("{}: the run began with other data rows than the file now gives; resume with the file it began with", file);
      LOCKSTEP_RETURN_IF_ERROR(policy.load(newest.value()->path));
      state = saved.take();
      hooks.say(fmt::format("resuming after step {} from {}", state.step, newest.value()->path));
    } else {
      hooks.say("no complete checkpoint yet: beginning again at step 0");
    }
    Result<RunDir::Truncation> cut = dir.truncate_after(newest.value() ? state.step : -1);
    if (!cut) return cut.status();
    if (last_logged_step != nullptr) *last_logged_step = cut.value().last_logged_step;
    if (newest.value() && state.step > 0 && cut.value().last_metrics_step != state.step) {
      hooks.say(fmt::format("{} does not reach step {}: it was changed after the checkpoint was written, and stays incomplete",
                            dir.metrics_path(), state.step));
    }
    if (cut.value().metrics_dropped + cut.value().rollouts_dropped > 0) {
      hooks.say(fmt::format("dropped {} metrics lines and {} rollout files of later steps, which will be run again",
                            cut.value().metrics_dropped, cut.value().rollouts_dropped));
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(dir.write_config(resolved));
  return dir;
}

Status follow_run(const std::string& checkpoint, const std::string& state_json, Policy& policy, RunState& state) {
  if (checkpoint.empty()) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(policy.load(checkpoint));
  Result<RunState> resumed = parse_run_state(state_json, checkpoint);
  if (!resumed) return resumed.status();
  state = resumed.take();
  return Status::ok();
}

}  // namespace lockstep
