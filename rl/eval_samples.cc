#include "rl/eval_samples.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <set>
#include <unordered_map>

#include "io/checked_line.h"

namespace lockstep {

namespace {

// A sample and its key, from an object whose sum was right; nothing for any that append() does not write.
std::optional<std::pair<EvalSample, std::string>> read_sample(const JsonValue& line) {
  const JsonValue *key = line.find("key"), *response = line.find("response"), *status = line.find("status"), *sample = line.find("sample"),
                  *tokens = line.find("num_tokens");
  EvalSample s;
  if (key == nullptr || response == nullptr || status == nullptr || sample == nullptr || tokens == nullptr || !sample->as_int64(&s.sample) ||
      !tokens->as_int64(&s.num_tokens))
    return std::nullopt;
  s.response = response->text;
  for (const AnswerStatus a : {AnswerStatus::completed, AnswerStatus::truncated})
    if (status->text == answer_status_name(a)) s.status = a;
  return std::pair(std::move(s), key->text);
}

}  // namespace

const char* answer_status_name(AnswerStatus status) {
  switch (status) {
    case AnswerStatus::completed: return "completed";
    case AnswerStatus::truncated: return "truncated";
    case AnswerStatus::unknown: break;
  }
  return "unknown";
}

bool by_problem_and_sample(const EvalSample& a, const EvalSample& b) { return std::pair(a.problem, a.sample) < std::pair(b.problem, b.sample); }

LoggedSamples parse_sample_log(std::string_view text, std::span<const uint64_t> keys, int64_t num_samples) {
  LoggedSamples found;
  std::unordered_map<std::string, int64_t> problems;
  for (size_t i = 0; i < keys.size(); ++i) problems.emplace(hex_digits(keys[i]), static_cast<int64_t>(i));
  std::set<std::pair<int64_t, int64_t>> seen;
  for_each_checked_line(text, [&](const JsonValue* object) {
    auto sample = object != nullptr ? read_sample(*object) : std::nullopt;
    if (!sample) {
      ++found.damaged_lines;
      return;
    }
    const auto problem = problems.find(sample->second);
    if (problem == problems.end()) {
      ++found.foreign_lines;
      return;
    }
    EvalSample& s = sample->first;
    s.problem = problem->second;
    if (s.sample < 0 || s.sample >= num_samples || !seen.emplace(s.problem, s.sample).second) return;
    found.samples.push_back(std::move(s));
  });
  std::sort(found.samples.begin(), found.samples.end(), by_problem_and_sample);
  return found;
}

Result<std::string> SampleLog::read() const {
  std::vector<std::string> paths;
  std::error_code error;
  std::filesystem::directory_iterator it(directory_, error);
  if (error == std::errc::no_such_file_or_directory) return std::string();
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.starts_with("samples_") && name.ends_with(".jsonl")) paths.push_back(it->path());
  }
  if (error) return errorf("cannot list {}: {}", directory_, error.message());
  std::sort(paths.begin(), paths.end());
  std::string all;
  for (const std::string& path : paths) {
    Result<std::string> text = read_file(path);
    if (!text) return text;
    all += text.value();
    all += '\n';  // a last line may have been cut off
  }
  return all;
}

Status SampleLog::open() {
  if (file_.is_open()) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(make_directories(directory_));
  FileDescriptor file(::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (!file.is_open()) return errno_status("cannot open", path_, errno);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return errorf("{}: another evaluation writes there; wait for it, or name another directory", path_);
    return errno_status("cannot lock", path_, errno);
  }
  struct stat now {};
  if (::fstat(file.get(), &now) != 0) return errno_status("cannot look at", path_, errno);
  if (now.st_size > 0) LOCKSTEP_RETURN_IF_ERROR(write_fully(file.get(), "\n", path_));  // an earlier start's last line may have been cut off
  file_ = std::move(file);
  return Status::ok();
}

Status SampleLog::append(std::span<const EvalSample> samples, std::span<const Prompt> problems, std::span<const uint64_t> keys) {
  if (samples.empty()) return Status::ok();
  LOCKSTEP_RETURN_IF_ERROR(open());
  std::string text;
  for (const EvalSample& s : samples) {
    const auto i = static_cast<size_t>(s.problem);
    JsonLine line;
    line.add("key", hex_digits(keys[i])).add("row", problems[i].row);
    if (!problems[i].row_id.empty()) line.add("id", problems[i].row_id);
    line.add("sample", s.sample).add("status", answer_status_name(s.status)).add("num_tokens", s.num_tokens).add("response", s.response);
    text += checked_line(line) + "\n";
  }
  return append_whole(file_.get(), text, path_);
}

Result<std::string> describe_log(const LoggedSamples& found, const std::string& directory) {
  if (found.samples.empty() && found.foreign_lines > 0)
    return errorf("{} holds {} samples of other weights, settings or problems and none of these; name another directory", directory, found.foreign_lines);
  if (found.samples.empty() && found.damaged_lines == 0) return std::string();
  std::string text = fmt::format("{}: {} samples are there already", directory, found.samples.size());
  if (found.damaged_lines > 0) text += fmt::format(", {} damaged lines are passed over", found.damaged_lines);
  if (found.foreign_lines > 0) text += fmt::format(", {} of other weights or settings are not used", found.foreign_lines);
  return text;
}

}  // namespace lockstep
