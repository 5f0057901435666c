#pragma once
// Byte pair encoding of one piece: as long as any two neighbours can be merged, the pair of lowest rank is, the leftmost first.
// O(n log n) in the length of the piece. Threads may share one.

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct Merge {
  int32_t left, right;  // ids of the pair
  int32_t result;       // and of what it becomes
};

class Bpe {
 public:
  // `tokens`: bytes of every id; empty for ids that pieces cannot become. `merges` in order of rank, no pair twice. CHECKs that
  // every single byte is a token and that a merge's result is as long as its pair.
  Bpe(std::span<const std::string> tokens, std::span<const Merge> merges);

  // Appends the ids of `piece`.
  void encode(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  // Rank and result of merging a pair; rank kNoRank: never.
  struct Pair {
    uint64_t key;
    uint32_t rank;
    int32_t result;
  };
  struct Slot {
    uint32_t tag;  // upper half of the hash
    int32_t id;    // -1: free
  };
  enum class Whole : uint8_t { unknown, yes, no };

  const Pair& find_pair(int32_t left, int32_t right) const;
  int32_t find_token(std::string_view bytes) const;
  void merge(std::string_view piece, std::vector<int32_t>* ids) const;
  void merge_short(std::string_view piece, std::vector<int32_t>* ids) const;
  void merge_long(std::string_view piece, std::vector<int32_t>* ids) const;
  std::string_view token(int32_t id) const {
    const auto i = static_cast<size_t>(id);
    return std::string_view(bytes_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }

  std::string bytes_;  // of all tokens
  std::vector<size_t> offsets_;
  std::vector<Slot> slots_;  // bytes to id, open addressing
  std::vector<Pair> pairs_;  // likewise
  int32_t byte_ids_[256];
  // Most pieces are a token. Whether merging arrives there is found out when the piece is first met; threads that race agree.
  std::unique_ptr<std::atomic<Whole>[]> whole_;
};

}  // namespace lockstep
