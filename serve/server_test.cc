// The server as its clients meet it: real sockets, a real model. What it says is compared, bit for bit, with an engine of its own that runs the same
// requests offline.

#include "serve/server.h"

#include <gtest/gtest.h>

#include <httplib.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <charconv>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "io/file.h"
#include "model/checkpoint_io.h"
#include "model/testing.h"
#include "rl/sampling.h"
#include "serve/weights.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Kind = JsonValue::Kind;

constexpr EngineOptions kEngine = {.max_running = 6, .max_batch_tokens = 64, .max_context = 900, .num_pages = 0, .cache_slots = 4};

const JsonValue& at(const JsonValue& v, std::string_view name) {
  const JsonValue* found = v.find(name);
  static const JsonValue missing;
  EXPECT_NE(found, nullptr) << name;
  return found == nullptr ? missing : *found;
}
int64_t integer(const JsonValue& v) {
  int64_t x = -1;
  EXPECT_TRUE(v.as_int64(&x)) << v.text;
  return x;
}
uint32_t bits(const JsonValue& v) {
  float x = 0;
  std::from_chars(v.text.data(), v.text.data() + v.text.size(), x);
  return std::bit_cast<uint32_t>(x);
}
JsonValue parsed(const std::string& text) {
  Result<JsonValue> v = parse_json(text);
  EXPECT_TRUE(v.is_ok()) << text;
  return v ? v.take() : JsonValue();
}
// The events of a stream, which must end with the end mark.
std::vector<JsonValue> events_of(const std::string& body) {
  std::vector<JsonValue> out;
  size_t from = 0;
  for (size_t end; (end = body.find("\n\n", from)) != std::string::npos; from = end + 2) {
    const std::string event = body.substr(from, end - from);
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    if (event != "data: [DONE]") out.push_back(parsed(event.substr(6)));
  }
  EXPECT_TRUE(body.ends_with(kSseEnd)) << body.substr(body.size() > 200 ? body.size() - 200 : 0);
  return out;
}

