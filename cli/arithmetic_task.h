#pragma once
// The files of the generated arithmetic task, as make-task and demo write them:
//   DIR/sft.jsonl    worked examples          DIR/train.jsonl  problems for reinforcement learning, other ones
//   DIR/eval.jsonl   held-out problems        DIR/tokenizer_lockstep.json

#include <string>

#include "cli/commands.h"
#include "core/status.h"

namespace lockstep {

Status write_arithmetic_task(const MakeTaskArgs& args);

}  // namespace lockstep
