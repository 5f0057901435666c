#include "rl/reward.h"

#include <string>

namespace lockstep {

namespace {

constexpr std::string_view kThinkEnd = "</think>";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v'; }

std::string_view trim(std::string_view s) {
  while (!s.empty() && is_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_space(s.back())) s.remove_suffix(1);
  return s;
}

void replace_all(std::string* s, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t hit; (hit = s->find(from, at)) != std::string::npos; at = hit + from.size()) {
    out.append(*s, at, hit - at);
    out += to;
  }
  out.append(*s, at);
  *s = std::move(out);
}

// Deletes LaTeX's thin and escaped blanks: \! \, \; \: and backslash-blank. A double backslash (a new row) is none of them.
void delete_spacing(std::string* s) {
  std::string out;
  for (size_t i = 0; i < s->size(); ++i) {
    const char next = i + 1 < s->size() ? (*s)[i + 1] : '\0';
    if ((*s)[i] == '\\' && next == '\\') {
      out += "\\\\";
      ++i;
    } else if ((*s)[i] == '\\' && next != '\0' && std::string_view("!,;: ").find(next) != std::string_view::npos) {
      ++i;
    } else {
      out += (*s)[i];
    }
  }
  *s = std::move(out);
}

// Deletes "\left" and the like, but not the beginning of a longer command such as "\leftarrow".
void delete_command(std::string* s, std::string_view command) {
  for (size_t at = 0; (at = s->find(command, at)) != std::string::npos;) {
    const size_t end = at + command.size();
    if (end < s->size() && is_letter((*s)[end])) {
      at = end;
    } else {
      s->erase(at, command.size());
    }
  }
}

// Index of the brace that closes the one at s[open], npos if none does.
size_t closing_brace(std::string_view s, size_t open) {
  int depth = 0;
  for (size_t i = open; i < s.size(); ++i) {
    if (s[i] == '{') ++depth;
    if (s[i] == '}' && --depth == 0) return i;
  }
  return std::string_view::npos;
}

// "\text{abc}" as a whole becomes "abc", likewise "{abc}"; repeated, for as long as anything encloses the rest.
void unwrap(std::string* s) {
  for (bool changed = true; changed;) {
    changed = false;
    for (const std::string_view wrapper : {"\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\mbox{", "\\boxed{", "{"}) {
      if (!s->starts_with(wrapper)) continue;
      const size_t open = wrapper.size() - 1;
      if (closing_brace(*s, open) != s->size() - 1) continue;
      *s = std::string(trim(std::string_view(*s).substr(open + 1, s->size() - open - 2)));
      changed = true;
    }
  }
}

// A unit behind the answer: "12\text{ cm}" becomes "12". What begins with \text is no unit but the answer.
void cut_unit(std::string* s) {
  for (const std::string_view text : {"\\text{ ", "\\mbox{ ", "\\mathrm{ ", "\\text{~"}) {
    const size_t at = s->find(text);
    if (at != std::string::npos && at > 0) s->erase(at);
  }
}

// ".5" becomes "0.5" at the start and behind anything that is not a digit.
void insert_leading_zeros(std::string* s) {
  std::string out;
  for (size_t i = 0; i < s->size(); ++i) {
    const bool digit_before = i > 0 && is_digit((*s)[i - 1]);
    const bool digit_after = i + 1 < s->size() && is_digit((*s)[i + 1]);
    if ((*s)[i] == '.' && !digit_before && digit_after) out += '0';
    out += (*s)[i];
  }
  *s = std::move(out);
}

// Gives `command` `arguments` braced arguments: \frac12 becomes \frac{1}{2}, \sqrt3 becomes \sqrt{3}. Only single
// characters that can be an argument are braced; anything else is left as it is.
void brace_arguments(std::string* s, std::string_view command, int arguments) {
  std::string out;
  size_t at = 0;
  for (size_t hit; (hit = s->find(command, at)) != std::string::npos;) {
    size_t i = hit + command.size();
    out.append(*s, at, i - at);
    at = i;
    for (int k = 0; k < arguments && i < s->size(); ++k) {
      if ((*s)[i] == '{') {
        const size_t close = closing_brace(*s, i);
        if (close == std::string::npos) break;
        out.append(*s, i, close + 1 - i);
        i = close + 1;
      } else if (is_digit((*s)[i]) || is_letter((*s)[i])) {
        out += '{';
        out += (*s)[i];
        out += '}';
        ++i;
      } else {
        break;
      }
      at = i;
    }
  }
  out.append(*s, at);
  *s = std::move(out);
}

bool all_digits(std::string_view s) {
  for (const char c : s)
    if (!is_digit(c)) return false;
  return !s.empty();
}

std::string_view without_leading_zeros(std::string_view digits) {
  while (digits.size() > 1 && digits.front() == '0') digits.remove_prefix(1);
  return digits;
}

// The number that `s` writes, in its one common form: "+034", "34.0", "34." are "34", "1,234.50" is "1234.5", "-0" is "0".
bool parse_decimal(std::string_view s, std::string* out) {
  const bool negative = s.starts_with('-');
  if (negative || s.starts_with('+')) s.remove_prefix(1);
  std::string_view fraction;
  if (const size_t point = s.find('.'); point != std::string_view::npos) {
    fraction = s.substr(point + 1);
    s = s.substr(0, point);
    if (!fraction.empty() && !all_digits(fraction)) return false;
    while (fraction.ends_with('0')) fraction.remove_suffix(1);
  }
  std::string digits;
  for (size_t i = 0; i < s.size(); ++i) {
    if (is_digit(s[i])) {
      digits += s[i];
      continue;
    }
    // A comma stands between a digit and three more, after which comes another comma or the end.
    const bool thousands = s[i] == ',' && i > 0 && i + 4 <= s.size() && all_digits(s.substr(i + 1, 3)) &&
                           (i + 4 == s.size() || s[i + 4] == ',');
    if (!thousands) return false;
  }
  if (digits.empty()) return false;
  std::string value(without_leading_zeros(digits));
  if (!fraction.empty()) {
    value += '.';
    value += fraction;
  }
  *out = negative && value != "0" ? "-" : "";
  *out += value;
  return true;
}

// "a/b" with integers a and b becomes "\frac{a}{b}", with the sign in front.
void long_fraction(std::string* s) {
  const size_t slash = s->find('/');
  if (slash == std::string::npos) return;
  std::string_view a = std::string_view(*s).substr(0, slash), b = std::string_view(*s).substr(slash + 1);
  const bool negative = a.starts_with('-');
  if (negative) a.remove_prefix(1);
  if (!all_digits(a) || !all_digits(b)) return;
  *s = (negative ? "-\\frac{" : "\\frac{") + std::string(a) + "}{" + std::string(b) + "}";
}

RewardResult graded(std::string pred, bool correct) {
  return {correct ? 1.0f : 0.0f, correct, std::move(pred), correct ? RewardReason::correct : RewardReason::wrong};
}

RewardResult ungraded(RewardReason reason) { return {0.0f, false, "", reason}; }

}  // namespace

