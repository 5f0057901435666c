#pragma once
// What regular expressions of tokenizers ask about a character, as one byte of flags. The properties are those of libutf8proc
// (Debian 12: Unicode 15.0). Characters that a later version of Unicode assigned have no flag; the classes of all others are the
// same from 15.0 to 17.0.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace lockstep {

enum CharClass : uint8_t {
  kLetter = 1 << 0,        // \p{L}
  kMark = 1 << 1,          // \p{M}
  kNumber = 1 << 2,        // \p{N}
  kPunctuation = 1 << 3,   // \p{P} or \p{S}
  kSpace = 1 << 4,         // \s: White_Space
  kNewline = 1 << 5,       // \r or \n (kSpace is set too)
  kCjk = 1 << 6,           // U+4E00 to U+9FA5, U+3040 to U+309F, U+30A0 to U+30FF
  kAsciiLetter = 1 << 7,   // A to Z, a to z (kLetter is set too)
};

class CharTable {
 public:
  // Made once, then shared.
  static const CharTable& get();

  uint8_t flags(uint32_t c) const { return pages_[page_of_[c >> 8] * size_t{256} + (c & 255)]; }  // REQUIRES: c <= 0x10FFFF

 private:
  CharTable();

  std::array<uint16_t, 0x1100> page_of_;
  std::vector<uint8_t> pages_;  // of 256 characters; equal pages are stored once
};

// The character at s[at]. REQUIRES: s is UTF-8 and `at` the beginning of a sequence.
struct Utf8Char {
  uint32_t code;
  uint32_t length;
};
inline Utf8Char utf8_char(std::string_view s, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(s[at + i])); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}

}  // namespace lockstep
