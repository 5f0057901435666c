#pragma once
// The long tail of a rollout: a few responses are many times longer than the rest, and at the end of a step most slots of the engine are empty.
//
// Over-sampling: a step asks for more prompts than it trains and stops when enough groups are complete. The others wait for the next step, before any new
// prompt, with what they have said so far or without. So each step takes as many new prompts from the data as it trains, none is lost, and each is trained
// once; who is trained in which step is in favour of short responses (rl spec 6.2).
//
// Order: the engine begins with the prompts that gave the longest responses before.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "rl/records.h"
#include "rollout/types.h"

namespace lockstep {

enum class PartialKind : uint8_t { drop, keep };
enum class RolloutOrder : uint8_t { given, longest };

struct LongTail {
  struct Waiting {
    Prompt prompt;
    std::vector<Completion> samples;  // by ascending index: finished ones, and as aborted ones those that have a token
  };
  std::vector<Waiting> waiting;         // by ascending prompt id
  std::map<int64_t, int64_t> longest;   // tokens of the longest response so far, by row of the data
};

// prompts_per_step x over_sample, rounded up.
int64_t submitted_prompts(int64_t prompts_per_step, float over_sample);

// The requests for what `samples` of one prompt's request lack: those of which there are tokens go on from these.
std::vector<Request> continued_requests(const Request& request, std::span<const Completion> samples);

// As a file of a checkpoint, checked lines (io/checked_line.h):
//   {"prompt_id":96,"row":3}               a prompt that waits
//   {"row":3,"longest":17}
//   what RolloutLog::text() makes of samples, which are taken back only for equal requests.
// `requests` are whole ones, one for each prompt that waits; `numerics` identifies the arithmetic of both sides.
std::string long_tail_text(const LongTail& tail, std::span<const Request> requests, uint64_t numerics);
// Prompts as (id, row) and lengths; or an error for a damaged line. Samples are read when there are requests for them.
struct LongTailRows {
  std::vector<std::pair<int64_t, int64_t>> waiting;
  std::map<int64_t, int64_t> longest;
};
Result<LongTailRows> read_long_tail_rows(const std::string& text);
std::vector<Completion> read_long_tail_samples(const std::string& text, std::span<const Request> requests, uint64_t numerics);

}  // namespace lockstep
