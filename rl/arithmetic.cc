#include "rl/arithmetic.h"

#include <xxhash.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "core/rng.h"
#include "io/file.h"
#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

constexpr int kMaxAnswer = 999;

// What a family makes of its random numbers. An answer outside 0..999 or a long solution is drawn again.
struct Problem {
  std::string prompt;
  std::string steps;
  int answer = 0;
};

class Draw {
 public:
  Draw(uint64_t seed, uint64_t index, uint32_t attempt) : rng_(seed, RngPurpose::task, index, attempt) {}
  int between(int low, int high) { return low + static_cast<int>(rng_.below(static_cast<uint32_t>(high - low + 1))); }

 private:
  Philox rng_;
};

void append_step(std::string* steps, const std::string& step) {
  if (!steps->empty()) *steps += ',';
  *steps += step;
}

Problem make_add(Draw& draw, int difficulty) {
  const int limit = difficulty == 1 ? 20 : difficulty == 2 ? 99 : 499;
  const int a = draw.between(0, limit), b = draw.between(0, limit);
  Problem p{fmt::format("{}+{}:", a, b), "", a + b};
  int x = a, y = b, carry = 0;
  do {
    const int sum = x % 10 + y % 10 + carry;
    append_step(&p.steps, fmt::format("{}+{}{}={}", x % 10, y % 10, carry > 0 ? "+1" : "", sum));
    carry = sum / 10;
    x /= 10;
    y /= 10;
  } while (x > 0 || y > 0);
  return p;
}

Problem make_subtract(Draw& draw, int difficulty) {
  const int limit = difficulty == 1 ? 20 : difficulty == 2 ? 99 : 999;
  int a = draw.between(0, limit), b = draw.between(0, limit);
  if (a < b) std::swap(a, b);
  Problem p{fmt::format("{}-{}:", a, b), "", a - b};
  int x = a, y = b, borrow = 0;
  do {
    const int difference = x % 10 - y % 10 - borrow;
    append_step(&p.steps, fmt::format("{}-{}{}={}", x % 10, y % 10, borrow > 0 ? "-1" : "", difference));
    borrow = difference < 0;
    x /= 10;
    y /= 10;
  } while (x > 0);
  return p;
}

Problem make_multiply(Draw& draw, int difficulty) {
  if (difficulty == 3) {  // two digits each: the ones and the tens of the left number, each times the right one
    const int a = draw.between(11, 49), b = draw.between(11, 20);
    return {fmt::format("{}*{}:", a, b), fmt::format("{}+{}={}", a % 10 * b, a / 10 * 10 * b, a * b), a * b};
  }
  const int a = difficulty == 1 ? draw.between(0, 9) : draw.between(10, 99);
  const int b = difficulty == 1 ? draw.between(0, 9) : draw.between(2, 9);
  Problem p{fmt::format("{}*{}:", a, b), "", a * b};
  int x = a, carry = 0;
  do {
    const int product = x % 10 * b + carry;
    append_step(&p.steps, fmt::format("{}*{}{}={}", x % 10, b, carry > 0 ? fmt::format("+{}", carry) : "", product));
    carry = product / 10;
    x /= 10;
  } while (x > 0);
  return p;
}

Problem make_remainder(Draw& draw, int difficulty) {
  const int a = difficulty == 1 ? draw.between(0, 30) : difficulty == 2 ? draw.between(10, 199) : draw.between(100, 999);
  const int b = draw.between(2, difficulty == 3 ? 12 : 9);
  Problem p{fmt::format("{}%{}:", a, b), "", a % b};
  int rest = 0;
  for (const char digit : std::to_string(a)) {  // long division
    const int x = rest * 10 + (digit - '0');
    rest = x % b;
    append_step(&p.steps, fmt::format("{}%{}={}", x, b, rest));
  }
  return p;
}

Problem make_gcd(Draw& draw, int difficulty) {
  // A common factor is drawn first: two random numbers would have none most of the time.
  const int limit = difficulty == 1 ? 5 : difficulty == 2 ? 9 : 15;
  const int factor = draw.between(1, difficulty == 3 ? 20 : 9);
  const int a = factor * draw.between(1, limit), b = factor * draw.between(1, limit);
  Problem p{fmt::format("gcd({},{}):", a, b), "", std::gcd(a, b)};
  for (int x = a, y = b; y != 0;) {
    append_step(&p.steps, fmt::format("{}%{}={}", x, y, x % y));
    x = std::exchange(y, x % y);
  }
  return p;
}

