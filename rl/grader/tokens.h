#pragma once
// An answer's text to tokens. What LaTeX writes in many ways is one token afterwards, and dressing is gone.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct Token {
  enum class Kind : uint8_t {
    number,    // text: digits, perhaps a point and an exponent ("1.5e3"), separators removed
    symbol,    // text: a letter, \alpha, infinity
    function,  // text: sin, ln, ..
    word,      // text: lower case, of \text{} or a run of letters
    unit,      // dropped where it follows a value
    punctuation,  // text: one character, or the name of an operator: "frac" "sqrt" "binom" "cup" "cap" "in" "le" "ge" "ne" "pm" "mp"
    open_brace, close_brace,  // invisible braces of LaTeX
    matrix_begin, matrix_end, new_row,
    end,
  };
  Kind kind = Kind::end;
  std::string text;
  bool space_before = false;
  bool is(std::string_view punctuation_text) const { return kind == Kind::punctuation && text == punctuation_text; }
};

// Linear in the text. False if it is longer than `max_tokens` or breaks off inside a command.
bool tokenize_answer(std::string_view text, size_t max_tokens, std::vector<Token>* tokens);

// The text without dressing and blanks; words keep their letters, others' case stays.
std::string plain_answer(std::string_view text);

// Replaces typographic characters by LaTeX or ASCII: minus signs, pi, infinity, times, roots, relations, full-width forms.
std::string ascii_answer(std::string_view text);

}  // namespace lockstep
