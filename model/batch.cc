#include "model/batch.h"

#include "core/device.h"

namespace lockstep {

namespace {

// A view over `arena` memory being filled as i32.
struct IntBuilder {
  IntBuilder(Arena& arena, int64_t n, const char* name) : view(arena.tensor(DType::i32, {n}, name)), p(view.ptr<int32_t>()) {}
  TensorView view;
  int32_t* p;
};

}  // namespace

BatchBuilder::BatchBuilder(const ModelConfig& config, int64_t page_tokens) : config_(config), page_tokens_(page_tokens) {
  batch_.entries.resize(static_cast<size_t>(config.num_layers()));
}

const SequenceBatch& BatchBuilder::build(Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted) { return build(arena, rows, wanted, 0); }

const SequenceBatch& BatchBuilder::build(Context& c, Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted, int64_t longest) {
  CHECK(longest == 0 || c.on_gpu(), "a batch for positions below {} is padded for the CPU, whose ops take none", longest);
  if (!c.on_gpu()) return build(arena, rows, wanted);
  // All arrays lie one behind the other in host scratch; each view then moves to the same place of the copy.
  const ArenaScope scope(*c.host);
  const size_t begin = c.host->mark();
  const char* const host = static_cast<const char*>(c.host->allocate(0, "batch"));
  build(*c.host, rows, wanted, longest);
  const size_t bytes = c.host->mark() - begin;
  char* const device = static_cast<char*>(arena.allocate(bytes, "batch"));
  upload_bytes(c, device, host, bytes);
  const auto move = [&](ConstTensorView& v) {
    if (v.data != nullptr) v.data = device + (static_cast<const char*>(v.data) - host);
  };
  SequenceView& q = batch_.seq;
  for (ConstTensorView* v : {&q.token_seq, &q.token_pos, &q.seq_row, &q.seq_pos, &q.seq_slot, &q.page_table, &batch_.tokens, &batch_.wanted}) move(*v);
  for (EntryView& e : batch_.entries)
    for (ConstTensorView* v : {&e.seq, &e.idx, &e.pos, &e.seq_first}) move(*v);
  return batch_;
}

const SequenceBatch& BatchBuilder::build(Arena& arena, std::span<const SequenceRows> rows, WantedRows wanted, int64_t padded_longest) {
  const int64_t num_sequences = static_cast<int64_t>(rows.size());
  int64_t num_tokens = 0, longest = 0;
  size_t max_pages = 0;
  for (const SequenceRows& r : rows) {
    CHECK(!r.tokens.empty(), "a sequence without new tokens");
    CHECK(r.first_position >= 0 && r.first_position + static_cast<int64_t>(r.tokens.size()) <= config_.max_positions,
          "positions [{}, {}) of a model with max_position_embeddings {}", r.first_position,
          r.first_position + static_cast<int64_t>(r.tokens.size()), config_.max_positions);
    CHECK(r.slot >= 0 || r.first_position == 0, "a sequence without a slot starts at position {}", r.first_position);
    num_tokens += static_cast<int64_t>(r.tokens.size());
    longest = std::max(longest, r.first_position + static_cast<int64_t>(r.tokens.size()));
    max_pages = std::max(max_pages, r.pages.size());
  }
  if (padded_longest > 0) {
    CHECK(longest <= padded_longest && num_tokens == num_sequences, "{} tokens of {} sequences, positions below {}, padded to positions below {}", num_tokens,
          num_sequences, longest, padded_longest);
    longest = padded_longest;
    max_pages = static_cast<size_t>((longest + page_tokens_ - 1) / page_tokens_);
  }
  IntBuilder tokens(arena, num_tokens, "batch.tokens"), token_seq(arena, num_tokens, "batch.token_seq"),
      token_pos(arena, num_tokens, "batch.token_pos"), seq_row(arena, num_sequences + 1, "batch.seq_row"),
      seq_pos(arena, num_sequences, "batch.seq_pos"), seq_slot(arena, num_sequences, "batch.seq_slot"),
      last(arena, num_sequences, "batch.wanted");
  TensorView page_table = arena.tensor(DType::i32, {num_sequences, static_cast<int64_t>(max_pages)}, "batch.page_table");

  int64_t row = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const SequenceRows& r = rows[static_cast<size_t>(s)];
    seq_row.p[s] = static_cast<int32_t>(row);
    seq_pos.p[s] = static_cast<int32_t>(r.first_position);
    seq_slot.p[s] = r.slot;
    for (size_t i = 0; i < r.tokens.size(); ++i, ++row) {
      CHECK(r.tokens[i] >= 0 && r.tokens[i] < config_.vocab_size, "token id {} with a vocabulary of {}", r.tokens[i], config_.vocab_size);
      tokens.p[row] = r.tokens[i];
      token_seq.p[row] = static_cast<int32_t>(s);
      token_pos.p[row] = static_cast<int32_t>(r.first_position + static_cast<int64_t>(i));
    }
    last.p[s] = static_cast<int32_t>(row - 1);
    for (size_t i = 0; i < r.pages.size(); ++i) page_table.row<int32_t>(s)[i] = r.pages[i];
  }
  seq_row.p[num_sequences] = static_cast<int32_t>(num_tokens);

