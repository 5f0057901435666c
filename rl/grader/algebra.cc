#include "rl/grader/algebra.h"

#include <algorithm>
#include <numeric>

#include <fmt/core.h>

namespace lockstep {

namespace {

constexpr unsigned kFloatBits = 512;   // of numeric evaluation
constexpr long kAgreeBits = 400;       // that equal constants have in common
constexpr int kMaxEvaluationDepth = 16;
constexpr unsigned long kTrialPrimes = 2000;  // factors up to here are found
constexpr int32_t kImaginary = 0, kPi = 1, kEuler = 2;

size_t bits_of(const mpq_class& q) {
  return mpz_sizeinbase(q.get_num_mpz_t(), 2) + mpz_sizeinbase(q.get_den_mpz_t(), 2);
}

bool is_integer(const mpq_class& q) { return q.get_den() == 1; }

// False if the result does not fit.
bool reduced(int64_t num, int64_t den, SmallRational* out) {
  const int64_t g = std::gcd(num, den);
  num /= g;
  den /= g;
  if (std::abs(num) > Algebra::kMaxExponent || den > Algebra::kMaxExponent) return false;
  *out = {static_cast<int32_t>(num), static_cast<int32_t>(den)};
  return true;
}

bool add_exponents(SmallRational a, SmallRational b, SmallRational* out) {
  return reduced(static_cast<int64_t>(a.num) * b.den + static_cast<int64_t>(b.num) * a.den, static_cast<int64_t>(a.den) * b.den, out);
}

bool small(const mpq_class& q, SmallRational* out) {
  if (!q.get_num().fits_sint_p() || !q.get_den().fits_sint_p()) return false;
  return reduced(q.get_num().get_si(), q.get_den().get_si(), out);
}

std::string exponent_text(SmallRational e) {
  if (e == SmallRational{1, 1}) return "";
  return e.den == 1 ? fmt::format("^{}", e.num) : fmt::format("^({}/{})", e.num, e.den);
}

const Polynomial& one() {
  static const Polynomial p = {{{}, 1}};
  return p;
}

bool is_one(const Polynomial& p) { return p.size() == 1 && p.begin()->first.empty() && p.begin()->second == 1; }

}  // namespace

bool Algebra::spend(int64_t work) {
  spent_ += work;
  if (spent_ > kBudget) exceeded_ = true;
  return ok();
}

int32_t Algebra::intern(Atom atom) {
  if (atoms_.empty()) {
    for (const char* name : {"i", "pi", "e"}) {
      by_key_.emplace(name, static_cast<int32_t>(atoms_.size()));
      atoms_.push_back({name, name, 0, {}});
    }
  }
  spend(static_cast<int64_t>(atom.key.size()));
  const auto [at, added] = by_key_.try_emplace(atom.key, static_cast<int32_t>(atoms_.size()));
  if (added) atoms_.push_back(std::move(atom));
  return at->second;
}

Value Algebra::atom_power(int32_t atom, SmallRational exponent) {
  if (exponent.num == 0) return number(1);
  return {{{{{atom, exponent}}, 1}}, one()};
}

Value Algebra::number(const mpq_class& q) {
  if (bits_of(q) > kMaxBits) exceeded_ = true;
  if (q == 0 || !ok()) return {{}, one()};
  return {{{{}, q}}, one()};
}

Value Algebra::symbol(std::string_view name) {
  const std::string key(name);
  return atom_power(intern({key, key, 0, {}}), {1, 1});
}

Value Algebra::opaque(std::string_view name, std::vector<Value> arguments, SmallRational exponent) {
  if (!ok()) return number(0);
  std::string key(name);
  key += '(';
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i > 0) key += ',';
    key += str(arguments[i]);
  }
  key += ')';
  if (key.size() > kMaxBits) exceeded_ = true;
  return atom_power(intern({key, std::string(name), 0, std::move(arguments)}), exponent);
}

void Algebra::add_term(Polynomial* p, const Monomial& m, const mpq_class& c) {
  if (c == 0) return;
  spend(static_cast<int64_t>(2 + m.size() + bits_of(c) / 64));
  const auto [at, added] = p->try_emplace(m, c);
  if (!added) at->second += c;
  if (bits_of(at->second) > kMaxBits || p->size() > kMaxTerms) exceeded_ = true;
  if (at->second == 0) p->erase(at);
}

