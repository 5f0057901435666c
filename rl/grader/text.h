#pragma once
// Pieces of text that graders share: trimming, replacing, braces, boxes.

#include <string>
#include <string_view>

#include "rl/grader/grader.h"

namespace lockstep {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v'; }
inline char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool all_digits(std::string_view s);  // and at least one
std::string lower(std::string_view s);
std::string_view trim(std::string_view s);
void replace_all(std::string* s, std::string_view from, std::string_view to);

// Index of the brace that closes the one at s[open], npos if none does.
size_t closing_brace(std::string_view s, size_t open);

// The content of the last \boxed{} (\fbox{} if there is no \boxed). Blanks may stand before the brace; braces nest.
// On failure `reason` says why and the result is empty.
std::string_view last_boxed(std::string_view text, RewardReason* reason);

// The same, passing over boxes that are blank. Linear in the text, however many boxes there are.
std::string_view last_nonempty_boxed(std::string_view text, RewardReason* reason);

// The text behind the last </think>. With thinking on and no such mark: false, nothing is to be graded.
bool after_thinking(std::string_view* response, GradeOptions options);

}  // namespace lockstep
