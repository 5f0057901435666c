#pragma once
// Internal to ops/compressor: the two CPU implementations and what they share, where the slots of an entry are. device: on the GPU,
// compressor_gpu.cu, with the same bits.

#include <algorithm>

#include "ops/compressor/compressor.h"

namespace lockstep {

// The projection rows of one entry's tokens, in slot order. Slot j reads half `half(j)` of its row; absent slots (the previous
// group of entry 0) are skipped: slots run from first_slot to num_slots - 1.
class EntrySlots {
 public:
  EntrySlots(ConstTensorView proj, ConstTensorView ring, const EntryView& entries, const SequenceView& seq,
             const CompressorShape& shape)
      : proj_(proj.ptr<float>()), proj_stride_(proj.row_stride), ring_rows_(shape.ring_rows()), width_(shape.proj_width()),
        ratio_(shape.ratio), entry_seq_(entries.seq.ptr<int32_t>()), entry_idx_(entries.idx.ptr<int32_t>()),
        seq_row_(seq.seq_row.ptr<int32_t>()), seq_pos_(seq.seq_pos.ptr<int32_t>()), seq_slot_(seq.seq_slot.ptr<int32_t>()) {
    if (ring.data != nullptr) ring_ = ring.ptr<float>(), slot_stride_ = ring.row_stride;
  }
  void select(int64_t e) {
    const int64_t s = entry_seq_[e];
    first_pos_ = (entry_idx_[e] + 1) * ratio_ - ring_rows_;  // of slot 0; negative: the slots before position 0 are absent
    const int64_t ahead = first_pos_ - seq_pos_[s];
    num_in_ring_ = std::clamp<int64_t>(-ahead, 0, ring_rows_);
    call_row_ = seq_row_[s] + ahead;
    slot_ring_ = ring_ == nullptr || seq_slot_[s] < 0 ? nullptr : ring_ + seq_slot_[s] * slot_stride_;
    ring_at_ = (first_pos_ + ring_rows_) % ring_rows_;
  }
  int64_t first_slot() const { return std::max<int64_t>(0, -first_pos_); }
  int64_t num_slots() const { return ring_rows_; }
  int64_t half(int64_t j) const { return j / ratio_; }
  int64_t call_row(int64_t j) const { return call_row_ + j; }  // packed row of slot j, when it is not in the ring
  const float* row(int64_t j) const {
    if (j >= num_in_ring_) return proj_ + (call_row_ + j) * proj_stride_;
    const int64_t at = ring_at_ + j;
    return slot_ring_ + (at >= ring_rows_ ? at - ring_rows_ : at) * width_;
  }

 private:
  const float* proj_;
  const float* ring_ = nullptr;
  const float* slot_ring_ = nullptr;
  int64_t proj_stride_, slot_stride_ = 0, ring_rows_, width_, ratio_;
  const int32_t *entry_seq_, *entry_idx_, *seq_row_, *seq_pos_, *seq_slot_;
  int64_t first_pos_ = 0, num_in_ring_ = 0, call_row_ = 0, ring_at_ = 0;
};

namespace reference {
void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
}  // namespace reference

namespace simd {
void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
}  // namespace simd

namespace device {
void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape);
}  // namespace device

}  // namespace lockstep