// Exponents add; i^n and whole powers of primes go into the factor. False if an exponent or the factor gets too large.
bool Algebra::multiply_monomials(const Monomial& a, const Monomial& b, Monomial* product, mpq_class* factor) {
  product->clear();
  *factor = 1;
  size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    std::pair<int32_t, SmallRational> entry;
    if (j == b.size() || (i < a.size() && a[i].first < b[j].first)) {
      entry = a[i++];
    } else if (i == a.size() || b[j].first < a[i].first) {
      entry = b[j++];
    } else {
      entry.first = a[i].first;
      if (!add_exponents(a[i++].second, b[j++].second, &entry.second)) return false;
    }
    SmallRational& e = entry.second;
    if (entry.first == kImaginary && e.den == 1) {
      const int32_t turns = ((e.num % 4) + 4) % 4;
      if (turns >= 2) *factor = -*factor;
      e.num = turns % 2;
    } else if (const mpz_class& prime = atoms_[static_cast<size_t>(entry.first)].prime; prime > 1) {
      const int32_t whole = e.num >= 0 ? e.num / e.den : -((-e.num + e.den - 1) / e.den);
      if (whole != 0) {
        const auto times = static_cast<unsigned long>(std::abs(whole));
        if (mpz_sizeinbase(prime.get_mpz_t(), 2) * times > kMaxBits) return false;
        mpz_class power;
        mpz_pow_ui(power.get_mpz_t(), prime.get_mpz_t(), times);
        *factor *= whole > 0 ? mpq_class(power) : mpq_class(1, power);
        e.num -= whole * e.den;
      }
    }
    if (e.num != 0) product->push_back(entry);
  }
  return true;
}

Polynomial Algebra::multiply(const Polynomial& a, const Polynomial& b) {
  if (is_one(a)) return b;
  if (is_one(b)) return a;
  Polynomial out;
  Monomial m;
  mpq_class factor;
  for (const auto& [ma, ca] : a) {
    for (const auto& [mb, cb] : b) {
      const auto limbs_a = static_cast<int64_t>(1 + bits_of(ca) / 64), limbs_b = static_cast<int64_t>(1 + bits_of(cb) / 64);
      if (!spend(limbs_a * limbs_b + static_cast<int64_t>(4 + ma.size() + mb.size()))) return {};
      if (!multiply_monomials(ma, mb, &m, &factor)) {
        exceeded_ = true;
        return {};
      }
      add_term(&out, m, ca * cb * factor);
      if (!ok()) return {};
    }
  }
  return out;
}

// A denominator of one term goes into the numerator; otherwise its first coefficient becomes 1.
Value Algebra::normalized(Polynomial num, Polynomial den) {
  if (den.empty()) undefined_ = true;
  if (!ok()) return {{}, one()};
  if (num.empty()) return {{}, one()};
  if (is_one(den)) return {std::move(num), std::move(den)};
  Polynomial inverse;
  if (den.size() == 1) {
    Monomial m = den.begin()->first;
    for (auto& [atom, exponent] : m) exponent.num = -exponent.num;
    inverse = {{m, 1 / den.begin()->second}};
    return {multiply(num, inverse), one()};
  }
  if (const mpq_class lead = den.begin()->second; lead != 1) {
    inverse = {{{}, 1 / lead}};
    num = multiply(num, inverse);
    den = multiply(den, inverse);
  }
  if (num == den) return number(1);
  return {std::move(num), std::move(den)};
}

Value Algebra::add(const Value& a, const Value& b) {
  if (!ok()) return number(0);
  if (a.den == b.den) {
    Polynomial sum = a.num;
    for (const auto& [m, c] : b.num) add_term(&sum, m, c);
    return normalized(std::move(sum), a.den);
  }
  Polynomial sum = multiply(a.num, b.den);
  for (const auto& [m, c] : multiply(b.num, a.den)) add_term(&sum, m, c);
  return normalized(std::move(sum), multiply(a.den, b.den));
}

Value Algebra::subtract(const Value& a, const Value& b) { return add(a, multiply(number(-1), b)); }

