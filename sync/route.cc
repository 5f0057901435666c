#include "sync/route.h"

#include <algorithm>
#include <utility>

namespace lockstep {

namespace {

// Pieces that stay within a rank are converted, looked at and stored one after the other: they should still be in the cache.
constexpr int64_t kLocalPieceBytes = int64_t{256} << 10;

void add_local(Route& route, size_t copy, int64_t bucket_bytes, int64_t& bucket, int64_t& filled) {
  const Copy& c = route.plan.copies[copy];
  const int64_t row_bytes = route.plan.row_bytes(c), at_once = std::max<int64_t>(1, std::min(bucket_bytes, kLocalPieceBytes) / row_bytes);
  CHECK(row_bytes <= bucket_bytes, "a bucket of {} bytes for rows of {}", bucket_bytes, row_bytes);
  for (int64_t row = c.box.rows.begin; row < c.box.rows.end; row += at_once) {
    const Range rows = {row, std::min(row + at_once, c.box.rows.end)};
    if (filled + rows.size() * row_bytes > bucket_bytes) ++bucket, filled = 0;
    filled += rows.size() * row_bytes;
    if (bucket == static_cast<int64_t>(route.buckets.size())) route.buckets.emplace_back();
    route.buckets[static_cast<size_t>(bucket)].local.push_back({copy, rows});
  }
}

}  // namespace

Route make_route(SyncPlan plan, int rank, int64_t bucket_bytes) {
  Route route{.plan = std::move(plan), .buckets = {}};
  const std::vector<Copy>& copies = route.plan.copies;
  const auto ranks = static_cast<size_t>(route.plan.ranks);
  // All ranks compute the same exchanges.
  route.exchanges = cut_into_rounds(route.plan, bucket_bytes, [&](int64_t at, size_t i, const Range& rows) {
    if (at == static_cast<int64_t>(route.buckets.size())) route.buckets.push_back({{}, {}, {}, std::vector<int64_t>(ranks), std::vector<int64_t>(ranks)});
    Route::Bucket& bucket = route.buckets.back();
    const Copy& copy = copies[i];
    const int64_t bytes = rows.size() * route.plan.row_bytes(copy);
    if (copy.from == rank) {
      bucket.sends.push_back({i, rows});
      bucket.send_bytes[static_cast<size_t>(copy.to)] += bytes;
    }
    if (copy.to == rank) {
      bucket.receives.push_back({i, rows});
      bucket.receive_bytes[static_cast<size_t>(copy.from)] += bytes;
    }
  });
  for (Route::Bucket& bucket : route.buckets) {
    // The exchange has a rank's rows by the other rank.
    std::stable_sort(bucket.sends.begin(), bucket.sends.end(), [&](const Route::Piece& a, const Route::Piece& b) { return copies[a.copy].to < copies[b.copy].to; });
    std::stable_sort(bucket.receives.begin(), bucket.receives.end(),
                     [&](const Route::Piece& a, const Route::Piece& b) { return copies[a.copy].from < copies[b.copy].from; });
  }
  int64_t bucket = 0, filled = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    (copies[i].local() ? route.local_bytes : route.moved_bytes) += route.plan.bytes(copies[i]);
    if (copies[i].local() && copies[i].to == rank) add_local(route, i, bucket_bytes, bucket, filled);
  }
  return route;
}

}  // namespace lockstep
