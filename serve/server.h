#pragma once
// The HTTP server: a thread a connection, each of which waits for its job's tokens; the engine has a thread of its own (serve/generator.h). Endpoints
// and limits: docs/serve.md.
//
// A client that is gone, or reads so slowly that a write does not finish in time, has its job aborted, which frees slots and pages at once.

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "serve/api.h"
#include "serve/generator.h"

namespace lockstep {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;              // 0: any that is free
  std::string api_key = {};  // empty: none is asked for
  std::string model_name = {};  // that clients call it by
  std::string model_path = {};  // for /get_model_info
  std::string tokenizer_path = {};
  int64_t max_context = 0;   // of the engine
  int64_t max_samples = 512;      // unfinished at once; more are answered 429
  int64_t max_connections = 320;  // threads; more connections wait. The library cannot serve descriptors from 1024 on
  int64_t max_body_bytes = 8 << 20;
  int64_t events_per_second = 2000;  // that streams share: few of them write every token as it is drawn, many write several at once, each at least 5 times a second
  float write_deadline_s = 10;   // of one write to a client
  float health_deadline_s = 20;
};

class Server {
 public:
  // `policy` as in Generator.
  Server(Policy& policy, ServerOptions options);
  ~Server();  // aborts what is left

  Status start();  // binds and listens; answers from then on
  int port() const { return port_; }
  // Refuses new work with 503, and lets what is under way end, for `limit`; then stops. True: all of it ended.
  bool stop(std::chrono::milliseconds limit);
  Generator& generator() { return generator_; }

 private:
  struct Http;
  const ServerOptions options_;
  const ServedModel model_;
  Generator generator_;
  std::unique_ptr<Http> http_;
  std::thread thread_;
  int port_ = 0;
  bool stopped_ = true;
};

}  // namespace lockstep
