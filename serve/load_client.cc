#include "serve/load_client.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include <fmt/format.h>

namespace lockstep {

LoadRequest load_request(size_t kind, int64_t vocab, int64_t tokens) {
  LoadRequest r{.prompt = {}, .max_tokens = std::max<int64_t>(1, tokens / 2 + static_cast<int64_t>(kind * 37 % kLoadKinds) * tokens / static_cast<int64_t>(kLoadKinds)), .seed = kind};
  for (size_t t = 0; t < 10 + kind; ++t) r.prompt.push_back(static_cast<int32_t>(3 + (t * 7 + kind) % static_cast<size_t>(vocab - 3)));
  return r;
}

uint64_t answer_hash(std::string_view text, std::string_view logprobs) { return hash_on(hash_on(kHashStart, text), logprobs); }

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What stands in `event` between `before` and the next `end` that no backslash escapes; empty if there is none.
std::string_view part(std::string_view event, std::string_view before, char end) {
  const size_t at = event.find(before);
  if (at == std::string_view::npos) return {};
  size_t i = at + before.size();
  while (i < event.size() && event[i] != end) i += event[i] == '\\' ? 2 : 1;
  return event.substr(at + before.size(), i - at - before.size());
}

struct Stream {
  int sock = -1;
  size_t round = 0, kind = 0;
  bool busy = false, head = false, done = false;  // asked; the answer's head was read; its end mark was
  std::string in, body, text, logprobs;           // bytes not read yet, events not read yet, what was said
  double last_event = 0;
};

class Client {
 public:
  Client(int port, size_t streams, int64_t vocab, int64_t tokens) : port_(port), vocab_(vocab), tokens_(tokens), streams_(streams), epoll_(::epoll_create1(0)) {
    for (size_t i = 0; i < streams; ++i) streams_[i].round = i;
    watch(STDIN_FILENO, streams);
  }

  int run() {
    std::vector<epoll_event> ready(512);
    for (;;) {
      const int n = ::epoll_wait(epoll_, ready.data(), static_cast<int>(ready.size()), -1);
      for (int i = 0; i < n; ++i) {
        const size_t which = ready[static_cast<size_t>(i)].data.u64;
        if (which < streams_.size()) {
          read(streams_[which]);
        } else if (!command()) {
          return 0;
        }
      }
      if (reporting_ && std::none_of(streams_.begin(), streams_.end(), [](const Stream& s) { return s.busy; })) write_report();
    }
  }

 private:
  void watch(int fd, size_t which) {
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = which;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e);
  }

  bool command() {
    char c = 0;
    if (::read(STDIN_FILENO, &c, 1) != 1) return false;
    going_ = c == 'g';
    reporting_ = c == 's';
    if (going_)
      for (Stream& s : streams_)
        if (!s.busy) ask(s);
    return true;
  }

