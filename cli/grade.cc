// lockstep grade: JSON lines {"response", "label"} to {"score", "correct", "pred", "reason"}, standard input to standard output, one
// line a row, in order. It answers what it has read as soon as no more is waiting, so that it can itself be a run's
// task.reward_command.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/console.h"
#include "io/file.h"
#include "io/json.h"
#include "rl/grader/judge.h"

namespace lockstep {

namespace {

constexpr size_t kRowsAtOnce = 512;
constexpr size_t kMaxLine = size_t{64} << 20;

// Lines of standard input.
class Lines {
 public:
  // The next line without its end. None at the end of input, or, if `wait` is false, when none is there yet.
  Result<std::optional<std::string>> next(bool wait) {
    for (;;) {
      if (const size_t end = buffer_.find('\n', searched_); end != std::string::npos) {
        std::string line = buffer_.substr(start_, end - start_);
        start_ = searched_ = end + 1;
        return std::optional(std::move(line));
      }
      buffer_.erase(0, start_);
      start_ = 0;
      searched_ = buffer_.size();
      if (ended_ && buffer_.empty()) return std::optional<std::string>();
      if (ended_) return std::optional(std::exchange(buffer_, {}));
      if (buffer_.size() > kMaxLine) return errorf("standard input: a line of more than {} bytes", kMaxLine);
      pollfd waiting = {STDIN_FILENO, POLLIN, 0};
      if (!wait && ::poll(&waiting, 1, 0) == 0) return std::optional<std::string>();
      char chunk[65536];
      const ssize_t n = ::read(STDIN_FILENO, chunk, sizeof chunk);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno_status("cannot read", "standard input", errno);
      ended_ = n == 0;
      buffer_.append(chunk, static_cast<size_t>(n));
    }
  }

 private:
  std::string buffer_;
  size_t start_ = 0, searched_ = 0;
  bool ended_ = false;
};

struct Row {
  std::string id;  // as JSON, or empty
  std::string prompt, response, label;
  std::string bad;  // why it cannot be judged
};

std::string id_json(const JsonValue& v) {
  if (v.is(JsonValue::Kind::number)) return v.text;
  std::string out;
  append_json_string(&out, v.text);
  return out;
}

Row parse_row(std::string_view line) {
  Row row;
  Result<JsonValue> parsed = parse_json(line);
  if (!parsed) {
    row.bad = parsed.message();
    return row;
  }
  const JsonValue& v = parsed.value();
  if (!v.is(JsonValue::Kind::object)) {
    row.bad = fmt::format("it is {}, an object is wanted", json_kind_name(v.kind));
    return row;
  }
  if (const JsonValue* id = v.find("id"); id != nullptr && !id->is(JsonValue::Kind::null)) {
    if (!id->is(JsonValue::Kind::string) && !id->is(JsonValue::Kind::number)) {
      row.bad = fmt::format("\"id\" is {}, a string or a number is wanted", json_kind_name(id->kind));
      return row;
    }
    row.id = id_json(*id);
  }
  for (const auto& [name, field] : {std::pair{"response", &row.response}, {"label", &row.label}, {"prompt", &row.prompt}}) {
    const JsonValue* text = v.find(name);
    const bool is_prompt = field == &row.prompt;
    if (text != nullptr && text->is(JsonValue::Kind::string)) {
      *field = text->text;
    } else if (text != nullptr && text->is(JsonValue::Kind::number) && field == &row.label) {
      Result<std::string> label = canonical_decimal(text->text);
      if (!label) row.bad = label.message();
      if (label) *field = label.take();
    } else if (!is_prompt) {
      row.bad = text == nullptr ? fmt::format("there is no \"{}\"", name) : fmt::format("\"{}\" is {}, a string is wanted", name, json_kind_name(text->kind));
      return row;
    }
  }
  return row;
}

// JSON has no number for a score that was not given: it is null.
std::string verdict_line(const Row& row, const RewardResult& r) {
  std::string out = row.id.empty() ? "{" : "{\"id\":" + row.id + ",";
  if (!r.scored()) out += "\"score\":null,";
  JsonLine line;
  if (r.scored()) line.add("score", r.score);
  line.add("correct", r.correct).add("pred", r.pred).add("reason", reward_reason_name(r.reason));
  if (!r.scored()) line.add("error", r.error);
  return out + line.str().substr(1) + "\n";
}

}  // namespace

int grade_command(const GradeArgs& args) {
  RewardOptions options;
  const auto named = std::find(std::begin(kGraderNames), std::end(kGraderNames), args.grader);
  options.grader = static_cast<GraderKind>(named - std::begin(kGraderNames));
  if (args.grader.empty()) options.grader = !args.command.empty() ? GraderKind::command : !args.url.empty() ? GraderKind::http : GraderKind::standard;
  if (!args.command.empty() && options.grader != GraderKind::command)
    return fail(kExitBadInput, errorf("--command is for --grader command, not {}", args.grader.empty() ? "together with --url" : args.grader));
  if (!args.url.empty() && options.grader != GraderKind::http)
    return fail(kExitBadInput, errorf("--url is for --grader http, not {}", args.grader.empty() ? "together with --command" : args.grader));
  options.command = args.command;
  options.url = args.url;
  options.workers = args.threads;
  options.deadline_s = args.deadline_s;
  options.thinking = args.thinking;
  Result<std::unique_ptr<Judge>> judge = Judge::make(options);
  if (!judge) return fail(kExitBadInput, judge.status());

  Lines lines;
  int64_t line_number = 0;
  int exit_code = kExitOk;
  for (bool more = true; more;) {
    std::vector<Row> rows;
    std::vector<int64_t> numbers;
    while (rows.size() < kRowsAtOnce) {
      Result<std::optional<std::string>> line = lines.next(rows.empty());
      if (!line) return fail(kExitFailure, line.status());
      if (!line.value()) {
        more = !rows.empty();  // nothing there yet, or the end, which the next turn sees
        break;
      }
      ++line_number;
      if (line.value()->find_first_not_of(" \t\r") == std::string::npos) continue;
      rows.push_back(parse_row(*line.value()));
      numbers.push_back(line_number);
    }
    std::vector<GradeRow> good;
    for (const Row& r : rows)
      if (r.bad.empty()) good.push_back({r.prompt, r.response, r.label});
    const std::vector<RewardResult> verdicts = judge.value()->grade(good);
    std::string out;
    size_t next = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const RewardResult verdict = rows[i].bad.empty() ? verdicts[next++] : reward_error(rows[i].bad);
      if (!rows[i].bad.empty()) {
        exit_code = fail(kExitBadInput, errorf("standard input:{}: {}", numbers[i], rows[i].bad));
      } else if (!verdict.scored()) {
        const int code = fail(kExitFailure, errorf("standard input:{}: not judged: {}", numbers[i], verdict.error));
        if (exit_code == kExitOk) exit_code = code;
      }
      out += verdict_line(rows[i], verdict);
    }
    std::fwrite(out.data(), 1, out.size(), stdout);
    if (std::fflush(stdout) != 0) return kExitOk;  // main says so
  }
  return exit_code;
}

}  // namespace lockstep
