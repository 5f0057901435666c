#pragma once
// One rank's part of a plan, in buckets: what it sends, receives and keeps, in which order. Pure.

#include <cstdint>
#include <vector>

#include "sync/plan.h"

namespace lockstep {

struct Route {
  // Rows of a copy's box that travel together.
  struct Piece {
    size_t copy;
    Range rows;  // of the tensor
  };
  struct Bucket {
    std::vector<Piece> local;            // within this rank
    std::vector<Piece> sends, receives;  // by the other rank; between two ranks in the same order
    std::vector<int64_t> send_bytes, receive_bytes;  // by rank; as planned, which a delta falls short of
  };
  SyncPlan plan;
  std::vector<Bucket> buckets;
  int64_t exchanges = 0;                     // as many buckets, the first, are exchanged by all ranks; further ones are local
  int64_t moved_bytes = 0, local_bytes = 0;  // of all ranks
};

// `bucket_bytes`: at most so many are sent, received or kept by a rank in a bucket. REQUIRES: a row of a copy fits.
Route make_route(SyncPlan plan, int rank, int64_t bucket_bytes);

}  // namespace lockstep
