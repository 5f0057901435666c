#include "rl/grader/tokens.h"

#include <algorithm>
#include <span>
#include <utility>

#include "rl/grader/text.h"

namespace lockstep {

namespace {

using Kind = Token::Kind;

constexpr std::string_view kDropped[] = {
    "left",   "right",  "big",    "Big",     "bigg",   "Bigg",        "bigl",        "bigr",      "Bigl", "Bigr",
    "biggl",  "biggr",  "quad",   "qquad",   "limits", "displaystyle", "textstyle",  "scriptstyle", "mathbf", "mathrm",
    "mathit", "boldsymbol", "bm", "mathsf",  "mathcal", "mathbb",      "boxed",      "fbox",      "nolimits", "hline", "rm", "bf",
    "overline", "vec", "hat", "middle"};
constexpr std::string_view kTextCommands[] = {"text", "textbf", "textit", "textrm", "mbox", "operatorname", "textsf", "texttt", "hbox"};
constexpr std::string_view kFunctions[] = {"sin",    "cos",    "tan",    "cot",    "sec",    "csc",  "arcsin", "arccos", "arctan",
                                           "sinh",   "cosh",   "tanh",   "ln",     "log",    "lg",   "exp",    "abs",    "floor",
                                           "ceil",   "max",    "min",    "gcd",    "lcm"};
constexpr std::string_view kUnits[] = {
    "cm",      "mm",      "km",     "kg",      "mg",     "ml",     "mph",     "kmh",    "sq",      "inch",    "inches", "feet",   "foot",   "ft",
    "yard",    "yards",   "mile",   "miles",   "meter",  "meters", "metre",   "metres", "centimeter", "centimeters", "kilometers", "gram", "grams",
    "liter",   "liters",  "second", "seconds", "sec",    "minute", "minutes", "min",    "hour",    "hours",   "day",    "days",   "week",   "weeks",
    "month",   "months",  "year",   "years",   "degree", "degrees", "deg",    "dollar", "dollars", "cent",    "cents",  "unit",   "units",  "square",
    "cubic",   "percent", "pound",  "pounds",  "lbs",    "usd",    "pm",      "am",     "points",  "radians", "rad",    "people", "ways"};
struct Named {
  std::string_view name, text;
};
constexpr Named kOperators[] = {
    {"frac", "frac"}, {"dfrac", "frac"}, {"tfrac", "frac"}, {"cfrac", "frac"}, {"sqrt", "sqrt"}, {"binom", "binom"}, {"dbinom", "binom"},
    {"tbinom", "binom"}, {"cdot", "*"}, {"times", "*"}, {"ast", "*"}, {"div", "/"}, {"le", "le"}, {"leq", "le"}, {"leqslant", "le"}, {"ge", "ge"},
    {"geq", "ge"}, {"geqslant", "ge"}, {"lt", "<"}, {"gt", ">"}, {"ne", "ne"}, {"neq", "ne"}, {"pm", "pm"}, {"mp", "mp"}, {"cup", "cup"},
    {"bigcup", "cup"}, {"cap", "cap"}, {"in", "in"}, {"lvert", "|"}, {"rvert", "|"}, {"vert", "|"}, {"mid", "|"}, {"colon", ":"},
    {"lbrack", "["}, {"rbrack", "]"}, {"lfloor", "lfloor"}, {"rfloor", "rfloor"}, {"lceil", "lceil"}, {"rceil", "rceil"}, {"approx", "="},
    {"equiv", "="}, {"lor", ","}, {"land", ","}, {"percent", "%"}, {"degree", "deg"}, {"prime", "'"}};

bool among(std::string_view word, std::span<const std::string_view> words) { return std::find(words.begin(), words.end(), word) != words.end(); }

class Lexer {
 public:
  Lexer(std::string_view s, size_t max_tokens, std::vector<Token>* out) : s_(s), max_(max_tokens), out_(*out), single_(s.size() + 1, false) {}

  bool run() {
    while (at_ < s_.size()) {
      if (out_.size() >= max_ || !step()) return false;
    }
    put(Kind::end, "");
    return true;
  }

 private:
  void put(Kind kind, std::string_view text) {
    out_.push_back({kind, std::string(text), space_});
    space_ = false;
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < s_.size() ? s_[at_ + ahead] : '\0'; }
  std::string_view rest() const { return s_.substr(at_); }
  bool skip(std::string_view text) {
    if (!rest().starts_with(text)) return false;
    at_ += text.size();
    return true;
  }

