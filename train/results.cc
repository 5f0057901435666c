#include "train/results.h"

#include <cstring>
#include <numeric>
#include <type_traits>

namespace lockstep {

namespace {

// [sum of rows, width], the rows of one dp index behind those of the one before; `fill` writes this rank's own, if it has any.
template <typename T, typename Fill>
const T* gather(Context& c, Groups& groups, Arena& scratch, DType dtype, std::span<const int64_t> rows_by_dp, int64_t width, Purpose p, Fill fill) {
  const Layout& layout = groups.grid.layout();
  std::vector<int64_t> rows(static_cast<size_t>(groups.grid.ranks()), 0);
  for (int d = 0; d < layout.dp; ++d)
    rows[static_cast<size_t>(groups.grid.rank_of({.tp = 0, .pp = layout.pp - 1, .dp = d}))] = rows_by_dp[static_cast<size_t>(d)];
  const int64_t own_rows = rows[static_cast<size_t>(groups.rank)];
  const TensorView all = scratch.tensor(dtype, {std::accumulate(rows.begin(), rows.end(), int64_t{0}), width}, "results of all ranks");
  T* own = all.ptr<T>() + std::accumulate(rows.begin(), rows.begin() + groups.rank, int64_t{0}) * width;
  if (own_rows > 0) fill(own);
  Context host = c.on_host();
  groups.all->all_gather(host, all, TensorView(own, dtype, {own_rows, width}), rows, p);
  return all.ptr<T>();
}

}  // namespace

void gather_logprobs(Context& c, Groups& groups, Arena& scratch, std::span<const TrainSample> samples, const Work& work,
                     std::span<TokenLogprobs> results) {
  const ArenaScope scope(scratch);
  std::vector<int64_t> rows;
  for (const std::vector<int32_t>& share : work.shares) {
    rows.push_back(0);
    for (const int32_t i : share) rows.back() += samples[i].response_length();
  }
  const float* from = gather<float>(c, groups, scratch, DType::f32, rows, 2, "log-probs", [&](float* own) {
    for (const int32_t i : work.shares[static_cast<size_t>(groups.dp.rank())]) {
      for (size_t t = 0; t < results[i].logprob.size(); ++t) {
        *own++ = results[i].logprob[t];
        *own++ = results[i].entropy[t];
      }
    }
  });
  for (const std::vector<int32_t>& share : work.shares) {
    for (const int32_t i : share) {
      const auto n = static_cast<size_t>(samples[i].response_length());
      results[i].logprob.resize(n);
      results[i].entropy.resize(n);
      for (size_t t = 0; t < n; ++t) {
        results[i].logprob[t] = *from++;
        results[i].entropy[t] = *from++;
      }
    }
  }
}

void gather_sums(Context& c, Groups& groups, Arena& scratch, const Work& work, std::span<LossSums> sums) {
  constexpr int64_t kWidth = sizeof(LossSums) / sizeof(double);
  static_assert(sizeof(LossSums) == kWidth * sizeof(double) && std::is_trivially_copyable_v<LossSums>);
  const ArenaScope scope(scratch);
  std::vector<int64_t> rows;
  for (const std::vector<int32_t>& share : work.shares) rows.push_back(static_cast<int64_t>(share.size()));
  const double* from = gather<double>(c, groups, scratch, DType::f64, rows, kWidth, "loss sums", [&](double* own) {
    for (const int32_t i : work.shares[static_cast<size_t>(groups.dp.rank())]) {
      std::memcpy(own, &sums[i], sizeof(LossSums));
      own += kWidth;
    }
  });
  for (const std::vector<int32_t>& share : work.shares) {
    for (const int32_t i : share) {
      std::memcpy(static_cast<void*>(&sums[i]), from, sizeof(LossSums));
      from += kWidth;
    }
  }
}

}  // namespace lockstep
