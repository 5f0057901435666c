#include "io/bpe.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace lockstep {
namespace {

// A random vocabulary: the bytes, then `count` merges of earlier tokens made of the bytes a to c.
struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<Merge> merges;
};
Vocabulary random_vocabulary(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  Vocabulary v;
  for (int b = 0; b < 256; ++b) v.tokens.push_back(std::string(1, static_cast<char>(b)));
  std::vector<int32_t> usable = {'a', 'b', 'c'};
  std::map<std::string, int32_t> known;
  std::map<std::pair<int32_t, int32_t>, bool> done;
  while (v.merges.size() < count) {
    const int32_t left = usable[random() % usable.size()], right = usable[random() % usable.size()];
    if (done[{left, right}]) continue;
    done[{left, right}] = true;
    const std::string joined = v.tokens[static_cast<size_t>(left)] + v.tokens[static_cast<size_t>(right)];
    const auto [at, is_new] = known.emplace(joined, static_cast<int32_t>(v.tokens.size()));
    if (is_new) {
      usable.push_back(at->second);
      v.tokens.push_back(joined);
    }
    v.merges.push_back({left, right, at->second});
  }
  return v;
}

// The definition, word for word: the lowest rank, the leftmost place, again and again.
std::vector<int32_t> by_definition(const Vocabulary& v, const std::string& piece) {
  std::vector<int32_t> ids;
  for (const char c : piece) ids.push_back(static_cast<uint8_t>(c));
  for (;;) {
    size_t rank = v.merges.size(), at = 0;
    for (size_t r = 0; r < v.merges.size() && rank == v.merges.size(); ++r) {
      for (size_t i = 0; i + 1 < ids.size(); ++i) {
        if (ids[i] == v.merges[r].left && ids[i + 1] == v.merges[r].right) {
          rank = r;
          at = i;
          break;
        }
      }
    }
    if (rank == v.merges.size()) return ids;
    ids[at] = v.merges[rank].result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, IsWhatTheDefinitionSays) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const Vocabulary v = random_vocabulary(seed, 5 + seed * 3);
    const Bpe bpe(v.tokens, v.merges);
    std::mt19937 random(seed + 1000);
    for (int i = 0; i < 60; ++i) {
      std::string piece;
      const size_t length = i % 3 == 0 ? 60 + random() % 80 : 1 + random() % 12;  // both sides of where the method changes
      while (piece.size() < length) piece += "abcx"[random() % (i % 2 ? 3 : 4)];
      const std::vector<int32_t> wanted = by_definition(v, piece);
      for (int again = 0; again < 2; ++again) {  // the second time from what the first one found out
        std::vector<int32_t> ids;
        bpe.encode(piece, &ids);
        ASSERT_EQ(ids, wanted) << "seed " << seed << " piece " << piece;
      }
    }
    for (const std::string& token : v.tokens) {
      std::vector<int32_t> ids;
      bpe.encode(token, &ids);
      ASSERT_EQ(ids, by_definition(v, token)) << "seed " << seed << " token " << token;
    }
  }
}

TEST(Bpe, ATokenThatMergesDoNotReach) {
  // "abc" is a token, but "bc" merges first and nothing joins a with it.
  Vocabulary v;
  for (int b = 0; b < 256; ++b) v.tokens.push_back(std::string(1, static_cast<char>(b)));
  v.tokens.insert(v.tokens.end(), {"bc", "ab", "abc"});
  v.merges = {{'b', 'c', 256}, {'a', 'b', 257}, {257, 'c', 258}};
  const Bpe bpe(v.tokens, v.merges);
  for (int again = 0; again < 2; ++again) {
    std::vector<int32_t> ids;
    bpe.encode("abc", &ids);
    EXPECT_EQ(ids, (std::vector<int32_t>{'a', 256}));
  }
}

TEST(BpeDeath, WhatItIsMadeOf) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.push_back(std::string(1, static_cast<char>(b)));
  const Merge same[] = {{'a', 'b', 256}, {'a', 'b', 256}};
  EXPECT_DEATH(Bpe(std::span(tokens).first(255), {}), "no token for byte 0xff");
  tokens.push_back("ab");
  EXPECT_DEATH(Bpe(tokens, same), "merge 1 stands twice");
  const Merge wrong[] = {{'a', 256, 256}};
  EXPECT_DEATH(Bpe(tokens, wrong), "merge 0");
}

}  // namespace
}  // namespace lockstep
