// The HTTP grader against a real server in this process.

#include <gtest/gtest.h>

#include <httplib.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "rl/grader/judge.h"

namespace lockstep {
namespace {

class Http : public ::testing::Test {
 protected:
  void serve(httplib::Server::Handler handler) {
    server_.Post("/grade", std::move(handler));
    port_ = server_.bind_to_any_port("127.0.0.1");
    ASSERT_GT(port_, 0);
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  void TearDown() override {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  std::vector<RewardResult> grade(size_t count, float deadline_s = 20) {
    RewardOptions options;
    options.grader = GraderKind::http;
    options.url = fmt::format("http://127.0.0.1:{}/grade", port_);
    options.workers = 3;
    options.deadline_s = deadline_s;
    std::vector<std::string> labels;
    for (size_t i = 0; i < count; ++i) labels.push_back(std::to_string(i));
    std::vector<GradeRow> rows;
    for (size_t i = 0; i < count; ++i) rows.push_back({"prompt", "line one\nline \"two\"", labels[i]});
    return Judge::make(options).value()->grade(rows);
  }
  void expect_error(const std::string& what, float deadline_s = 20) {
    const std::vector<RewardResult> r = grade(2, deadline_s);
    for (const RewardResult& v : r) {
      EXPECT_FALSE(v.scored());
      EXPECT_NE(v.error.find(what), std::string::npos) << v.error;
    }
  }

  httplib::Server server_;
  std::thread thread_;
  int port_ = 0;
};

TEST_F(Http, ResultsAreInTheOrderOfTheRows) {
  std::atomic<int> requests = 0;
  serve([&](const httplib::Request& request, httplib::Response& response) {
    ++requests;
    const Result<JsonValue> rows = parse_json(request.body);
    if (!rows) return;
    std::string out;
    for (const JsonValue& row : rows.value().items) {  // last first
      if (row.find("response")->text != "line one\nline \"two\"" || row.find("prompt")->text != "prompt") continue;
      std::string verdict = fmt::format("{{\"id\":{},\"score\":{}.25}}", row.find("id")->text, row.find("label")->text);
      out = out.empty() ? verdict : fmt::format("{},{}", verdict, out);
    }
    response.set_content(fmt::format("[{}]", out), "application/json");
  });
  const std::vector<RewardResult> r = grade(100);
  for (size_t i = 0; i < r.size(); ++i) {
    ASSERT_TRUE(r[i].scored()) << r[i].error;
    EXPECT_EQ(r[i].score, static_cast<float>(i) + 0.25f);
  }
  EXPECT_EQ(requests, 7);
}

TEST_F(Http, WhatPassesIsTriedAgain) {
  std::atomic<int> requests = 0;
  serve([&](const httplib::Request&, httplib::Response& response) {
    response.status = ++requests < 3 ? 503 : 200;
    response.set_content("[{\"id\":0,\"score\":1},{\"id\":1,\"score\":0}]", "application/json");
  });
  const std::vector<RewardResult> r = grade(2);
  EXPECT_TRUE(r[0].correct);
  EXPECT_EQ(r[1].reason, RewardReason::wrong);
  EXPECT_EQ(requests, 3);
}

TEST_F(Http, OtherStatusesAreErrorsAtOnce) {
  std::atomic<int> requests = 0;
  serve([&](const httplib::Request&, httplib::Response& response) {
    ++requests;
    response.status = 400;
    response.set_content("bad label", "text/plain");
  });
  expect_error("status 400: \"bad label\"");
  EXPECT_EQ(requests, 1);
}

TEST_F(Http, AServerThatStaysIllIsAnError) {
  serve([&](const httplib::Request&, httplib::Response& response) { response.status = 500; });
  expect_error("status 500");
}

TEST_F(Http, MalformedAnswersAreErrors) {
  std::atomic<int> turn = 0;
  serve([&](const httplib::Request&, httplib::Response& response) {
    static const char* const kAnswers[] = {"nonsense", "{}", "[]", "[{\"id\":5,\"score\":1}]", "[1,null]"};
    response.set_content(kAnswers[turn++], "application/json");
  });
  for (const char* what : {"no JSON", "an array of verdicts is wanted", "no verdict with this row's id", "no verdict with this row's id", "no verdict"}) expect_error(what);
}

TEST_F(Http, OneBadVerdictIsOneError) {
  serve([&](const httplib::Request&, httplib::Response& response) {
    response.set_content("[{\"id\":1,\"score\":2,\"correct\":true},{\"id\":0,\"score\":\"high\"}]", "application/json");
  });
  const std::vector<RewardResult> r = grade(2);
  EXPECT_FALSE(r[0].scored());
  EXPECT_TRUE(r[1].correct);
  EXPECT_EQ(r[1].score, 2.0f);
}

TEST_F(Http, ASlowServerIsAnError) {
  serve([&](const httplib::Request&, httplib::Response& response) {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    response.set_content("[]", "application/json");
  });
  expect_error("(4 attempts)", 0.05f);
}

TEST(HttpOptions, WantAnAddress) {
  RewardOptions options;
  options.grader = GraderKind::http;
  for (const char* url : {"", "localhost:80/x", "http://", "http:///x", "ftp://a/b"}) {
    options.url = url;
    EXPECT_FALSE(Judge::make(options).is_ok()) << url;
  }
}

TEST(HttpOptions, NobodyThere) {
  RewardOptions options;
  options.grader = GraderKind::http;
  options.url = "http://127.0.0.1:1";
  const GradeRow row = {"", "r", "l"};
  const std::vector<RewardResult> r = Judge::make(options).value()->grade({&row, 1});
  EXPECT_FALSE(r[0].scored());
  EXPECT_NE(r[0].error.find("http://127.0.0.1:1/: "), std::string::npos) << r[0].error;
}

}  // namespace
}  // namespace lockstep
