#pragma once
// Prompt, Trajectory, Group: the records that travel round the loop. Each stage fills in its part and changes no other.
//
//   task       Prompt      {id 12, text "3+4=", tokens {54, 46, 55, 64}, label "7"}
//   rollout    Trajectory  {group_index 12, index 50, tokens {54, 46, 55, 64, 58, 1}, prompt_length 4, mask {1, 1},
//                           logprobs {-0.3, -0.01}, versions {6, 6}, status completed, text "7"}
//   reward                 score 1, reward 1, correct true, answer "7", reason "correct"
//   advantage              advantage {0.66, 0.66}
//
// Ids are authoritative: text is for rewards and people, and is never tokenised again.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/choices.h"

namespace lockstep {

struct Prompt {
  int64_t id = 0;   // issued in ascending order, never twice in a run: the group index
  int64_t row = 0;  // place in the data file, from 0
  std::string text;
  std::vector<int32_t> tokens;
  std::string label;
  std::string row_id = {};    // the data file's own name for it; may be empty
  std::string messages = {};  // only of load_problems: JSON list of the messages that `text` was written from; empty: it was text
};

enum class TrajectoryStatus : uint8_t { completed, truncated, aborted, failed };
const char* trajectory_status_name(TrajectoryStatus status);

struct Trajectory {
  int64_t group_index = 0;
  int64_t index = 0;            // sample id in the run: group_index * samples per prompt + place in the group
  std::vector<int32_t> tokens;  // prompt, then response
  int64_t prompt_length = 0;
  std::vector<uint8_t> mask;      // [R] 1: trained
  std::vector<float> logprobs;    // [R] of the distribution each token was drawn from
  std::vector<int32_t> versions;  // [R] policy version that drew each token
  ChoiceLog choices;              // of the sampler, where the trainer repeats them
  TrajectoryStatus status = TrajectoryStatus::completed;
  std::string failure;  // why status is failed
  std::string text;     // the response, without a stop token

  float score = 0;       // the grader's
  float reward = 0;      // what training uses: the score with length shaping
  bool correct = false;  // what accuracy and pass@k use
  std::string answer;    // what the grader took for the answer
  std::string reason;    // the grader's word for its verdict

  std::vector<float> advantage;  // [R]

  int64_t response_length() const { return static_cast<int64_t>(tokens.size()) - prompt_length; }
  std::span<const int32_t> response() const { return std::span(tokens).subspan(static_cast<size_t>(prompt_length)); }
  bool usable() const { return status == TrajectoryStatus::completed || status == TrajectoryStatus::truncated; }
};

struct Group {
  Prompt prompt;
  std::vector<Trajectory> trajectories;  // by ascending index
};

// What every received record must satisfy (rl spec 1): lengths agree, ids lie in the vocabulary, trained log-probs are finite and
// not positive, the response is not empty, every token has a version. A record that fails is marked failed and counted, never
// trained.
Status check_trajectory(const Trajectory& trajectory, int64_t vocab_size);

}  // namespace lockstep