Value Algebra::multiply(const Value& a, const Value& b) {
  if (!ok()) return number(0);
  return normalized(multiply(a.num, b.num), multiply(a.den, b.den));
}

Value Algebra::divide(const Value& a, const Value& b) {
  if (b.num.empty()) undefined_ = true;
  if (!ok()) return number(0);
  return normalized(multiply(a.num, b.den), multiply(a.den, b.num));
}

bool Algebra::as_rational(const Value& a, mpq_class* q) const {
  if (!is_one(a.den) || a.num.size() > 1) return false;
  if (a.num.empty()) {
    *q = 0;
    return true;
  }
  if (!a.num.begin()->first.empty()) return false;
  *q = a.num.begin()->second;
  return true;
}

bool Algebra::as_symbol(const Value& a, std::string_view* name) const {
  if (!is_one(a.den) || a.num.size() != 1 || a.num.begin()->second != 1) return false;
  const Monomial& m = a.num.begin()->first;
  if (m.size() != 1 || m[0].second != SmallRational{1, 1}) return false;
  *name = atoms_[static_cast<size_t>(m[0].first)].key;
  return true;
}

Value Algebra::integer_power(const Value& base, long n) {
  if (n < 0) return divide(number(1), integer_power(base, -n));
  Value out = number(1), square = base;
  for (; n > 0 && ok(); n >>= 1) {
    if (n & 1) out = multiply(out, square);
    if (n > 1) square = multiply(square, square);
  }
  return out;
}

// A positive integer as prime powers, each raised to `exponent`, or to the symbolic `*by`.
Value Algebra::prime_powers(mpz_class n, const SmallRational& exponent, const Value* by) {
  Value out = number(1);
  const auto take = [&](const mpz_class& p, int32_t count) {
    SmallRational e;
    if (!reduced(static_cast<int64_t>(count) * exponent.num, exponent.den, &e)) {
      exceeded_ = true;
      return;
    }
    Value factor;
    if (by == nullptr) {
      factor = atom_power(intern({p.get_str(), "prime", p, {}}), e);
    } else {
      factor = opaque("pow", {number(mpq_class(p)), *by}, e);
    }
    out = multiply(out, factor);
  };
  for (unsigned long p = 2; p <= kTrialPrimes && n > 1 && ok(); ++p) {
    spend(static_cast<int64_t>(1 + mpz_size(n.get_mpz_t()) / 8));
    int32_t count = 0;
    while (mpz_divisible_ui_p(n.get_mpz_t(), p) != 0 && spend(static_cast<int64_t>(mpz_size(n.get_mpz_t())))) {
      mpz_divexact_ui(n.get_mpz_t(), n.get_mpz_t(), p);
      ++count;
    }
    if (count > 0) take(p, count);
  }
  if (n > 1 && ok()) {  // no small factor is left: look whether it is a power
    int32_t degree = 1;
    const auto most = static_cast<unsigned long>(mpz_sizeinbase(n.get_mpz_t(), 2) / 10);
    for (unsigned long k = 2; k <= most && k <= 64 && mpz_perfect_power_p(n.get_mpz_t()) != 0 && ok(); ++k) {
      mpz_class r;
      spend(static_cast<int64_t>(mpz_size(n.get_mpz_t()) * mpz_size(n.get_mpz_t())));
      while (mpz_root(r.get_mpz_t(), n.get_mpz_t(), k) != 0 && n > 1) {
        n = r;
        degree *= static_cast<int32_t>(k);
      }
    }
    take(n, degree);
  }
  return out;
}