const char* reward_reason_name(RewardReason reason) {
  switch (reason) {
    case RewardReason::correct: return "correct";
    case RewardReason::wrong: return "wrong";
    case RewardReason::no_answer: return "no_answer";
    case RewardReason::unbalanced_box: return "unbalanced_box";
    case RewardReason::empty_box: return "empty_box";
    case RewardReason::unfinished_thinking: return "unfinished_thinking";
  }
  return "?";
}

RewardResult exact_match_reward(std::string_view response, std::string_view label) {
  const std::string_view pred = trim(response);
  if (pred.empty()) return ungraded(RewardReason::no_answer);
  return graded(std::string(pred.substr(0, kMaxAnswerBytes)), pred == trim(label));
}

std::string_view last_boxed(std::string_view text, RewardReason* reason) {
  constexpr std::string_view kBoxed = "\\boxed", kFbox = "\\fbox";
  std::string_view command = kBoxed;
  size_t at = text.rfind(kBoxed);
  if (at == std::string_view::npos) {
    command = kFbox;
    at = text.rfind(kFbox);
  }
  *reason = RewardReason::no_answer;
  if (at == std::string_view::npos) return {};
  size_t open = at + command.size();
  while (open < text.size() && is_space(text[open])) ++open;
  if (open == text.size()) *reason = RewardReason::unbalanced_box;  // cut off before its brace
  if (open == text.size() || text[open] != '{') return {};
  const size_t close = closing_brace(text, open);
  *reason = close == std::string_view::npos ? RewardReason::unbalanced_box : RewardReason::empty_box;
  if (close == std::string_view::npos) return {};
  const std::string_view content = trim(text.substr(open + 1, close - open - 1));
  if (!content.empty()) *reason = RewardReason::wrong;  // until it is graded
  return content;
}

