#include "serve/server.h"

#include <httplib.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <ctime>

#include "core/device.h"
#include "io/utf8.h"
#include "serve/weights.h"

namespace lockstep {

namespace {

constexpr const char* kJson = "application/json";
using Clock = Job::Clock;
constexpr auto kLook = std::chrono::milliseconds(200);  // how often a waiting thread looks whether its client is still there

// Equal in a time that does not tell where they differ.
bool same_secret(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  return difference == 0;
}

void answer_error(httplib::Response& response, const ApiError& error) {
  response.status = error.status;
  response.set_content(openai_error_json(error), kJson);
}

Result<JsonValue> json_object(const httplib::Request& request, bool may_be_empty) {
  if (may_be_empty && request.body.find_first_not_of(" \t\r\n") == std::string::npos) return JsonValue{.kind = JsonValue::Kind::object, .text = {}, .items = {}, .members = {}};
  Result<JsonValue> body = parse_json(request.body);
  if (!body) return errorf("the body is no JSON: {}", body.message());
  if (!body.value().is(JsonValue::Kind::object)) return errorf("the body is {}, an object is wanted", json_kind_name(body.value().kind));
  return body;
}

std::string message_json(bool success, std::string_view message) {
  return fmt::format("{{\"success\":{},\"message\":{}}}", success, json_string(message));
}

}  // namespace

struct Server::Http {
  explicit Http(Server& s) : s(s) {}
  void routes();
  void generate(const Result<JsonValue>& body, httplib::Response& response, const std::function<bool(const JsonValue&, Call*, ApiError*)>& read);
  Clock::time_point next_writing() const;
  void health(httplib::Response& response);
  void update(const JsonValue& body, httplib::Response& response);
  std::string metrics() const;

