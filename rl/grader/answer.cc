#include "rl/grader/answer.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "rl/grader/text.h"
#include "rl/grader/tokens.h"

namespace lockstep {

namespace {

using Kind = Token::Kind;
using AnswerKind = Answer::Kind;

// Recursive descent over tokens. Any failure sets failed_, after which every rule returns at once.
//
//   list      = item {"," item}
//   item      = union {relation union}
//   union     = sum {"cup" sum}
//   sum       = [sign] term {sign term}
//   term      = factor {["*" "/"] factor}           factors side by side are multiplied
//   factor    = primary {"!" "%" degree "^" argument}
class Parser {
 public:
  Parser(const std::vector<Token>& tokens, Algebra& algebra, bool percent_is_hundredth)
      : tokens_(tokens), algebra_(algebra), hundredth_(percent_is_hundredth) {}

  bool run(Answer* out) {
    *out = list();
    return !failed_ && current().kind == Kind::end && algebra_.ok();
  }

 private:
  const Token& current() const { return tokens_[at_]; }
  const Token& ahead(size_t n) const { return tokens_[std::min(at_ + n, tokens_.size() - 1)]; }
  bool at(std::string_view punctuation) const { return current().is(punctuation); }
  bool accept(std::string_view punctuation) {
    if (failed_ || !at(punctuation)) return false;
    ++at_;
    return true;
  }
  bool accept(Kind kind) {
    if (failed_ || current().kind != kind) return false;
    ++at_;
    return true;
  }
  Answer fail() {
    failed_ = true;
    return {};
  }
  Answer value(Value v) {
    if (!algebra_.ok()) failed_ = true;
    Answer a;
    a.value = std::move(v);
    return a;
  }
  Answer symbol(std::string_view name) { return value(algebra_.symbol(name)); }
  // Arithmetic is for values alone.
  const Value& number(const Answer& a) {
    if (a.kind != AnswerKind::value) failed_ = true;
    return a.value;
  }

  class Deeper {
   public:
    explicit Deeper(Parser& p) : p_(p) {
      if (++p_.depth_ > kMaxDepth) p_.failed_ = true;
    }
    ~Deeper() { --p_.depth_; }

   private:
    Parser& p_;
  };

  bool ends_list() const {
    const Token& t = current();
    return t.kind == Kind::end || t.kind == Kind::close_brace || t.kind == Kind::matrix_end || t.kind == Kind::new_row || t.is(")") || t.is("]") ||
           t.is("\\}") || t.is("&");
  }

  // Items joined by commas; one item is itself. +- gives two items.
  Answer list() {
    const Deeper deeper(*this);
    ++lists_;
    Answer out = items();
    --lists_;
    if (out.kind == AnswerKind::list && out.items.size() == 1) {
      Answer only = std::move(out.items[0]);
      return only;
    }
    return out;
  }

  Answer items() {
    Answer out;
    out.kind = AnswerKind::list;
    do {
      while (accept(",")) {
      }
      if (ends_list()) break;
      const size_t start = at_;
      if (lists_ == 1) saw_plus_minus_ = false;
      out.items.push_back(item());
      if (saw_plus_minus_ && !failed_ && lists_ == 1) {  // inside of a formula it belongs to the whole of it
        at_ = start;
        plus_minus_ = -1;
        out.items.push_back(item());
        plus_minus_ = 1;
      }
      if (out.items.size() > kMaxItems) return fail();
    } while (!failed_ && (accept(",") || accept(";")));
    if (failed_) return {};
    return out;
  }

  Answer item() {
    Answer left = unions();
    Answer chain;
    bool turned = false;
    while (!failed_) {
      char op = 0;
      if (accept("=")) op = '=';
      else if (accept("<")) op = '<';
      else if (accept("le")) op = 'l';
      else if (accept("ne")) op = 'n';
      else if (accept("in")) op = 'i';
      else if (at(">") || at("ge")) {
        op = at(">") ? '<' : 'l';
        ++at_;
        turned = true;
      } else if (at(":") && chain.items.empty()) {
        return ratio(std::move(left));
      } else {
        break;
      }
      if (chain.items.empty()) chain.items.push_back(std::move(left));
      chain.operators += op;
      chain.items.push_back(unions());
      if (chain.items.size() > kMaxItems) return fail();
    }
    if (chain.items.empty()) return left;
    chain.kind = AnswerKind::relation;
    if (turned) {
      std::reverse(chain.items.begin(), chain.items.end());
      std::reverse(chain.operators.begin(), chain.operators.end());
    }
    return chain;
  }

