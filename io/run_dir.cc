#include "io/run_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLockFile = "run.lock";
constexpr const char* kMarker = "COMPLETE";
constexpr const char* kRollouts = "rollouts";
constexpr const char* kEvals = "evals";  // whoever evaluates writes there
constexpr const char* kRolloutLog = "rollout_log";  // ranks make it when they need it
constexpr const char* kCheckpoints = "checkpoints";

// The names in a directory, sorted; none if it does not exist.
Result<std::vector<std::string>> list_directory(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator it(path, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) names.push_back(it->path().filename().string());
  if (error) return errorf("cannot list {}: {}", path, error.message());
  std::sort(names.begin(), names.end());
  return names;
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

Status remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return error ? errorf("cannot remove {}: {}", path, error.message()) : Status::ok();
}

// The step of "step_000012" + suffix; nothing for any name that step_name() would not give.
std::optional<int64_t> parse_step(std::string_view name, std::string_view suffix) {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix) || !name.ends_with(suffix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - suffix.size());
  int64_t step = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || stop != digits.data() + digits.size() || step < 0) return std::nullopt;
  if (name.substr(0, name.size() - suffix.size()) != step_name(step)) return std::nullopt;
  return step;
}

std::optional<int64_t> step_of_line(std::string_view line) {
  const Result<JsonValue> parsed = parse_json(line);
  if (!parsed) return std::nullopt;
  const JsonValue* member = parsed.value().find("step");
  int64_t step = 0;
  if (member == nullptr || !member->as_int64(&step)) return std::nullopt;
  return step;
}

Status remove_temporaries(const std::string& directory) {
  Result<std::vector<std::string>> names = list_directory(directory);
  if (!names) return names.status();
  for (const std::string& name : names.value())
    if (is_temporary_name(name)) LOCKSTEP_RETURN_IF_ERROR(remove_tree(directory + "/" + name));
  return Status::ok();
}

// Opens run.lock and locks it, or says who has it.
Result<FileDescriptor> take_lock(const std::string& run) {
  const std::string path = run + "/" + kLockFile;
  FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd.is_open()) return errno_status("cannot open", path, errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return errno_status("cannot lock", path, errno);
    char holder[256];
    const ssize_t n = ::pread(fd.get(), holder, sizeof holder, 0);
    std::string_view who(holder, n > 0 ? static_cast<size_t>(n) : 0);
    if (who.ends_with('\n')) who.remove_suffix(1);
    return errorf("the run directory {} is being written by {}; stop it first, or name another directory", run,
                  who.empty() ? "another process" : who);
  }
  char host[128] = "";
  ::gethostname(host, sizeof host - 1);
  const std::string me = fmt::format("process {} on {}\n", ::getpid(), host);
  if (::ftruncate(fd.get(), 0) != 0) return errno_status("cannot write", path, errno);
  LOCKSTEP_RETURN_IF_ERROR(write_fully(fd.get(), me, path));
  return fd;
}

// Whether anything of a run stands here beside the lock: metrics, rollouts or checkpoints.
Result<bool> has_begun(const std::string& run) {
  for (const char* name : {kRollouts, kCheckpoints}) {
    Result<std::vector<std::string>> names = list_directory(run + "/" + name);
    if (!names) return names.status();
    if (!names.value().empty()) return true;
  }
  std::error_code error;
  const uintmax_t bytes = fs::file_size(run + "/metrics.jsonl", error);
  return !error && bytes > 0;
}

}  // namespace

std::string step_name(int64_t step) {
  CHECK_GE(step, 0);
  return fmt::format("step_{:06}", step);
}

std::string rollout_log_path(const std::string& run, int64_t step) { return fmt::format("{}/{}/{}", run, kRolloutLog, step_name(step)); }

Result<std::vector<Checkpoint>> complete_checkpoints(const std::string& run) {
  const std::string directory = run + "/" + kCheckpoints;
  Result<std::vector<std::string>> names = list_directory(directory);
  if (!names) return names.status();
  std::vector<Checkpoint> found;
  for (const std::string& name : names.value()) {
    const std::optional<int64_t> step = parse_step(name, "");
    if (step && exists(directory + "/" + name + "/" + kMarker)) found.push_back({*step, directory + "/" + name});
  }
  std::sort(found.begin(), found.end(), [](const Checkpoint& a, const Checkpoint& b) { return a.step < b.step; });
  return found;
}