  Server& s;
  httplib::Server server;
  socket_t listener = INVALID_SOCKET;
  std::atomic<int64_t> answering{0};                     // calls whose answers are not written yet
  std::atomic<int64_t> requests{0}, dropped{0}, errors{0};
};

void Server::Http::generate(const Result<JsonValue>& body, httplib::Response& response, const std::function<bool(const JsonValue&, Call*, ApiError*)>& read) {
  if (!body) return answer_error(response, {.status = 400, .message = body.message()});
  auto call = std::make_shared<Call>();
  ApiError error;
  if (!read(body.value(), call.get(), &error)) return answer_error(response, error);
  const bool stream = call->options.stream;
  // Counted before the engine may work on it: a stop that sees the work end must also see that an answer is still to be written.
  ++answering;
  std::shared_ptr<void> answer(nullptr, [this](void*) { --answering; });
  const Generator::Submitted submitted = s.generator_.submit(std::move(call->requests), std::move(call->options));
  switch (submitted.refusal) {
    case Generator::Refusal::none: break;
    case Generator::Refusal::bad: return answer_error(response, {.status = 400, .message = submitted.message});
    case Generator::Refusal::busy: response.set_header("Retry-After", "1"); return answer_error(response, {.status = 429, .message = submitted.message});
    case Generator::Refusal::draining: return answer_error(response, {.status = 503, .message = submitted.message});
  }
  // From here on a chunked answer: only while one is being written does the library tell whether the client is there.
  const std::shared_ptr<Job> job = submitted.job;
  struct Progress {
    uint64_t seen = 0;
    Clock::time_point quiet_until;  // the next event is not written before
  };
  auto progress = std::make_shared<Progress>();
  progress->quiet_until = stream ? Clock::time_point() : Clock::time_point::max();
  response.set_chunked_content_provider(
      stream ? "text/event-stream" : kJson,
      [this, job, call, stream, progress](size_t, httplib::DataSink& sink) {
        progress->seen = job->wait(progress->seen, Clock::now() + kLook, progress->quiet_until);
        const bool ended = job->ended();
        std::string text;
        if (stream) text = call->reply->events(*job);
        if (!stream && ended) text = call->reply->whole(*job);
        if (text.empty()) return sink.is_writable();
        if (!sink.write(text.data(), text.size())) return false;
        if (stream ? text.ends_with(kSseEnd) : ended) {
          sink.done();
        } else {
          progress->quiet_until = next_writing();
        }
        return true;
      },
      [this, job, answer = std::move(answer)](bool written) {
        if (!written) ++dropped;
        if (!job->ended()) s.generator_.cancel(job);
      });
}

// When a stream that has written may write again: all at the same moments, or some would always be taking a core from under one of the engine's threads while
// the others wait for it.
Clock::time_point Server::Http::next_writing() const {
  const Clock::duration between = std::chrono::nanoseconds(std::max<int64_t>(1, 1'000'000'000 * answering / s.options_.events_per_second));
  return Clock::time_point((Clock::now().time_since_epoch() / between + 1) * between);
}

void Server::Http::health(httplib::Response& response) {
  const Status status = s.generator_.health(std::chrono::milliseconds(static_cast<int64_t>(1000 * s.options_.health_deadline_s)));
  if (!status) return answer_error(response, {.status = 503, .message = status.message()});
  response.set_content("{\"status\":\"ok\"}", kJson);
}

void Server::Http::update(const JsonValue& body, httplib::Response& response) {
  Fields f(body);
  const std::string path = f.text("model_path", "");
  if (path.empty()) f.fail("model_path", "model_path is missing; the directory of a checkpoint or run is wanted");
  const std::string how = f.text("policy", f.boolean("abort_all_requests", false) ? "abort" : "wait");
  if (how != "wait" && how != "abort" && how != "retract") f.fail("policy", fmt::format("policy is {}, wait, abort or retract is wanted", json_string(how)));
  const std::string label = f.text("weight_version", "");
  for (const char* name : {"load_format", "manifest", "is_async", "keep_pause", "recapture_cuda_graph", "torch_empty_cache"}) f.refuse(name, "it is not built");
  const Status status = f.failed() ? Status::error(f.error().message)
                                   : s.generator_.update(path, how == "wait" ? Quiesce::wait : how == "abort" ? Quiesce::abort : Quiesce::retract, label);
  response.status = status ? 200 : 400;
  const std::string version = s.generator_.weight_version();
  response.set_content(fmt::format("{{\"success\":{},\"message\":{},\"num_paused_requests\":0,\"weight_version\":{}}}", status.is_ok(),
                                   json_string(status ? "the new weights serve" : status.message()), json_string(version)),
                       kJson);
}

std::string Server::Http::metrics() const {
  const GeneratorStats g = s.generator_.stats();
  std::string out;
  const auto add = [&](const char* name, const char* type, const char* help, double value) {
    out += fmt::format("# HELP lockstep_{0} {1}\n# TYPE lockstep_{0} {2}\nlockstep_{0} {3}\n", name, help, type, value);
  };
  const auto count = [&](const char* name, const char* help, double value) { add(name, "counter", help, value); };
  const auto gauge = [&](const char* name, const char* help, double value) { add(name, "gauge", help, value); };
  count("http_requests_total", "HTTP requests answered or being answered.", static_cast<double>(requests));
  count("http_errors_total", "HTTP answers with a status of 400 or more.", static_cast<double>(errors));
  count("dropped_clients_total", "Clients that left, or read too slowly, before their answer ended.", static_cast<double>(dropped));
  count("jobs_total", "Generation requests taken.", static_cast<double>(g.jobs));
  count("refused_total", "Generation requests refused because of the load or a shutdown.", static_cast<double>(g.refused));
  count("samples_stopped_total", "Samples that ended by a stop id or stop string.", static_cast<double>(g.stopped));
  count("samples_truncated_total", "Samples that ended by their greatest length.", static_cast<double>(g.truncated));
  count("samples_aborted_total", "Samples that were aborted.", static_cast<double>(g.aborted));
  count("prompt_tokens_total", "Prompt tokens run.", static_cast<double>(g.engine.prefill_tokens));
  count("shared_prompt_tokens_total", "Prompt tokens not run because another sample of the request had.", static_cast<double>(g.engine.shared_prompt_tokens));
  count("cached_prompt_tokens_total", "Prompt tokens not run because an earlier request had.", static_cast<double>(g.engine.cached_prompt_tokens));
  count("generation_tokens_total", "Tokens drawn.", static_cast<double>(g.engine.decode_tokens));
  count("steps_total", "Forwards.", static_cast<double>(g.engine.steps));
  count("forward_seconds_total", "Time in forwards.", g.engine.forward_seconds);
  count("sample_seconds_total", "Time in sampling.", g.engine.sample_seconds);
  count("weight_updates_total", "Updates of the weights.", static_cast<double>(g.updates));
  count("weight_update_failures_total", "Updates that failed and left the old weights.", static_cast<double>(g.failed_updates));
  gauge("unfinished_samples", "Samples taken and not ended.", static_cast<double>(g.unfinished));
  gauge("running_samples", "Samples and prompts that hold state.", static_cast<double>(g.load.running));
  gauge("waiting_requests", "Requests that the engine has not admitted.", static_cast<double>(g.load.waiting));
  gauge("free_pages", "Pages of sequence state that nobody holds.", static_cast<double>(g.load.free_pages));
  gauge("pages", "Pages of sequence state.", static_cast<double>(g.load.num_pages));
  gauge("cached_prefixes", "Snapshots that later prompts may continue from.", static_cast<double>(g.load.cached_prefixes));
  gauge("paused", "1 while generation is paused.", g.paused ? 1 : 0);
  std::string label;
  for (const char c : g.weight_version) label += c == '\\' ? "\\\\" : c == '"' ? "\\\"" : c == '\n' ? "\\n" : std::string(1, c);
  return out + fmt::format("# HELP lockstep_weight_version The version that serves, as a label.\n# TYPE lockstep_weight_version gauge\nlockstep_weight_version{{version=\"{}\"}} 1\n", label);
}

void Server::Http::routes() {
  using httplib::Request;
  using httplib::Response;
  const ServerOptions& o = s.options_;
  server.new_task_queue = [&o] { return new httplib::ThreadPool(static_cast<size_t>(o.max_connections)); };
  server.set_payload_max_length(static_cast<size_t>(o.max_body_bytes));
  server.set_write_timeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * o.write_deadline_s)));
  server.set_keep_alive_max_count(1000000);
  server.set_tcp_nodelay(true);
  // The library's default would let a second server bind the same port. The buffer, which connections inherit, bounds what a slow reader keeps in the kernel.
  server.set_socket_options([this](socket_t sock) {
    listener = sock;
    const int yes = 1, bytes = 128 << 10;
    ::setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    ::setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  });