class Serve : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    root_ = fs::temp_directory_path() / fmt::format("lockstep_server_test_{}", ::getpid());
    ModelConfig m = testing::tiny_config();
    m.vocab_size = ByteTokenizer().vocab_size();
    m.hidden_size = 256;  // an answer must take longer than a client needs to come back with the next call
    m.expert_dim = 128;
    m.max_positions = kEngine.max_context;
    for (const char* name : {"a", "b"}) {
      Arena arena("test", size_t{1} << 28);
      const std::vector<TensorSpec> table = tensor_table(m);
      TensorSet masters = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
      initialize_masters(m, table, masters, static_cast<uint64_t>(name[0]));
      fs::create_directories(root_ / name);
      ASSERT_TRUE(save_checkpoint(root_ / name, m, table, masters).is_ok());
      ASSERT_TRUE(ByteTokenizer().save(root_ / name).is_ok());
    }
  }
  static void TearDownTestSuite() { fs::remove_all(root_); }

  static std::unique_ptr<Policy> make_policy(const char* name, int64_t cache_slots) {
    PolicyUse use{.threads = 1, .engine = kEngine};
    use.engine.cache_slots = cache_slots;
    Result<std::unique_ptr<Policy>> p = Policy::make({.config = "", .init = root_ / name, .tokenizer = "", .numerics = Numerics::bf16}, use);
    CHECK(p.is_ok(), "{}", p.message());
    return p.take();
  }
  void serve(ServerOptions o = {}) {
    server_.reset();
    policy_ = make_policy("a", kEngine.cache_slots);
    o.model_name = "tiny";
    o.model_path = root_ / "a";
    o.max_context = kEngine.max_context;
    o.max_connections = 24;
    server_ = std::make_unique<Server>(*policy_, o);
    const Status s = server_->start();
    ASSERT_TRUE(s.is_ok()) << s.message();
  }
  httplib::Client client() const {
    httplib::Client c("127.0.0.1", server_->port());
    c.set_read_timeout(120, 0);
    return c;
  }
  std::string post(const std::string& path, const std::string& body, int status = 200) const {
    httplib::Client c = client();
    const httplib::Result r = c.Post(path, body, "application/json");
    if (!r) {
      ADD_FAILURE() << path << ": " << httplib::to_string(r.error());
      return "";
    }
    EXPECT_EQ(r->status, status) << path << " " << body.substr(0, 200) << ": " << r->body.substr(0, 500);
    return r->body;
  }
  std::string get(const std::string& path, int status = 200) const {
    httplib::Client c = client();
    const httplib::Result r = c.Get(path);
    if (!r) {
      ADD_FAILURE() << path << ": " << httplib::to_string(r.error());
      return "";
    }
    EXPECT_EQ(r->status, status) << path << ": " << r->body;
    return r->body;
  }
  void expect_error(const std::string& body, const std::string& message, const std::string& type) const {
    const JsonValue v = parsed(body);
    EXPECT_NE(at(at(v, "error"), "message").text.find(message), std::string::npos) << body;
    EXPECT_EQ(at(at(v, "error"), "type").text, type);
  }
  // Waits until nothing holds state, and says whether all pages are free then.
  void expect_all_free() const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (server_->generator().stats().unfinished > 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    server_->generator().flush_cache();
    server_->generator().flush_cache();  // the first one's effect is published by now
    const GeneratorStats s = server_->generator().stats();
    EXPECT_EQ(s.unfinished, 0);
    EXPECT_EQ(s.load.running, 0);
    EXPECT_EQ(s.load.free_pages, s.load.num_pages);
    EXPECT_EQ(s.load.free_slots, kEngine.max_running + 1 + kEngine.cache_slots);
  }
  // A connection that has sent a request for a stream and reads nothing.
  int silent_client(const std::string& path, const std::string& body) const {
    const int sock = ::socket(AF_INET, SOCK_STREAM, 0);
    const int small = 2048;
    ::setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(sock, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const std::string request = fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\nContent-Type: application/json\r\n\r\n{}", path, body.size(), body);
    EXPECT_EQ(::send(sock, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
    return sock;
  }
  void wait_for_tokens(int64_t more) const {
    const int64_t from = server_->generator().stats().engine.decode_tokens;
    while (server_->generator().stats().engine.decode_tokens < from + more) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  static inline fs::path root_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<Server> server_;  // goes first
};

Request offline_request(const Policy& p, const std::string& text, uint64_t prompt_id, int32_t n, uint64_t seed, int64_t max_new) {
  Request r;
  r.prompt_id = prompt_id;
  r.prompt = prompt_tokens(p.tokenizer(), text).value();
  r.num_samples = n;
  r.seed = seed;
  r.sampling.max_new_tokens = max_new;
  r.sampling.stop_ids = {p.tokenizer().eos_id()};
  return r;
}

std::vector<Completion> offline(Policy& p, std::vector<Request> requests) { return run_requests(p.engine(), requests, {}, "").take(); }

const std::string kLong(150, 'q');  // over two pages

TEST_F(Serve, EveryInterfaceStreamedOrNotSaysWhatTheEngineSaysOffline) {
  serve();
  const std::unique_ptr<Policy> reference = make_policy("a", 0);
  const std::vector<std::string> prompts = {"one and one is", kLong + " two"};
  std::vector<Request> requests;
  for (size_t i = 0; i < 2; ++i) {
    requests.push_back(offline_request(*reference, prompts[i], i, 3, 77, 40));
    requests.back().sampling.temperature = 0.8f;
    requests.back().sampling.top_p = 0.9f;
  }
  const std::vector<Completion> expected = offline(*reference, requests);
  const std::string sampling = "\"n\":3,\"temperature\":0.8,\"top_p\":0.9";
  const std::string openai = fmt::format("{{\"model\":\"tiny\",\"prompt\":[{},{}],\"max_tokens\":40,\"seed\":77,\"logprobs\":0,{}", json_string(prompts[0]), json_string(prompts[1]), sampling);
  std::string ids;
  for (const Request& r : requests) ids += fmt::format("{}[{}]", ids.empty() ? "" : ",", fmt::join(r.prompt, ","));
  const std::string sglang = fmt::format("{{\"input_ids\":[{}],\"return_logprob\":true,\"sampling_params\":{{\"max_new_tokens\":40,\"sampling_seed\":77,{}}}", ids, sampling);

  for (int round = 0; round < 2; ++round) {  // the second finds the first one's prefixes
    const JsonValue whole = parsed(post("/v1/completions", openai + "}"));
    ASSERT_EQ(at(whole, "choices").items.size(), 6u);
    EXPECT_EQ(at(whole, "object").text, "text_completion");
    size_t tokens = 0;
    for (size_t i = 0; i < 6; ++i) {
      const JsonValue& c = at(whole, "choices").items[i];
      const Completion& e = expected[i];
      EXPECT_EQ(integer(at(c, "index")), static_cast<int64_t>(i));
      EXPECT_EQ(at(c, "text").text, response_text(reference->tokenizer(), e.tokens));
      EXPECT_EQ(at(c, "finish_reason").text, finish_reason_name(e.reason));
      const JsonValue& logprobs = at(at(c, "logprobs"), "token_logprobs");
      ASSERT_EQ(logprobs.items.size(), e.logprobs.size());
      for (size_t t = 0; t < e.logprobs.size(); ++t) EXPECT_EQ(bits(logprobs.items[t]), std::bit_cast<uint32_t>(e.logprobs[t]));
      tokens += e.tokens.size();
    }
    EXPECT_EQ(integer(at(at(whole, "usage"), "completion_tokens")), static_cast<int64_t>(tokens));
    EXPECT_EQ(integer(at(at(whole, "usage"), "prompt_tokens")), static_cast<int64_t>(requests[0].prompt.size() + requests[1].prompt.size()));

    std::vector<std::string> texts(6), reasons(6);
    std::vector<std::vector<uint32_t>> logprobs(6);
    const std::vector<JsonValue> parts = events_of(post("/v1/completions", openai + ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}"));
    for (const JsonValue& part : parts) {
      for (const JsonValue& c : at(part, "choices").items) {
        const auto i = static_cast<size_t>(integer(at(c, "index")));
        EXPECT_TRUE(reasons[i].empty()) << "more after the end";
        texts[i] += at(c, "text").text;
        reasons[i] = at(c, "finish_reason").text;
        for (const JsonValue& l : at(at(c, "logprobs"), "token_logprobs").items) logprobs[i].push_back(bits(l));
      }
    }
    EXPECT_GT(parts.size(), 2u) << "as tokens come, not at the end; how many come at once is the machine's business";
    EXPECT_EQ(integer(at(at(parts.back(), "usage"), "completion_tokens")), static_cast<int64_t>(tokens));
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(texts[i], response_text(reference->tokenizer(), expected[i].tokens));
      EXPECT_EQ(reasons[i], finish_reason_name(expected[i].reason));
      ASSERT_EQ(logprobs[i].size(), expected[i].logprobs.size());
      for (size_t t = 0; t < logprobs[i].size(); ++t) EXPECT_EQ(logprobs[i][t], std::bit_cast<uint32_t>(expected[i].logprobs[t]));
    }

    std::vector<JsonValue> answers = parsed(post("/generate", sglang + "}")).items;
    std::vector<JsonValue> streamed(6);
    for (JsonValue& e : events_of(post("/generate", sglang + ",\"stream\":true}"))) streamed[static_cast<size_t>(integer(at(e, "index")))] = e;
    ASSERT_EQ(answers.size(), 6u);
    answers.insert(answers.end(), streamed.begin(), streamed.end());
    for (size_t i = 0; i < answers.size(); ++i) {
      const Completion& e = expected[i % 6];
      const JsonValue& meta = at(answers[i], "meta_info");
      EXPECT_EQ(at(answers[i], "text").text, response_text(reference->tokenizer(), e.tokens));
      ASSERT_EQ(at(answers[i], "output_ids").items.size(), e.tokens.size());
      for (size_t t = 0; t < e.tokens.size(); ++t) {
        EXPECT_EQ(integer(at(answers[i], "output_ids").items[t]), e.tokens[t]);
        EXPECT_EQ(bits(at(meta, "output_token_logprobs").items[t].items[0]), std::bit_cast<uint32_t>(e.logprobs[t]));
        EXPECT_EQ(integer(at(meta, "output_token_logprobs").items[t].items[1]), e.tokens[t]);
        EXPECT_EQ(integer(at(meta, "output_token_versions").items[t]), 0);
      }
      EXPECT_EQ(at(at(meta, "finish_reason"), "type").text, finish_reason_name(e.reason));
      EXPECT_EQ(integer(at(meta, "completion_tokens")), static_cast<int64_t>(e.tokens.size()));
    }
  }
  EXPECT_GT(server_->generator().stats().engine.cached_prompt_tokens, 0);
  expect_all_free();
}

TEST_F(Serve, AStreamThatMayRarelyWriteSaysTheSameInFewEvents) {
  serve({.events_per_second = 1});
  const std::string body = "{\"prompt\":\"abc\",\"max_tokens\":300,\"seed\":3,\"ignore_eos\":true,\"logprobs\":0";
  const JsonValue whole = parsed(post("/v1/completions", body + "}"));
  const std::vector<JsonValue> parts = events_of(post("/v1/completions", body + ",\"stream\":true}"));
  std::string text;
  std::vector<uint32_t> logprobs;
  for (const JsonValue& part : parts) {
    const JsonValue& c = at(part, "choices").items.at(0);
    text += at(c, "text").text;
    for (const JsonValue& l : at(at(c, "logprobs"), "token_logprobs").items) logprobs.push_back(bits(l));
  }
  const JsonValue& choice = at(whole, "choices").items.at(0);
  EXPECT_EQ(text, at(choice, "text").text);
  const std::vector<JsonValue>& expected = at(at(choice, "logprobs"), "token_logprobs").items;
  ASSERT_EQ(logprobs.size(), expected.size());
  for (size_t t = 0; t < expected.size(); ++t) EXPECT_EQ(logprobs[t], bits(expected[t]));
  EXPECT_LT(parts.size(), 150u);
}

TEST_F(Serve, ManyClientsAtOnceSayWhatTheEngineSaysOffline) {
  serve();
  const std::unique_ptr<Policy> reference = make_policy("a", 0);
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 16; ++i) requests.push_back(offline_request(*reference, i % 2 ? kLong + std::to_string(i) : "p" + std::to_string(i), 0, 2, i, 30));
  std::vector<std::vector<Completion>> expected;
  for (const Request& r : requests) expected.push_back(offline(*reference, {r}));
  std::vector<std::thread> clients;
  std::atomic<int> wrong = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    clients.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round) {
        const JsonValue v = parsed(post("/generate", fmt::format("{{\"input_ids\":[{}],\"sampling_params\":{{\"max_new_tokens\":30,\"sampling_seed\":{},\"n\":2}},\"return_logprob\":true}}",
                                                                 fmt::join(requests[i].prompt, ","), i)));
        for (size_t s = 0; s < 2; ++s) {
          const Completion& e = expected[i][s];
          const JsonValue& pairs = at(at(v.items.at(s), "meta_info"), "output_token_logprobs");
          wrong += pairs.items.size() != e.tokens.size();
          for (size_t t = 0; t < std::min(pairs.items.size(), e.tokens.size()); ++t)
            wrong += integer(pairs.items[t].items[1]) != e.tokens[t] || bits(pairs.items[t].items[0]) != std::bit_cast<uint32_t>(e.logprobs[t]);
        }
      }
    });
  }
  for (std::thread& t : clients) t.join();
  EXPECT_EQ(wrong, 0);
  expect_all_free();
}

