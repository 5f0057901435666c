// The server under load: CLIENTS streams at once for SECONDS, each answer compared with the offline engine's, tokens a second of both, and the
// process's memory. Usage: serve_load CONFIG.json CLIENTS SECONDS [TOKENS]. Weights are random. Prints a line of figures; exits 1 if any answer differs.

#include <httplib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "rl/sampling.h"
#include "serve/server.h"

namespace lockstep {
namespace {

constexpr size_t kKinds = 64;  // different requests

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double resident_mib() {
  std::ifstream statm("/proc/self/statm");
  double total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

int run(const std::string& config, int clients, double seconds, int64_t tokens) {
  const PolicyOptions options{.config = config, .init = "random", .tokenizer = "", .numerics = Numerics::bf16};
  PolicyUse use;
  use.engine = {.max_running = 256, .max_batch_tokens = 1024, .max_context = 256, .num_pages = 0, .cache_slots = 16};
  Result<std::unique_ptr<Policy>> made = Policy::make(options, use);
  if (!made) {
    std::fprintf(stderr, "%s\n", made.message().c_str());
    return 2;
  }
  Policy& policy = *made.value();
  std::vector<Request> requests(kKinds);
  for (size_t i = 0; i < kKinds; ++i) {
    Request& r = requests[i];
    for (size_t t = 0; t < 10 + i; ++t) r.prompt.push_back(static_cast<int32_t>(3 + (t * 7 + i) % static_cast<size_t>(policy.config().vocab_size - 3)));
    r.seed = i;
    r.sampling.max_new_tokens = tokens;
  }
  // Offline: as many at once as there are clients.
  std::vector<std::vector<int32_t>> expected(kKinds);
  double offline = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<Request> all;
    for (int i = 0; i < clients; ++i) {
      all.push_back(requests[static_cast<size_t>(i) % kKinds]);
      all.back().tag = static_cast<uint64_t>(i) % kKinds;
    }
    const double start = now();
    int64_t count = 0;
    const std::vector<Completion> done = run_requests(policy.engine(), all, {}, "").take();
    for (const Completion& c : done) {
      expected[c.tag] = c.tokens;
      count += static_cast<int64_t>(c.tokens.size());
    }
    offline = static_cast<double>(count) / (now() - start);
  }

  ServerOptions o{.max_context = use.engine.max_context, .max_samples = 4096, .max_connections = clients + 8};
  o.model_name = "bench";
  Server server(policy, o);
  if (const Status s = server.start(); !s) {
    std::fprintf(stderr, "%s\n", s.message().c_str());
    return 2;
  }
  std::atomic<int64_t> answers{0}, drawn{0}, errors{0}, wrong{0};
  std::atomic<bool> go{true};
  const auto ask = [&](size_t id) {
    httplib::Client client("127.0.0.1", server.port());
    client.set_keep_alive(true);
    client.set_tcp_nodelay(true);
    client.set_read_timeout(120, 0);
    for (size_t round = id; go; round += 17) {
      const size_t kind = round % kKinds;
      const Request& r = requests[kind];
      httplib::Request request;
      request.method = "POST";
      request.path = "/v1/completions";
      request.body = fmt::format("{{\"prompt\":[{}],\"max_tokens\":{},\"seed\":{},\"ignore_eos\":true,\"logprobs\":0,\"stream\":true}}", [&] {
        std::string ids;
        for (const int32_t t : r.prompt) ids += (ids.empty() ? "" : ",") + std::to_string(t);
        return ids;
      }(), tokens, r.seed);
      std::string body;
      request.content_receiver = [&](const char* data, size_t n, uint64_t, uint64_t) {
        body.append(data, n);
        return true;
      };
      const httplib::Result answer = client.send(request);
      if (!answer || answer->status != 200 || !body.ends_with(kSseEnd)) {
        if (++errors == 1) std::fprintf(stderr, "first error: %s\n", answer ? answer->body.c_str() : httplib::to_string(answer.error()).c_str());
        continue;
      }
      // The texts of all events joined against the offline tokens' text.
      std::string text;
      for (size_t from = 0, end; (end = body.find("\n\n", from)) != std::string::npos; from = end + 2) {
        const Result<JsonValue> event = parse_json(std::string_view(body).substr(from + 6, end - from - 6));
        if (event && event.value().find("choices") != nullptr) text += event.value().find("choices")->items.at(0).find("text")->text;
      }
      wrong += text != policy.tokenizer().decode(expected[kind]);
      ++answers;
      drawn += tokens;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < clients; ++i) threads.emplace_back(ask, static_cast<size_t>(i));
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds / 4));  // warm
  const double rss_before = resident_mib(), start = now();
  const int64_t from = server.generator().stats().engine.decode_tokens;
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds * 3 / 4));
  const double served = static_cast<double>(server.generator().stats().engine.decode_tokens - from) / (now() - start), rss_after = resident_mib();
  go = false;
  for (std::thread& t : threads) t.join();
  server.generator().flush_cache();
  const EngineLoad load = server.generator().stats().load;
  const bool all_free = load.free_pages == load.num_pages;
  std::printf("%d streams, %.0f s: %lld answers, %lld errors, %lld unlike offline; %.0f tokens/s, offline %.0f (%.2f); resident %.1f MiB, later %.1f; pages %s\n", clients,
              seconds, static_cast<long long>(answers.load()), static_cast<long long>(errors.load()), static_cast<long long>(wrong.load()), served, offline, served / offline,
              rss_before, rss_after, all_free ? "all free" : "LOST");
  return errors == 0 && wrong == 0 && all_free ? 0 : 1;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: serve_load CONFIG.json CLIENTS SECONDS [TOKENS]\n");
    return 2;
  }
  return lockstep::run(argv[1], std::atoi(argv[2]), std::atof(argv[3]), argc > 4 ? std::atoll(argv[4]) : 100);
}