  bool step() {
    const char c = peek();
    if (is_space(c) || c == '~') {
      ++at_;
      space_ = true;
      return true;
    }
    if (c == '\\') return command();
    if (is_digit(c) || (c == '.' && is_digit(peek(1)))) return number();
    if (is_letter(c)) return letters();
    ++at_;
    switch (c) {
      case '$': return true;
      case '{': put(Kind::open_brace, "{"); return true;
      case '}': put(Kind::close_brace, "}"); return true;
      case '&': put(Kind::punctuation, "&"); return true;
      case '(': case '[': ++depth_; break;
      case ')': case ']': --depth_; break;
      case '.': return trim(rest()).empty();  // a full stop at the end, else unreadable
      case '>': if (skip("=")) { put(Kind::punctuation, "ge"); return true; } break;
      case '<': if (skip("=")) { put(Kind::punctuation, "le"); return true; } break;
      case '!': if (skip("=")) { put(Kind::punctuation, "ne"); return true; } break;
      case '*': if (skip("*")) { put(Kind::punctuation, "^"); return true; } break;
      case '=': skip("="); break;
      case '^': {  // a degree sign, however it is braced
        for (const std::string_view sign : {"\\circ", "{\\circ}", "{\\,\\circ}", "{ \\circ }", "\\degree", "{\\degree}"}) {
          if (!skip(sign)) continue;
          put(Kind::punctuation, "deg");
          return true;
        }
        break;
      }
      default: break;
    }
    put(Kind::punctuation, s_.substr(at_ - 1, 1));
    return true;
  }

  // Digits, separators of thousands, a point, an exponent.
  bool number() {
    std::string digits;
    if (single_[at_]) {
      put(Kind::number, s_.substr(at_++, 1));
      return true;
    }
    const auto group = [&](size_t ahead) {  // three digits and no fourth
      return is_digit(peek(ahead)) && is_digit(peek(ahead + 1)) && is_digit(peek(ahead + 2)) && !is_digit(peek(ahead + 3));
    };
    while (at_ < s_.size()) {
      if (is_digit(peek())) {
        digits += peek();
        ++at_;
      } else if (!digits.empty() && digits.size() <= 3 + 3 * groups_ && peek() == ',' && depth_ == 0 && group(1)) {
        at_ += 1;
        ++groups_;
      } else if (!digits.empty() && rest().starts_with("{,}") && is_digit(peek(3))) {
        at_ += 3;
      } else if (!digits.empty() && (rest().starts_with("\\,") || rest().starts_with("\\!")) && group(2)) {
        at_ += 2;
      } else if (!digits.empty() && (rest().starts_with(",\\!") || rest().starts_with(",\\,")) && group(3)) {
        at_ += 3;
      } else {
        break;
      }
    }
    groups_ = 0;
    if (peek() == '.' && is_digit(peek(1))) {
      digits += '.';
      ++at_;
      while (is_digit(peek())) digits += s_[at_++];
    } else if (peek() == '.' && (at_ + 1 == s_.size() || !is_digit(peek(1)))) {
      ++at_;  // "42."
    }
    const size_t sign = peek(1) == '-' || peek(1) == '+' ? 1 : 0;
    if ((peek() == 'e' || peek() == 'E') && is_digit(peek(1 + sign)) && (sign > 0 || digits.find('.') != std::string::npos)) {
      digits += 'e';
      if (peek(1) == '-') digits += '-';
      at_ += 1 + sign;
      while (is_digit(peek())) digits += s_[at_++];
    }
    put(Kind::number, digits);
    return true;
  }

  // Of \text{} or of letters that stand together; in the former units come before functions (min).
  void word(std::string_view text, bool from_text) {
    std::string w;
    for (const char c : lower(text))
      if (!is_space(c) || (!w.empty() && w.back() != ' ')) w += is_space(c) ? ' ' : c;
    if (w == "or" || w == "and") {
      put(Kind::punctuation, ",");
    } else if (from_text && among(w, kUnits)) {
      put(Kind::unit, w);
    } else if (among(w, kFunctions)) {
      put(Kind::function, w);
    } else if (w == "pi") {
      put(Kind::symbol, "pi");
    } else if (w == "infinity" || w == "inf" || w == "infty" || w == "oo") {
      put(Kind::symbol, "infinity");
    } else if (w == "sqrt") {
      put(Kind::punctuation, "sqrt");
    } else if (w == "in" || w == "cup" || w == "union") {
      put(Kind::punctuation, w == "in" ? "in" : "cup");
    } else {
      put(among(w, kUnits) ? Kind::unit : Kind::word, w);
    }
  }

