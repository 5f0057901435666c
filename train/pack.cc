#include "train/pack.h"

#include <algorithm>
#include <numeric>

#include "core/status.h"

namespace lockstep {

std::vector<MicroBatch> pack(std::span<const int64_t> rows, int64_t max_rows) {
  CHECK_GT(max_rows, 0);
  std::vector<int32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[a] > rows[b]; });

  std::vector<MicroBatch> batches;
  size_t first_open = 0;  // batches before it are full to the last row, which long lists of equal lengths make common
  for (const int32_t i : order) {
    CHECK_GE(rows[i], 0);
    while (first_open < batches.size() && batches[first_open].rows >= max_rows) ++first_open;
    size_t b = first_open;
    while (b < batches.size() && batches[b].rows + rows[i] > max_rows) ++b;
    if (b == batches.size()) batches.emplace_back();
    batches[b].samples.push_back(i);
    batches[b].rows += rows[i];
  }
  for (MicroBatch& b : batches) std::sort(b.samples.begin(), b.samples.end());
  return batches;
}

std::vector<std::vector<int32_t>> share_out(std::span<const int64_t> rows, int parts) {
  CHECK_GT(parts, 0);
  std::vector<int32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[a] > rows[b]; });
  std::vector<std::vector<int32_t>> shares(static_cast<size_t>(parts));
  std::vector<int64_t> load(shares.size(), 0);
  for (const int32_t i : order) {
    const auto lightest = std::min_element(load.begin(), load.end());
    *lightest += rows[i];
    shares[static_cast<size_t>(lightest - load.begin())].push_back(i);
  }
  for (std::vector<int32_t>& share : shares) std::sort(share.begin(), share.end());
  return shares;
}

std::vector<int32_t> canonical_order(std::span<const TrainSample> samples) {
  std::vector<int32_t> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return samples[a].index < samples[b].index; });
  return order;
}

Work plan_work(std::span<const TrainSample> samples, std::span<const int32_t> chosen, int parts, int part, int64_t max_rows) {
  const auto lengths = [&](std::span<const int32_t> places) {
    std::vector<int64_t> rows;
    rows.reserve(places.size());
    for (const int32_t i : places) rows.push_back(trained_rows(samples[i]));
    return rows;
  };
  Work work;
  work.shares = share_out(lengths(chosen), parts);
  size_t most = 0;
  for (int p = 0; p < parts; ++p) {
    std::vector<int32_t>& share = work.shares[static_cast<size_t>(p)];
    for (int32_t& i : share) i = chosen[i];
    std::vector<MicroBatch> packed = pack(lengths(share), max_rows);
    work.total += static_cast<int64_t>(packed.size());
    most = std::max(most, packed.size());
    if (p != part) continue;
    for (MicroBatch& m : packed)
      for (int32_t& i : m.samples) i = share[i];
    work.micro_batches = std::move(packed);
  }
  work.micro_batches.resize(most);
  return work;
}

}  // namespace lockstep