  batch_.seq = SequenceView{num_tokens, num_sequences, token_seq.view, token_pos.view, seq_row.view, seq_pos.view, seq_slot.view, page_table, page_tokens_, longest};
  batch_.tokens = tokens.view;
  batch_.wanted = wanted == WantedRows::all ? ConstTensorView() : ConstTensorView(last.view);

  // Entries that complete in this call, once for every distinct ratio.
  for (int64_t layer = 0; layer < config_.num_layers(); ++layer) {
    const int64_t m = config_.layers[static_cast<size_t>(layer)].ratio;
    EntryView& out = batch_.entries[static_cast<size_t>(layer)];
    out = EntryView();
    if (m == 0) continue;
    int64_t same = 0;
    while (same < layer && config_.layers[static_cast<size_t>(same)].ratio != m) ++same;
    if (same < layer) {
      out = batch_.entries[static_cast<size_t>(same)];
      continue;
    }
    const auto first_entry = [&](const SequenceRows& r) { return r.first_position / m; };
    const auto end_entry = [&](const SequenceRows& r) { return (r.first_position + static_cast<int64_t>(r.tokens.size())) / m; };
    for (const SequenceRows& r : rows) {
      out.num_entries += end_entry(r) - first_entry(r);
      CHECK(static_cast<int64_t>(r.pages.size()) * page_tokens_ >= end_entry(r) * m, "{} pages of {} positions for {} entries of ratio {}",
            r.pages.size(), page_tokens_, end_entry(r), m);
    }
    if (padded_longest > 0 && out.num_entries > 0) out.num_entries = num_sequences;
    IntBuilder seq(arena, out.num_entries, "batch.entry_seq"), idx(arena, out.num_entries, "batch.entry_idx"),
        pos(arena, out.num_entries, "batch.entry_pos"), first(arena, num_sequences + 1, "batch.entry_first");
    int64_t e = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const SequenceRows& r = rows[static_cast<size_t>(s)];
      first.p[s] = static_cast<int32_t>(e);
      for (int64_t i = first_entry(r); i < end_entry(r); ++i, ++e) {
        seq.p[e] = static_cast<int32_t>(s);
        idx.p[e] = static_cast<int32_t>(i);
        pos.p[e] = static_cast<int32_t>(i * m);
      }
    }
    first.p[num_sequences] = static_cast<int32_t>(e);
    for (; e < out.num_entries; ++e) {  // padding
      seq.p[e] = -1;
      idx.p[e] = pos.p[e] = 0;
    }
    out.seq = seq.view;
    out.idx = idx.view;
    out.pos = pos.view;
    out.seq_first = first.view;
  }
  return batch_;
}

}  // namespace lockstep
