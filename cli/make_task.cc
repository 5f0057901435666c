// lockstep make-task DIR: a small task that can be learned on a laptop.

#include <cstdio>
#include <filesystem>
#include <span>

#include "cli/arithmetic_task.h"
#include "cli/console.h"
#include "io/file.h"
#include "io/tokenizer.h"
#include "rl/arithmetic.h"

namespace lockstep {

Status write_arithmetic_task(const MakeTaskArgs& args) {
  ArithmeticOptions options{
      .seed = static_cast<uint64_t>(args.seed), .difficulty_min = args.difficulty_min, .difficulty_max = args.difficulty_max,
      .unboxed_share = args.unboxed_share};
  for (size_t at = 0; at < args.families.size();) {
    const size_t comma = std::min(args.families.find(',', at), args.families.size());
    Result<ArithmeticFamily> family = parse_arithmetic_family(std::string_view(args.families).substr(at, comma - at));
    if (!family) return family.status();
    options.families.push_back(family.value());
    at = comma + 1;
  }
  Result<std::vector<ArithmeticItem>> train = make_arithmetic_set(options, ArithmeticSplit::train, args.num_sft + args.num_train);
  if (!train) return train.status();
  Result<std::vector<ArithmeticItem>> held_out = make_arithmetic_set(options, ArithmeticSplit::held_out, args.num_eval);
  if (!held_out) return held_out.status();
  LOCKSTEP_RETURN_IF_ERROR(make_directories(args.directory));
  const std::span<const ArithmeticItem> items = train.value();
  const auto num_sft = static_cast<size_t>(args.num_sft);
  LOCKSTEP_RETURN_IF_ERROR(write_arithmetic_examples(args.directory + "/sft.jsonl", items.first(num_sft)));
  LOCKSTEP_RETURN_IF_ERROR(write_arithmetic_prompts(args.directory + "/train.jsonl", items.subspan(num_sft)));
  LOCKSTEP_RETURN_IF_ERROR(write_arithmetic_prompts(args.directory + "/eval.jsonl", held_out.value()));
  return ByteTokenizer(std::string(kArithmeticAlphabet)).save(args.directory);
}

int make_task_command(const MakeTaskArgs& args) {
  std::error_code error;
  for (const char* name : {"sft.jsonl", "train.jsonl", "eval.jsonl"}) {
    if (std::filesystem::exists(args.directory + "/" + name, error))
      return fail(kExitBadInput, errorf("{}/{} exists; name another directory, or remove it", args.directory, name));
  }
  if (const Status s = write_arithmetic_task(args); !s) return fail(kExitBadInput, s);
  std::printf(
      "%s: %lld worked examples in sft.jsonl, %lld problems in train.jsonl, %lld held out in eval.jsonl; the tokenizer has %d "
      "ids\n",
      args.directory.c_str(), static_cast<long long>(args.num_sft), static_cast<long long>(args.num_train),
      static_cast<long long>(args.num_eval), ByteTokenizer(std::string(kArithmeticAlphabet)).vocab_size());
  return kExitOk;
}

}  // namespace lockstep