Result<std::optional<Checkpoint>> newest_complete_checkpoint(const std::string& run) {
  Result<std::vector<Checkpoint>> all = complete_checkpoints(run);
  if (!all) return all.status();
  if (all.value().empty()) return std::optional<Checkpoint>();
  return std::optional<Checkpoint>(all.value().back());
}

Result<RunDir> RunDir::open(const std::string& path, Mode mode) {
  if (mode == Mode::resume && !exists(path + "/" + kLockFile))
    return errorf("{} is not a run directory (it has no {}); there is nothing to resume", path, kLockFile);
  LOCKSTEP_RETURN_IF_ERROR(make_directories(path));
  if (!exists(path + "/" + kLockFile)) {
    Result<std::vector<std::string>> names = list_directory(path);
    if (!names) return names.status();
    if (!names.value().empty())
      return errorf("{} is not empty ({} and {} more) and is not a run directory; name a new one", path,
                    in_quotes(names.value()[0]), names.value().size() - 1);
  }
  Result<FileDescriptor> lock = take_lock(path);
  if (!lock) return lock.status();
  if (mode == Mode::start) {
    const Result<bool> begun = has_begun(path);
    if (!begun) return begun.status();
    if (begun.value()) return errorf("{} already holds a run; resume it, or name a new directory", path);
    LOCKSTEP_RETURN_IF_ERROR(remove_tree(path + "/" + kRolloutLog));
  }
  for (const char* name : {kRollouts, kCheckpoints}) LOCKSTEP_RETURN_IF_ERROR(make_directories(path + "/" + name));
  LOCKSTEP_RETURN_IF_ERROR(remove_temporaries(path));
  for (const char* name : {kRollouts, kEvals}) LOCKSTEP_RETURN_IF_ERROR(remove_temporaries(path + "/" + name));
  RunDir run(path, lock.take());
  LOCKSTEP_RETURN_IF_ERROR(run.open_metrics());
  LOCKSTEP_RETURN_IF_ERROR(sync_directory(path));
  return run;
}