  void ask(Stream& s) {
    const auto fail = [&](const char* what) {
      std::fprintf(stderr, "load client: %s: %s\n", what, std::strerror(errno));
      std::exit(1);
    };
    if (s.sock < 0) {
      s.sock = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(static_cast<uint16_t>(port_));
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (::connect(s.sock, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail("connect");
      const int yes = 1;
      ::setsockopt(s.sock, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      ::fcntl(s.sock, F_SETFL, O_NONBLOCK);
      watch(s.sock, static_cast<size_t>(&s - streams_.data()));
    }
    s.kind = s.round % kLoadKinds;
    s.round += 17;  // prime to kLoadKinds: all of them
    const LoadRequest r = load_request(s.kind, vocab_, tokens_);
    const std::string body = fmt::format("{{\"prompt\":[{}],\"max_tokens\":{},\"seed\":{},\"ignore_eos\":true,\"logprobs\":0,\"stream\":true}}", fmt::join(r.prompt, ","), r.max_tokens, r.seed);
    const std::string request = fmt::format("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}", body.size(), body);
    if (::send(s.sock, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) fail("send");
    s.busy = true;
    s.head = s.done = false;
    s.text.clear();
    s.logprobs.clear();
    s.last_event = 0;
  }

  void read(Stream& s) {
    char buffer[16384];
    for (;;) {
      const ssize_t n = ::recv(s.sock, buffer, sizeof buffer, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) break;
      if (n == 0) return lost(s, "the server closed the connection");
      s.in.append(buffer, static_cast<size_t>(n));
      if (static_cast<size_t>(n) < sizeof buffer) break;
    }
    if (s.busy) take(s);
  }

  // The head, then chunks: their size in hexadecimal, a line end, that many bytes, a line end; the last one is empty.
  void take(Stream& s) {
    size_t at = 0;
    bool ended = false;
    if (!s.head) {
      const size_t end = s.in.find("\r\n\r\n");
      if (end == std::string::npos) return;
      if (!s.in.starts_with("HTTP/1.1 200")) return lost(s, s.in);
      s.head = true;
      at = end + 4;
    }
    while (!ended) {
      const size_t line = s.in.find("\r\n", at);
      size_t size = 0;
      if (line == std::string::npos) break;
      std::from_chars(s.in.data() + at, s.in.data() + line, size, 16);
      if (s.in.size() < line + 2 + size + 2) break;
      s.body.append(s.in, line + 2, size);
      at = line + 2 + size + 2;
      ended = size == 0;
    }
    s.in.erase(0, at);
    events(s);
    if (!ended) return;
    if (!s.done) return lost(s, "an answer without an end mark");
    s.busy = false;
    ++report_.answers;
    ++said_[{s.kind, answer_hash(s.text, s.logprobs)}];
    if (going_) {
      ask(s);
    } else {
      close(s);
    }
  }

  void events(Stream& s) {
    size_t from = 0;
    for (size_t end; (end = s.body.find("\n\n", from)) != std::string::npos; from = end + 2) {
      const std::string_view event = std::string_view(s.body).substr(from, end - from);
      if (event == "data: [DONE]") {
        s.done = true;
        continue;
      }
      s.text += part(event, "\"text\":\"", '"');
      const std::string_view logprobs = part(event, "\"token_logprobs\":[", ']');
      if (!logprobs.empty()) s.logprobs.append(s.logprobs.empty() ? "" : ",").append(logprobs);
      ++report_.events;
      const double time = now();
      if (s.last_event > 0) report_.longest_wait = std::max(report_.longest_wait, time - s.last_event);
      s.last_event = time;
    }
    s.body.erase(0, from);
  }

  void lost(Stream& s, const std::string& why) {
    if (s.busy && ++report_.errors == 1) std::fprintf(stderr, "load client: first error: %s\n", why.c_str());
    close(s);
    if (std::exchange(s.busy, false) && going_) ask(s);
  }

  void close(Stream& s) {
    ::close(s.sock);
    s.sock = -1;
    s.in.clear();
    s.body.clear();
  }

  void write_report() {
    rusage u{};
    ::getrusage(RUSAGE_SELF, &u);
    const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    std::string out = fmt::format("{} {} {} {} {} {}\n", report_.answers, report_.errors, report_.events, seconds(u.ru_utime) + seconds(u.ru_stime), report_.longest_wait, said_.size());
    for (const auto& [what, count] : said_) out += fmt::format("{} {} {}\n", what.first, what.second, count);
    if (::write(STDOUT_FILENO, out.data(), out.size()) != static_cast<ssize_t>(out.size())) std::exit(1);
    report_ = {};
    said_.clear();
    reporting_ = false;
  }

  const int port_;
  const int64_t vocab_, tokens_;
  std::vector<Stream> streams_;
  const int epoll_;
  bool going_ = false, reporting_ = false;
  LoadReport report_;
  std::map<std::pair<size_t, uint64_t>, int64_t> said_;
};

}  // namespace

int load_client(std::span<char*> args) {
  if (args.size() != 4) return 2;
  return Client(std::atoi(args[0]), static_cast<size_t>(std::atoi(args[1])), std::atoll(args[2]), std::atoll(args[3])).run();
}

bool read_load_report(int fd, LoadReport* report) {
  *report = {};
  FILE* in = ::fdopen(::dup(fd), "r");
  size_t said = 0;
  bool good = std::fscanf(in, "%ld %ld %ld %lf %lf %zu", &report->answers, &report->errors, &report->events, &report->cpu_seconds, &report->longest_wait, &said) == 6;
  for (size_t i = 0; good && i < said; ++i) {
    LoadReport::Said s;
    good = std::fscanf(in, "%zu %lu %ld", &s.kind, &s.hash, &s.count) == 3;
    report->said.push_back(s);
  }
  std::fclose(in);
  return good;
}

}  // namespace lockstep
