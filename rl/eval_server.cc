#include "rl/eval_server.h"

#include <httplib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include "io/json.h"
#include "io/utf8.h"
#include "rl/grader/judge.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxAnswer = size_t{64} << 20;
constexpr auto kFirstPause = std::chrono::milliseconds(500);  // doubles
constexpr auto kLongestPause = std::chrono::milliseconds(30000);

struct Address {
  std::string host, path;
};

Result<Address> read_address(const ServerOptions& o) {
  const size_t scheme = o.url.starts_with("http://") ? 7 : o.url.starts_with("https://") ? 8 : 0;
  const size_t slash = o.url.find('/', scheme);
  if (scheme == 0 || slash == scheme || scheme == o.url.size())
    return errorf("{} is no address of a server; http://HOST:PORT is wanted", in_quotes(o.url));
  std::string path = slash == std::string::npos ? "" : o.url.substr(slash);
  while (path.ends_with('/')) path.pop_back();
  if (path.empty()) path = "/v1";
  return Address{o.url.substr(0, slash), path + (o.chat ? "/chat/completions" : "/completions")};
}

std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(&out, text);
  return out;
}

uint64_t sample_seed(int64_t seed, int64_t row, int64_t sample) { return checksum(fmt::format("{} {} {}", seed, row, sample)) >> 33; }  // 31 bits

// Everything but the seed.
std::string body_start(const ServerOptions& server, const Prompt& problem, const EvalOptions& o) {
  JsonLine line;
  line.add("model", server.model).add("max_tokens", o.max_new_tokens).add("temperature", o.temperature).add("top_p", o.top_p);
  if (o.top_k > 0) line.add("top_k", o.top_k);  // beyond the protocol
  std::string body = line.str();
  body.pop_back();
  if (!server.chat) return body + ",\"prompt\":" + json_string(problem.text);
  body += ",\"messages\":" + (problem.messages.empty() ? "[{\"role\":\"user\",\"content\":" + json_string(problem.text) + "}]" : problem.messages);
  if (!server.thinking.empty()) body += ",\"chat_template_kwargs\":{\"thinking\":" + server.thinking + "}";
  return body;
}

Status read_answer(const std::string& text, EvalSample* s) {
  const Result<JsonValue> parsed = parse_json(text);
  if (!parsed) return errorf("its answer is no JSON: {}", parsed.message());
  const JsonValue* choices = parsed.value().find("choices");
  if (choices == nullptr || !choices->is(JsonValue::Kind::array) || choices->items.empty())
    return errorf("its answer has no \"choices\": {}", in_quotes(text));
  const JsonValue& choice = choices->items[0];
  const auto read = [](const JsonValue& from, const char* name, std::string* out) {
    const JsonValue* v = from.find(name);
    if (v == nullptr || !v->is(JsonValue::Kind::string)) return false;
    *out = v->text;
    return true;
  };
  if (const JsonValue* message = choice.find("message")) {
    std::string reasoning;
    const bool content = read(*message, "content", &s->response);
    const bool reasons = read(*message, "reasoning_content", &reasoning) || read(*message, "reasoning", &reasoning);
    if (!content && !reasons && message->find("content") == nullptr) return errorf("its answer's message has no content: {}", in_quotes(text));
    if (reasons && !reasoning.empty()) s->response = reasoning + (content && !s->response.empty() ? "</think>" + s->response : "");
  } else if (!read(choice, "text", &s->response)) {
    return errorf("its answer's choice has neither message nor text: {}", in_quotes(text));
  }
  std::string end;
  s->status = read(choice, "finish_reason", &end) && end == "length" ? AnswerStatus::truncated : AnswerStatus::completed;
  const JsonValue* usage = parsed.value().find("usage");
  const JsonValue* tokens = usage == nullptr ? nullptr : usage->find("completion_tokens");
  if (tokens == nullptr || !tokens->as_int64(&s->num_tokens) || s->num_tokens < 0) s->num_tokens = -1;
  return Status::ok();
}

class Connection {
 public:
  Connection(const ServerOptions& options, const Address& address) : options_(options), address_(address), client_(address.host) {
    const auto seconds = static_cast<time_t>(options.deadline_s);
    const auto microseconds = static_cast<time_t>((options.deadline_s - std::floor(options.deadline_s)) * 1e6f);
    client_.set_connection_timeout(seconds, microseconds);
    client_.set_read_timeout(seconds, microseconds);
    client_.set_write_timeout(seconds, microseconds);
    client_.set_keep_alive(true);
  }