Value Algebra::root(const Value& a, int32_t degree) {
  if (degree == 0) undefined_ = true;
  if (!ok()) return number(0);
  if (degree < 0) return divide(number(1), root(a, -degree));
  if (degree == 1 || a.num.empty()) return a;
  if (degree > kMaxExponent) {
    exceeded_ = true;
    return number(0);
  }
  if (!is_one(a.den)) return divide(root({a.num, one()}, degree), root({a.den, one()}, degree));
  const SmallRational e{1, degree};
  // The content c of c * p, p with whole coprime coefficients of which the first is positive.
  mpz_class gcd = 0, lcm = 1;
  for (const auto& [m, c] : a.num) {
    gcd = ::gcd(gcd, c.get_num());
    lcm = ::lcm(lcm, c.get_den());
    if (mpz_sizeinbase(lcm.get_mpz_t(), 2) > kMaxBits) exceeded_ = true;
    if (!spend(static_cast<int64_t>(mpz_size(lcm.get_mpz_t()) + mpz_size(gcd.get_mpz_t())))) return number(0);
  }
  Value rest = normalized(multiply(a.num, {{{}, mpq_class(lcm) / gcd}}), one());
  if (!ok()) return number(0);
  Value out = divide(prime_powers(gcd, e, nullptr), prime_powers(lcm, e, nullptr));
  if (rest.num.size() > 1) return multiply(out, opaque("root", {rest}, e));
  const auto& [m, sign] = *rest.num.begin();
  if (sign < 0) {  // -1 has the root i, or -1 for odd degrees
    if (degree % 2 == 1) {
      out = multiply(out, number(-1));
    } else {
      intern({"i", "i", 0, {}});
      out = multiply(out, atom_power(kImaginary, {1, degree / 2}));
    }
  }
  for (const auto& [atom, exponent] : m) {
    SmallRational r;
    if (!reduced(exponent.num, static_cast<int64_t>(exponent.den) * degree, &r)) {
      exceeded_ = true;
      break;
    }
    const bool constant = atom <= kEuler || atoms_[static_cast<size_t>(atom)].prime > 1;
    // The even root of an even power is never negative: sqrt(x^2) is |x|.
    if (!constant && degree % 2 == 0 && exponent.den == 1 && exponent.num % 2 == 0 && r.num % 2 != 0) {
      out = multiply(out, opaque("abs", {atom_power(atom, {1, 1})}, r));
    } else {
      out = multiply(out, atom_power(atom, r));
    }
  }
  return out;
}

Value Algebra::power(const Value& base, const Value& exponent) {
  if (!ok()) return number(0);
  mpq_class q, b;
  const bool rational_base = as_rational(base, &b);
  if (as_rational(exponent, &q)) {
    if (q == 0) {
      if (base.num.empty()) undefined_ = true;
      return number(1);
    }
    if (rational_base && (b == 1 || b == 0)) return b == 0 && q < 0 ? divide(number(1), base) : base;
    if (rational_base && b == -1 && is_integer(q)) return mpz_even_p(q.get_num_mpz_t()) != 0 ? number(1) : base;
    SmallRational e;
    if (!small(q, &e)) return opaque("pow", {base, exponent});  // a tower: 9^387420489
    const size_t bits = rational_base ? bits_of(b) : 0;
    if (bits * static_cast<size_t>(std::abs(e.num)) > kMaxBits) return opaque("pow", {base, exponent});
    if (rational_base && e.den > 1 && b > 0) {  // (1/4)^(3/2): primes first, so that numbers stay small
      return divide(prime_powers(b.get_num(), e, nullptr), prime_powers(b.get_den(), e, nullptr));
    }
    if (e.den == 1 && is_one(base.den) && base.num.size() == 1 && !rational_base) {
      Monomial m = base.num.begin()->first;
      Value out = power(number(base.num.begin()->second), exponent);
      for (const auto& [atom, x] : m) {
        SmallRational r;
        if (!reduced(static_cast<int64_t>(x.num) * e.num, x.den, &r)) return opaque("pow", {base, exponent});
        out = multiply(out, atom_power(atom, r));
      }
      // A product reduces what the power of one atom may have left: i^2, sqrt(2)^2.
      Polynomial reduced_terms;
      for (const auto& [term, c] : out.num) {
        Monomial product;
        mpq_class factor;
        if (!multiply_monomials(term, {}, &product, &factor)) exceeded_ = true;
        add_term(&reduced_terms, product, c * factor);
      }
      return {reduced_terms, out.den};
    }
    return e.den == 1 ? integer_power(base, e.num) : integer_power(root(base, e.den), e.num);
  }
  // b^(c0 + c1 t1 + ..) is the product of b^c0 and (b^t)^c, for bases that are positive for sure, or e.
  std::string_view name;
  const bool euler = as_symbol(base, &name) && name == "e";
  if (!is_one(exponent.den) || !(euler || (rational_base && b > 0))) return opaque("pow", {base, exponent});
  Value out = number(1);
  for (const auto& [m, c] : exponent.num) {
    SmallRational e;
    if (m.empty()) {
      out = multiply(out, power(base, number(c)));
      continue;
    }
    const Value term = {{{m, 1}}, one()};
    if (!small(c, &e)) return opaque("pow", {base, exponent});
    if (!euler) {
      out = multiply(out, divide(prime_powers(b.get_num(), e, &term), prime_powers(b.get_den(), e, &term)));
    } else if (m.size() == 2 && m[0] == std::pair{kImaginary, SmallRational{1, 1}} && m[1] == std::pair{kPi, SmallRational{1, 1}}) {
      const Value angle = multiply(number(c), symbol("pi"));
      out = multiply(out, add(sine(angle, true), multiply(symbol("i"), sine(angle, false))));
    } else {
      out = multiply(out, opaque("pow", {base, term}, e));
    }
  }
  return out;
}

