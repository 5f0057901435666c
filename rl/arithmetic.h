#pragma once
// Made-up integer problems for runs on small machines: short prompts over a small alphabet, a worked solution that a tiny
// character model can learn, and an answer from 0 to 999 that math_reward can check. An item is a pure function of
// (options, index); nothing is stored, and any range of indices can be made again.
//
//   family     prompt              solution: steps;\boxed{answer}
//   add        58+67:              8+7=15,5+6+1=12;\boxed{125}        digits from the right, the carry last
//   subtract   103-98:             3-8=-5,0-9-1=-10,1-0-1=0;\boxed{5}  likewise; below 0 borrows 10
//   multiply   47*6:               7*6=42,4*6+4=28;\boxed{282}        digits from the right, the carry last
//   remainder  475%6:              4%6=4,47%6=5,55%6=1;\boxed{1}      long division
//   gcd        gcd(48,18):         48%18=12,18%12=6,12%6=0;\boxed{6}  Euclid's chain
//   linear     7x+25=95:           95-25=70,70=7*10;\boxed{10}
//   max        max(37,52,45):      37,52,52;\boxed{52}                the largest so far
//   mixed      2+3*4:              3*4=12,2+12=14;\boxed{14}          the product, then the sum
//
// The colon ends a prompt, so that no prompt is the beginning of another one.
//
// Training and held-out items are told apart by a hash of the prompt's text alone: one prompt in kHeldOutOneIn is held out,
// whatever the seed, options or index that made it, so no training set contains a prompt of any held-out set.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

enum class ArithmeticFamily : uint8_t { add, subtract, multiply, remainder, gcd, linear, max, mixed };
inline constexpr int kArithmeticFamilies = 8;
const char* arithmetic_family_name(ArithmeticFamily family);
Result<ArithmeticFamily> parse_arithmetic_family(std::string_view name);

// Every character that prompts and solutions use, in ASCII order: an alphabet for ByteTokenizer.
inline constexpr std::string_view kArithmeticAlphabet = "%()*+,-0123456789:;=\\abcdegmox{}";
inline constexpr size_t kMaxArithmeticPrompt = 17;    // bytes
inline constexpr size_t kMaxArithmeticSolution = 52;  // bytes
inline constexpr int kMaxDifficulty = 3;
inline constexpr int64_t kMaxArithmeticItems = 1'000'000;  // of one file; they are made in memory
inline constexpr uint64_t kHeldOutOneIn = 8;

struct ArithmeticOptions {
  uint64_t seed = 0;
  // From 1 (one digit, mostly) to kMaxDifficulty (three digits); each item draws evenly from [min, max].
  int difficulty_min = 1, difficulty_max = kMaxDifficulty;
  std::vector<ArithmeticFamily> families = {};  // drawn evenly; empty means all
  float unboxed_share = 0;                      // of items whose solution stops after the steps, without the boxed answer
};

struct ArithmeticItem {
  std::string id;  // "gcd-1234": family and index
  ArithmeticFamily family = ArithmeticFamily::add;
  int difficulty = 1;
  std::string prompt;
  std::string solution;
  std::string label;
};

Status check_arithmetic_options(const ArithmeticOptions& options);

// Item number `index`, of either split. The options must be valid.
ArithmeticItem make_arithmetic_item(const ArithmeticOptions& options, uint64_t index);

enum class ArithmeticSplit { train, held_out };
ArithmeticSplit arithmetic_split(std::string_view prompt);

// The first `count` items of a split. The held-out set has no prompt twice; training items repeat as they are drawn.
// Fails if the options are wrong or there are fewer distinct prompts than asked for.
Result<std::vector<ArithmeticItem>> make_arithmetic_set(const ArithmeticOptions& options, ArithmeticSplit split, int64_t count);

// JSON lines {"id","prompt","label"} for RL and evaluation, and {"id","prompt","completion"} for supervised training.
Status write_arithmetic_prompts(const std::string& path, std::span<const ArithmeticItem> items);
Status write_arithmetic_examples(const std::string& path, std::span<const ArithmeticItem> items);

}  // namespace lockstep
