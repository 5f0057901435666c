// Any bytes as another program's answers, and as a log of samples: an error or samples that are in order and in range.

#include <cstdint>

#include "rl/eval_completions.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<Prompt> problems(3);
  for (size_t i = 0; i < problems.size(); ++i) problems[i].row = static_cast<int64_t>(i);
  for (const char* id : {"", "a"}) {
    problems[1].row_id = id;
    const Result<std::vector<EvalSample>> samples = parse_completions(text, "fuzz", problems);
    if (!samples) {
      CHECK(!samples.message().empty(), "an error without words");
      continue;
    }
    for (size_t i = 0; i < samples.value().size(); ++i) {
      const EvalSample& s = samples.value()[i];
      CHECK(s.problem >= 0 && s.problem < 3 && s.num_tokens >= -1, "problem {}, {} tokens", s.problem, s.num_tokens);
      CHECK(i == 0 || by_problem_and_sample(samples.value()[i - 1], s), "sample {} is out of order", i);
    }
  }
  const uint64_t keys[] = {0, 1};
  const LoggedSamples found = parse_sample_log(text, keys, 4);
  for (const EvalSample& s : found.samples) CHECK(s.problem >= 0 && s.problem < 2 && s.sample >= 0 && s.sample < 4, "sample {} of {}", s.sample, s.problem);
  return 0;
}
