#pragma once
// Cuts text into the pieces inside which byte pairs are merged. A tokenizer.json names a chain of regular expressions for that; the
// known ones are scanners here, in one pass each, without backtracking: linear time and constant stack whatever the text.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace lockstep {

enum class SplitPattern : uint8_t {
  numbers,  // \p{N}{1,3}
  cjk,      // [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+
  words,    // DeepSeek's third pattern
  gpt2,     // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
};

// The pattern that a tokenizer.json writes as `regex`.
std::optional<SplitPattern> find_split_pattern(std::string_view regex);

// Appends the pieces of `text` to `pieces`: matches of the first pattern and what lies between them, each cut by the next pattern,
// and so on. Together they are `text`; none is empty. An expression sees its piece alone: (?!\S) holds at the piece's end.
// REQUIRES: text is UTF-8.
void split_text(std::string_view text, const std::vector<SplitPattern>& patterns, std::vector<std::string_view>* pieces);

}  // namespace lockstep
