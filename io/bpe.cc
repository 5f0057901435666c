#include "io/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <queue>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/status.h"

namespace lockstep {

namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kFree = std::numeric_limits<uint64_t>::max();
constexpr size_t kShort = 64;  // bytes up to which looking at all pairs is faster than keeping a heap

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t mix(uint64_t key) {
  key *= 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
  return key ^ key >> 32;
}

// Slots of a table that `count` entries fill to half at most.
size_t table_size(size_t count) { return std::bit_ceil(2 * count + 2); }

}  // namespace

Bpe::Bpe(std::span<const std::string> tokens, std::span<const Merge> merges)
    : slots_(table_size(tokens.size()), Slot{0, -1}), pairs_(table_size(merges.size()), Pair{kFree, kNoRank, -1}),
      whole_(std::make_unique<std::atomic<Whole>[]>(tokens.size())) {
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  offsets_.push_back(0);
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string& t = tokens[id];
    bytes_ += t;
    offsets_.push_back(bytes_.size());
    whole_[id].store(Whole::unknown, std::memory_order_relaxed);
    if (t.empty()) continue;
    if (t.size() == 1) byte_ids_[static_cast<uint8_t>(t[0])] = static_cast<int32_t>(id);
    const uint64_t hash = XXH3_64bits(t.data(), t.size());
    size_t i = hash & (slots_.size() - 1);
    while (slots_[i].id >= 0) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {static_cast<uint32_t>(hash >> 32), static_cast<int32_t>(id)};
  }
  for (int b = 0; b < 256; ++b) CHECK(byte_ids_[b] >= 0, "no token for byte 0x{:02x}", b);
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& m = merges[rank];
    CHECK(token(m.left).size() + token(m.right).size() == token(m.result).size(), "merge {}", rank);
    const uint64_t key = pair_key(m.left, m.right);
    size_t i = mix(key) & (pairs_.size() - 1);
    while (pairs_[i].key != kFree) {
      CHECK(pairs_[i].key != key, "merge {} stands twice", rank);
      i = (i + 1) & (pairs_.size() - 1);
    }
    pairs_[i] = {key, static_cast<uint32_t>(rank), m.result};
  }
}

const Bpe::Pair& Bpe::find_pair(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  size_t i = mix(key) & (pairs_.size() - 1);
  while (pairs_[i].key != key && pairs_[i].key != kFree) i = (i + 1) & (pairs_.size() - 1);
  return pairs_[i];
}

int32_t Bpe::find_token(std::string_view bytes) const {
  const uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t i = hash & (slots_.size() - 1);
  for (; slots_[i].id >= 0; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].tag == tag && token(slots_[i].id) == bytes) return slots_[i].id;
  }
  return -1;
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (piece.empty()) return;
  const int32_t id = find_token(piece);
  if (id < 0) return merge(piece, ids);
  std::atomic<Whole>& whole = whole_[static_cast<size_t>(id)];
  switch (whole.load(std::memory_order_relaxed)) {
    case Whole::yes: ids->push_back(id); return;
    case Whole::no: merge(piece, ids); return;
    case Whole::unknown: break;
  }
  const size_t before = ids->size();
  merge(piece, ids);
  whole.store(ids->size() == before + 1 ? Whole::yes : Whole::no, std::memory_order_relaxed);
}

void Bpe::merge(std::string_view piece, std::vector<int32_t>* ids) const {
  piece.size() <= kShort ? merge_short(piece, ids) : merge_long(piece, ids);
}

void Bpe::merge_short(std::string_view piece, std::vector<int32_t>* ids) const {
  int32_t id[kShort];
  const Pair* pair[kShort];  // pair[i] is (id[i], id[i + 1]); the last one merges never
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) id[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < n; ++i) pair[i] = &find_pair(id[i], id[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i)
      if (pair[i]->rank < pair[best]->rank) best = i;
    if (pair[best]->rank == kNoRank) break;
    id[best] = pair[best]->result;
    std::copy(id + best + 2, id + n, id + best + 1);
    if (best + 2 < n) std::copy(pair + best + 2, pair + n - 1, pair + best + 1);
    --n;
    if (best > 0) pair[best - 1] = &find_pair(id[best - 1], id[best]);
    if (best + 1 < n) pair[best] = &find_pair(id[best], id[best + 1]);
  }
  ids->insert(ids->end(), id, id + n);
}

void Bpe::merge_long(std::string_view piece, std::vector<int32_t>* ids) const {
  // A list of symbols through the bytes where they begin. A heap entry is rank and place of a pair; it counts if the pair at that
  // place still has that rank.
  struct Symbol {
    int32_t id;
    uint32_t rank;  // of the pair with the next one; kNoRank also for symbols that are merged away
    int32_t result;
    uint32_t previous, next;
  };
  CHECK(piece.size() < kNoRank, "a piece of {} bytes", piece.size());
  const auto n = static_cast<uint32_t>(piece.size());
  std::vector<Symbol> symbols(n);
  for (uint32_t i = 0; i < n; ++i) symbols[i] = {byte_ids_[static_cast<uint8_t>(piece[i])], kNoRank, -1, i - 1, i + 1};
  std::vector<uint64_t> entries;
  entries.reserve(n);
  const auto update = [&](uint32_t i) {
    Symbol& s = symbols[i];
    s.rank = kNoRank;
    if (s.next >= n) return false;
    const Pair& p = find_pair(s.id, symbols[s.next].id);
    s.rank = p.rank;
    s.result = p.result;
    return p.rank != kNoRank;
  };
  const auto entry = [&](uint32_t i) { return static_cast<uint64_t>(symbols[i].rank) << 32 | i; };
  for (uint32_t i = 0; i < n; ++i)
    if (update(i)) entries.push_back(entry(i));
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>(), std::move(entries));
  while (!heap.empty()) {
    const uint64_t top = heap.top();
    heap.pop();
    const auto i = static_cast<uint32_t>(top);
    Symbol& s = symbols[i];
    if (s.rank != top >> 32) continue;
    Symbol& gone = symbols[s.next];
    s.id = s.result;
    s.next = gone.next;
    gone.rank = kNoRank;
    if (s.next < n) symbols[s.next].previous = i;
    if (update(i)) heap.push(entry(i));
    if (i > 0 && update(s.previous)) heap.push(entry(s.previous));
  }
  for (uint32_t i = 0; i < n; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace lockstep