  server.set_pre_routing_handler([this, &o](const Request& request, Response& response) {
    ++requests;
    if (o.api_key.empty() || request.path == "/health" || request.path == "/health_generate") return httplib::Server::HandlerResponse::Unhandled;
    if (same_secret(request.get_header_value("Authorization"), "Bearer " + o.api_key)) return httplib::Server::HandlerResponse::Unhandled;
    response.set_header("Connection", "close");  // the body was not read
    answer_error(response, {.status = 401, .message = "the Authorization header holds no Bearer token, or another than the server's"});
    return httplib::Server::HandlerResponse::Handled;
  });
  server.set_error_handler([this](const Request& request, Response& response) {
    ++errors;
    if (!response.body.empty()) return;
    const char* why = response.status == 413 ? "the body is larger than the server takes" : response.status == 404 ? "there is no such endpoint" : "the request cannot be read";
    const int status = response.status;
    answer_error(response, {.status = status, .message = fmt::format("{} {}: {}", request.method, in_quotes(request.path), why)});
  });
  server.set_exception_handler([](const Request&, Response& response, std::exception_ptr e) {
    std::string what = "unknown";
    try {
      std::rethrow_exception(std::move(e));
    } catch (const std::exception& x) {
      what = x.what();
    } catch (...) {
    }
    answer_error(response, {.status = 500, .message = what});
  });