Problem make_linear(Draw& draw, int difficulty) {
  const int a = draw.between(2, difficulty == 1 ? 5 : 9);
  const int x = draw.between(0, difficulty == 1 ? 9 : difficulty == 2 ? 20 : 99);
  const int b = draw.between(1, difficulty == 1 ? 9 : difficulty == 2 ? 50 : 99);
  const bool minus = difficulty > 1 && draw.between(0, 1) == 1 && a * x >= b;
  const int right = minus ? a * x - b : a * x + b;
  return {fmt::format("{}x{}{}={}:", a, minus ? '-' : '+', b, right),
          fmt::format("{}{}{}={},{}={}*{}", right, minus ? '+' : '-', b, a * x, a * x, a, x), x};
}

Problem make_max(Draw& draw, int difficulty) {
  const int limit = difficulty == 1 ? 9 : difficulty == 2 ? 99 : 999;
  const int a = draw.between(0, limit), b = draw.between(0, limit), c = draw.between(0, limit);
  const int ab = std::max(a, b), abc = std::max(ab, c);
  return {fmt::format("max({},{},{}):", a, b, c), fmt::format("{},{},{}", a, ab, abc), abc};
}

Problem make_mixed(Draw& draw, int difficulty) {
  const int a = draw.between(0, difficulty == 1 ? 9 : difficulty == 2 ? 99 : 299);
  const int b = difficulty == 1 ? draw.between(0, 5) : difficulty == 2 ? draw.between(2, 9) : draw.between(10, 49);
  const int c = difficulty == 1 ? draw.between(0, 5) : draw.between(2, 9);
  return {fmt::format("{}+{}*{}:", a, b, c), fmt::format("{}*{}={},{}+{}={}", b, c, b * c, a, b * c, a + b * c), a + b * c};
}

Problem make_problem(ArithmeticFamily family, Draw& draw, int difficulty) {
  switch (family) {
    case ArithmeticFamily::add: return make_add(draw, difficulty);
    case ArithmeticFamily::subtract: return make_subtract(draw, difficulty);
    case ArithmeticFamily::multiply: return make_multiply(draw, difficulty);
    case ArithmeticFamily::remainder: return make_remainder(draw, difficulty);
    case ArithmeticFamily::gcd: return make_gcd(draw, difficulty);
    case ArithmeticFamily::linear: return make_linear(draw, difficulty);
    case ArithmeticFamily::max: return make_max(draw, difficulty);
    case ArithmeticFamily::mixed: return make_mixed(draw, difficulty);
  }
  CHECK(false, "family {}", static_cast<int>(family));
  return {};
}

Status write_rows(const std::string& path, std::span<const ArithmeticItem> items, const char* key,
                  std::string ArithmeticItem::*text) {
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file) return file.status();
  for (const ArithmeticItem& item : items)
    LOCKSTEP_RETURN_IF_ERROR(
        file.value().write(JsonLine().add("id", item.id).add("prompt", item.prompt).add(key, item.*text).str() + "\n"));
  return file.value().commit();
}

}  // namespace

const char* arithmetic_family_name(ArithmeticFamily family) {
  switch (family) {
    case ArithmeticFamily::add: return "add";
    case ArithmeticFamily::subtract: return "subtract";
    case ArithmeticFamily::multiply: return "multiply";
    case ArithmeticFamily::remainder: return "remainder";
    case ArithmeticFamily::gcd: return "gcd";
    case ArithmeticFamily::linear: return "linear";
    case ArithmeticFamily::max: return "max";
    case ArithmeticFamily::mixed: return "mixed";
  }
  return "?";
}

Result<ArithmeticFamily> parse_arithmetic_family(std::string_view name) {
  std::string known;
  for (int i = 0; i < kArithmeticFamilies; ++i) {
    const ArithmeticFamily family = static_cast<ArithmeticFamily>(i);
    if (name == arithmetic_family_name(family)) return family;
    known += std::string(i ? ", " : "") + arithmetic_family_name(family);
  }
  return errorf("{} is not a family of problems; there are {}", in_quotes(name), known);
}