Value Algebra::factorial(const Value& a) {
  mpq_class q;
  if (!as_rational(a, &q) || !is_integer(q) || q < 0 || q > kMaxFactorial) return opaque("factorial", {a});
  mpz_class f;
  mpz_fac_ui(f.get_mpz_t(), q.get_num().get_ui());
  spend(q.get_num().get_si());
  return number(mpq_class(f));
}

// Multiples of pi/12 that have short values; other angles up to their sign.
Value Algebra::sine(const Value& angle, bool cosine) {
  mpq_class turns;  // in units of pi / 12
  if (ratio(angle, symbol("pi"), &turns)) {
    turns *= 12;
    if (cosine) turns += 6;
    if (is_integer(turns)) {
      mpz_class k;
      mpz_fdiv_r_ui(k.get_mpz_t(), turns.get_num_mpz_t(), 24);
      long at = k.get_si();
      const bool negative = at >= 12;
      at %= 12;
      if (at > 6) at = 12 - at;
      const mpq_class half(negative ? -1 : 1, 2);
      switch (at) {
        case 0: return number(0);
        case 2: return number(half);
        case 3: return multiply(number(half), root(number(2), 2));
        case 4: return multiply(number(half), root(number(3), 2));
        case 6: return number(2 * half);
        default: break;
      }
    }
  }
  const char* name = cosine ? "cos" : "sin";
  if (!angle.num.empty() && angle.num.begin()->second < 0) {
    const Value turned = opaque(name, {multiply(number(-1), angle)});
    return cosine ? turned : multiply(number(-1), turned);
  }
  return angle.num.empty() ? number(cosine ? 1 : 0) : opaque(name, {angle});
}

Value Algebra::logarithm(const Value& a) {
  mpq_class q;
  std::string_view name;
  if (as_symbol(a, &name) && name == "e") return number(1);
  if (a.num.empty()) undefined_ = true;
  if (!as_rational(a, &q) || q <= 0 || !ok()) {
    // ln(e^x) is x
    if (is_one(a.den) && a.num.size() == 1 && a.num.begin()->second == 1 && a.num.begin()->first.size() == 1) {
      const auto& [atom, exponent] = a.num.begin()->first[0];
      const Value times = number(mpq_class(exponent.num, exponent.den));
      const Atom& found = atoms_[static_cast<size_t>(atom)];
      if (atom == kEuler) return times;
      if (found.prime > 1) return multiply(times, logarithm(number(mpq_class(found.prime))));
      if (found.name == "pow" && as_symbol(found.arguments[0], &name) && name == "e") return multiply(times, found.arguments[1]);
    }
    return opaque("ln", {a});
  }
  Value out = number(0);
  for (const bool numerator : {true, false}) {
    const Value factors = prime_powers(numerator ? q.get_num() : q.get_den(), {1, kMaxExponent}, nullptr);
    if (!ok() || factors.num.empty()) return number(0);
    mpq_class whole;
    if (as_rational(factors, &whole) && whole != 1) return opaque("ln", {a});  // an exponent beyond what is kept
    for (const auto& [atom, e] : factors.num.begin()->first) {
      const Value term = multiply(number(mpq_class(e.num, e.den) * kMaxExponent),
                                  opaque("ln", {number(mpq_class(atoms_[static_cast<size_t>(atom)].prime))}));
      out = numerator ? add(out, term) : subtract(out, term);
    }
  }
  return out;
}

