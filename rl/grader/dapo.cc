// The `dapo` grader (rl spec 5.4): what stands behind the last "Answer:", normalised as in arXiv 2206.14858, appendix D.

#include <fmt/core.h>

#include "io/utf8.h"
#include "rl/grader/standard.h"
#include "rl/grader/text.h"

namespace lockstep {

namespace {

constexpr size_t kTailCharacters = 300, kBoxTailCharacters = 100;

// The last `count` characters (code points) of s.
std::string_view tail(std::string_view s, size_t count) {
  size_t at = s.size();
  while (at > 0 && count > 0) {
    --at;
    if ((static_cast<unsigned char>(s[at]) & 0xC0) != 0x80) --count;
  }
  return s.substr(at);
}

// The rest of the line behind the last "answer", blanks, ":". Blanks may hold line ends, as in the public graders.
bool answer_line(std::string_view s, std::string_view* out) {
  const std::string small = lower(s);
  for (size_t at = small.size(); (at = small.rfind("answer", at)) != std::string::npos; --at) {
    size_t i = at + 6;
    while (i < s.size() && is_space(s[i])) ++i;
    if (i < s.size() && s[i] == ':') {
      ++i;
      while (i < s.size() && is_space(s[i])) ++i;
      const std::string_view line = s.substr(i, s.find('\n', i) - i);
      if (!line.empty()) {
        *out = line;
        return true;
      }
    }
    if (at == 0) break;
  }
  return false;
}

void remove_all(std::string* s, std::string_view what) { replace_all(s, what, ""); }

// "\text{abc}" anywhere becomes "abc".
void unwrap_everywhere(std::string* s, std::string_view command) {
  for (size_t at = 0; (at = s->find(command, at)) != std::string::npos;) {
    const size_t close = closing_brace(*s, at + command.size() - 1);
    if (close == std::string::npos) return;
    s->erase(close, 1);
    s->erase(at, command.size());
  }
}

// frac ab is frac{a}{b}, sqrt a is sqrt{a}; where braces stand already, nothing happens.
void expand_shorthand(std::string* s, std::string_view command, size_t arguments) {
  std::string out;
  size_t at = 0;
  for (size_t hit; (hit = s->find(command, at)) != std::string::npos;) {
    size_t i = hit + command.size();
    out.append(*s, at, i - at);
    if (i + arguments <= s->size() && (*s)[i] != '{')
      for (size_t k = 0; k < arguments; ++k) ((out += '{') += (*s)[i++]) += '}';
    at = i;
  }
  *s = out.append(*s, at);
}

// "34." and "**34**" are 34: markdown and a full stop around an answer.
std::string_view without_decoration(std::string_view s) {
  for (bool changed = true; changed;) {
    const size_t before = s.size();
    s = trim(s);
    while (!s.empty() && (s.front() == '*' || s.front() == '_')) s.remove_prefix(1);
    while (!s.empty() && (s.back() == '*' || s.back() == '_' || s.back() == '.')) s.remove_suffix(1);
    changed = s.size() != before;
  }
  return s;
}

bool integer_text(std::string_view label, std::string* out) {
  label = trim(label);
  const bool negative = label.starts_with('-');
  if (negative || label.starts_with('+')) label.remove_prefix(1);
  if (const size_t point = label.find('.'); point != std::string_view::npos) {
    for (const char c : label.substr(point + 1))
      if (c != '0') return false;
    label = label.substr(0, point);
  }
  if (!all_digits(label)) return false;
  while (label.size() > 1 && label.front() == '0') label.remove_prefix(1);
  out->clear();
  if (negative && label != "0") out->push_back('-');
  *out += label;
  return true;
}

RewardResult signed_score(RewardResult r) {
  r.score = r.correct ? 1.0f : -1.0f;
  return r;
}

}  // namespace

std::string normalize_dapo_answer(std::string_view answer) {
  std::string s(answer.substr(answer.rfind('=') == std::string_view::npos ? 0 : answer.rfind('=') + 1));
  for (const std::string_view gone : {"an ", "a ", ".$", "\\$", "\\ ", " "}) replace_all(&s, gone, gone == ".$" ? "$" : "");
  replace_all(&s, "mbox", "text");
  replace_all(&s, ",\\text{and}", ",");
  replace_all(&s, "\\text{and}", ",");
  for (const std::string_view word :
       {"square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "sue", "points", "feet", "minutes", "digits", "cents",
        "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}",
        "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", "\"", "\\dots"})
    remove_all(&s, word);
  if (const size_t open = s.find('$'); open != std::string::npos) {
    const size_t close = s.find('$', open + 1);
    if (close != std::string::npos) s = s.substr(open + 1, close - open - 1);
  }
  for (const std::string_view command : {"\\text{", "\\textbf{", "\\overline{", "\\boxed{"}) unwrap_everywhere(&s, command);
  expand_shorthand(&s, "frac", 2);
  expand_shorthand(&s, "sqrt", 1);
  remove_all(&s, "$");
  bool digits_and_commas = !s.empty();
  for (const char c : s) digits_and_commas = digits_and_commas && (is_digit(c) || c == ',');
  if (digits_and_commas) remove_all(&s, ",");
  return std::string(trim(s));
}

RewardResult dapo_reward(std::string_view response, std::string_view label, GradeOptions options, DapoRules rules) {
  std::string truth(trim(label));
  if (rules == DapoRules::miles && !integer_text(label, &truth)) {
    return reward_error(fmt::format("label {} is not an integer, which dapo_miles needs; use dapo", in_quotes(truth)));
  }
  if (rules == DapoRules::ours && !after_thinking(&response, options)) return signed_score(ungraded(RewardReason::unfinished_thinking));
  const std::string_view end = tail(response, kTailCharacters);
  std::string_view line;
  const bool found = answer_line(end, &line);
  if (rules != DapoRules::ours) {
    if (found) {
      const std::string pred = normalize_dapo_answer(line);
      return signed_score(graded(pred, pred == normalize_dapo_answer(truth)));
    }
    if (rules == DapoRules::miles) return signed_score(ungraded(RewardReason::no_answer));
    RewardReason reason;
    const std::string_view near = tail(end, kBoxTailCharacters);
    const size_t at = near.rfind("\\boxed{");
    const std::string_view box = at == std::string_view::npos ? std::string_view() : last_boxed(near.substr(at), &reason);
    if (box.empty()) return signed_score(ungraded(RewardReason::no_answer));
    return signed_score(graded(std::string(box), box == truth));
  }
  RewardReason reason = RewardReason::wrong;
  const bool boxed = line.find("\\boxed") != std::string_view::npos;
  std::string_view answer = without_decoration(line);
  if (boxed || !found) answer = last_boxed(found ? line : end, &reason);
  if (answer.empty()) return signed_score(ungraded(found && !boxed ? RewardReason::no_answer : reason));
  std::string pred = normalize_dapo_answer(answer);
  bool timeout = false;
  const bool equal = (!pred.empty() && pred == normalize_dapo_answer(truth)) || math_equal(answer, truth, {}, &timeout);
  if (equal) pred = normalize_math_answer(answer);
  RewardResult result = signed_score(graded(std::move(pred), equal));
  if (!equal && timeout) result.reason = RewardReason::timeout;
  return result;
}

}  // namespace lockstep