TEST_F(Serve, ChatStreamedOrNotIsTheSame) {
  serve();
  for (const std::string mode : {"chat", "thinking"}) {
    const std::string body = fmt::format(
        "{{\"messages\":[{{\"role\":\"system\",\"content\":\"Be brief.\"}},{{\"role\":\"user\",\"content\":[{{\"type\":\"text\",\"text\":\"Hello\"}}]}}],"
        "\"max_completion_tokens\":30,\"seed\":5,\"logprobs\":true,\"thinking_mode\":\"{}\"", mode);
    const JsonValue whole = parsed(post("/v1/chat/completions", body + "}"));
    const JsonValue& choice = at(whole, "choices").items.at(0);
    EXPECT_EQ(at(at(choice, "message"), "role").text, "assistant");
    EXPECT_EQ(at(whole, "object").text, "chat.completion");
    std::string content, reasoning, reason;
    std::vector<std::string> logprobs;
    const std::vector<JsonValue> parts = events_of(post("/v1/chat/completions", body + ",\"stream\":true}"));
    EXPECT_EQ(at(at(at(parts.at(0), "choices").items.at(0), "delta"), "role").text, "assistant");
    for (const JsonValue& part : parts) {
      const JsonValue& c = at(part, "choices").items.at(0);
      if (const JsonValue* x = at(c, "delta").find("content")) content += x->text;
      if (const JsonValue* x = at(c, "delta").find("reasoning_content")) reasoning += x->text;
      if (const JsonValue* x = at(c, "logprobs").find("content"))
        for (const JsonValue& l : x->items) logprobs.push_back(at(l, "logprob").text);
      reason = at(c, "finish_reason").text;
    }
    EXPECT_EQ(content, at(at(choice, "message"), "content").text);
    if (mode == "thinking") {
      EXPECT_EQ(reasoning, at(at(choice, "message"), "reasoning_content").text);
    }
    EXPECT_FALSE((content + reasoning).empty());
    EXPECT_EQ(reason, at(choice, "finish_reason").text);
    const JsonValue& list = at(at(choice, "logprobs"), "content");
    ASSERT_EQ(list.items.size(), logprobs.size());
    for (size_t i = 0; i < logprobs.size(); ++i) EXPECT_EQ(at(list.items[i], "logprob").text, logprobs[i]);
  }
}