  Answer ratio(Answer first) {
    Answer out;
    out.kind = AnswerKind::ratio;
    out.items.push_back(std::move(first));
    while (accept(":")) {
      out.items.push_back(sum());
      if (out.items.size() > kMaxItems) return fail();
    }
    for (const Answer& a : out.items) number(a);
    return out;
  }

  Answer unions() {
    Answer first = sum();
    for (const auto& [name, kind] : {std::pair{"cup", AnswerKind::unions}, {"cap", AnswerKind::intersection}}) {
      if (failed_ || !at(name)) continue;
      Answer out;
      out.kind = kind;
      out.items.push_back(std::move(first));
      while (accept(name)) {
        out.items.push_back(sum());
        if (out.items.size() > kMaxItems) return fail();
      }
      return out;
    }
    return first;
  }

  // +1 or -1 for a sign at hand, which is taken; 0 if there is none.
  int accept_sign() {
    if (accept("+")) return 1;
    if (accept("-")) return -1;
    if (!failed_ && (at("pm") || at("mp"))) {
      saw_plus_minus_ = true;
      return accept("pm") ? plus_minus_ : (++at_, -plus_minus_);
    }
    return 0;
  }

  Answer signed_term() {
    int sign = 1;
    for (int s; (s = accept_sign()) != 0;) sign *= s;
    Answer a = term();
    if (sign > 0 || failed_) return a;
    return value(algebra_.multiply(algebra_.number(-1), number(a)));
  }

  Answer sum() {
    const Deeper deeper(*this);
    if (failed_) return {};
    Answer total = signed_term();
    while (!failed_) {
      const int sign = accept_sign();
      if (sign == 0) break;
      const Answer next = signed_term();
      if (failed_) break;
      total = value(sign > 0 ? algebra_.add(number(total), number(next)) : algebra_.subtract(number(total), number(next)));
    }
    return total;
  }

  bool starts_factor() const {
    const Token& t = current();
    switch (t.kind) {
      case Kind::number: case Kind::symbol: case Kind::function: case Kind::open_brace: return true;
      case Kind::punctuation:
        return t.is("(") || t.is("frac") || t.is("sqrt") || t.is("binom") || t.is("lfloor") || t.is("lceil") || (t.is("|") && bars_ == 0) ||
               t.is("[");
      default: return false;
    }
  }

  void skip_units() {
    for (;;) {
      const bool braced = current().kind == Kind::open_brace && ahead(1).kind == Kind::unit && ahead(2).kind == Kind::close_brace;
      if (failed_ || !(braced || current().kind == Kind::unit || current().kind == Kind::word)) return;
      at_ += braced ? 3 : 1;
      if (accept("^")) argument();
      if (at("/") && (ahead(1).kind == Kind::unit || ahead(1).kind == Kind::word)) ++at_;
    }
  }

  Answer term() {
    size_t start = at_;
    const auto lone_number = [&] { return at_ == start + 1 && tokens_[start].kind == Kind::number; };
    Answer product = factor();
    bool last_was_number = lone_number();
    while (!failed_) {
      skip_units();
      if (accept("*")) {
        start = at_;
        const int sign = unary_sign();
        const Answer next = factor();
        if (failed_) break;
        product = value(algebra_.multiply(number(product), number(next)));
        if (sign < 0) product = value(algebra_.multiply(algebra_.number(-1), number(product)));
      } else if (accept("/")) {
        start = at_;
        const int sign = unary_sign();
        const Answer next = factor();
        if (failed_) break;
        product = value(algebra_.divide(number(product), number(next)));
        if (sign < 0) product = value(algebra_.multiply(algebra_.number(-1), number(product)));
      } else if (starts_factor()) {
        if (last_was_number && current().kind == Kind::number) {  // 7 3/4; other numbers side by side are not read
          if (!mixed_number(&product)) return fail();
          continue;
        }
        const bool whole_before = last_was_number && whole_literal(tokens_[at_ - 1]);
        const bool fraction = at("frac");
        start = at_;
        const Answer next = factor();
        if (failed_) break;
        const bool mixed = whole_before && fraction && literal_fraction(start);
        product = value(mixed ? algebra_.add(number(product), number(next)) : algebra_.multiply(number(product), number(next)));
      } else {
        break;
      }
      last_was_number = lone_number();
    }
    return product;
  }

