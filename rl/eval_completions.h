#pragma once
// Answers that another program produced, as samples of our problems. Taken are
//
//   JSON lines, or one JSON array of such rows:
//     {"id": "aime2024-I-05", "response": "..."}          one sample a row: the problem's id, or its place from 0 as "index" or "row"
//     {"index": 4, "responses": ["...", "..."]}           several at once; also under "response"
//     {"id": "...", "choices": [{"message": {"content": "..."}, "finish_reason": "length"}]}   an OpenAI-compatible server's answer, of whose
//     {"custom_id": "...", "response": {"body": {"choices": [...]}}}                             reasoning_content is put before </think>; the same from a batch
//     "..." or ["...", "..."]                             no id: the rows are the problems in order
//   one JSON object {"ID": "..." or ["...", "..."], ...}
//   what `lockstep eval` wrote: samples_N.jsonl, --records
//
// "response" may be called completion, output, text, generation, generated_text or answer_text; its end "status" or "finish_reason" (length or
// truncated, else completed; missing: unknown), its length "num_tokens". "id" that no problem has, where no problem has ids, is a place. Samples
// of a problem are counted in the file's order, unless "sample" numbers them. Every problem needs at least one.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rl/eval_samples.h"

namespace lockstep {

// Ordered by (problem, sample). Errors name the row, or the problems that have no answer. `path` is for messages.
Result<std::vector<EvalSample>> parse_completions(std::string_view text, const std::string& path, std::span<const Prompt> problems);

}  // namespace lockstep