  bool letters() {
    size_t end = at_;
    while (end < s_.size() && is_letter(s_[end])) ++end;
    const std::string_view run = s_.substr(at_, end - at_);
    const std::string w = lower(run);
    const bool known = among(w, kFunctions) || among(w, kUnits) || w == "or" || w == "and" || w == "pi" || w == "infinity" || w == "inf" ||
                       w == "oo" || w == "sqrt" || w == "union";
    at_ = end;
    if (run.size() >= 2 && (known || run.size() >= 4)) {
      word(run, false);
    } else {
      for (const char& c : run) put(Kind::symbol, std::string_view(&c, 1));
    }
    return true;
  }

  // The whole text of a braced argument that begins at at_, which is moved behind it.
  bool braced(std::string_view* content) {
    while (is_space(peek())) ++at_;
    if (peek() != '{') return false;
    const size_t close = closing_brace(s_, at_);
    if (close == std::string_view::npos) return false;
    *content = s_.substr(at_ + 1, close - at_ - 1);
    at_ = close + 1;
    return true;
  }

  bool after_value() const {
    if (out_.empty()) return false;
    const Token& t = out_.back();
    return t.kind == Kind::number || t.kind == Kind::symbol || t.kind == Kind::close_brace || t.is(")") || t.is("deg");
  }

  // \mathrm{~m} behind a value is its unit; \mathrm{e} is Euler's number, and other letters are letters.
  bool roman_unit() {
    const size_t start = at_;
    std::string_view content;
    if (after_value() && braced(&content)) {
      while (!content.empty() && (is_space(content.front()) || content.front() == '~')) content.remove_prefix(1);
      content = trim(content);
      const bool letters = !content.empty() && std::all_of(content.begin(), content.end(), is_letter);
      if (letters && content != "e" && content != "i" && !among(content, kFunctions)) {
        put(Kind::unit, content);
        return true;
      }
    }
    at_ = start;
    return false;
  }

  bool text_argument() {
    const size_t start = at_;
    std::string_view content;
    if (!braced(&content)) return false;
    content = trim(content);
    while (!content.empty() && (content.front() == ',' || content.front() == '~')) content = trim(content.substr(1));
    while (!content.empty() && (content.back() == ',' || content.back() == '.' || content.back() == '~'))
      content = trim(content.substr(0, content.size() - 1));
    size_t run = 0, longest = 0;
    for (const char c : content) {
      run = is_letter(c) ? run + 1 : 0;
      longest = std::max(longest, run);
    }
    if (content.empty()) return true;
    const bool unit = after_value() && is_letter(content.front()) && longest < 2;  // m/s
    const bool readable = !unit && (longest < 2 || is_digit(content.front()) || content.find('\\') != std::string_view::npos);
    // A number, a choice or mathematics: read as if the command were not there. Nested commands are met once a level.
    if (readable) {
      at_ = start;
      return ++texts_ <= 100;
    }
    if (content.front() == '(' && content.back() == ')' && content.size() > 2) content = content.substr(1, content.size() - 2);
    if (unit) {
      put(Kind::unit, content);
    } else {
      word(content, true);
    }
    return true;
  }

  // Marks where \frac has one-digit arguments: \frac12, \frac1{72}, \frac{1}2.
  void mark_arguments() {
    size_t p = at_;
    for (int k = 0; k < 2; ++k) {
      while (p < s_.size() && is_space(s_[p])) ++p;
      if (p >= s_.size()) return;
      if (is_digit(s_[p])) {
        single_[p] = true;
        ++p;
      } else if (s_[p] == '{' && ++fractions_ <= 200) {
        const size_t close = closing_brace(s_, p);
        if (close == std::string_view::npos) return;
        p = close + 1;
      } else {
        return;
      }
    }
  }

  bool command() {
    const char next = peek(1);
    if (!is_letter(next)) {
      at_ += 2;
      switch (next) {
        case '\\': put(Kind::new_row, "\\\\"); return true;
        case '{': ++depth_; put(Kind::punctuation, "\\{"); return true;
        case '}': --depth_; put(Kind::punctuation, "\\}"); return true;
        case '%': put(Kind::punctuation, "%"); return true;
        case '|': put(Kind::punctuation, "|"); return true;
        case '$': case '(': case ')': case '[': case ']': case '!': return true;
        case ',': case ';': case ':': case ' ': case '\n': space_ = true; return true;
        default: return false;
      }
    }
    size_t end = at_ + 1;
    while (end < s_.size() && is_letter(s_[end])) ++end;
    const std::string_view name = s_.substr(at_ + 1, end - at_ - 1);
    at_ = end;
    if (name == "mathrm" && roman_unit()) return true;
    if (among(name, kDropped)) {
      if ((name == "left" || name == "right") && peek() == '.') ++at_;
      space_ = space_ || name.ends_with("quad");
      return true;
    }
    if (among(name, kTextCommands)) return text_argument();
    if (name == "begin" || name == "end") {
      std::string_view environment;
      if (!braced(&environment)) return false;
      const bool begins = name == "begin";
      if (environment == "array" && begins) {
        std::string_view columns;
        braced(&columns);
      }
      depth_ += begins ? 1 : -1;
      put(begins ? Kind::matrix_begin : Kind::matrix_end, "");
      return true;
    }
    for (const Named& op : kOperators) {
      if (op.name != name) continue;
      if (op.text == "frac" || op.text == "binom") mark_arguments();
      put(Kind::punctuation, op.text);
      return true;
    }
    if (name == "circ") {
      put(Kind::punctuation, "deg");
    } else if (name == "lbrace" || name == "rbrace") {
      depth_ += name == "lbrace" ? 1 : -1;
      put(Kind::punctuation, name == "lbrace" ? "\\{" : "\\}");
    } else if (among(name, kFunctions)) {
      put(Kind::function, name);
    } else if (name == "infty") {
      put(Kind::symbol, "infinity");
    } else if (name == "varnothing") {
      put(Kind::symbol, "emptyset");
    } else {
      put(Kind::symbol, name);
    }
    return true;
  }

