// Identities that hold exactly, and near misses that do not.

#include "rl/grader/algebra.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Algebra, Radicals) {
  Algebra a;
  const Value two = a.number(2), three = a.number(3), six = a.number(6);
  const Value r2 = a.root(two, 2), r3 = a.root(three, 2);
  EXPECT_TRUE(a.equal(a.multiply(r2, r2), two));
  EXPECT_TRUE(a.equal(a.multiply(r2, r3), a.root(six, 2)));
  EXPECT_TRUE(a.equal(a.root(a.number(12), 2), a.multiply(two, r3)));
  EXPECT_TRUE(a.equal(a.divide(a.number(1), r2), a.divide(r2, two)));
  EXPECT_TRUE(a.equal(a.root(a.number(-8), 3), a.number(-2)));
  EXPECT_TRUE(a.equal(a.root(a.number(-4), 2), a.multiply(two, a.symbol("i"))));
  EXPECT_TRUE(a.equal(a.divide(a.number(1), a.subtract(r3, r2)), a.add(r3, r2)));
  // Denesting is seen by value: sqrt(5 + 2 sqrt 6) = sqrt 2 + sqrt 3.
  const Value nested = a.root(a.add(a.number(5), a.multiply(two, a.root(six, 2))), 2);
  EXPECT_TRUE(a.equal(nested, a.add(r2, r3)));
  EXPECT_FALSE(a.equal(nested, a.add(a.add(r2, r3), a.power(a.number(10), a.number(-100)))));  // 10^-100 is beyond a double, not beyond us
  EXPECT_FALSE(a.equal(r2, a.number(mpq_class("141421356237309504880168872420969807856967187537694/100000000000000000000000000000000000000000000000000"))));
  EXPECT_TRUE(a.ok());
}

TEST(Algebra, SymbolsAndFractions) {
  Algebra a;
  const Value x = a.symbol("x"), one = a.number(1);
  const Value square = a.power(a.add(x, one), a.number(2));
  EXPECT_TRUE(a.equal(square, a.add(a.add(a.multiply(x, x), a.multiply(a.number(2), x)), one)));
  EXPECT_TRUE(a.equal(a.divide(a.subtract(a.multiply(x, x), one), a.subtract(x, one)), a.add(x, one)));
  EXPECT_FALSE(a.equal(square, a.add(a.multiply(x, x), one)));
  EXPECT_TRUE(a.equal(a.root(a.multiply(x, x), 2), a.call("abs", {x})));
  EXPECT_FALSE(a.equal(a.root(a.multiply(x, x), 2), x));
  EXPECT_TRUE(a.equal(a.power(a.root(x, 2), a.number(2)), x));
}

TEST(Algebra, ExponentsAndLogarithms) {
  Algebra a;
  const Value n = a.symbol("n"), e = a.symbol("e"), two = a.number(2);
  EXPECT_TRUE(a.equal(a.power(two, a.add(n, a.number(1))), a.multiply(two, a.power(two, n))));
  EXPECT_TRUE(a.equal(a.power(a.number(4), n), a.power(two, a.multiply(two, n))));
  EXPECT_FALSE(a.equal(a.power(two, n), a.power(a.number(3), n)));
  EXPECT_TRUE(a.equal(a.call("ln", {a.number(12)}), a.add(a.call("ln", {a.number(3)}), a.multiply(two, a.call("ln", {two})))));
  EXPECT_TRUE(a.equal(a.call("ln", {a.power(e, n)}), n));
  EXPECT_TRUE(a.equal(a.call("log", {a.number(8), two}), a.number(3)));
  EXPECT_TRUE(a.equal(a.power(e, a.multiply(a.symbol("i"), a.symbol("pi"))), a.number(-1)));
  EXPECT_TRUE(a.equal(a.power(a.symbol("i"), a.number(2)), a.number(-1)));
  EXPECT_TRUE(a.equal(a.power(a.symbol("i"), a.number(7)), a.multiply(a.number(-1), a.symbol("i"))));
}

TEST(Algebra, Angles) {
  Algebra a;
  const auto angle = [&](int num, int den) { return a.multiply(a.number(mpq_class(num, den)), a.symbol("pi")); };
  EXPECT_TRUE(a.equal(a.call("sin", {angle(1, 6)}), a.number(mpq_class(1, 2))));
  EXPECT_TRUE(a.equal(a.call("cos", {angle(2, 3)}), a.number(mpq_class(-1, 2))));
  EXPECT_TRUE(a.equal(a.call("tan", {angle(3, 4)}), a.number(-1)));
  EXPECT_TRUE(a.equal(a.call("sin", {angle(-1, 3)}), a.multiply(a.number(mpq_class(-1, 2)), a.root(a.number(3), 2))));
  EXPECT_TRUE(a.equal(a.call("cos", {a.number(0)}), a.number(1)));
  for (int k = -48; k <= 48; ++k) {  // sin^2 + cos^2 = 1 where both are known
    const Value s = a.call("sin", {angle(k, 12)}), c = a.call("cos", {angle(k, 12)});
    if (k % 2 != 0 && k % 3 != 0) continue;
    EXPECT_TRUE(a.equal(a.add(a.multiply(s, s), a.multiply(c, c)), a.number(1))) << k;
  }
  const Value x = a.symbol("x");
  EXPECT_TRUE(a.equal(a.call("sin", {a.multiply(a.number(-1), x)}), a.multiply(a.number(-1), a.call("sin", {x}))));
  EXPECT_TRUE(a.equal(a.call("tan", {x}), a.divide(a.call("sin", {x}), a.call("cos", {x}))));
}

TEST(Algebra, NumbersBeyondWords) {
  Algebra a;
  mpz_class big;
  mpz_ui_pow_ui(big.get_mpz_t(), 2, 300);
  EXPECT_TRUE(a.equal(a.power(a.number(2), a.number(300)), a.number(mpq_class(big))));
  EXPECT_FALSE(a.equal(a.power(a.number(2), a.number(300)), a.number(mpq_class(big + 1))));
  EXPECT_TRUE(a.equal(a.divide(a.factorial(a.number(100)), a.factorial(a.number(98))), a.number(9900)));
}

TEST(Algebra, StopsAtItsBounds) {
  {
    Algebra a;
    a.divide(a.number(1), a.number(0));
    EXPECT_TRUE(a.undefined());
  }
  {
    Algebra a;
    Value sum = a.number(1);
    for (int k = 0; k < 8; ++k) sum = a.add(sum, a.symbol(std::string(1, static_cast<char>('a' + k))));
    a.power(sum, a.number(30));
    EXPECT_TRUE(a.exceeded());
  }
  {
    Algebra a;  // a tower stays as it is
    Value tower = a.number(9);
    for (int k = 0; k < 3; ++k) tower = a.power(a.number(9), tower);
    EXPECT_TRUE(a.ok());
    EXPECT_FALSE(a.equal(tower, a.number(1)));
    EXPECT_TRUE(a.equal(tower, tower));
  }
}

TEST(Algebra, TextDoesNotDependOnWhatCameBefore) {
  Algebra a, b;
  const Value left = a.add(a.symbol("x"), a.multiply(a.number(2), a.symbol("y")));
  b.symbol("y");
  b.symbol("z");
  const Value right = b.add(b.multiply(b.symbol("y"), b.number(2)), b.symbol("x"));
  EXPECT_EQ(a.str(left), b.str(right));
  EXPECT_EQ(a.str(a.number(mpq_class(-1, 2))), "-1/2");
}

}  // namespace
}  // namespace lockstep