  int unary_sign() {
    int sign = 1;
    for (int s; (s = accept_sign()) != 0;) sign *= s;
    return sign;
  }

  static bool whole_literal(const Token& t) { return t.kind == Kind::number && all_digits(t.text); }

  // Whether the tokens [start, at_) are \frac of two whole numbers.
  bool literal_fraction(size_t start) const {
    size_t numbers = 0;
    for (size_t i = start + 1; i < at_; ++i) {
      if (tokens_[i].kind == Kind::open_brace || tokens_[i].kind == Kind::close_brace) continue;
      if (!whole_literal(tokens_[i])) return false;
      ++numbers;
    }
    return numbers == 2;
  }

  // At "3/4" behind a whole number and a blank.
  bool mixed_number(Answer* whole) {
    if (!current().space_before || !whole_literal(current()) || !ahead(1).is("/") || !whole_literal(ahead(2)) || !whole_literal(tokens_[at_ - 1]))
      return false;
    const Answer numerator = factor();
    accept("/");
    const Answer denominator = factor();
    if (failed_) return false;
    *whole = value(algebra_.add(number(*whole), algebra_.divide(number(numerator), number(denominator))));
    return !failed_;
  }

  Answer factor() {
    const Deeper deeper(*this);
    if (failed_) return {};
    Answer base = primary();
    while (!failed_) {
      if (accept("^")) {
        if (accept("'")) continue;
        const Answer exponent = argument();
        if (failed_) break;
        if (base.kind == AnswerKind::value) {
          base = value(algebra_.power(number(base), number(exponent)));
        } else {
          return fail();
        }
      } else if (accept("!")) {
        base = value(algebra_.factorial(number(base)));
      } else if (accept("%")) {
        if (hundredth_) base = value(algebra_.divide(number(base), algebra_.number(100)));
      } else if (accept("deg")) {
        if (angles_ > 0) base = value(algebra_.multiply(number(base), algebra_.divide(algebra_.symbol("pi"), algebra_.number(180))));
      } else {
        break;
      }
    }
    return base;
  }

  // What ^, _, \frac and \sqrt take: a braced group, or one token with its sign.
  Answer argument() {
    const Deeper deeper(*this);
    if (failed_) return {};
    if (current().kind == Kind::open_brace) return group();
    if (accept("-")) {
      const Answer a = primary();
      if (failed_) return {};
      return value(algebra_.multiply(algebra_.number(-1), number(a)));
    }
    accept("+");
    return primary();
  }

  Answer group() {
    ++at_;
    Answer inner = list();
    if (!accept(Kind::close_brace)) return fail();
    if (inner.kind == AnswerKind::list && inner.items.empty()) return fail();
    return inner;
  }

  Answer literal() {
    const Token& t = current();
    const std::string_view text = t.text;
    const size_t e = text.find('e'), point = text.find('.');
    const std::string_view mantissa = text.substr(0, e);
    long exponent = 0;
    if (e != std::string_view::npos) {
      const std::string digits(text.substr(e + 1));
      if (digits.size() > 6) return fail();
      exponent = std::strtol(digits.c_str(), nullptr, 10);
    }
    std::string digits(mantissa.substr(0, point));
    if (point != std::string_view::npos) {
      digits += mantissa.substr(point + 1);
      exponent -= static_cast<long>(mantissa.size() - point - 1);
    }
    if (digits.empty() || !all_digits(digits) || std::abs(exponent) > static_cast<long>(Algebra::kMaxBits / 4)) return fail();
    if (!algebra_.spend(static_cast<int64_t>(digits.size() + static_cast<size_t>(std::abs(exponent))))) return fail();
    ++at_;
    // The base of "1101_2" is part of its name.
    if (at("_")) {
      ++at_;
      return symbol(digits + "_" + raw_argument());
    }
    mpz_class scale;
    mpz_ui_pow_ui(scale.get_mpz_t(), 10, static_cast<unsigned long>(std::abs(exponent)));
    mpq_class q{mpz_class(digits, 10)};
    if (exponent < 0) q /= scale;
    if (exponent > 0) q *= scale;
    return value(algebra_.number(q));
  }