Status check_arithmetic_options(const ArithmeticOptions& options) {
  if (options.difficulty_min < 1 || options.difficulty_max > kMaxDifficulty || options.difficulty_min > options.difficulty_max)
    return errorf("difficulties from {} to {}; they go from 1 to {}", options.difficulty_min, options.difficulty_max,
                  kMaxDifficulty);
  if (!(options.unboxed_share >= 0 && options.unboxed_share <= 1))
    return errorf("a share of {} solutions without their box; it goes from 0 to 1", options.unboxed_share);
  return Status::ok();
}

ArithmeticItem make_arithmetic_item(const ArithmeticOptions& options, uint64_t index) {
  const Status valid = check_arithmetic_options(options);
  CHECK(valid.is_ok(), "{}", valid.message());
  // Only Euclid's chains are ever too long, and few of them: no index comes near this many attempts.
  constexpr uint32_t kAttempts = 1000;
  for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
    Draw draw(options.seed, index, attempt);
    ArithmeticItem item;
    item.family = options.families.empty()
                      ? static_cast<ArithmeticFamily>(draw.between(0, kArithmeticFamilies - 1))
                      : options.families[static_cast<size_t>(draw.between(0, static_cast<int>(options.families.size()) - 1))];
    item.difficulty = draw.between(options.difficulty_min, options.difficulty_max);
    Problem problem = make_problem(item.family, draw, item.difficulty);
    item.solution = fmt::format("{};\\boxed{{{}}}", problem.steps, problem.answer);
    if (problem.answer < 0 || problem.answer > kMaxAnswer || problem.prompt.size() > kMaxArithmeticPrompt ||
        item.solution.size() > kMaxArithmeticSolution)
      continue;
    // Drawn apart and after the length was judged, so that the problems are the same whatever the share.
    const bool unboxed = uniform_open(philox(options.seed, RngPurpose::task, index, kAttempts, 0)[0]) < options.unboxed_share;
    if (unboxed) item.solution = problem.steps;
    item.id = fmt::format("{}-{}", arithmetic_family_name(item.family), index);
    item.prompt = std::move(problem.prompt);
    item.label = std::to_string(problem.answer);
    return item;
  }
  CHECK(false, "no problem fits at index {} of seed {}", index, options.seed);
  return {};
}

ArithmeticSplit arithmetic_split(std::string_view prompt) {
  const bool held_out = XXH64(prompt.data(), prompt.size(), 0) % kHeldOutOneIn == 0;
  return held_out ? ArithmeticSplit::held_out : ArithmeticSplit::train;
}

Result<std::vector<ArithmeticItem>> make_arithmetic_set(const ArithmeticOptions& options, ArithmeticSplit split, int64_t count) {
  LOCKSTEP_RETURN_IF_ERROR(check_arithmetic_options(options));
  constexpr uint64_t kPatience = 20000;  // indices in a row without a new item: the prompts are used up
  std::vector<ArithmeticItem> items;
  std::unordered_set<std::string> seen;
  uint64_t last = 0;
  for (uint64_t index = 0; static_cast<int64_t>(items.size()) < count; ++index) {
    if (index - last > kPatience)
      return errorf("{} distinct {} problems were asked for, there are about {}; ask for fewer, or allow more families or "
                    "difficulties",
                    count, split == ArithmeticSplit::train ? "training" : "held-out", items.size());
    ArithmeticItem item = make_arithmetic_item(options, index);
    if (arithmetic_split(item.prompt) != split) continue;
    if (split == ArithmeticSplit::held_out && !seen.insert(item.prompt).second) continue;
    last = index;
    items.push_back(std::move(item));
  }
  return items;
}

Status write_arithmetic_prompts(const std::string& path, std::span<const ArithmeticItem> items) {
  return write_rows(path, items, "label", &ArithmeticItem::label);
}

Status write_arithmetic_examples(const std::string& path, std::span<const ArithmeticItem> items) {
  return write_rows(path, items, "completion", &ArithmeticItem::solution);
}

}  // namespace lockstep
