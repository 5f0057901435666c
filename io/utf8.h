#pragma once
// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

// Length of the well-formed sequence that begins at s[at], or 0 if none does.
size_t utf8_sequence(std::string_view s, size_t at);

// Where the first byte stands that belongs to no well-formed sequence; npos if there is none.
size_t find_invalid_utf8(std::string_view s);

// Copies s with every maximal broken piece replaced by one U+FFFD (the W3C and Python rule).
std::string replace_invalid_utf8(std::string_view s);

// Bytes at the end of s (0 to 3) that begin a sequence which more bytes could complete.
size_t incomplete_utf8_tail(std::string_view s);

// For messages: quoted, control and broken bytes as \xNN, cut with "..." after max_bytes.
std::string in_quotes(std::string_view s, size_t max_bytes = 80);

// For terminals: control bytes other than newline and tab as \xNN. A NUL would end the text early, an escape could do anything.
std::string without_controls(std::string_view s);

}  // namespace lockstep