  // The text of a subscript.
  std::string raw_argument() {
    std::string text;
    if (!accept(Kind::open_brace)) {
      if (current().kind == Kind::end) failed_ = true;
      text = current().text;
      if (current().kind != Kind::end) ++at_;
      return text;
    }
    int open = 1;
    for (; open > 0 && current().kind != Kind::end; ++at_) {
      open += current().kind == Kind::open_brace ? 1 : current().kind == Kind::close_brace ? -1 : 0;
      if (open > 0 && current().kind != Kind::open_brace && current().kind != Kind::close_brace) text += current().text;
    }
    if (open > 0) failed_ = true;
    return text;
  }

  Answer named() {
    std::string name = current().text;
    ++at_;
    while (!failed_ && accept("_")) name += "_" + raw_argument();
    while (accept("'")) name += "'";
    return symbol(name);
  }

  Answer function() {
    std::string name = current().text;
    ++at_;
    std::vector<Value> arguments;
    Answer power, base;
    bool has_power = false, inverse = false;
    for (int k = 0; k < 2; ++k) {
      if (accept("_")) {
        base = argument();
        if (!failed_) arguments.push_back(number(base));
      } else if (accept("^")) {
        power = argument();
        has_power = true;
      }
    }
    if (failed_) return {};
    if (mpq_class q; has_power && algebra_.as_rational(number(power), &q) && q == -1 && (name == "sin" || name == "cos" || name == "tan")) {
      inverse = true;
      name = "arc" + name;
    }
    ++angles_;
    Answer a;
    if (at("(") || current().kind == Kind::open_brace || at("|")) {
      a = primary();
    } else {  // \sin 2x
      const int sign = unary_sign();
      a = factor();
      while (!failed_ && (current().kind == Kind::number || current().kind == Kind::symbol || at("frac") || at("sqrt"))) {
        const Answer next = factor();
        if (!failed_) a = value(algebra_.multiply(number(a), number(next)));
      }
      if (sign < 0 && !failed_) a = value(algebra_.multiply(algebra_.number(-1), number(a)));
    }
    --angles_;
    if (failed_) return {};
    if (a.kind == AnswerKind::tuple || a.kind == AnswerKind::list) {
      arguments.clear();
      for (const Answer& x : a.items) arguments.push_back(number(x));
    } else {
      arguments.insert(arguments.begin(), number(a));
    }
    if (failed_ || arguments.empty()) return fail();
    Value v = algebra_.call(name, arguments);
    if (has_power && !inverse) v = algebra_.power(v, number(power));
    return value(std::move(v));
  }

  // A parenthesis around one value is grouping; anything else is a tuple or an interval.
  Answer bracketed() {
    Answer out;
    out.kind = AnswerKind::tuple;
    out.open = current().text[0];
    ++at_;
    const int bars = std::exchange(bars_, 0);
    Answer inner = list();
    bars_ = bars;
    if (failed_ || !(at(")") || at("]"))) return fail();
    out.close = current().text[0];
    ++at_;
    const bool matched = (out.open == '(') == (out.close == ')');
    if (inner.kind != AnswerKind::list) {
      if (!matched) return fail();
      return inner;
    }
    if (inner.items.empty()) return fail();
    out.items = std::move(inner.items);
    return out;
  }

  Answer set() {
    ++at_;
    const int bars = std::exchange(bars_, 0), lists = std::exchange(lists_, 0);  // its items may have +- of their own
    const bool saw = saw_plus_minus_;
    Answer inner = list();
    saw_plus_minus_ = saw;
    lists_ = lists;
    if (accept("|") || accept(":")) inner = fail();  // {x | ..}: compared as text
    bars_ = bars;
    if (!accept("\\}")) return fail();
    if (inner.kind == AnswerKind::list) return inner.items.empty() ? symbol("emptyset") : inner;
    Answer out;
    out.kind = AnswerKind::list;
    out.items.push_back(std::move(inner));
    return out;
  }

  Answer matrix() {
    ++at_;
    Answer out;
    out.kind = AnswerKind::matrix;
    size_t columns = 0;
    while (!failed_) {
      if (accept(Kind::matrix_end)) break;
      out.items.push_back(list());
      ++columns;
      if (out.items.size() > kMaxItems) return fail();
      if (accept("&")) continue;
      if (out.columns == 0) out.columns = columns;
      if (columns != out.columns) return fail();
      columns = 0;
      if (accept(Kind::matrix_end)) break;
      if (!accept(Kind::new_row)) return fail();
    }
    if (out.items.empty()) return fail();
    return out;
  }

  Answer enclosed(std::string_view close, std::string_view name) {
    ++at_;
    if (close == "|") ++bars_;
    const Answer inner = sum();
    if (close == "|") --bars_;
    if (failed_ || !accept(close)) return fail();
    return value(algebra_.call(name, {number(inner)}));
  }

