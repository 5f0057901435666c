// The HTTP grader: POST of a JSON array of rows, answered by an array of verdicts in any order. What may pass (no connection, a
// time-out, 429, 5xx) is tried again with growing pauses; what remains is an error of its rows.

#include <httplib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "io/utf8.h"
#include "rl/grader/judge.h"

namespace lockstep {

namespace {

constexpr size_t kHttpRows = 16;  // of one request
constexpr int kAttempts = 4;
constexpr size_t kMaxAnswer = 16 << 20;
constexpr auto kFirstPause = std::chrono::milliseconds(100);  // doubles: 0.7 s in all

class HttpJudge : public Judge {
 public:
  HttpJudge(const RewardOptions& options, std::string host, std::string path)
      : options_(options), host_(std::move(host)), path_(std::move(path)) {}

  std::vector<RewardResult> grade(std::span<const GradeRow> rows) override {
    std::vector<RewardResult> verdicts(rows.size());
    for_each_row((rows.size() + kHttpRows - 1) / kHttpRows, options_.workers, [&](size_t part) {
      const size_t first = part * kHttpRows, count = std::min(kHttpRows, rows.size() - first);
      try {
        ask(rows, first, std::span(verdicts).subspan(first, count));
      } catch (const std::exception& e) {
        for (RewardResult& v : std::span(verdicts).subspan(first, count)) v = reward_error(e.what());
      }
    });
    return verdicts;
  }
  bool is_pure() const override { return false; }

 private:
  void ask(std::span<const GradeRow> rows, size_t first, std::span<RewardResult> verdicts) const {
    std::string body = "[";
    for (size_t i = 0; i < verdicts.size(); ++i) {
      if (i > 0) body += ',';
      body += grade_row_json(first + i, rows[first + i]);
    }
    body += ']';
    const Result<std::string> answer = post(body);
    const Result<JsonValue> parsed = answer ? parse_json(answer.value()) : Result<JsonValue>(answer.status());
    std::string why;
    if (!parsed) {
      why = answer ? "its answer is no JSON: " + parsed.message() : answer.message();
    } else if (!parsed.value().is(JsonValue::Kind::array)) {
      why = fmt::format("its answer is {}, an array of verdicts is wanted", json_kind_name(parsed.value().kind));
    } else {
      why = "its answer has no verdict with this row's id";
    }
    for (RewardResult& v : verdicts) v = reward_error(fmt::format("{}{}: {}", host_, path_, why));
    if (!parsed || !parsed.value().is(JsonValue::Kind::array)) return;
    for (const JsonValue& item : parsed.value().items) {
      const JsonValue* id = item.find("id");
      int64_t n = -1;
      if (id == nullptr || !id->as_int64(&n) || n < static_cast<int64_t>(first) || n >= static_cast<int64_t>(first + verdicts.size())) continue;
      bool answers = false;
      verdicts[static_cast<size_t>(n) - first] = verdict_from_json(item, static_cast<size_t>(n), &answers);
    }
  }

  Result<std::string> post(const std::string& body) const {
    httplib::Client client(host_);
    const auto seconds = static_cast<time_t>(options_.deadline_s);
    const auto microseconds = static_cast<time_t>((options_.deadline_s - std::floor(options_.deadline_s)) * 1e6f);
    client.set_connection_timeout(seconds, microseconds);
    client.set_read_timeout(seconds, microseconds);
    client.set_write_timeout(seconds, microseconds);
    std::string why;
    auto pause = kFirstPause;
    for (int attempt = 0; attempt < kAttempts; ++attempt, pause *= 2) {
      if (attempt > 0) std::this_thread::sleep_for(pause);
      // The client's time-outs are for one read; the deadline is for the whole answer, however slowly it drips.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.deadline_s);
      bool late = false;
      std::string answer;
      httplib::Request request;
      request.method = "POST";
      request.path = path_;
      request.headers = {{"Content-Type", "application/json"}};
      request.body = body;
      request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
        answer.append(data, size);
        late = std::chrono::steady_clock::now() > deadline;
        return !late && answer.size() <= kMaxAnswer;
      };
      const httplib::Result result = client.send(request);
      if (result && result->status == 200) return answer;
      why = result ? fmt::format("status {}: {}", result->status, in_quotes(answer))
                   : late ? fmt::format("no whole answer within {} s", options_.deadline_s) : httplib::to_string(result.error());
      if (result && result->status != 429 && result->status < 500) return Status::error(why);
    }
    return errorf("{} ({} attempts)", why, kAttempts);
  }

  RewardOptions options_;
  std::string host_, path_;
};

}  // namespace

Result<std::unique_ptr<Judge>> make_http_judge(const RewardOptions& options) {
  const std::string& url = options.url;
  const size_t scheme = url.starts_with("http://") ? 7 : url.starts_with("https://") ? 8 : 0;
  const size_t slash = url.find('/', scheme);
  if (scheme == 0 || slash == scheme || scheme == url.size())
    return errorf("{} is no address of a grader; http://HOST:PORT/PATH is wanted", in_quotes(url));
  const std::string path = slash == std::string::npos ? "/" : url.substr(slash);
  return std::unique_ptr<Judge>(std::make_unique<HttpJudge>(options, url.substr(0, slash), path));
}

}  // namespace lockstep