TEST_F(Serve, StopStringsEndTheTextAndTheWork) {
  serve();
  const std::string body = "{\"prompt\":\"abc\",\"max_tokens\":300,\"seed\":3,\"ignore_eos\":true";
  const std::string text = at(at(parsed(post("/v1/completions", body + "}")), "choices").items.at(0), "text").text;
  // Two ASCII characters of the text as the stop string.
  size_t i = 20;
  const auto plain = [&](size_t k) { return static_cast<unsigned char>(text.at(k)) >= 0x20 && static_cast<unsigned char>(text.at(k)) < 0x7f; };
  while (!plain(i) || !plain(i + 1)) ++i;
  const std::string stop = text.substr(i, 2);
  const std::string before = text.substr(0, text.find(stop));
  for (const bool stream : {false, true}) {
    const std::string answer = post("/v1/completions", fmt::format("{},\"stop\":[{},\"zzzz\"],\"stream\":{}}}", body, json_string(stop), stream));
    std::string got;
    std::string reason;
    for (const JsonValue& e : stream ? events_of(answer) : std::vector<JsonValue>{parsed(answer)}) {
      got += at(at(e, "choices").items.at(0), "text").text;
      reason = at(at(e, "choices").items.at(0), "finish_reason").text;
    }
    EXPECT_EQ(got, before);
    EXPECT_EQ(reason, "stop");
  }
  const JsonValue v = parsed(post("/generate", fmt::format("{{\"text\":\"abc\",\"sampling_params\":{{\"max_new_tokens\":300,\"sampling_seed\":3,\"ignore_eos\":true,\"stop\":{}}}}}", json_string(stop))));
  EXPECT_EQ(at(v, "text").text, before);
  EXPECT_EQ(at(at(at(v, "meta_info"), "finish_reason"), "matched").text, stop);
  EXPECT_LT(at(v, "output_ids").items.size(), 300u) << "no token is drawn after the stop string";
  expect_all_free();
}