  Answer primary() {
    const Deeper deeper(*this);
    if (failed_) return {};
    const Token& t = current();
    switch (t.kind) {
      case Kind::number: return literal();
      case Kind::symbol: return named();
      case Kind::function: return function();
      case Kind::open_brace: return group();
      case Kind::matrix_begin: return matrix();
      case Kind::word: case Kind::unit: {  // words that stand together are one
        std::string name = t.text;
        for (++at_; current().kind == Kind::word || current().kind == Kind::unit; ++at_) name += " " + current().text;
        return symbol("\"" + name);
      }
      case Kind::punctuation: break;
      default: return fail();
    }
    if (t.is("(") || t.is("[")) return bracketed();
    if (t.is("\\{")) return set();
    if (t.is("|")) return enclosed("|", "abs");
    if (t.is("lfloor")) return enclosed("rfloor", "floor");
    if (t.is("lceil")) return enclosed("rceil", "ceil");
    if (accept("frac")) {
      const Answer a = argument(), b = argument();
      if (failed_) return {};
      return value(algebra_.divide(number(a), number(b)));
    }
    if (accept("binom")) {
      const Answer a = argument(), b = argument();
      if (failed_) return {};
      return value(algebra_.call("binom", {number(a), number(b)}));
    }
    if (accept("sqrt")) {
      int32_t degree = 2;
      if (at("[")) {
        ++at_;
        const Answer n = sum();
        mpq_class q;
        if (failed_ || !accept("]") || !algebra_.as_rational(number(n), &q) || q.get_den() != 1 || q < 2 || q > Algebra::kMaxExponent) return fail();
        degree = static_cast<int32_t>(q.get_num().get_si());
      }
      const Answer a = argument();
      if (failed_) return {};
      return value(algebra_.root(number(a), degree));
    }
    return fail();
  }

  const std::vector<Token>& tokens_;
  Algebra& algebra_;
  bool hundredth_;
  size_t at_ = 0;
  int depth_ = 0;
  int bars_ = 0;    // absolute values that are open
  int angles_ = 0;  // functions whose argument is being read: degrees become radians
  int lists_ = 0;   // that are open, outside of which sets count anew
  int plus_minus_ = 1;
  bool saw_plus_minus_ = false;
  bool failed_ = false;
};

bool is_value(const Answer& a) { return a.kind == AnswerKind::value; }

// A name that an answer may be introduced with: x = 5, f(x) = .., \text{Area} = .., y in ..
bool is_name(const Answer& a, const Algebra& algebra) {
  std::string_view name;
  if (!is_value(a)) return false;
  if (algebra.as_symbol(a.value, &name)) return true;
  // f(x) is the product of two symbols.
  if (a.value.num.size() != 1) return false;
  const auto& [m, c] = *a.value.num.begin();
  return c == 1 && m.size() == 2 && m[0].second == SmallRational{1, 1} && m[1].second == SmallRational{1, 1};
}

const Answer& stripped(const Answer& a, const Algebra& algebra) {
  if (a.kind != AnswerKind::relation) return a;
  const bool named = is_name(a.items.front(), algebra);
  if (named && a.operators.find_first_not_of('=') == std::string::npos) return a.items.back();
  if (named && a.operators == "i") return a.items.back();
  return a;
}

bool items_equal(const Answer& a, const Answer& b, Algebra& algebra) {
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i)
    if (!answers_equal(a.items[i], b.items[i], algebra)) return false;
  return true;
}

bool unordered_equal(const Answer& a, const Answer& b, Algebra& algebra) {
  if (a.items.size() != b.items.size()) return false;
  std::vector<bool> used(b.items.size(), false);
  for (const Answer& x : a.items) {
    size_t j = 0;
    while (j < used.size() && (used[j] || !answers_equal(x, b.items[j], algebra))) ++j;
    if (j == used.size()) return false;
    used[j] = true;
  }
  return true;
}

// a op b of two values as one value and a sign of comparison: 2x < 4 is x < 2.
bool relations_equal(const Answer& a, const Answer& b, Algebra& algebra) {
  if (a.operators == b.operators && items_equal(a, b, algebra)) return true;
  if (a.items.size() != 2 || b.items.size() != 2 || a.operators != b.operators || a.operators == "i") return false;
  for (const Answer* r : {&a, &b})
    if (!is_value(r->items[0]) || !is_value(r->items[1])) return false;
  const Value left = algebra.subtract(a.items[0].value, a.items[1].value), right = algebra.subtract(b.items[0].value, b.items[1].value);
  mpq_class q;
  if (!algebra.ratio(left, right, &q)) return false;
  return a.operators == "=" || a.operators == "n" ? q != 0 : q > 0;
}

}  // namespace

