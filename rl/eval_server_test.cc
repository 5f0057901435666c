// Answers over HTTP, from a real server in this process.

#include "rl/eval_server.h"

#include <gtest/gtest.h>

#include <httplib.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "io/json.h"
#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;

class EvalServer : public ::testing::Test {
 protected:
  void serve(const std::string& path, httplib::Server::Handler handler) {
    server_.Post(path, [this, handler](const httplib::Request& request, httplib::Response& response) {
      ++asked_;
      handler(request, response);
    });
    const int port = server_.bind_to_any_port("127.0.0.1");
    ASSERT_GT(port, 0);
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
    options_.url = fmt::format("http://127.0.0.1:{}", port);
    options_.model = "m";
    options_.concurrency = 3;
    options_.deadline_s = 20;
    for (int64_t i = 0; i < 4; ++i) problems_.push_back({.row = i, .text = fmt::format("question {}", i), .tokens = {}, .label = "1"});
  }
  void TearDown() override {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  Result<std::vector<EvalSample>> sample(SampleLog* log = nullptr, int64_t samples = 2) {
    EvalOptions o;
    o.samples = samples;
    o.temperature = 0.5f;
    o.max_new_tokens = 9;
    return sample_server(options_, problems_, o, {}, log);
  }
  // Answers with the question, and the seed.
  static void echo(const httplib::Request& request, httplib::Response& response) {
    const JsonValue body = parse_json(request.body).take();
    const JsonValue* messages = body.find("messages");
    const std::string question = messages == nullptr ? body.find("prompt")->text : messages->items[0].find("content")->text;
    const JsonLine text = JsonLine().add("content", question + " seed " + body.find("seed")->text);
    JsonLine choice, line;
    choice.add(messages == nullptr ? "text" : "ignored", question).add("message", text).add("finish_reason", "length");
    response.set_content(fmt::format("{{\"choices\":[{}],\"usage\":{{\"completion_tokens\":5}}}}",
                                     messages == nullptr ? JsonLine().add("text", question).add("finish_reason", "stop").str() : choice.str()),
                         "application/json");
  }

  httplib::Server server_;
  std::thread thread_;
  std::atomic<int> asked_ = 0;
  ServerOptions options_;
  std::vector<Prompt> problems_;
};

TEST_F(EvalServer, Chat) {
  std::mutex mutex;
  std::set<std::string> keys;
  std::string body;
  options_.key = "secret";
  serve("/v1/chat/completions", [&](const httplib::Request& request, httplib::Response& response) {
    {
      const std::lock_guard lock(mutex);
      keys.insert(request.get_header_value("Authorization"));
      if (request.body.find("question 0") != std::string::npos) body = request.body;
    }
    echo(request, response);
  });
  const Result<std::vector<EvalSample>> samples = sample();
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  ASSERT_EQ(samples.value().size(), 8u);
  std::set<std::string> seeds;
  for (size_t i = 0; i < 8; ++i) {
    const EvalSample& s = samples.value()[i];
    EXPECT_EQ(s.problem, static_cast<int64_t>(i / 2));
    EXPECT_EQ(s.sample, static_cast<int64_t>(i % 2));
    EXPECT_TRUE(s.response.starts_with(fmt::format("question {} seed ", i / 2))) << s.response;
    EXPECT_EQ(s.status, AnswerStatus::truncated);
    EXPECT_EQ(s.num_tokens, 5);
    seeds.insert(s.response.substr(s.response.find("seed")));
  }
  EXPECT_EQ(seeds.size(), 8u) << "every sample has a seed of its own";
  EXPECT_EQ(keys, std::set<std::string>{"Bearer secret"});
  EXPECT_TRUE(body.starts_with(R"({"model":"m","max_tokens":9,"temperature":0.5,"top_p":1,"messages":[{"role":"user","content":"question 0"}],"seed":)")) << body;
  const Result<std::vector<EvalSample>> again = sample();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(again.value()[i].response, samples.value()[i].response) << "the same seeds";
}

TEST_F(EvalServer, CompletionsUnderAPath) {
  serve("/my/v1/completions", [](const auto& request, auto& response) { echo(request, response); });
  options_.url += "/my/v1/";
  options_.chat = false;
  const Result<std::vector<EvalSample>> samples = sample();
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  EXPECT_EQ(samples.value()[7].response, "question 3");
  EXPECT_EQ(samples.value()[7].status, AnswerStatus::completed);
}

TEST_F(EvalServer, PassingFailuresAreTriedAgain) {
  std::mutex mutex;
  std::map<std::string, int> attempts;
  serve("/v1/chat/completions", [&](const httplib::Request& request, httplib::Response& response) {
    int attempt = 0;
    {
      const std::lock_guard lock(mutex);
      attempt = attempts[request.body]++;
    }
    if (attempt == 0) {
      response.status = request.body.find("question 1") != std::string::npos ? 429 : 503;
    } else {
      echo(request, response);
    }
  });
  options_.retries = 1;
  const Result<std::vector<EvalSample>> samples = sample(nullptr, 1);
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  EXPECT_EQ(asked_, 8);
  options_.retries = 0;
  attempts.clear();
  EXPECT_TRUE(fails_with(sample(nullptr, 1), "(1 attempts)"));
}

TEST_F(EvalServer, RefusalsEndTheWorkAtOnce) {
  serve("/v1/chat/completions", [](const httplib::Request&, httplib::Response& response) {
    response.status = 404;
    response.set_content("no model m", "text/plain");
  });
  options_.concurrency = 1;
  EXPECT_TRUE(fails_with(sample(), "problem 0, sample 0: status 404: \"no model m\""));
  EXPECT_EQ(asked_, 1);
}

TEST_F(EvalServer, OddAnswersAreErrors) {
  std::string answer;
  serve("/v1/chat/completions", [&](const httplib::Request&, httplib::Response& response) { response.set_content(answer, "application/json"); });
  for (const auto& [text, what] : {std::pair{"<html>", "its answer is no JSON"}, {"{}", "its answer has no \"choices\""}, {R"({"choices":[]})", "no \"choices\""},
                                   {R"({"choices":[{}]})", "neither message nor text"}, {R"({"choices":[{"message":{}}]})", "has no content"}}) {
    answer = text;
    EXPECT_TRUE(fails_with(sample(), what));
  }
  answer = R"({"choices":[{"message":{"content":null,"reasoning_content":"so far"},"finish_reason":"length"}]})";
  const Result<std::vector<EvalSample>> samples = sample();
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  EXPECT_EQ(samples.value()[0].response, "so far");
  EXPECT_EQ(samples.value()[0].num_tokens, -1);
}

TEST_F(EvalServer, AnAnswerThatIsTooSlow) {
  serve("/v1/chat/completions", [](const httplib::Request& request, httplib::Response& response) {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    echo(request, response);
  });
  options_.deadline_s = 0.1f;
  options_.retries = 0;
  EXPECT_FALSE(sample().is_ok());
}

TEST_F(EvalServer, GoesOnWhereItStopped) {
  std::atomic<bool> broken = true;
  serve("/v1/chat/completions", [&](const httplib::Request& request, httplib::Response& response) {
    if (broken && request.body.find("question 2") != std::string::npos) {
      response.status = 400;
    } else {
      echo(request, response);
    }
  });
  testing::TemporaryDirectory d;
  options_.concurrency = 1;
  {
    SampleLog log(d.path(), 0);
    EXPECT_TRUE(fails_with(sample(&log), "4 of 8 samples are kept in " + d.path()));
  }
  broken = false;
  asked_ = 0;
  SampleLog log(d.path(), 0);
  const Result<std::vector<EvalSample>> samples = sample(&log);
  ASSERT_TRUE(samples.is_ok()) << samples.message();
  EXPECT_EQ(asked_, 4) << "none is asked for twice";
  EXPECT_EQ(log.num_reused, 4);
  ASSERT_EQ(samples.value().size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(samples.value()[i].response.starts_with(fmt::format("question {} ", i / 2)));
}

TEST(EvalServerAddress, MustBeOne) {
  for (const char* url : {"", "localhost:80", "http://", "ftp://x"}) EXPECT_FALSE(check_server({.url = url, .model = "m"}).is_ok()) << url;
}

}  // namespace
}  // namespace lockstep