Value Algebra::call(std::string_view name, const std::vector<Value>& arguments) {
  if (!ok()) return number(0);
  const Value& a = arguments.at(0);
  mpq_class q, r;
  const bool rational = as_rational(a, &q);
  if (name == "sin" || name == "cos") return sine(a, name == "cos");
  if (name == "tan") return divide(sine(a, false), sine(a, true));
  if (name == "cot") return divide(sine(a, true), sine(a, false));
  if (name == "sec") return divide(number(1), sine(a, true));
  if (name == "csc") return divide(number(1), sine(a, false));
  if (name == "exp") return power(symbol("e"), a);
  if (name == "ln") return logarithm(a);
  if (name == "log" && arguments.size() == 2) return divide(logarithm(a), logarithm(arguments[1]));
  if (name == "abs") {
    const int s = sign(a);
    if (s == 0 || s == 1) return a;
    const Value negated = multiply(number(-1), a);
    if (s == -1) return negated;
    return opaque("abs", {!a.num.empty() && a.num.begin()->second < 0 ? negated : a});
  }
  if ((name == "floor" || name == "ceil") && rational) {
    mpz_class whole;
    if (name == "floor") mpz_fdiv_q(whole.get_mpz_t(), q.get_num_mpz_t(), q.get_den_mpz_t());
    if (name == "ceil") mpz_cdiv_q(whole.get_mpz_t(), q.get_num_mpz_t(), q.get_den_mpz_t());
    return number(mpq_class(whole));
  }
  if (name == "binom" && arguments.size() == 2 && rational && as_rational(arguments[1], &r) && is_integer(q) && is_integer(r) && q >= 0 &&
      q <= kMaxFactorial && r >= 0) {
    mpz_class out;
    mpz_bin_uiui(out.get_mpz_t(), q.get_num().get_ui(), r.get_num().fits_ulong_p() ? r.get_num().get_ui() : kMaxFactorial + 1);
    return number(mpq_class(out));
  }
  return opaque(name, arguments);
}

bool Algebra::ratio(const Value& a, const Value& b, mpq_class* q) {
  if (b.num.empty() || !ok()) return false;
  const Polynomial left = multiply(a.num, b.den), right = multiply(b.num, a.den);
  if (!ok() || left.size() != right.size()) return ok() && left.empty() && (*q = 0, true);
  *q = left.begin()->second / right.begin()->second;
  for (auto l = left.begin(), r = right.begin(); l != left.end(); ++l, ++r)
    if (l->first != r->first || l->second != *q * r->second) return false;
  return true;
}

namespace {

// pi by Machin's formula, e by its series, in fixed point; computed once.
mpf_class fixed_point(const mpz_class& v) {
  mpf_class f(v, kFloatBits);
  mpf_div_2exp(f.get_mpf_t(), f.get_mpf_t(), kFloatBits);
  return f;
}

mpz_class arctan_inverse(unsigned long x) {
  mpz_class unit = mpz_class(1) << kFloatBits, power = unit / x, sum = power;
  for (unsigned long k = 3; power != 0; k += 2) {
    power /= x * x;
    sum += (k % 4 == 3 ? -1 : 1) * mpz_class(power / k);
  }
  return sum;
}

const mpf_class& pi_value() {
  static const mpf_class v = fixed_point(16 * arctan_inverse(5) - 4 * arctan_inverse(239));
  return v;
}

const mpf_class& euler_value() {
  static const mpf_class v = [] {
    mpz_class term = mpz_class(1) << kFloatBits, sum = 0;
    for (unsigned long k = 1; term != 0; ++k) {
      sum += term;
      term /= k;
    }
    return fixed_point(sum);
  }();
  return v;
}

// x^(1/degree) of a positive x.
bool float_root(const mpf_class& x, unsigned long degree, mpf_class* out) {
  if (degree == 1) {
    *out = x;
    return true;
  }
  if (degree == 2) {
    mpf_sqrt(out->get_mpf_t(), x.get_mpf_t());
    return true;
  }
  if (degree > 16 || x > mpf_class("1e100") || x < mpf_class("1e-100")) return false;
  mpf_class scaled(x, kFloatBits * 20);
  mpf_mul_2exp(scaled.get_mpf_t(), scaled.get_mpf_t(), kFloatBits * degree);
  mpz_class whole(scaled), root;
  mpz_root(root.get_mpz_t(), whole.get_mpz_t(), degree);
  *out = fixed_point(root);
  return true;
}

}  // namespace