std::string normalize_math_answer(std::string_view answer) {
  std::string s(trim(answer.substr(0, kMaxAnswerBytes)));
  unwrap(&s);
  replace_all(&s, "\n", "");
  delete_spacing(&s);
  replace_all(&s, "{,}", ",");  // LaTeX's comma without the blank behind it
  replace_all(&s, "\\\\", "\\");
  replace_all(&s, "\u2212", "-");  // the minus sign that is no hyphen
  replace_all(&s, "tfrac", "frac");
  replace_all(&s, "dfrac", "frac");
  for (const std::string_view command : {"\\left", "\\right", "\\displaystyle", "\\quad"}) delete_command(&s, command);
  for (const std::string_view sign : {"^{\\circ}", "^\\circ", "\u00B0", "\\$", "$", "\\%", "%"}) replace_all(&s, sign, "");
  // Several answers are a list, not an answer with a unit.
  for (const std::string_view word : {"\\text{ or }", "\\text{ and }", "\\text{or}", "\\text{and}"}) replace_all(&s, word, ",");
  cut_unit(&s);
  s = std::string(trim(s));
  unwrap(&s);
  replace_all(&s, "~", "");
  insert_leading_zeros(&s);
  // "x=5" is 5; "x+y=5" stays.
  if (const size_t equal = s.find('='); equal != std::string::npos && s.find('=', equal + 1) == std::string::npos &&
                                        trim(std::string_view(s).substr(0, equal)).size() <= 2)
    s.erase(0, equal + 1);
  for (const std::string_view blank : {" ", "\t", "\r", "\f", "\v"}) replace_all(&s, blank, "");
  brace_arguments(&s, "\\sqrt", 1);
  brace_arguments(&s, "\\frac", 2);
  if (std::string number; parse_decimal(s, &number)) s = number;
  if (s == "0.5") s = "\\frac{1}{2}";
  long_fraction(&s);
  return s;
}

RewardResult math_reward(std::string_view response, std::string_view label, MathRewardOptions options) {
  if (options.thinking) {
    const size_t end = response.rfind(kThinkEnd);
    if (end == std::string_view::npos) return ungraded(RewardReason::unfinished_thinking);
    response.remove_prefix(end + kThinkEnd.size());
  }
  RewardReason reason;
  const std::string_view answer = last_boxed(response, &reason);
  if (answer.empty()) return ungraded(reason);
  RewardReason label_reason;
  const std::string_view boxed_label = last_boxed(label, &label_reason);
  std::string pred = normalize_math_answer(answer);
  const std::string truth = normalize_math_answer(boxed_label.empty() ? label : boxed_label);
  const bool whole = answer.size() <= kMaxAnswerBytes;  // a cut answer equals nothing
  const bool equal = whole && !pred.empty() && pred == truth;
  return graded(std::move(pred), equal);
}

}  // namespace lockstep
