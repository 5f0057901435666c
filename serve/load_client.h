#pragma once
// The clients of the load bench (serve/load_bench.cc), in a process of their own so that they can be killed and their memory and time are not the server's.
// One thread, all connections non-blocking; what an answer says is hashed as it comes and compared by the bench, which knows what the engine says offline.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

constexpr size_t kLoadKinds = 64;  // different requests

struct LoadRequest {
  std::vector<int32_t> prompt;  // 10 to 73 tokens
  int64_t max_tokens = 0;       // half to one and a half of what is asked for
  uint64_t seed = 0;
};
LoadRequest load_request(size_t kind, int64_t vocab, int64_t tokens);

// 64-bit FNV-1a, carried on.
constexpr uint64_t kHashStart = 0xcbf29ce484222325;
constexpr uint64_t hash_on(uint64_t hash, std::string_view bytes) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}
// Of an answer's text as JSON writes it and of its log-probs, joined by commas.
uint64_t answer_hash(std::string_view text, std::string_view logprobs);

// args: PORT STREAMS VOCAB TOKENS. Reads commands from standard input, one letter each: 'g', all streams ask, one request after another; 's', they
// stop when their answers have ended, and what they saw is written to standard output, as read_load_report() reads it. Ends with standard input.
int load_client(std::span<char*> args);

struct LoadReport {
  struct Said {
    size_t kind = 0;
    uint64_t hash = 0;
    int64_t count = 0;
  };
  int64_t answers = 0, errors = 0, events = 0;
  double cpu_seconds = 0;    // of the process, so far
  double longest_wait = 0;   // seconds between two events of one stream
  std::vector<Said> said;
};
// False: the client is gone.
bool read_load_report(int fd, LoadReport* report);

}  // namespace lockstep