  server.Post("/v1/completions", [this](const Request& request, Response& response) {
    generate(json_object(request, false), response, [this](const JsonValue& body, Call* call, ApiError* error) { return read_completions(body, s.model_, call, error); });
  });
  server.Post("/v1/chat/completions", [this](const Request& request, Response& response) {
    generate(json_object(request, false), response, [this](const JsonValue& body, Call* call, ApiError* error) { return read_chat_completions(body, s.model_, call, error); });
  });
  server.Post("/generate", [this](const Request& request, Response& response) {
    generate(json_object(request, false), response, [this](const JsonValue& body, Call* call, ApiError* error) {
      return read_generate(body, s.model_, s.generator_.weight_version(), call, error);
    });
  });
  server.Get("/v1/models", [this, &o, created = std::time(nullptr)](const Request&, Response& response) {
    response.set_content(fmt::format("{{\"object\":\"list\",\"data\":[{{\"id\":{},\"object\":\"model\",\"created\":{},\"owned_by\":\"lockstep\",\"max_model_len\":{}}}]}}",
                                     json_string(o.model_name), created, o.max_context),
                         kJson);
  });
  const auto health_endpoint = [this](const Request&, Response& response) { health(response); };
  server.Get("/health", health_endpoint);
  server.Get("/health_generate", health_endpoint);
  const auto info = [this, &o](const Request&, Response& response) {
    response.set_content(fmt::format("{{\"model_path\":{},\"tokenizer_path\":{},\"is_generation\":true,\"max_context\":{},\"weight_version\":{}}}", json_string(o.model_path),
                                     json_string(o.tokenizer_path), o.max_context, json_string(s.generator_.weight_version())),
                         kJson);
  };
  server.Get("/get_model_info", info);
  server.Get("/weights_checksums", [this](const Request& request, Response& response) {
    const auto index = [&](const char* name, int64_t size) -> int64_t {  // -1: not asked for; size: none of the model's
      const std::string text = request.get_param_value(name);
      int64_t i = size;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), i);
      return !request.has_param(name) ? -1 : error == std::errc() && end == text.data() + text.size() && i >= 0 && i < size ? i : size;
    };
    s.generator_.look_at_weights([&](const Weights& w, Device device) {
      const auto tensors = static_cast<int64_t>(w.table().size());
      const int64_t id = index("id", tensors);
      const int64_t rows = id >= 0 && id < tensors ? w.table()[static_cast<size_t>(id)].box.rows.size() : 0, row = index("row", rows);
      if (id == tensors || row == rows || (row >= 0 && id < 0))
        return answer_error(response, {.status = 400, .message = fmt::format("id is the number of one of the {} tensors, row that of one of its rows", tensors)});
      DeviceContext c(device);
      response.set_content(id < 0 ? checksums_json(c, w, s.generator_.weight_version()) : row < 0 ? row_checksums_json(c, w, static_cast<int>(id))
                                                                                               : row_bits_json(c, w, static_cast<int>(id), row),
                           kJson);
    });
  });
  server.Get("/metrics", [this](const Request&, Response& response) { response.set_content(metrics(), "text/plain; version=0.0.4"); });

  // Commands: an object, which may be missing.
  const auto command = [this](const char* path, std::function<void(const JsonValue&, Response&)> run) {
    server.Post(path, [run = std::move(run)](const Request& request, Response& response) {
      const Result<JsonValue> body = json_object(request, true);
      if (!body) return answer_error(response, {.status = 400, .message = body.message()});
      run(body.value(), response);
    });
  };
  command("/pause_generation", [this](const JsonValue& body, Response& response) {
    Fields f(body);
    const std::string mode = f.text("mode", "abort");
    if (mode != "abort" && mode != "retract" && mode != "in_place") f.fail("mode", fmt::format("mode is {}, abort, retract or in_place is wanted", json_string(mode)));
    if (f.failed()) return answer_error(response, f.error());
    s.generator_.pause(mode == "abort" ? Quiesce::abort : mode == "retract" ? Quiesce::retract : Quiesce::in_place);
    response.set_content(message_json(true, "generation is paused"), kJson);
  });
  command("/continue_generation", [this](const JsonValue&, Response& response) {
    s.generator_.resume();
    response.set_content(message_json(true, "generation goes on"), kJson);
  });
  command("/flush_cache", [this](const JsonValue&, Response& response) {
    s.generator_.flush_cache();
    response.set_content(message_json(true, "the prefix cache is empty"), kJson);
  });
  server.Get("/flush_cache", [this](const Request&, Response& response) {
    s.generator_.flush_cache();
    response.set_content(message_json(true, "the prefix cache is empty"), kJson);
  });
  command("/abort_request", [this](const JsonValue& body, Response& response) {
    Fields f(body);
    const std::string rid = f.text("rid", "");
    const bool all = f.boolean("abort_all", false);
    if (!f.failed() && rid.empty() && !all) f.fail("rid", "wanted: rid, or abort_all");
    if (f.failed()) return answer_error(response, f.error());
    if (all) {
      s.generator_.abort_all();
    } else {
      s.generator_.abort(rid);
    }
    response.set_content(message_json(true, "aborted what there was"), kJson);
  });
  command("/update_weights_from_disk", [this](const JsonValue& body, Response& response) { update(body, response); });
}

Server::Server(Policy& policy, ServerOptions options)
    : options_(std::move(options)),
      model_{.tokenizer = &policy.tokenizer(), .name = options_.model_name, .max_context = options_.max_context},
      generator_(policy, options_.max_samples, std::to_string(policy.weights().version())),
      http_(std::make_unique<Http>(*this)) {
  http_->routes();
}

Server::~Server() { stop(std::chrono::milliseconds(0)); }

Status Server::start() {
  port_ = options_.port;
  const bool bound = port_ == 0 ? (port_ = http_->server.bind_to_any_port(options_.host)) > 0 : http_->server.bind_to_port(options_.host, port_);
  if (!bound) return errorf("{}:{} cannot be bound; is the port in use, or the host not of this machine?", options_.host, options_.port);
  // The library asks for a queue of 5, over which a burst of clients is turned away.
  if (::listen(http_->listener, SOMAXCONN) != 0) return errorf("{}:{}: the queue of connections cannot be made longer", options_.host, port_);
  stopped_ = false;
  thread_ = std::thread([this] { http_->server.listen_after_bind(); });
  while (!http_->server.is_running()) std::this_thread::yield();
  return Status::ok();
}

bool Server::stop(std::chrono::milliseconds limit) {
  if (stopped_) return true;
  stopped_ = true;
  const auto until = std::chrono::steady_clock::now() + limit;
  bool ended = generator_.drain(limit);
  if (!ended) generator_.abort_all();
  generator_.drain(std::chrono::milliseconds(1000));  // a pause or update that waits ends with them
  // Answers that have ended are still being written; a client that does not read them is not waited for longer than this.
  constexpr std::chrono::seconds kLastWords{10};
  while (http_->answering > 0 && std::chrono::steady_clock::now() < until + kLastWords) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  http_->server.stop();
  thread_.join();
  return ended;
}

}  // namespace lockstep
