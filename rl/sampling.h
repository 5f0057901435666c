#pragma once
// Requests to completions: drives the engine until all are finished. Completions to trajectories: here the engine's words become
// the loop's.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/tokenizer.h"
#include "rl/hooks.h"
#include "rl/records.h"
#include "rollout/engine.h"

namespace lockstep {

// The same in two steps, for engines that work together: between the two they must agree that all took their requests, since one that gives up
// alone would leave the others waiting.
//
// Called with the completions that finished together, before anyone else hears of them.
using OnFinished = std::function<Status(std::span<const Completion>)>;

// An error leaves the engine idle.
Status submit_requests(Engine& engine, std::span<const Request> requests);
// Runs what was submitted, in all its ep ranks to the end. An error of on_finished is returned once all are done: other ranks may be taking part in
// each step of the engine.
Result<std::vector<Completion>> finish_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks, const std::string& label,
                                                const OnFinished& on_finished = {});

// Ordered by (prompt id, sample index), whatever the order of finishing was. The engine must be idle before, and is after.
Result<std::vector<Completion>> run_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks,
                                             const std::string& label, const OnFinished& on_finished = {});

// Everything is trained until a later stage says otherwise. A record that breaks a rule of check_trajectory comes back as failed.
Trajectory make_trajectory(const Prompt& prompt, const Completion& completion, int64_t samples_per_prompt,
                           const Tokenizer& tokenizer, int64_t vocab_size);

}  // namespace lockstep
