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

// Called with the completions that finished together, before anyone else hears of them.
using OnFinished = std::function<Status(std::span<const Completion>)>;

// A run in two steps, for engines that work together: between the two they must agree that all took their requests, since one that gives up
// alone would leave the others waiting. An error leaves the engine idle.
Status submit_requests(Engine& engine, std::span<const Request> requests);
// Runs what was submitted, in all its ep ranks to the end. An error of on_finished is returned then: others may take part in each step.
Result<std::vector<Completion>> finish_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks, const std::string& label,
                                                const OnFinished& on_finished = {});

// Likewise until `enough` says so, which hears before each step what finished in the one before it; then the rest is aborted. With others, in all of
// them at the same step. It must be enough when everything has finished.
std::vector<Completion> finish_until(Engine& engine, std::span<const Request> requests, const Hooks& hooks, const std::string& label,
                                     const std::function<bool(std::span<const Completion>)>& enough);

// Both. Ordered by (prompt id, sample index), whatever the order of finishing was. The engine must be idle before, and is after.
Result<std::vector<Completion>> run_requests(Engine& engine, std::span<const Request> requests, const Hooks& hooks,
                                             const std::string& label, const OnFinished& on_finished = {});

// Everything is trained until a later stage says otherwise. A record that breaks a rule of check_trajectory comes back as failed.
Trajectory make_trajectory(const Prompt& prompt, const Completion& completion, int64_t samples_per_prompt,
                           const Tokenizer& tokenizer, int64_t vocab_size);

}  // namespace lockstep
