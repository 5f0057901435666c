#pragma once
// Answers as the `default` grader reads them: LaTeX or plain text to a small tree whose leaves are exact values (algebra.h).
//
// Dressing is dropped: \left, spacing, $, units, currency, degree signs, \text around a number. Read are numbers with separators,
// decimals, scientific notation, fractions, mixed numbers, powers, roots, factorials, functions, absolute values, +- (two values),
// lists (commas, "or", "and"), sets, pairs and tuples, intervals and their unions, matrices, ratios, numbers with a base,
// equations and inequalities, words.
//
// Nesting beyond kMaxDepth, more than kMaxTokens tokens or kMaxItems items are not read. Recursion is as deep as kMaxDepth.

#include <string>
#include <string_view>
#include <vector>

#include "rl/grader/algebra.h"

namespace lockstep {

struct Answer {
  enum class Kind : uint8_t {
    value,      // `value`; a word is a symbol
    list,       // items in any order: "1, 2" and {1, 2}
    tuple,      // items in order between `open` and `close`: (1, 2), [0, 1)
    unions,     // of intervals or sets, in any order
    intersection,
    matrix,     // `columns` items a row
    ratio,      // 3:2
    relation,   // items joined by `operators`: '=' '<' 'l' (at most) 'n' (not equal) 'i' (in); > is turned round
  };
  Kind kind = Kind::value;
  Value value;
  std::vector<Answer> items;
  std::string operators;
  char open = 0, close = 0;
  size_t columns = 0;
};

constexpr int kMaxDepth = 100;
constexpr size_t kMaxTokens = 3000;
constexpr size_t kMaxItems = 64;
constexpr size_t kMaxParsedBytes = 8192;

struct ParsedAnswer {
  bool ok = false;          // `whole` and `hundredth` mean something
  Answer whole;             // with percent signs dropped
  bool has_percent = false;
  Answer hundredth;         // with percent signs as 1/100; only if there are any
  std::string plain;        // the text without dressing, for what cannot be read: equal plain texts are equal answers
};

ParsedAnswer parse_answer(std::string_view text, Algebra& algebra);

bool answers_equal(const Answer& a, const Answer& b, Algebra& algebra);
bool answers_equal(const ParsedAnswer& a, const ParsedAnswer& b, Algebra& algebra);

// Of a parsed answer: the same for equal values in the same form.
std::string answer_text(const Answer& a, const Algebra& algebra);

}  // namespace lockstep
