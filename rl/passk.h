#pragma once
// What n samples a problem say about a policy: pass@k, majority votes, and how far chance alone moves the mean.

#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

// The chance that at least one of k samples, drawn without replacement from n of which c are correct, is correct:
// 1 - C(n - c, k) / C(n, k) (Chen et al. 2021). REQUIRES 0 <= c <= n and 1 <= k <= n.
double pass_at_k(int64_t n, int64_t c, int64_t k);

// The mean over problems, all with n samples; correct[q] of them right. 0 without problems.
double mean_pass_at_k(std::span<const int64_t> correct, int64_t n, int64_t k);

// Index of the first sample that gives the most frequent answer; ties go to the answer that came first. Empty answers (no
// box) do not vote; -1 if there is no other. Answers are compared as text: pass normalised ones (RewardResult::pred).
int64_t majority_vote(std::span<const std::string> answers);

// Standard error of the mean accuracy that sampling alone causes: sqrt(sum of p (1 - p) / n) / problems, p = correct / n.
double sampling_standard_error(std::span<const int64_t> correct, int64_t n);

}  // namespace lockstep
