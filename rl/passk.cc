#include "rl/passk.h"

#include <cmath>
#include <unordered_map>

#include "core/status.h"

namespace lockstep {

double pass_at_k(int64_t n, int64_t c, int64_t k) {
  CHECK(c >= 0 && c <= n && k >= 1 && k <= n, "pass@{} of {} correct among {}", k, c, n);
  if (n - c < k) return 1.0;
  // C(n - c, k) / C(n, k) as a product of c factors, none of which overflows.
  double miss = 1.0;
  for (int64_t i = n - c + 1; i <= n; ++i) miss *= 1.0 - static_cast<double>(k) / static_cast<double>(i);
  return 1.0 - miss;
}

double mean_pass_at_k(std::span<const int64_t> correct, int64_t n, int64_t k) {
  double sum = 0;
  for (const int64_t c : correct) sum += pass_at_k(n, c, k);
  return correct.empty() ? 0 : sum / static_cast<double>(correct.size());
}

int64_t majority_vote(std::span<const std::string> answers) {
  std::unordered_map<std::string, int64_t> votes;
  for (const std::string& answer : answers)
    if (!answer.empty()) ++votes[answer];
  int64_t best = -1, best_votes = 0;
  for (size_t i = 0; i < answers.size(); ++i) {  // in order of first appearance, so a tie keeps the earlier answer
    if (answers[i].empty()) continue;
    const int64_t n = votes[answers[i]];
    if (n > best_votes) {
      best = static_cast<int64_t>(i);
      best_votes = n;
    }
  }
  return best;
}

double sampling_standard_error(std::span<const int64_t> correct, int64_t n) {
  CHECK_GE(n, 1);
  double variance = 0;
  for (const int64_t c : correct) {
    const double p = static_cast<double>(c) / static_cast<double>(n);
    variance += p * (1 - p) / static_cast<double>(n);
  }
  return correct.empty() ? 0 : std::sqrt(variance) / static_cast<double>(correct.size());
}

}  // namespace lockstep