bool Algebra::evaluate(const Polynomial& p, int depth, mpf_class* out) {
  mpf_class sum(0, kFloatBits);
  for (const auto& [m, c] : p) {
    mpf_class term(c, kFloatBits);
    for (const auto& [atom, e] : m) {
      if (!spend(2000)) return false;
      const Atom& a = atoms_[static_cast<size_t>(atom)];
      mpf_class base(0, kFloatBits), x(0, kFloatBits);
      if (atom == kPi) {
        base = pi_value();
      } else if (atom == kEuler) {
        base = euler_value();
      } else if (a.prime > 1) {
        base = mpf_class(a.prime, kFloatBits);
      } else if (a.name == "root") {
        if (!evaluate(a.arguments[0], depth + 1, &base)) return false;
      } else {
        return false;
      }
      if (base <= 0 || std::abs(e.num) > 64 || !float_root(base, static_cast<unsigned long>(e.den), &x)) return false;
      mpf_pow_ui(x.get_mpf_t(), x.get_mpf_t(), static_cast<unsigned long>(std::abs(e.num)));
      if (e.num < 0) {
        term /= x;
      } else {
        term *= x;
      }
    }
    sum += term;
  }
  *out = sum;
  return true;
}

bool Algebra::evaluate(const Value& a, int depth, mpf_class* out) {
  if (depth > kMaxEvaluationDepth || !ok()) return false;
  mpf_class num(0, kFloatBits), den(0, kFloatBits);
  if (!evaluate(a.num, depth, &num) || !evaluate(a.den, depth, &den) || den == 0) return false;
  *out = num / den;
  return true;
}

int Algebra::sign(const Value& a) {
  mpq_class q;
  if (as_rational(a, &q)) return sgn(q);
  mpf_class x(0, kFloatBits), bound(1, kFloatBits);
  if (!evaluate(a, 0, &x)) return 2;
  mpf_div_2exp(bound.get_mpf_t(), bound.get_mpf_t(), kAgreeBits);
  return abs(x) <= bound ? 0 : sgn(x);
}

bool Algebra::equal(const Value& a, const Value& b) {
  if (a.den == b.den && a.num == b.num) return ok();
  const Value difference = subtract(a, b);
  if (!ok()) return false;
  if (difference.num.empty()) return true;
  mpf_class x(0, kFloatBits), y(0, kFloatBits);
  if (!evaluate(a, 0, &x) || !evaluate(b, 0, &y)) return false;
  mpq_class qa, qb;
  if (as_rational(a, &qa) && as_rational(b, &qb)) return false;  // exact already
  mpf_class bound = abs(x) + abs(y);
  mpf_div_2exp(bound.get_mpf_t(), bound.get_mpf_t(), kAgreeBits);
  return abs(x - y) <= bound;
}

std::string Algebra::str(const Polynomial& p) const {
  std::vector<std::string> terms;
  for (const auto& [m, c] : p) {
    std::vector<std::string> factors;
    for (const auto& [atom, e] : m) factors.push_back(atoms_[static_cast<size_t>(atom)].key + exponent_text(e));
    std::sort(factors.begin(), factors.end());
    std::string term;
    for (const std::string& f : factors) {
      if (!term.empty()) term += '*';
      term += f;
    }
    if (term.empty()) {
      term = c.get_str();
    } else if (c != 1) {
      term = c == -1 ? fmt::format("-{}", term) : fmt::format("{}*{}", c.get_str(), term);
    }
    terms.push_back(std::move(term));
  }
  std::sort(terms.begin(), terms.end());
  std::string out;
  for (const std::string& t : terms) {
    if (!out.empty() && !t.starts_with('-')) out += '+';
    out += t;
  }
  return out.empty() ? "0" : out;
}

std::string Algebra::str(const Value& a) const {
  if (is_one(a.den)) return str(a.num);
  return fmt::format("({})/({})", str(a.num), str(a.den));
}

}  // namespace lockstep