Status RunDir::open_metrics() {
  metrics_ = FileDescriptor(::open(metrics_path().c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  return metrics_.is_open() ? Status::ok() : errno_status("cannot open", metrics_path(), errno);
}

Status RunDir::write_config(std::string_view toml) { return atomic_write(config_path(), toml); }

Status RunDir::append_metrics(std::string_view json) {
  CHECK(json.find('\n') == std::string_view::npos && step_of_line(json).has_value(),
        "a metrics line is one JSON object with an integer \"step\", not {}", in_quotes(json));
  return append_whole(metrics_.get(), std::string(json) + "\n", metrics_path());
}

Status RunDir::write_rollouts(int64_t step, std::string_view jsonl) {
  // A wait for the disk at every step would be a good part of a small run's time, and only a checkpoint can be resumed.
  LOCKSTEP_RETURN_IF_ERROR(atomic_write(rollouts_path(step), jsonl, Durability::later));
  unsynced_.push_back(rollouts_path(step));
  return Status::ok();
}

Result<std::string> RunDir::begin_checkpoint(int64_t step) {
  const std::string path = checkpoint_path(step);
  if (exists(path + "/" + kMarker)) return errorf("{} is a complete checkpoint and is not written again", path);
  LOCKSTEP_RETURN_IF_ERROR(abandon_checkpoint(step));
  LOCKSTEP_RETURN_IF_ERROR(make_directories(partial_path(step)));
  return partial_path(step);
}

Status RunDir::abandon_checkpoint(int64_t step) {
  const std::string path = checkpoint_path(step);
  LOCKSTEP_RETURN_IF_ERROR(remove_tree(partial_path(step)));
  return exists(path + "/" + kMarker) ? Status::ok() : remove_tree(path);
}

Status RunDir::finish_checkpoint(int64_t step) {
  const std::string path = checkpoint_path(step), partial = partial_path(step);
  Result<std::vector<std::string>> names = list_directory(partial);
  if (!names) return names.status();
  for (const std::string& name : names.value()) LOCKSTEP_RETURN_IF_ERROR(sync_file(partial + "/" + name));
  LOCKSTEP_RETURN_IF_ERROR(sync_directory(partial));
  if (::rename(partial.c_str(), path.c_str()) != 0) return errno_status("cannot replace", path, errno);
  LOCKSTEP_RETURN_IF_ERROR(sync_directory(parent_directory(path)));
  for (const std::string& file : unsynced_)
    if (exists(file)) LOCKSTEP_RETURN_IF_ERROR(sync_file(file));  // its owner may have deleted it meanwhile
  unsynced_.clear();
  LOCKSTEP_RETURN_IF_ERROR(sync_directory(path_ + "/" + kRollouts));
  if (::fsync(metrics_.get()) != 0) return errno_status("cannot sync", metrics_path(), errno);
  LOCKSTEP_RETURN_IF_ERROR(atomic_write(path + "/" + kMarker, ""));
  return drop_rollout_logs(step).status();
}

Result<int64_t> RunDir::drop_rollout_logs(int64_t step) {
  int64_t last = -1;
  const std::string directory = path_ + "/" + kRolloutLog;
  Result<std::vector<std::string>> names = list_directory(directory);
  if (!names) return names.status();
  for (const std::string& name : names.value()) {
    const std::optional<int64_t> logged = parse_step(name, "");
    if (!logged) continue;
    if (*logged > step) {
      last = std::max(last, *logged);
    } else {
      LOCKSTEP_RETURN_IF_ERROR(remove_tree(directory + "/" + name));
    }
  }
  return last;
}

Result<RunDir::Truncation> RunDir::truncate_after(int64_t step) {
  Truncation result;
  Result<std::optional<Checkpoint>> newest = newest_complete_checkpoint(path_);
  if (!newest) return newest.status();
  if (newest.value() && newest.value()->step > step)
    return errorf("{} is complete and later than step {}; resume from it, or move it away", newest.value()->path, step);

  Result<std::string> text = read_file(metrics_path());
  if (!text) return text.status();
  std::string kept;
  for (std::string_view rest = text.value(); !rest.empty();) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    const std::optional<int64_t> line_step = end == std::string_view::npos ? std::nullopt : step_of_line(line);
    if (!line_step) {
      ++result.metrics_unreadable;
    } else if (*line_step > step) {
      ++result.metrics_dropped;
    } else {
      ++result.metrics_kept;
      result.last_metrics_step = *line_step;
      kept += line;
      kept += '\n';
    }
  }
  if (kept.size() != text.value().size()) {
    LOCKSTEP_RETURN_IF_ERROR(atomic_write(metrics_path(), kept));
    LOCKSTEP_RETURN_IF_ERROR(open_metrics());  // the open descriptor is the old file's
  }

  const std::pair<const char*, int64_t*> folders[] = {{kRollouts, &result.rollouts_dropped}, {kEvals, &result.evals_dropped}};
  for (const auto& [folder, dropped] : folders) {
    Result<std::vector<std::string>> names = list_directory(path_ + "/" + folder);
    if (!names) return names.status();
    for (const std::string& name : names.value()) {
      const std::optional<int64_t> file_step = parse_step(name, ".jsonl");
      if (!file_step || *file_step <= step) continue;
      LOCKSTEP_RETURN_IF_ERROR(remove_tree(path_ + "/" + folder + "/" + name));
      ++*dropped;
    }
  }

  Result<std::vector<std::string>> checkpoints = list_directory(path_ + "/" + kCheckpoints);
  if (!checkpoints) return checkpoints.status();
  for (const std::string& name : checkpoints.value()) {
    const std::string directory = path_ + "/" + kCheckpoints + "/" + name;
    const bool partial = parse_step(name, ".partial").has_value();
    if (!partial && (!parse_step(name, "") || exists(directory + "/" + kMarker))) continue;
    LOCKSTEP_RETURN_IF_ERROR(remove_tree(directory));
    ++result.checkpoints_dropped;
  }
  Result<int64_t> logged = drop_rollout_logs(step);
  if (!logged) return logged.status();
  result.last_logged_step = logged.value();
  return result;
}

}  // namespace lockstep
