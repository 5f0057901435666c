#include "io/pretokenize.h"

#include <span>

#include "io/unicode.h"

namespace lockstep {

namespace {

// As tokenizer.json has them once JSON is read; the third holds a real carriage return and newline.
constexpr std::string_view kNumbers = R"(\p{N}{1,3})";
constexpr std::string_view kCjkRuns = "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+";
constexpr std::string_view kWords =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^)" "\r\n"
    R"(\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[)" "\r\n"
    R"(]*|\s*[)" "\r\n"
    R"(]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text), table_(CharTable::get()) {}

  // Where the match of `pattern` that begins at `at` ends; `at` if there is none.
  size_t match(SplitPattern pattern, size_t at) const {
    switch (pattern) {
      case SplitPattern::numbers: return match_numbers(at);
      case SplitPattern::cjk: return run(at, kCjk);
      case SplitPattern::words: return match_words(at);
      case SplitPattern::gpt2: return match_gpt2(at);
    }
    return at;
  }
  size_t after(size_t at) const { return at + utf8_char(text_, at).length; }

 private:
  // Flags of the character at `at`; 0 at the end of the text.
  uint8_t flags(size_t at) const { return at < text_.size() ? table_.flags(utf8_char(text_, at).code) : 0; }

  // The end of the longest run of characters that have one of `wanted`.
  size_t run(size_t at, uint8_t wanted) const {
    while (at < text_.size()) {
      const Utf8Char c = utf8_char(text_, at);
      if ((table_.flags(c.code) & wanted) == 0) break;
      at += c.length;
    }
    return at;
  }
  size_t run_without(size_t at, uint8_t unwanted) const {
    while (at < text_.size()) {
      const Utf8Char c = utf8_char(text_, at);
      if ((table_.flags(c.code) & unwanted) != 0) break;
      at += c.length;
    }
    return at;
  }

  size_t match_numbers(size_t at) const {
    for (int i = 0; i < 3 && (flags(at) & kNumber) != 0; ++i) at = after(at);
    return at;
  }

  // \s+(?!\S)|\s+ : all of a run of spaces at the end of the text, else all but its last character, else that one. With
  // `to_newline` \s*[\r\n]+ comes first: up to the last newline of the run.
  size_t match_spaces(size_t at, bool to_newline) const {
    size_t end = at, last = at, newline = at;
    while (end < text_.size()) {
      const Utf8Char c = utf8_char(text_, end);
      const uint8_t f = table_.flags(c.code);
      if ((f & kSpace) == 0) break;
      last = end;
      end += c.length;
      if (f & kNewline) newline = end;
    }
    if (to_newline && newline > at) return newline;
    return end == text_.size() || last == at ? end : last;
  }

  size_t match_words(size_t at) const {
    const uint8_t f = flags(at);
    const size_t next = after(at);
    if (f & (kLetter | kMark)) return run(next, kLetter | kMark);
    if (f & kPunctuation) {
      if (next == at + 1 && (flags(next) & kAsciiLetter)) return run(next, kAsciiLetter);
      return run(run(next, kPunctuation), kNewline);
    }
    if (!(f & kNewline) && (flags(next) & (kLetter | kMark))) return run(next, kLetter | kMark);
    if (text_[at] == ' ' && (flags(next) & kPunctuation)) return run(run(next, kPunctuation), kNewline);
    if (f & kSpace) return match_spaces(at, true);
    return at;
  }

  size_t match_gpt2(size_t at) const {
    if (text_[at] == '\'') {
      for (const std::string_view ending : {"s", "t", "re", "ve", "m", "ll", "d"})
        if (text_.substr(at + 1).starts_with(ending)) return at + 1 + ending.size();
    }
    // A space joins what follows, unless that is a space or the end.
    const bool joins = text_[at] == ' ' && at + 1 < text_.size() && !(flags(at + 1) & kSpace);
    const size_t begin = joins ? at + 1 : at;
    const uint8_t f = flags(begin);
    if (f & kLetter) return run(begin, kLetter);
    if (f & kNumber) return run(begin, kNumber);
    if (f & kSpace) return match_spaces(at, false);
    return run_without(begin, kSpace | kLetter | kNumber);
  }

  std::string_view text_;
  const CharTable& table_;
};

void split_by(std::string_view text, std::span<const SplitPattern> patterns, std::vector<std::string_view>* pieces) {
  if (patterns.empty()) {
    if (!text.empty()) pieces->push_back(text);
    return;
  }
  const Scanner scanner(text);
  size_t done = 0;  // everything before has been handed on
  for (size_t at = 0; at < text.size();) {
    const size_t end = scanner.match(patterns[0], at);
    if (end == at) {
      at = scanner.after(at);
      continue;
    }
    if (at > done) split_by(text.substr(done, at - done), patterns.subspan(1), pieces);
    split_by(text.substr(at, end - at), patterns.subspan(1), pieces);
    done = at = end;
  }
  if (done < text.size()) split_by(text.substr(done), patterns.subspan(1), pieces);
}

}  // namespace

std::optional<SplitPattern> find_split_pattern(std::string_view regex) {
  if (regex == kNumbers) return SplitPattern::numbers;
  if (regex == kCjkRuns) return SplitPattern::cjk;
  if (regex == kWords) return SplitPattern::words;
  if (regex == kGpt2) return SplitPattern::gpt2;
  return std::nullopt;
}

void split_text(std::string_view text, const std::vector<SplitPattern>& patterns, std::vector<std::string_view>* pieces) {
  split_by(text, patterns, pieces);
}

}  // namespace lockstep
