#pragma once
// Which rank steps which parameters (ZeRO-1, Rajbhandari et al. 2020). Ranks that hold the same parameters, the dp group for dense ones and the expert
// replicas for experts, cut the run of their gradients into parts, one a rank: masters and moments exist for a rank's own part alone.
//
// Parts are nearly equal and cut between rows, so that what a rank owns of a tensor is a Box of it: a Piece. Alone, pieces are whole tensors and nothing
// is copied.

#include <algorithm>
#include <span>
#include <vector>

#include "model/weights.h"
#include "parallel/groups.h"

namespace lockstep {

struct Piece {
  int id = 0;      // of the tensor
  Range rows;      // of the shard's part of it, seen as a matrix
  Range elements;  // the same numbers in the shard's part
  Range flat;      // and in the run
  Box box;         // and in the whole tensor
};

// A run of gradients (Gradients::dense or experts) in parts.
struct CutRun {
  std::vector<Range> parts;                 // of the run; padding belongs to either side
  std::vector<std::vector<Piece>> pieces;  // of each part, in order
};
// `begin`: by id, where the tensors lie in a run of `length`; -1: not in it.
CutRun cut_run(const std::vector<TensorSpec>& table, std::span<const int64_t> begin, int64_t length, int parts);
CutRun cut_run(const std::vector<TensorSpec>& table, const TensorSet& gradients, ConstTensorView run, int parts);

// Whether a tensor's numbers on this tp index are copies of those on tp index 0. Copies are neither counted nor saved.
bool is_copy(const TensorSpec& spec, int tp_index);

class Partition {
 public:
  // Both outlive the partition. groups == nullptr: alone.
  Partition(const Gradients& gradients, Groups* groups);

  const std::vector<Piece>& own() const { return own_; }  // by id
  TensorView gradient(const Piece& piece) const;          // [rows, columns]
  // One rank of those that hold a tensor saves what all of them have, like masters of frozen tensors.
  bool saves(const TensorSpec& spec) const;
  bool counts(const TensorSpec& spec) const { return !is_copy(spec, tp_index_); }

  // Gradients of own pieces become the sums over all ranks that hold them, in rank order. Elsewhere they stay this rank's.
  void sum_gradients(Context& c) const;
  // All ranks have written their own pieces into the rows of `weights`: gives them to all, but for tensors that are quantised. At most kBucketBytes are on their way at a time.
  void share_rows(Context& c, Weights& weights) const;

  // The whole of a tensor's master in this shard, from the pieces of all ranks that hold it: what blocks of rows are quantised from. `own` is this rank's
  // piece, empty if it has none. All ranks call it, for the same tensors in the same order. Alone it is `own`; otherwise in the workspace, which the caller's
  // scope releases.
  ConstTensorView gather_master(Context& c, int id, ConstTensorView own) const;

  static constexpr int64_t kBucketBytes = int64_t{4} << 20;
  // Elements of each part that share_rows gives away in a round.
  static constexpr int64_t round_elements(int ranks) { return std::max<int64_t>(1, kBucketBytes / static_cast<int64_t>(sizeof(float)) / ranks); }

 private:
  struct Run {
    TensorView gradients;  // [n]
    RankGroup* ranks;      // null: alone
    CutRun cut;
  };
  void share_run(Context& c, Weights& weights, const Run& run) const;

  const std::vector<TensorSpec>& table_;
  Run dense_, experts_;
  int tp_index_ = 0, dense_index_ = 0, expert_index_ = 0;
  std::vector<Piece> own_;
};

}  // namespace lockstep
