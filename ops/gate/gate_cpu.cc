#include "ops/gate/gate_cpu.h"

#include <algorithm>

#include "ops/fixed_math.h"
#include "ops/gate/gate.h"

namespace lockstep::reference {

namespace {

constexpr float kSumFloor = 1e-20f;

// Rough costs per score and per slot for parallel_for.
constexpr int64_t kScoreCost = 12, kSlotCost = 60;

void sort_ascending(int32_t* ids, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const int32_t id = ids[i];
    int64_t j = i;
    for (; j > 0 && ids[j - 1] > id; --j) ids[j] = ids[j - 1];
    ids[j] = id;
  }
}

// The ids of the k largest key[e] = s[e] + bias[e], ascending. Candidates come in ascending id and replace only a strictly
// smaller key, so ties go to the lower id; keys that are NaN lose to every number and still leave k valid ids.
void select_top(int32_t* ids, int64_t k, const float* s, const float* bias, int64_t experts) {
  float best[kMaxExpertsPerToken];  // descending, beside ids
  int64_t kept = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float key = bias == nullptr ? s[e] : s[e] + bias[e];
    if (kept == k && !(key > best[k - 1])) continue;
    int64_t j = kept < k ? kept++ : k - 1;
    for (; j > 0 && key > best[j - 1]; --j) {
      best[j] = best[j - 1];
      ids[j] = ids[j - 1];
    }
    best[j] = key;
    ids[j] = static_cast<int32_t>(e);
  }
  sort_ascending(ids, k);
}

// weight[i] from the scores s[i] of the chosen slots.
void normalise(float* weight, const float* s, int64_t k, float factor) {
  float sum = 0.0f;
  for (int64_t i = 0; i < k; ++i) sum += s[i];
  for (int64_t i = 0; i < k; ++i) weight[i] = s[i] / (sum + kSumFloor) * factor;
}

}  // namespace

void score_row(float* s, const float* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) s[i] = sqrtsoftplus_f32(z[i]);
}

void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor,
                  ScoreRow score) {
  const int64_t experts = z.dim(1), k = ids.dim(1);
  const float* b = bias.empty() ? nullptr : bias.ptr<float>();
  parallel_for(c, z.rows(), experts * kScoreCost, [&](int64_t begin, int64_t end, int) {
    float s[kMaxExperts], chosen[kMaxExpertsPerToken];
    for (int64_t t = begin; t < end; ++t) {
      score(s, z.row<float>(t), experts);
      int32_t* id = ids.row<int32_t>(t);
      select_top(id, k, s, b, experts);
      for (int64_t i = 0; i < k; ++i) chosen[i] = s[id[i]];
      normalise(weight.row<float>(t), chosen, k, factor);
    }
  });
}

void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens,
                  ConstTensorView table, float factor) {
  const int64_t experts = z.dim(1), k = ids.dim(1), vocab = table.rows();
  parallel_for(c, z.rows(), k * kSlotCost, [&](int64_t begin, int64_t end, int) {
    float chosen[kMaxExpertsPerToken];
    for (int64_t t = begin; t < end; ++t) {
      const int32_t token = *tokens.row<int32_t>(t);
      CHECK(token >= 0 && token < vocab, "route_hashed: token {} in row {}, the table has {} rows", token, t, vocab);
      int32_t* id = ids.row<int32_t>(t);
      std::copy_n(table.row<int32_t>(token), k, id);
      sort_ascending(id, k);
      CHECK(id[0] >= 0 && id[k - 1] < experts, "route_hashed: token {} goes to experts {} to {} of {}", token, id[0], id[k - 1],
            experts);
      for (int64_t i = 0; i < k; ++i) chosen[i] = sqrtsoftplus_f32(z.row<float>(t)[id[i]]);
      normalise(weight.row<float>(t), chosen, k, factor);
    }
  });
}

void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z, float factor) {
  const int64_t experts = z.dim(1), k = ids.dim(1);
  parallel_for(c, z.rows(), k * kSlotCost + experts / 8, [&](int64_t begin, int64_t end, int) {
    float s[kMaxExpertsPerToken];
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* id = ids.row<int32_t>(t);
      const float* zt = z.row<float>(t);
      const float* dw = dweight.row<float>(t);
      float* out = dz.row<float>(t);
      std::fill_n(out, experts, 0.0f);
      float sum = 0.0f, dot = 0.0f;
      for (int64_t i = 0; i < k; ++i) {
        CHECK(id[i] >= 0 && id[i] < experts, "route_backward: expert {} in row {} of {} experts", id[i], t, experts);
        s[i] = sqrtsoftplus_f32(zt[id[i]]);
        sum += s[i];
        dot += dw[i] * s[i];
      }
      sum += kSumFloor;
      for (int64_t i = 0; i < k; ++i) {
        if (s[i] == 0.0f) continue;
        const float ds = factor / sum * (dw[i] - dot / sum);
        out[id[i]] += ds * sigmoid_f32(zt[id[i]]) / (2.0f * s[i]);
      }
    }
  });
}

}  // namespace lockstep::reference
