#pragma once
// Exact arithmetic on answers. A value is a fraction of two polynomials with rational coefficients over "atoms": symbols, i, pi, e,
// prime numbers under a root, and functions of values that nothing simplifies (sin(x), 2^x, sqrt(x + 1)). Exponents are rational.
//
// Values are brought into one form as far as cheap rules go: radicals to primes, i^2 = -1, exponents and logarithms split, sines
// and cosines of the usual angles. Two values are equal if the cross product of their fractions vanishes, or if both are real
// constants of roots, pi and e that agree in their first 400 bits (sqrt(3 + 2 sqrt(2)) against 1 + sqrt(2)).
//
// All work is counted. What would pass the budget, kMaxBits or kMaxTerms stops at once and makes the Algebra `exceeded`; a division
// by zero makes it `undefined`. From then on results mean nothing, and nothing is computed any more. Not thread-safe: one object
// a comparison.

#include <gmpxx.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// num / den in lowest terms, den > 0.
struct SmallRational {
  int32_t num = 0, den = 1;
  bool operator==(const SmallRational&) const = default;
  auto operator<=>(const SmallRational&) const = default;
};

// Atoms to exponents, by ascending atom; no exponent is 0.
using Monomial = std::vector<std::pair<int32_t, SmallRational>>;
using Polynomial = std::map<Monomial, mpq_class>;  // no coefficient is 0; the empty map is 0

struct Value {
  Polynomial num, den;  // den is not 0
};

class Algebra {
 public:
  static constexpr int64_t kBudget = 400'000;  // multiplications of limbs, about
  static constexpr size_t kMaxBits = 1 << 15;    // of one coefficient
  static constexpr size_t kMaxTerms = 400;
  static constexpr int32_t kMaxExponent = 10000;
  static constexpr long kMaxFactorial = 1000;

  bool ok() const { return !exceeded_ && !undefined_; }
  bool exceeded() const { return exceeded_; }
  bool undefined() const { return undefined_; }
  void clear_undefined() { undefined_ = false; }
  // Counts work done outside; false once the budget is spent.
  bool spend(int64_t work);

  Value number(const mpq_class& q);
  Value symbol(std::string_view name);  // "i", "pi" and "e" are the constants

  Value add(const Value& a, const Value& b);
  Value subtract(const Value& a, const Value& b);
  Value multiply(const Value& a, const Value& b);
  Value divide(const Value& a, const Value& b);
  Value power(const Value& base, const Value& exponent);
  Value root(const Value& a, int32_t degree);
  Value factorial(const Value& a);
  // sin cos tan cot sec csc ln exp abs floor ceil max min gcd lcm binom and any other name, which stays as it is.
  Value call(std::string_view name, const std::vector<Value>& arguments);

  bool equal(const Value& a, const Value& b);
  // -1, 0, 1: the sign of a rational constant or of a real one that can be evaluated; 2 if unknown.
  int sign(const Value& a);
  bool as_rational(const Value& a, mpq_class* q) const;
  // a / b as a rational constant; false if it is none.
  bool ratio(const Value& a, const Value& b, mpq_class* q);
  // One symbol or atom alone; its name.
  bool as_symbol(const Value& a, std::string_view* name) const;
  // The same text for the same value in the same form, whatever was computed before.
  std::string str(const Value& a) const;

 private:
  struct Atom {
    std::string key;   // unique
    std::string name;  // of a function: "sin"; of a prime: "prime"; else that of the symbol
    mpz_class prime;
    std::vector<Value> arguments;
  };

  int32_t intern(Atom atom);
  Value atom_power(int32_t atom, SmallRational exponent);
  Value opaque(std::string_view name, std::vector<Value> arguments, SmallRational exponent = {1, 1});
  void add_term(Polynomial* p, const Monomial& m, const mpq_class& c);
  Polynomial multiply(const Polynomial& a, const Polynomial& b);
  bool multiply_monomials(const Monomial& a, const Monomial& b, Monomial* product, mpq_class* factor);
  Value normalized(Polynomial num, Polynomial den);
  Value integer_power(const Value& base, long n);
  Value prime_powers(mpz_class n, const SmallRational& exponent, const Value* by);  // n^exponent or n^by
  Value sine(const Value& angle, bool cosine);
  Value logarithm(const Value& a);
  bool evaluate(const Value& a, int depth, mpf_class* out);
  bool evaluate(const Polynomial& p, int depth, mpf_class* out);
  std::string str(const Polynomial& p) const;

  std::vector<Atom> atoms_;
  std::map<std::string, int32_t, std::less<>> by_key_;
  int64_t spent_ = 0;
  bool exceeded_ = false, undefined_ = false;
};

}  // namespace lockstep
