#include "rl/grader/text.h"

#include <vector>

namespace lockstep {

namespace {

constexpr std::string_view kBoxed = "\\boxed", kFbox = "\\fbox", kThinkEnd = "</think>";

// The content of the box whose command ends at `at`; `close` is the place of its closing brace, npos to look for it.
std::string_view box_content(std::string_view text, size_t open, size_t close, RewardReason* reason) {
  *reason = RewardReason::unbalanced_box;
  if (close == std::string_view::npos) return {};
  const std::string_view content = trim(text.substr(open + 1, close - open - 1));
  *reason = content.empty() ? RewardReason::empty_box : RewardReason::wrong;  // until it is graded
  return content;
}

size_t skip_spaces(std::string_view text, size_t at) {
  while (at < text.size() && is_space(text[at])) ++at;
  return at;
}

}  // namespace

bool all_digits(std::string_view s) {
  for (const char c : s)
    if (!is_digit(c)) return false;
  return !s.empty();
}

std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out) c = to_lower(c);
  return out;
}

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

size_t closing_brace(std::string_view s, size_t open) {
  int64_t depth = 0;
  for (size_t i = open; i < s.size(); ++i) {
    if (s[i] == '{') ++depth;
    if (s[i] == '}' && --depth == 0) return i;
  }
  return std::string_view::npos;
}

std::string_view last_boxed(std::string_view text, RewardReason* reason) {
  size_t at = text.rfind(kBoxed), open = at + kBoxed.size();
  if (at == std::string_view::npos) {
    at = text.rfind(kFbox);
    open = at + kFbox.size();
  }
  *reason = RewardReason::no_answer;
  if (at == std::string_view::npos) return {};
  open = skip_spaces(text, open);
  if (open == text.size()) *reason = RewardReason::unbalanced_box;  // cut off before its brace
  if (open == text.size() || text[open] != '{') return {};
  return box_content(text, open, closing_brace(text, open), reason);
}

std::string_view last_nonempty_boxed(std::string_view text, RewardReason* reason) {
  const std::string_view last = last_boxed(text, reason);
  if (*reason != RewardReason::empty_box) return last;  // a box that is cut off is no reason to take an earlier one
  // One pass to the right finds every pair of braces, so that no box is scanned twice.
  std::vector<size_t> open;
  std::string_view found;
  size_t found_at = 0;
  const auto command_before = [&](size_t brace) {
    std::string_view head = text.substr(0, brace);
    while (!head.empty() && is_space(head.back())) head.remove_suffix(1);
    return head.ends_with(kBoxed);
  };
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{') open.push_back(i);
    if (text[i] != '}' || open.empty()) continue;
    const size_t from = open.back();
    open.pop_back();
    if (from < found_at || !command_before(from)) continue;
    RewardReason reason_here;
    const std::string_view content = box_content(text, from, i, &reason_here);
    if (content.empty()) continue;
    found = content;
    found_at = from;
  }
  *reason = found.empty() ? RewardReason::empty_box : RewardReason::wrong;
  return found;
}

bool after_thinking(std::string_view* response, GradeOptions options) {
  const size_t end = response->rfind(kThinkEnd);
  if (end == std::string_view::npos) return !options.thinking;
  if (options.thinking) response->remove_prefix(end + kThinkEnd.size());
  return true;
}

}  // namespace lockstep
