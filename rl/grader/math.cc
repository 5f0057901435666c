// The `math` and `deepscaler` graders (rl spec 5.3, 5.5), after the graders of MATH and PRM800K.

#include <set>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "rl/grader/answer.h"
#include "rl/grader/standard.h"
#include "rl/grader/text.h"

namespace lockstep {

namespace {

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
  out->clear();
  if (negative && value != "0") out->push_back('-');
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
  *s = fmt::format("{}\\frac{{{}}}{{{}}}", negative ? "-" : "", std::string(a), std::string(b));
}


// Step B's text: words for numbers and units gone, thousands joined, mixed numbers as sums. LaTeX stays but for plain fractions;
// the algebra reads it.
std::string symbolic_form(std::string_view answer, MathRules rules) {
  std::string s(trim(answer.substr(0, kMaxAnswerBytes)));
  unwrap(&s);
  s = lower(s);
  for (const std::string_view gone : {"\\%", "\\$", "$", "%", "^{\\circ}", "^\\circ", "\u00B0", ",\\!"}) replace_all(&s, gone, "");
  replace_all(&s, "{,}", ",");
  delete_spacing(&s);
  for (const std::string_view command : {"\\left", "\\right", "\\displaystyle", "\\quad"}) delete_command(&s, command);
  for (const std::string_view word : {"\\text{ or }", "\\text{ and }", "\\text{or}", "\\text{and}", " or ", " and "}) replace_all(&s, word, ",");
  replace_all(&s, "million", "*10^6");
  replace_all(&s, "billion", "*10^9");
  replace_all(&s, "trillion", "*10^12");
  // A unit stands behind a blank or a digit; an exponent goes with it.
  for (const std::string_view unit : {"degrees", "degree", "centimeters", "centimeter", "cm", "meters", "meter", "miles", "mile", "seconds", "second",
                                      "minutes", "minute", "hours", "hour", "days", "day", "weeks", "week", "months", "month", "years", "year",
                                      "feet", "foot", "inches", "inch", "yards", "yard"}) {
    for (size_t at = 0; (at = s.find(unit, at)) != std::string::npos;) {
      size_t end = at + unit.size();
      const bool inside = (at > 0 && (is_letter(s[at - 1]) || s[at - 1] == '\\')) || (end < s.size() && is_letter(s[end]));
      if (inside) {
        at = end;
        continue;
      }
      if (end + 1 < s.size() && s[end] == '^' && is_digit(s[end + 1])) end += 2;
      s.erase(at, end - at);
    }
  }
  cut_unit(&s);
  replace_all(&s, "tfrac", "frac");
  replace_all(&s, "dfrac", "frac");
  replace_all(&s, "- ", "-");
  brace_arguments(&s, "\\frac", 2);
  // \frac{3}{4} is 3/4, which "both plain fractions" below compares as text.
  for (size_t at = 0; (at = s.find("\\frac{", at)) != std::string::npos; ++at) {
    const size_t middle = closing_brace(s, at + 5);
    if (middle == std::string::npos || middle + 1 >= s.size() || s[middle + 1] != '{') continue;
    const size_t close = closing_brace(s, middle + 1);
    if (close == std::string::npos) continue;
    const std::string a = s.substr(at + 6, middle - at - 6), b = s.substr(middle + 2, close - middle - 2);
    if (!all_digits(a) || !all_digits(b)) continue;
    const bool mixed = at > 0 && is_digit(s[at - 1]);
    s.replace(at, close + 1 - at, (mixed ? "+" : "") + a + "/" + b);
  }
  // 7 3/4 is 7+3/4.
  for (size_t i = 1; i + 1 < s.size(); ++i) {
    size_t end = i + 1;
    while (end < s.size() && is_digit(s[end])) ++end;
    if (s[i] == ' ' && is_digit(s[i - 1]) && end > i + 1 && end < s.size() && s[end] == '/') s[i] = '+';
  }
  for (const std::string_view blank : {" ", "~", "\t", "\r", "\n", "\f", "\v"}) replace_all(&s, blank, "");
  unwrap(&s);
  // Thousands: a comma between a digit and three more. In ours (1,234) is a pair, so brackets keep their commas.
  if (rules.miles || s.find_first_of("()[]") == std::string::npos) {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t i = 1; i + 3 < s.size(); ++i) {
        if (s[i] != ',' || !is_digit(s[i - 1]) || !all_digits(std::string_view(s).substr(i + 1, 3)) || (i + 4 < s.size() && is_digit(s[i + 4]))) continue;
        s.erase(i, 1);
        changed = true;
      }
    }
  }
  return s;
}

bool is_bracket(char c) { return c == '(' || c == ')' || c == '[' || c == ']'; }

// The elements of a tuple or interval, or the text itself.
std::vector<std::string> elements(const std::string& s) {
  if (s.size() <= 2 || !is_bracket(s.front()) || !is_bracket(s.back())) return {s};
  const std::string inner = s.substr(1, s.size() - 2);
  if (inner.find_first_of("()[]") != std::string::npos) return {s};
  std::vector<std::string> out;
  size_t at = 0;
  for (size_t comma; (comma = inner.find(',', at)) != std::string::npos; at = comma + 1) out.push_back(inner.substr(at, comma - at));
  out.push_back(inner.substr(at));
  return out;
}

