// The server under load beside the engine alone, on one machine and in one run: rounds of CLIENTS streams at once, SECONDS together, alternate with the same
// requests given to an engine without a server. Every answer is compared with the engine's, bit for bit. Then client processes are killed in the middle of
// their streams, and others stop reading.
//
//   serve_load MODEL [CLIENTS [SECONDS [TOKENS]]]     MODEL: a config.json (random weights), a checkpoint or a run; 256 streams, 120 s, answers of 100
//
// Exits 1 if an answer differs, a call fails or a page stays taken.

#include <httplib.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include <fmt/format.h>

#include "rl/checkpoint.h"
#include "rl/sampling.h"
#include "serve/load_client.h"
#include "serve/server.h"

namespace lockstep {
namespace {

constexpr int64_t kMaxContext = 256;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

double resident_mib() {
  std::ifstream statm("/proc/self/statm");
  double total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

double cpu_seconds() {
  rusage u{};
  ::getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

// load_client() in a process of its own.
class Clients {
 public:
  Clients(int port, int streams, int64_t vocab, int64_t tokens) {
    int in[2], out[2];
    CHECK(::pipe2(in, O_CLOEXEC) == 0 && ::pipe2(out, O_CLOEXEC) == 0, "no pipes");
    std::vector<std::string> args = {"serve_load", "--client", std::to_string(port), std::to_string(streams), std::to_string(vocab), std::to_string(tokens)};
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(in[0], STDIN_FILENO);
      ::dup2(out[1], STDOUT_FILENO);
      ::close_range(3, ~0u, 0);  // the server's connections, which this process must not hold open
      ::execv("/proc/self/exe", argv.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    commands_ = in[1];
    reports_ = out[0];
  }
  ~Clients() {
    ::close(commands_);
    ::close(reports_);
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  }
  Clients(const Clients&) = delete;
  Clients& operator=(const Clients&) = delete;

  void start() const { command('g'); }
  // Waits for the answers under way.
  LoadReport stop() const {
    command('s');
    LoadReport report;
    CHECK(read_load_report(reports_, &report), "the client process is gone");
    return report;
  }
  void signal(int number) const { ::kill(pid_, number); }

 private:
  void command(char c) const { CHECK(::write(commands_, &c, 1) == 1, "the client process is gone"); }
  pid_t pid_ = -1;
  int commands_ = -1, reports_ = -1;
};

// Tokens over time, of the clock and of this process's processors.
struct Rate {
  double tokens = 0, seconds = 0, cpu = 0;
  double per_second() const { return tokens / seconds; }
};

struct Bench {
  Policy& served;
  Policy& alone;
  int clients;
  int64_t tokens;
  std::vector<Request> requests;  // by kind
  std::vector<uint64_t> expected;
  int64_t wrong = 0, unfinished = 0;  // of `alone`, which goes on from window to window
  size_t next = 0;

  void expect() {
    const Tokenizer& tokenizer = alone.tokenizer();
    for (size_t kind = 0; kind < kLoadKinds; ++kind) {
      const LoadRequest asked = load_request(kind, alone.config().vocab_size, tokens);
      Request r;
      r.tag = kind;
      r.prompt = asked.prompt;
      r.seed = asked.seed;
      r.sampling.max_new_tokens = asked.max_tokens;
      requests.push_back(r);
    }
    expected.resize(kLoadKinds);
    for (const Completion& c : run_requests(alone.engine(), requests, {}, "").take()) expected[c.tag] = hash(tokenizer, c);
  }
  static uint64_t hash(const Tokenizer& tokenizer, const Completion& c) {
    const std::string text = json_string(tokenizer.decode(c.tokens));
    std::string logprobs;
    for (const float x : c.logprobs) logprobs.append(logprobs.empty() ? "" : ",").append(json_number(x));
    return answer_hash(std::string_view(text).substr(1, text.size() - 2), logprobs);
  }

  // Drawn before a measurement: after a start all prompts are run at once.
  double warm_tokens() const { return static_cast<double>(clients * tokens); }

  // The engine alone, as many samples at once as there are clients.
  Rate run_alone(double seconds) {
    Engine& engine = alone.engine();
    const auto drawn = [&] { return static_cast<double>(engine.stats().decode_tokens); };
    const double begin = now(), cpu = cpu_seconds(), from = drawn();
    do {
      for (; unfinished < clients; ++unfinished, next += 17) CHECK(engine.submit(requests[next % kLoadKinds]).is_ok(), "a request of the bench");
      engine.step();
      for (const Completion& c : engine.take_finished()) {
        wrong += hash(alone.tokenizer(), c) != expected[c.tag];
        --unfinished;
      }
    } while (now() < begin + seconds);
    return {.tokens = drawn() - from, .seconds = now() - begin, .cpu = cpu_seconds() - cpu};
  }
};

std::map<std::string, double> metrics(int port) {
  httplib::Client client("127.0.0.1", port);
  client.set_read_timeout(30, 0);
  std::map<std::string, double> out;
  const httplib::Result answer = client.Get("/metrics");
  CHECK(answer && answer->status == 200, "/metrics: {}", answer ? answer->body : httplib::to_string(answer.error()));
  std::istringstream lines(answer->body);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("lockstep_")) out[line.substr(9, line.rfind(' ') - 9)] = std::atof(line.c_str() + line.rfind(' '));
  return out;
}

// Seconds until nothing is taken any more, as /metrics tells it; negative: it stays taken.
double seconds_until_free(int port) {
  const double start = now();
  httplib::Client client("127.0.0.1", port);
  for (double time = start; time < start + 60; time = now()) {
    if (metrics(port)["unfinished_samples"] == 0) {
      const double freed = now() - start;
      client.Post("/flush_cache");
      std::map<std::string, double> m = metrics(port);
      return m["running_samples"] == 0 && m["free_pages"] == m["pages"] ? freed : -1;
    }
    sleep(0.005);
  }
  return -1;
}

// Client processes with streams in full flow, killed; in every second round they were stopped before, so that they read no more.
bool killed_clients_free_all(Bench& b, int port) {
  constexpr int kProcesses = 8, kRounds = 5;
  double slowest = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::unique_ptr<Clients>> processes;
    for (int i = 0; i < kProcesses; ++i) processes.push_back(std::make_unique<Clients>(port, b.clients / kProcesses, b.alone.config().vocab_size, b.tokens));
    for (const auto& p : processes) p->start();
    const double drawn = metrics(port)["generation_tokens_total"];
    while (metrics(port)["generation_tokens_total"] < drawn + 20.0 * b.clients) sleep(0.005);
    if (round % 2 == 1) {
      for (const auto& p : processes) p->signal(SIGSTOP);
      sleep(0.2);
    }
    for (const auto& p : processes) p->signal(SIGKILL);
    const double seconds = seconds_until_free(port);
    if (seconds < 0) {
      std::printf("kill -9: pages or samples stayed taken\n");
      return false;
    }
    slowest = std::max(slowest, seconds);
  }
  std::printf("kill -9 of %d processes with %d streams, %d times, twice after SIGSTOP: all slots and pages free after at most %.3f s\n", kProcesses, b.clients, kRounds, slowest);
  return true;
}

Result<std::unique_ptr<Policy>> make_policy(const std::string& model) {
  PolicyOptions options{.config = model, .init = "random", .tokenizer = "", .numerics = Numerics::bf16};
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) {
    Result<std::string> checkpoint = find_checkpoint(model);
    if (!checkpoint) return checkpoint.status();
    options = {.config = "", .init = checkpoint.take(), .tokenizer = "", .numerics = Numerics::bf16};
  }
  PolicyUse use;
  use.engine = {.max_running = 256, .max_batch_tokens = 1024, .max_context = kMaxContext, .num_pages = 0, .cache_slots = 16};
  return Policy::make(options, use);
}

int run(const std::string& model, int clients, double seconds, int64_t tokens) {
  Result<std::unique_ptr<Policy>> served = make_policy(model), alone = make_policy(model);
  for (const auto* p : {&served, &alone}) {
    if (p->is_ok()) continue;
    std::fprintf(stderr, "serve_load: %s\n", p->message().c_str());
    return 2;
  }
  Bench b{.served = *served.value(), .alone = *alone.value(), .clients = clients, .tokens = tokens, .requests = {}, .expected = {}};
  b.expect();
  ServerOptions o{.max_context = kMaxContext, .max_samples = 4096, .max_connections = clients + 8};
  o.model_name = "bench";
  Server server(b.served, o);
  if (const Status s = server.start(); !s) {
    std::fprintf(stderr, "serve_load: %s\n", s.message().c_str());
    return 2;
  }
  const auto drawn = [&] { return static_cast<double>(server.generator().stats().engine.decode_tokens); };

  constexpr int kRounds = 12;
  const Clients process(server.port(), clients, b.alone.config().vocab_size, tokens);
  LoadReport all;
  std::vector<double> ratios, served_rates, alone_rates, resident;
  Rate served_all, alone_all;
  const auto add = [](Rate& sum, const Rate& r) { sum = {sum.tokens + r.tokens, sum.seconds + r.seconds, sum.cpu + r.cpu}; };
  while (static_cast<double>(b.alone.engine().stats().decode_tokens) < b.warm_tokens()) b.run_alone(0);
  for (int round = 0; round < kRounds; ++round) {
    const Rate before = b.run_alone(seconds / kRounds / 4);
    const double idle = drawn();
    process.start();
    while (drawn() < idle + b.warm_tokens()) sleep(0.01);
    const double begin = now(), cpu = cpu_seconds(), from = drawn();
    while (now() < begin + seconds / kRounds) {
      sleep(0.5);
      resident.push_back(resident_mib());
    }
    const Rate served_now{.tokens = drawn() - from, .seconds = now() - begin, .cpu = cpu_seconds() - cpu};
    const LoadReport r = process.stop();
    all.answers += r.answers;
    all.errors += r.errors;
    all.events += r.events;
    all.cpu_seconds = r.cpu_seconds;
    all.longest_wait = std::max(all.longest_wait, r.longest_wait);
    for (const LoadReport::Said& s : r.said) b.wrong += s.hash == b.expected.at(s.kind) ? 0 : s.count;
    Rate alone_now = before;
    add(alone_now, b.run_alone(seconds / kRounds / 4));
    add(served_all, served_now);
    add(alone_all, alone_now);
    served_rates.push_back(served_now.per_second());
    alone_rates.push_back(alone_now.per_second());
    ratios.push_back(served_rates.back() / alone_rates.back());
  }
  const auto median = [](std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%s, hidden %ld: %d streams, %.0f s: %ld answers, %ld errors, %ld unlike the engine's\n", model.c_str(), b.alone.config().hidden_size, clients, seconds, all.answers, all.errors, b.wrong);
  std::printf("tokens/s: served %.0f, the engine alone %.0f, ratio %.3f (%d rounds, %.3f to %.3f)\n", median(served_rates), median(alone_rates), median(ratios), kRounds, *least, *most);
  std::printf("processor time a token, in us: server %.2f, clients %.2f, the engine alone %.2f; %.1f tokens an event, at most %.0f ms between two of a stream\n", 1e6 * served_all.cpu / served_all.tokens,
              1e6 * all.cpu_seconds / static_cast<double>(all.answers * tokens), 1e6 * alone_all.cpu / alone_all.tokens, static_cast<double>(all.answers * tokens) / static_cast<double>(all.events),
              1e3 * all.longest_wait);
  const size_t part = resident.size() / kRounds;
  std::printf("resident MiB by round:");
  for (size_t i = 0; i < resident.size(); i += part) std::printf(" %.1f", *std::max_element(resident.begin() + static_cast<int64_t>(i), resident.begin() + static_cast<int64_t>(std::min(i + part, resident.size()))));
  std::printf("\n");
  std::fflush(stdout);
  return killed_clients_free_all(b, server.port()) && seconds_until_free(server.port()) >= 0 && all.errors == 0 && b.wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc > 1 && std::string_view(argv[1]) == "--client") return load_client(std::span(argv + 2, static_cast<size_t>(argc - 2)));
  const int clients = argc > 2 ? std::atoi(argv[2]) : 256;
  const double seconds = argc > 3 ? std::atof(argv[3]) : 120;
  const int64_t tokens = argc > 4 ? std::atoll(argv[4]) : 100;
  if (argc < 2 || argc > 5 || clients < 8 || clients > 900 || seconds < 6 || tokens < 1 || tokens > 120) {
    std::fprintf(stderr, "usage: serve_load MODEL [CLIENTS 8..900 [SECONDS 6.. [TOKENS 1..120]]]\n");
    return 2;
  }
  return run(argv[1], clients, seconds, tokens);
}
