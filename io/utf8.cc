#include "io/utf8.h"

#include <cstdint>

#include <fmt/core.h>

namespace lockstep {

namespace {

// How far the bytes at s[at] can be read as the beginning of a sequence (at least 1), and whether it is complete.
struct Piece {
  size_t length;
  bool whole;
};

// Bytes of the sequence that `lead` begins; 0 if it begins none: continuation, overlong two-byte forms, above U+10FFFF.
size_t utf8_need(char lead) {
  const auto b = static_cast<uint8_t>(lead);
  if (b < 0x80) return 1;
  if (b < 0xC2 || b > 0xF4) return 0;
  return b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}

Piece read_piece(std::string_view s, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t lead = byte(at);
  const size_t need = utf8_need(s[at]);
  if (need <= 1) return {1, need == 1};
  // The second byte alone decides about overlong forms, surrogates and the upper end.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  size_t length = 1;
  while (length < need && at + length < s.size()) {
    const uint8_t b = byte(at + length);
    if (b < (length == 1 ? low : 0x80) || b > (length == 1 ? high : 0xBF)) break;
    ++length;
  }
  return {length, length == need};
}

}  // namespace

size_t utf8_sequence(std::string_view s, size_t at) {
  const Piece piece = read_piece(s, at);
  return piece.whole ? piece.length : 0;
}

size_t find_invalid_utf8(std::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const Piece piece = read_piece(s, i);
    if (!piece.whole) return i;
    i += piece.length;
  }
  return std::string_view::npos;
}

std::string replace_invalid_utf8(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size();) {
    const Piece piece = read_piece(s, i);
    if (piece.whole) {
      out += s.substr(i, piece.length);
    } else {
      out += "\xEF\xBF\xBD";
    }
    i += piece.length;
  }
  return out;
}

size_t incomplete_utf8_tail(std::string_view s) {
  for (size_t n = 1; n <= 3 && n <= s.size(); ++n) {
    const size_t at = s.size() - n;
    if (static_cast<uint8_t>(s[at]) < 0xC0) continue;  // no lead byte, so nothing begins here that could be cut
    const Piece piece = read_piece(s, at);
    return !piece.whole && piece.length == n && utf8_need(s[at]) > n ? n : 0;
  }
  return 0;
}

std::string in_quotes(std::string_view s, size_t max_bytes) {
  std::string out = "\"";
  size_t i = 0;
  while (i < s.size() && i < max_bytes) {
    const Piece piece = read_piece(s, i);
    const uint8_t b = static_cast<uint8_t>(s[i]);
    if (!piece.whole || b < 0x20 || b == 0x7F) {
      out += fmt::format("\\x{:02x}", b);
      i += 1;
    } else {
      out += s.substr(i, piece.length);
      i += piece.length;
    }
  }
  out += i < s.size() ? "\"..." : "\"";
  return out;
}

std::string without_controls(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (const char c : s) {
    const uint8_t b = static_cast<uint8_t>(c);
    if ((b < 0x20 && c != '\n' && c != '\t') || b == 0x7F) {
      out += fmt::format("\\x{:02x}", b);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace lockstep