TEST_F(Serve, InformationHealthAndMetrics) {
  serve();
  EXPECT_EQ(at(at(parsed(get("/v1/models")), "data").items.at(0), "id").text, "tiny");
  const JsonValue info = parsed(get("/get_model_info"));
  EXPECT_EQ(at(info, "weight_version").text, "0");
  EXPECT_EQ(integer(at(info, "max_context")), kEngine.max_context);
  get("/health");
  get("/health_generate");
  post("/flush_cache", "");
  const std::string metrics = get("/metrics");
  EXPECT_NE(metrics.find("\nlockstep_jobs_total 2\n"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("\nlockstep_generation_tokens_total 2\n"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("lockstep_weight_version{version=\"0\"} 1\n"), std::string::npos) << metrics;
}

TEST_F(Serve, BadRequestsSayWhatIsWrong) {
  serve({.max_samples = 8, .max_body_bytes = 4096});
  const auto bad = [&](const std::string& path, const std::string& body, const std::string& message) { expect_error(post(path, body, 400), message, "invalid_request_error"); };
  bad("/v1/completions", "{\"prompt\":", "no JSON");
  bad("/v1/completions", "[]", "an object is wanted");
  bad("/v1/completions", "{}", "prompt is missing");
  bad("/v1/completions", "{\"prompt\":{}}", "wanted: a text or a list of token ids");
  bad("/v1/completions", "{\"prompt\":[]}", "an empty list");
  bad("/v1/completions", "{\"prompt\":[1,-2]}", "prompt[1] is -2");
  bad("/v1/completions", "{\"prompt\":[1,999]}", "token 999 at position 1 is outside the vocabulary");
  bad("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens is 0");
  bad("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":899}", "exceed the context of 900");
  bad("/v1/completions", "{\"prompt\":\"a\",\"temperature\":-1}", "temperature is -1");
  bad("/v1/completions", "{\"prompt\":\"a\",\"temperature\":\"hot\"}", "temperature is a string");
  bad("/v1/completions", "{\"prompt\":\"a\",\"top_p\":0}", "top_p 0");
  bad("/v1/completions", "{\"prompt\":\"a\",\"logprobs\":5}", "logprobs is 5");
  bad("/v1/completions", "{\"prompt\":\"a\",\"frequency_penalty\":0.5}", "frequency_penalty is not supported");
  bad("/v1/completions", "{\"prompt\":\"a\",\"echo\":true,\"logprobs\":1}", "echo with logprobs");
  bad("/v1/completions", "{\"prompt\":\"a\",\"n\":9}", "at most 8");
  bad("/v1/completions", "{\"prompt\":\"a\",\"stop\":[1]}", "stop: a string");
  bad("/v1/chat/completions", "{\"messages\":[]}", "messages");
  bad("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"top_logprobs\":3}", "top_logprobs is not supported");
  bad("/generate", "{\"text\":\"a\",\"input_ids\":[1]}", "either text or input_ids");
  bad("/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":0}}", "max_new_tokens is 0");
  bad("/pause_generation", "{\"mode\":\"slow\"}", "mode is \"slow\"");
  bad("/abort_request", "{}", "wanted: rid, or abort_all");
  expect_error(post("/v1/completions", "{\"model\":\"gpt\",\"prompt\":\"a\"}", 404), "\"tiny\" is served", "not_found_error");
  expect_error(post("/v2/completions", "{}", 404), "no such endpoint", "not_found_error");
  expect_error(post("/v1/completions", std::string(5000, ' '), 413), "larger than the server takes", "invalid_request_error");
  expect_all_free();
}

TEST_F(Serve, MoreThanTheLimitIsRefusedAndComesBack) {
  serve({.max_samples = 8});
  post("/pause_generation", "{\"mode\":\"in_place\"}");
  std::thread first([&] { post("/v1/completions", "{\"prompt\":\"a\",\"n\":8,\"max_tokens\":5}"); });
  while (server_->generator().stats().unfinished < 8) std::this_thread::yield();
  expect_error(post("/v1/completions", "{\"prompt\":\"a\"}", 429), "limit of 8", "rate_limit_error");
  expect_error(get("/health", 503), "paused", "server_error");
  post("/continue_generation", "");
  first.join();
  post("/v1/completions", "{\"prompt\":\"a\"}");
}

TEST_F(Serve, ABearerTokenIsAskedFor) {
  serve({.api_key = "secret"});
  expect_error(post("/v1/completions", "{\"prompt\":\"a\"}", 401), "Bearer", "authentication_error");
  expect_error(get("/metrics", 401), "Bearer", "authentication_error");
  get("/health");
  for (const auto& [token, status] : {std::pair{"secret", 200}, {"secre", 401}, {"secrets", 401}, {"", 401}, {"secresecre", 401}}) {
    httplib::Client c = client();
    c.set_bearer_token_auth(token);
    const httplib::Result r = c.Get("/v1/models");
    ASSERT_TRUE(r);
    EXPECT_EQ(r->status, status) << token;
  }
}

TEST_F(Serve, ClientsThatLeaveFreeWhatTheyHeld) {
  serve();
  const std::string body = "{\"prompt\":\"abc\",\"max_tokens\":880,\"n\":4,\"ignore_eos\":true";
  {
    // A stream that is left after some of it.
    httplib::Client c = client();
    httplib::Request r;
    r.method = "POST";
    r.path = "/v1/completions";
    r.body = body + ",\"stream\":true}";
    size_t got = 0;
    r.content_receiver = [&](const char*, size_t n, uint64_t, uint64_t) { return (got += n) < 2000; };
    EXPECT_FALSE(c.send(r));
  }
  expect_all_free();
  // One that waits for a whole answer, and one that queues behind others.
  post("/pause_generation", "{\"mode\":\"in_place\"}");
  const int whole = silent_client("/v1/completions", body + "}"), queued = silent_client("/v1/completions", body + ",\"stream\":true}");
  while (server_->generator().stats().unfinished < 8) std::this_thread::yield();
  post("/continue_generation", "");
  wait_for_tokens(20);
  post("/pause_generation", "{\"mode\":\"in_place\"}");
  EXPECT_EQ(server_->generator().stats().load.running, kEngine.max_running + 1);
  ::close(queued);
  ::close(whole);
  expect_all_free();
  const GeneratorStats s = server_->generator().stats();
  EXPECT_EQ(s.aborted, 12);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (get("/metrics").find("lockstep_dropped_clients_total 3\n") == std::string::npos && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_NE(get("/metrics").find("lockstep_dropped_clients_total 3\n"), std::string::npos);
}

// Processes that stream, some of which read no more after a while, and are killed with SIGKILL in the middle.
TEST_F(Serve, KilledClientsFreeWhatTheyHeldAndOthersNoticeNothing) {
  serve();
  constexpr int kClients = 8;
  const std::string body = "{\"prompt\":\"abc\",\"max_tokens\":880,\"n\":2,\"ignore_eos\":true,\"stream\":true}", asked = "{\"prompt\":\"a\",\"max_tokens\":60,\"seed\":1,\"ignore_eos\":true,\"logprobs\":0";
  const auto choice = [](const std::string& answer) {
    std::string out;
    append_json(&out, at(parsed(answer), "choices"));
    return out;
  };
  const std::string expected = choice(post("/v1/completions", asked + "}"));
  const auto metric = [&](const std::string& name) {
    const std::string all = get("/metrics"), line = "\nlockstep_" + name + " ";
    const size_t found = all.find(line);
    EXPECT_NE(found, std::string::npos) << name;
    return found == std::string::npos ? -1.0 : std::atof(all.c_str() + found + line.size());
  };
  for (int round = 0; round < 2; ++round) {
    std::vector<pid_t> clients;
    for (int i = 0; i < kClients; ++i) {
      const int sock = silent_client("/v1/completions", body);
      const pid_t pid = ::fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) {  // system calls alone: the locks of the parent's threads are as they were
        char buffer[4096];
        int64_t left = i % 2 == 0 ? 2000 : INT64_MAX;
        for (ssize_t n; left > 0 && (n = ::recv(sock, buffer, sizeof buffer, 0)) > 0;) left -= n;
        ::pause();
        ::_exit(0);
      }
      ::close(sock);
      clients.push_back(pid);
    }
    while (server_->generator().stats().unfinished < 2 * kClients) std::this_thread::yield();
    std::string other;
    std::thread survivor([&] { other = post("/v1/completions", asked + "}"); });
    wait_for_tokens(100);
    EXPECT_LT(metric("free_pages"), metric("pages"));
    EXPECT_GT(metric("running_samples"), 0);
    for (const pid_t pid : clients) ::kill(pid, SIGKILL);
    for (const pid_t pid : clients) ::waitpid(pid, nullptr, 0);
    survivor.join();
    EXPECT_EQ(choice(other), expected);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (metric("unfinished_samples") > 0 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    post("/flush_cache", "");
    EXPECT_EQ(metric("unfinished_samples"), 0);
    EXPECT_EQ(metric("running_samples"), 0);
    EXPECT_EQ(metric("free_pages"), metric("pages"));
    EXPECT_EQ(metric("dropped_clients_total"), (round + 1) * kClients);
  }
  EXPECT_EQ(metric("samples_aborted_total"), 2 * 2 * kClients);
  expect_all_free();
}

TEST_F(Serve, AReaderThatIsTooSlowIsLeft) {
  serve({.write_deadline_s = 0.2f});
  // An answer larger than what sockets hold.
  const int sock = silent_client("/generate", "{\"text\":\"abc\",\"return_logprob\":true,\"sampling_params\":{\"max_new_tokens\":890,\"n\":40,\"ignore_eos\":true}}");
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  while (get("/metrics").find("lockstep_dropped_clients_total 1\n") == std::string::npos && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_NE(get("/metrics").find("lockstep_dropped_clients_total 1\n"), std::string::npos);
  expect_all_free();
  ::close(sock);
}

TEST_F(Serve, AbortPauseAndContinue) {
  serve();
  const auto start = [&](const std::string& rid, int64_t tokens) {
    return std::thread([this, rid, tokens] {
      const JsonValue v = parsed(post("/generate", fmt::format("{{\"text\":\"abc\",\"rid\":\"{}\",\"sampling_params\":{{\"max_new_tokens\":{},\"ignore_eos\":true,\"sampling_seed\":1}}}}", rid, tokens)));
      EXPECT_EQ(at(at(at(v, "meta_info"), "finish_reason"), "type").text, rid.starts_with("abort") ? "abort" : "length");
      EXPECT_EQ(at(at(v, "meta_info"), "id").text, rid);
    });
  };
  std::thread aborted = start("abort1", 880), other = start("stays", 60);
  wait_for_tokens(5);
  post("/abort_request", "{\"rid\":\"abort1\"}");
  aborted.join();
  other.join();

  // Whatever the pause does to the state, what is said is the same.
  const std::string body = "{\"text\":\"abc\",\"sampling_params\":{\"max_new_tokens\":880,\"ignore_eos\":true,\"sampling_seed\":9,\"n\":2},\"return_logprob\":true}";
  const auto words = [&](const std::string& answer) {
    std::string out;
    for (const JsonValue& v : parsed(answer).items) append_json(&out, at(at(v, "meta_info"), "output_token_logprobs"));
    return out;
  };
  const std::string expected = words(post("/generate", body));
  for (const char* mode : {"in_place", "retract"}) {
    std::string got;
    std::thread t([&] { got = words(post("/generate", body)); });
    wait_for_tokens(30);
    post("/pause_generation", fmt::format("{{\"mode\":\"{}\"}}", mode));
    const GeneratorStats paused = server_->generator().stats();
    EXPECT_TRUE(paused.paused);
    EXPECT_EQ(paused.load.running, std::string(mode) == "retract" ? 0 : 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(server_->generator().stats().engine.decode_tokens, paused.engine.decode_tokens);
    post("/continue_generation", "");
    t.join();
    EXPECT_EQ(got, expected) << mode;
  }
  std::thread last = start("abort2", 880);
  wait_for_tokens(5);
  post("/pause_generation", "");
  last.join();
  post("/continue_generation", "");
  expect_all_free();
}

TEST_F(Serve, WeightsAreUpdatedOrTheOldOnesServeOn) {
  serve();
  const std::string body = "{\"text\":\"abc\",\"sampling_params\":{\"max_new_tokens\":200,\"ignore_eos\":true,\"sampling_seed\":4},\"return_logprob\":true}";
  const auto generate = [&] { return parsed(post("/generate", body)); };
  const auto words = [&](const JsonValue& v) {
    std::string out;
    append_json(&out, at(at(v, "meta_info"), "output_token_logprobs"));
    return out;
  };
  const std::string old_words = words(generate());

  // Checkpoints that cannot serve, while a client is being answered.
  fs::create_directories(root_ / "cut");
  fs::copy(root_ / "b", root_ / "cut", fs::copy_options::recursive);
  fs::resize_file(root_ / "cut" / "model.safetensors", fs::file_size(root_ / "cut" / "model.safetensors") - 100);
  fs::create_directories(root_ / "nan");
  fs::copy(root_ / "b", root_ / "nan", fs::copy_options::recursive);
  {
    std::fstream f(root_ / "nan" / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    const uint32_t nan = 0x7fc00000;
    f.seekp(-400, std::ios::end);
    f.write(reinterpret_cast<const char*>(&nan), 4);
  }
  fs::create_directories(root_ / "other");
  fs::copy(root_ / "b", root_ / "other", fs::copy_options::recursive);
  {
    std::string config = read_file(root_ / "other" / "config.json").value();
    const size_t at_window = config.find("\"sliding_window\":") + 17;
    config.replace(at_window, config.find_first_of(",}", at_window) - at_window, " 6");
    ASSERT_TRUE(atomic_write(root_ / "other" / "config.json", config).is_ok());
  }
  std::string during;
  std::thread busy([&] { during = words(generate()); });
  for (const auto& [name, why] : {std::pair{"cut", "model.safetensors"}, {"nan", "model.safetensors"}, {"other", "not the one that is served"}, {"none", "no such checkpoint"}}) {
    const JsonValue v = parsed(post("/update_weights_from_disk", fmt::format("{{\"model_path\":{},\"policy\":\"abort\"}}", json_string((root_ / name).string())), 400));
    EXPECT_FALSE(at(v, "success").boolean);
    EXPECT_NE(at(v, "message").text.find(why), std::string::npos) << at(v, "message").text;
    EXPECT_EQ(at(v, "weight_version").text, "0");
  }
  busy.join();
  EXPECT_EQ(during, old_words) << "a refused update aborts nothing";
  post("/update_weights_from_disk", "{}", 400);
  EXPECT_EQ(words(generate()), old_words);

  // To b: a sample under way ends under the old weights (wait), is ended (abort), or goes on under the new ones (retract).
  const std::unique_ptr<Policy> b = make_policy("b", 0);
  Request r = offline_request(*b, "abc", 0, 1, 4, 200);
  r.sampling.stop_ids.clear();
  const Completion new_words = offline(*b, {r}).at(0);
  int64_t version = 0;
  for (const std::string how : {"wait", "abort", "retract"}) {
    for (const char* name : {"b", "a"}) {
      SCOPED_TRACE(how + " to " + name);
      const bool to_b = name[0] == 'b';
      JsonValue v;
      std::thread t([&] { v = generate(); });
      wait_for_tokens(20);
      const JsonValue answer = parsed(post("/update_weights_from_disk", fmt::format("{{\"model_path\":{},\"policy\":\"{}\",\"weight_version\":\"{}\"}}", json_string((root_ / name).string()), how,
                                                                                     to_b ? "label b" : "")));
      t.join();
      ++version;
      EXPECT_TRUE(at(answer, "success").boolean);
      EXPECT_EQ(at(answer, "weight_version").text, to_b ? "label b" : std::to_string(version));
      const std::string reason = at(at(at(v, "meta_info"), "finish_reason"), "type").text;
      std::vector<int64_t> versions;
      for (const JsonValue& x : at(at(v, "meta_info"), "output_token_versions").items) versions.push_back(integer(x));
      EXPECT_TRUE(std::is_sorted(versions.begin(), versions.end()));
      EXPECT_EQ(versions.front(), version - 1);
      if (how == "wait") {
        EXPECT_EQ(versions.back(), version - 1);
        EXPECT_EQ(versions.size(), 200u);
      } else if (how == "abort") {
        EXPECT_TRUE(reason == "abort" || versions.size() == 200u);
      } else {
        EXPECT_EQ(reason, "length");
      }
      const JsonValue now = generate();
      if (to_b) {
        ASSERT_EQ(at(now, "output_ids").items.size(), new_words.tokens.size());
        for (size_t i = 0; i < new_words.tokens.size(); ++i)
          EXPECT_EQ(bits(at(at(now, "meta_info"), "output_token_logprobs").items[i].items[0]), std::bit_cast<uint32_t>(new_words.logprobs[i]));
      } else {
        EXPECT_EQ(words(now), old_words);
      }
      EXPECT_EQ(integer(at(at(now, "meta_info"), "output_token_versions").items.at(0)), version);
    }
  }
  expect_all_free();
}

TEST_F(Serve, TheNumbersThatServeAreTheTrainersExport) {
  serve();
  const ModelConfig m = policy_->config();
  CpuContext c(1);
  const auto compare = [&](const ReadBox& masters) {
    const Result<ServedWeights> r = compare_served_weights(c, {fmt::format("http://127.0.0.1:{}", server_->port()), ""}, m, masters);
    EXPECT_TRUE(r.is_ok()) << (r ? "" : r.message());
    return r ? r.value() : ServedWeights();
  };
  const auto source = [&](const char* name) { return checkpoint_source(root_ / name, m).value(); };
  const ServedWeights a = compare(source("a"));
  EXPECT_EQ(a.numerics, Numerics::bf16);
  EXPECT_EQ(a.comparison.different, 0);
  EXPECT_EQ(a.comparison.tensors, static_cast<int64_t>(tensor_table(m).size()));

  // A trainer one of whose numbers is another one: the next that bf16 has.
  const ReadBox planted = [&](const TensorSpec& spec, const Box& box, TensorView out) {
    LOCKSTEP_RETURN_IF_ERROR(source("a")(spec, box, out));
    if (spec.name == "layers.1.ffn.experts.*.w3.weight") {
      float& x = out.row<float>(2 * m.expert_dim + 7)[11];
      x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) + (1u << 16));
    }
    return Status::ok();
  };
  const ServedWeights other = compare(planted);
  EXPECT_EQ(other.comparison.different, 1);
  ASSERT_TRUE(other.comparison.first.has_value());
  EXPECT_EQ(other.comparison.first->tensor, "layers.1.ffn.experts.2.w3.weight");
  EXPECT_EQ(other.comparison.first->row, 7);
  EXPECT_EQ(other.comparison.first->column, 11);

  EXPECT_GT(compare(source("b")).comparison.different, 0);
  post("/update_weights_from_disk", fmt::format("{{\"model_path\":\"{}\",\"weight_version\":\"b\"}}", (root_ / "b").string()));
  const ServedWeights b = compare(source("b"));
  EXPECT_EQ(b.comparison.different, 0);
  EXPECT_EQ(b.version, "b");
  for (const char* query : {"?id=-1", "?id=100000", "?id=x", "?row=0", "?id=0&row=100000"}) get(std::string("/weights_checksums") + query, 400);
  ModelConfig wider = m;
  wider.q_rank *= 2;
  const Result<ServedWeights> strange = compare_served_weights(c, {fmt::format("http://127.0.0.1:{}", server_->port()), ""}, wider, random_boxes(wider, 1));
  ASSERT_FALSE(strange.is_ok());
  EXPECT_NE(strange.message().find("a tensor that is not the checkpoint's"), std::string::npos) << strange.message();
}

TEST_F(Serve, StoppingLetsAnswersEnd) {
  serve();
  std::string answer;
  std::thread t([&] { answer = post("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":300,\"ignore_eos\":true,\"stream\":true}"); });
  wait_for_tokens(10);
  EXPECT_TRUE(server_->stop(std::chrono::seconds(60)));
  t.join();
  EXPECT_EQ(at(at(events_of(answer).back(), "choices").items.at(0), "finish_reason").text, "length");
  // And a deadline ends what does not end.
  serve();
  std::thread u([&] { answer = post("/generate", "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":890,\"ignore_eos\":true}}"); });
  wait_for_tokens(5);
  EXPECT_FALSE(server_->stop(std::chrono::milliseconds(1)));
  u.join();
  EXPECT_EQ(at(at(at(parsed(answer), "meta_info"), "finish_reason"), "type").text, "abort");
}

}  // namespace
}  // namespace lockstep
