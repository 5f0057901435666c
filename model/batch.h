#pragma once
// SequenceBatch: which tokens of which sequences one call of the model runs, as packed rows. Contents, not modes: one new token
// a sequence is decoding, a chunk is prefill, a whole sequence from position 0 is training.

#include <span>
#include <vector>

#include "core/arena.h"
#include "model/config.h"
#include "ops/sequence/sequence.h"

namespace lockstep {

// One sequence's part of a call.
struct SequenceRows {
  std::span<const int32_t> tokens;  // new tokens, at least one
  int64_t first_position = 0;       // position of tokens[0]
  int32_t slot = -1;                // state slot; -1: whole sequence from position 0, rings not kept
  std::span<const int32_t> pages;   // page ids covering positions 0 .. first_position + tokens.size() - 1; may be empty without compression
};

// Packed form in an arena; valid until the arena's mark is released. Everything the ops need to know about a call.
struct SequenceBatch {
  SequenceView seq;
  ConstTensorView tokens;           // [T] i32
  ConstTensorView wanted;           // [R] i32 rows whose final hidden state is returned; empty: all T
  std::vector<EntryView> entries;   // by layer; empty for window-only layers (shared between layers of one ratio)
  int64_t num_wanted() const { return wanted.empty() ? seq.num_tokens : wanted.rows(); }
};

enum class WantedRows { all, last_of_each };

// Storage that a caller keeps, so that building a batch in steady state allocates nothing.
class BatchBuilder {
 public:
  BatchBuilder(const ModelConfig& config, int64_t page_tokens);
  // Checks token ids and positions (CHECK), packs `rows` into `arena`. The result is overwritten by the next build.
  const SequenceBatch& build(Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted);
  // The same for an arena of c's device: to the GPU it goes as one copy. With `longest`, which no position reaches, and a token for each sequence, on the GPU, the shape of
  // what is built depends on `longest`, the number of rows and which ratios have entries alone: the page table is as wide as `longest` may need, and entries, where there are any,
  // are padded to one for each sequence.
  const SequenceBatch& build(Context& c, Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted, int64_t longest = 0);
  int64_t page_tokens() const { return page_tokens_; }

 private:
  const SequenceBatch& build(Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted, int64_t padded_longest);

  const ModelConfig& config_;
  int64_t page_tokens_;
  SequenceBatch batch_;
};

}  // namespace lockstep
