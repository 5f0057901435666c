#pragma once
// Parts of a step beside what the machine allows in the same run: a decode step by batch, a call of prompts, an update of the sampler's weights. Random weights
// and tokens of the config's shape.

#include <functional>
#include <string>
#include <vector>

#include "rl/model_bench.h"

namespace lockstep {

// `what`: decode, prefill, sync; `o`: numerics, device, threads, prompt, new_tokens, microbatch_tokens, repeat. A JSON line a measurement: what, ms (median), ms_min,
// ms_max, bytes and operations of the mathematics, floor_ms = max(bytes / copy rate, operations / rate of the numerics' products), share = floor_ms / ms.
//   decode   for each of `batches`: new_tokens steps of so many samples that have prompts behind them, sampling included; every weight read once (experts as chance has them
//            chosen), and the sequences' state
//   prefill  one call of microbatch_tokens in prompts of `prompt` tokens, first tokens drawn
//   sync     "convert": the f32 masters become the sampler's weights, in `numerics`; "transfer": as a run updates a sampler that has weights of its own, from a trainer
//            in bf16 (f32 for f32), votes, checksums and, of a GPU, the ways through host memory included
Status bench_steps(const ModelConfig& config, const std::string& what, const std::vector<int64_t>& batches, const ModelBenchOptions& o,
                   const std::function<void(const std::string& line)>& tell);

}  // namespace lockstep