ParsedAnswer parse_answer(std::string_view text, Algebra& algebra) {
  ParsedAnswer out;
  const std::string ascii = ascii_answer(trim(text));
  out.plain = plain_answer(ascii);
  if (ascii.size() > kMaxParsedBytes) return out;
  std::vector<Token> tokens;
  if (!tokenize_answer(ascii, kMaxTokens, &tokens)) return out;
  out.has_percent = std::any_of(tokens.begin(), tokens.end(), [](const Token& t) { return t.is("%"); });
  out.ok = Parser(tokens, algebra, false).run(&out.whole);
  if (out.ok && out.has_percent) out.ok = Parser(tokens, algebra, true).run(&out.hundredth);
  return out;
}

bool answers_equal(const Answer& left, const Answer& right, Algebra& algebra) {
  if (!algebra.spend(20)) return false;
  const bool both_relations = left.kind == AnswerKind::relation && right.kind == AnswerKind::relation;
  if (both_relations && relations_equal(left, right, algebra)) return true;
  const Answer &a = both_relations ? left : stripped(left, algebra), &b = both_relations ? right : stripped(right, algebra);
  if (both_relations) return false;
  if (a.kind != b.kind) {
    // {5} is 5.
    if (a.kind == AnswerKind::list && a.items.size() == 1) return answers_equal(a.items[0], b, algebra);
    if (b.kind == AnswerKind::list && b.items.size() == 1) return answers_equal(a, b.items[0], algebra);
    return false;
  }
  switch (a.kind) {
    case AnswerKind::value: return algebra.equal(a.value, b.value);
    case AnswerKind::list: case AnswerKind::unions: case AnswerKind::intersection: return unordered_equal(a, b, algebra);
    case AnswerKind::tuple: return a.open == b.open && a.close == b.close && items_equal(a, b, algebra);
    case AnswerKind::matrix: return a.columns == b.columns && items_equal(a, b, algebra);
    case AnswerKind::ratio: {
      if (a.items.size() != b.items.size()) return false;
      for (size_t i = 1; i < a.items.size(); ++i) {
        if (!algebra.equal(algebra.multiply(a.items[0].value, b.items[i].value), algebra.multiply(a.items[i].value, b.items[0].value))) return false;
      }
      return true;
    }
    case AnswerKind::relation: return false;  // both are: seen above
  }
  return false;
}

bool answers_equal(const ParsedAnswer& a, const ParsedAnswer& b, Algebra& algebra) {
  if (!a.plain.empty() && a.plain == b.plain) return true;
  if (!a.ok || !b.ok) return false;
  if (answers_equal(a.whole, b.whole, algebra)) return true;
  if (a.has_percent == b.has_percent) return false;
  return a.has_percent ? answers_equal(a.hundredth, b.whole, algebra) : answers_equal(a.whole, b.hundredth, algebra);
}

std::string answer_text(const Answer& a, const Algebra& algebra) {
  const Answer& s = stripped(a, algebra);
  if (is_value(s)) return algebra.str(s.value);
  std::vector<std::string> parts;
  for (const Answer& x : s.items) parts.push_back(answer_text(x, algebra));
  std::string joint = ", ", open, close;
  switch (s.kind) {
    case AnswerKind::list: std::sort(parts.begin(), parts.end()); break;
    case AnswerKind::unions: std::sort(parts.begin(), parts.end()); joint = " u "; break;
    case AnswerKind::intersection: std::sort(parts.begin(), parts.end()); joint = " n "; break;
    case AnswerKind::tuple: open = s.open; close = s.close; break;
    case AnswerKind::matrix: open = "[" + std::to_string(s.columns) + ": "; close = "]"; break;
    case AnswerKind::ratio: joint = ":"; break;
    case AnswerKind::relation: case AnswerKind::value: break;
  }
  std::string out = open;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += s.kind == AnswerKind::relation ? std::string(" ") + s.operators[i - 1] + " " : joint;
    out += parts[i];
  }
  return out + close;
}

}  // namespace lockstep