  // Asks until there is an answer, `stop` is set, or all attempts are used up.
  Status ask(const std::string& body, const std::atomic<bool>& stop, EvalSample* sample) {
    std::string why;
    auto pause = std::chrono::milliseconds(kFirstPause);
    for (int64_t attempt = 0; attempt <= options_.retries; ++attempt) {
      if (attempt > 0) {
        for (auto waited = std::chrono::milliseconds(0); waited < pause && !stop; waited += std::chrono::milliseconds(50))
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        pause = std::min(2 * pause, std::chrono::milliseconds(kLongestPause));
      }
      if (stop) return Status::error("stopped");
      // The client's time-outs are for one read; the deadline is for the whole answer, however slowly it drips.
      const auto deadline = Clock::now() + std::chrono::duration<double>(options_.deadline_s);
      bool late = false;
      std::string answer;
      httplib::Request request;
      request.method = "POST";
      request.path = address_.path;
      request.headers = {{"Content-Type", "application/json"}};
      if (!options_.key.empty()) request.headers.emplace("Authorization", "Bearer " + options_.key);
      request.body = body;
      request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
        answer.append(data, size);
        late = Clock::now() > deadline;
        return !late && answer.size() <= kMaxAnswer;
      };
      const httplib::Result result = client_.send(request);
      if (result && result->status == 200) return read_answer(answer, sample);
      why = result ? fmt::format("status {}: {}", result->status, in_quotes(answer))
                   : late ? fmt::format("no whole answer within {} s", options_.deadline_s) : httplib::to_string(result.error());
      if (result && result->status != 408 && result->status != 429 && result->status < 500) return Status::error(why);
    }
    return errorf("{} ({} attempts)", why, options_.retries + 1);
  }

 private:
  const ServerOptions& options_;
  const Address& address_;
  httplib::Client client_;
};

}  // namespace

Status check_server(const ServerOptions& options) { return read_address(options).status(); }

Result<std::vector<EvalSample>> sample_server(const ServerOptions& server, std::span<const Prompt> problems, const EvalOptions& options, const Hooks& hooks,
                                              SampleLog* log) {
  const Result<Address> address = read_address(server);
  if (!address) return address.status();
  std::vector<std::string> bodies;
  std::vector<uint64_t> keys;
  for (const Prompt& p : problems) {
    bodies.push_back(body_start(server, p, options));
    keys.push_back(checksum(fmt::format("{} {}\n{} {}\n{}", address.value().host, address.value().path, options.seed, p.row, bodies.back())));
  }
  std::vector<EvalSample> samples;
  if (log != nullptr) {
    const Result<std::string> text = log->read();
    if (!text) return text.status();
    LoggedSamples found = parse_sample_log(text.value(), keys, options.samples);
    const Result<std::string> said = describe_log(found, log->directory());
    if (!said) return said.status();
    if (!said.value().empty()) hooks.say(said.value());
    LOCKSTEP_RETURN_IF_ERROR(log->open());
    samples = std::move(found.samples);
    log->num_reused = static_cast<int64_t>(samples.size());
  }
  std::vector<EvalSample> wanted;
  size_t at = 0;
  for (int64_t q = 0; q < static_cast<int64_t>(problems.size()); ++q) {
    for (int64_t s = 0; s < options.samples; ++s) {
      if (at < samples.size() && samples[at].problem == q && samples[at].sample == s) {
        ++at;
      } else {
        wanted.push_back({.problem = q, .sample = s, .response = {}});
      }
    }
  }

  const auto total = static_cast<int64_t>(wanted.size());
  const auto workers = std::max<int64_t>(1, std::min(server.concurrency, total));
  std::atomic<size_t> next = 0;
  std::atomic<bool> stop = false;
  std::mutex mutex;  // over what follows, log and hooks
  Status failure;
  int64_t done = 0, tokens = 0;
  for_each_row(static_cast<size_t>(workers), workers, [&](size_t) {
    Connection connection(server, address.value());
    for (size_t i; !stop && (i = next.fetch_add(1)) < wanted.size();) {
      EvalSample& s = wanted[i];
      const auto q = static_cast<size_t>(s.problem);
      Status answered = connection.ask(fmt::format("{},\"seed\":{}}}", bodies[q], sample_seed(options.seed, problems[q].row, s.sample)), stop, &s);
      const std::lock_guard lock(mutex);
      if (answered && log != nullptr) answered = log->append(std::span(&s, 1), problems, keys);
      if (!answered) {
        if (failure && !stop) failure = errorf("{}{}: problem {}, sample {}: {}", address.value().host, address.value().path, problems[q].row, s.sample, answered.message());
        stop = true;
        return;
      }
      tokens += std::max<int64_t>(0, s.num_tokens);
      hooks.report("eval", ++done, total, static_cast<double>(tokens), "tokens");
    }
  });
  if (!failure) return log == nullptr ? failure : errorf("{}; {} of {} samples are kept in {}: the same command goes on from there", failure.message(),
                                                         static_cast<int64_t>(samples.size()) + done, static_cast<int64_t>(samples.size()) + total, log->directory());
  for (EvalSample& s : wanted) samples.push_back(std::move(s));
  std::sort(samples.begin(), samples.end(), by_problem_and_sample);
  return samples;
}

}  // namespace lockstep