  std::string_view s_;
  size_t max_;
  std::vector<Token>& out_;
  std::vector<bool> single_;
  size_t at_ = 0;
  bool space_ = false;
  int depth_ = 0, texts_ = 0, fractions_ = 0;
  size_t groups_ = 0;
};

}  // namespace

bool tokenize_answer(std::string_view text, size_t max_tokens, std::vector<Token>* tokens) { return Lexer(text, max_tokens, tokens).run(); }

std::string ascii_answer(std::string_view text) {
  static constexpr Named kCharacters[] = {
      {"\u2212", "-"}, {"\u2013", "-"}, {"\u00d7", "\\times "}, {"\u00b7", "\\cdot "}, {"\u22c5", "\\cdot "}, {"\u00f7", "\\div "},
      {"\u03c0", "\\pi "}, {"\u221e", "\\infty "}, {"\u221a", "\\sqrt "}, {"\u2264", "\\le "}, {"\u2265", "\\ge "}, {"\u2260", "\\ne "},
      {"\u222a", "\\cup "}, {"\u2229", "\\cap "}, {"\u2208", "\\in "}, {"\u00b1", "\\pm "}, {"\u00b0", "^\\circ "}, {"\uff0c", ","},
      {"\u20ac", ""}, {"\u00a3", ""}, {"\u00a5", ""}, {"\u00a0", " "}, {"\u2009", " "}, {"\u202f", " "}, {"\u00bd", "\\frac12 "},
      {"\u00bc", "\\frac14 "}, {"\u00be", "\\frac34 "}, {"\u00b2", "^2 "}, {"\u00b3", "^3 "}, {"\uff08", "("}, {"\uff09", ")"}, {"\u3002", " "},
      {"\u03b8", "\\theta "}, {"\u03b1", "\\alpha "}, {"\u03b2", "\\beta "}, {"\u2205", "\\emptyset "}};
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      out += text[i++];
      continue;
    }
    const auto found = std::find_if(std::begin(kCharacters), std::end(kCharacters), [&](const Named& c) { return text.substr(i).starts_with(c.name); });
    if (found == std::end(kCharacters)) {
      out += text[i++];
    } else {
      out += found->text;
      i += found->name.size();
    }
  }
  return out;
}

std::string plain_answer(std::string_view text) {
  std::string out;
  std::vector<bool> kept;      // of the open braces; those of dropped commands are not
  bool after_dropped = false;  // nothing but blanks since a dropped command
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_space(c) || c == '$' || c == '~') continue;
    const bool dressing = std::exchange(after_dropped, false);
    if (c == '{') {
      kept.push_back(!dressing);
      if (!dressing) out += c;
    } else if (c == '}') {
      if (kept.empty() || kept.back()) out += c;
      if (!kept.empty()) kept.pop_back();
    } else if (c != '\\') {
      out += c;
    } else if (const char next = i + 1 < text.size() ? text[i + 1] : '\0'; !is_letter(next)) {
      ++i;
      if (next != '\0' && std::string_view(",;:! $()[]").find(next) == std::string_view::npos) (out += c) += next;
    } else {
      size_t end = i + 1;
      while (end < text.size() && is_letter(text[end])) ++end;
      const std::string_view name = text.substr(i + 1, end - i - 1);
      after_dropped = among(name, kDropped) || among(name, kTextCommands);
      if (!after_dropped) (out += '\\') += name;
      i = end - 1;
    }
  }
  while (out.ends_with('.')) out.pop_back();
  return out;
}

}  // namespace lockstep