bool plain_fraction(std::string_view s) {
  if (s.starts_with('-')) s.remove_prefix(1);
  const size_t slash = s.find('/');
  return slash != std::string_view::npos && all_digits(s.substr(0, slash)) && all_digits(s.substr(slash + 1));
}

// The integer that `s` spells, in one form. The public grader reads exponents too.
bool integral(const std::string& s, MathRules rules, std::string* out) {
  if (parse_decimal(s, out)) return out->find('.') == std::string::npos;
  const size_t e = s.find('e');
  if (!rules.miles || e == std::string::npos || e == 0 || e + 4 < s.size() || !all_digits(s.substr(e + 1))) return false;
  std::string mantissa;
  if (!parse_decimal(s.substr(0, e), &mantissa) || mantissa.find('.') != std::string::npos) return false;
  *out = mantissa == "0" ? mantissa : mantissa + std::string(static_cast<size_t>(std::stoi(s.substr(e + 1))), '0');
  return true;
}

// At most two unknown letters and no tower of powers: what the symbolic comparison is tried on.
bool worth_simplifying(std::string_view s) {
  std::set<char> unknown;
  int64_t towers = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '\\') {
      while (i + 1 < s.size() && is_letter(s[i + 1])) ++i;
    } else if (is_letter(s[i]) && !s.substr(i).starts_with("sqrt")) {
      unknown.insert(s[i]);
    } else if (is_letter(s[i])) {
      i += 3;
    } else if (s[i] == '^') {
      size_t end = i + 1;
      while (end < s.size() && (is_digit(s[end]) || s[end] == '{')) ++end;
      towers += end < s.size() && end > i + 1 && s[end] == '^' ? 1 : 0;
    }
  }
  return unknown.size() <= 2 && towers == 0;
}

bool element_equal(const std::string& a, const std::string& b, MathRules rules, bool* timeout) {
  if (plain_fraction(a) && plain_fraction(b)) return a == b;
  std::string whole_a, whole_b;
  const bool is_a = integral(a, rules, &whole_a), is_b = integral(b, rules, &whole_b);
  if (is_a != is_b) return false;
  if (is_a) return whole_a == whole_b;
  if (!worth_simplifying(a) || !worth_simplifying(b)) return false;
  Algebra algebra;
  const ParsedAnswer left = parse_answer(a, algebra), right = parse_answer(b, algebra);
  using Kind = Answer::Kind;
  const bool equal = left.ok && right.ok && left.whole.kind == Kind::value && right.whole.kind == Kind::value &&
                     algebra.equal(left.whole.value, right.whole.value);
  *timeout = *timeout || (!equal && algebra.exceeded());
  return equal;
}

bool symbolic_equal(std::string_view answer, std::string_view label, MathRules rules, bool* timeout) {
  const std::string a = symbolic_form(answer, rules), b = symbolic_form(label, rules);
  if (a.empty() || b.empty()) return false;
  if (a == b) return true;
  const std::vector<std::string> left = elements(a), right = elements(b);
  if (left.size() != right.size()) return false;
  const bool brackets = a.front() == b.front() && a.back() == b.back();
  if (left.size() > 1 && !brackets) return false;
  // In ours brackets around a single element belong to it.
  if (!rules.miles && left.size() == 1) return element_equal(a, b, rules, timeout);
  for (size_t i = 0; i < left.size(); ++i)
    if (!element_equal(left[i], right[i], rules, timeout)) return false;
  return true;
}

}  // namespace

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

bool math_equal(std::string_view answer, std::string_view label, MathRules rules, bool* timeout) {
  if (answer.size() > kMaxAnswerBytes || label.size() > kMaxAnswerBytes) return false;  // a cut answer equals nothing
  const std::string pred = normalize_math_answer(answer);
  if (!pred.empty() && pred == normalize_math_answer(label)) return true;
  return symbolic_equal(answer, label, rules, timeout);
}

RewardResult math_reward(std::string_view response, std::string_view label, GradeOptions options, MathRules rules) {
  if (!rules.miles && !after_thinking(&response, options)) return ungraded(RewardReason::unfinished_thinking);
  RewardReason reason;
  const std::string_view answer = last_boxed(response, &reason);
  if (answer.empty()) return ungraded(reason);
  if (rules.miles && response.find("\\boxed{", response.rfind("\\boxed")) == std::string_view::npos && response.find("\\boxed") != std::string_view::npos)
    return ungraded(RewardReason::no_answer);  // a blank before the brace
  RewardReason label_reason;
  const std::string_view boxed_label = last_boxed(label, &label_reason);
  bool timeout = false;
  const bool equal = math_equal(answer, boxed_label.empty() ? label : boxed_label, rules, &timeout);
  RewardResult result = graded(normalize_math_answer(answer), equal);
  if (!equal && timeout) result.reason = RewardReason::timeout;
  return result;
}

RewardResult deepscaler_reward(std::string_view response, std::string_view label, GradeOptions options) {
  bool marked = false;
  for (const std::string_view marker : {"</think>", "###Response"}) {
    const size_t at = response.rfind(marker);
    if (at == std::string_view::npos || marked) continue;
    response.remove_prefix(at + marker.size());
    marked = true;
  }
  if (!marked && options.thinking) return ungraded(RewardReason::no_think_marker);
  return math_reward(response, label, {});
}

}  // namespace lockstep
