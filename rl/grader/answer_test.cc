// What the default grader holds equal, and what it does not.

#include "rl/grader/answer.h"

#include <gtest/gtest.h>

#include "rl/grader/grader.h"

namespace lockstep {
namespace {

bool equal(const char* a, const char* b) {
  return grade(GraderKind::standard, std::string("\\boxed{") + a + "}", b).correct;
}

TEST(Answer, Equal) {
  const char* pairs[][2] = {
      {"0.(3)", "0.(3)"}, {"1e-3", "0.001"}, {"1.5e3", "1500"}, {"6.02\\times10^{23}", "602\\cdot10^{21}"}, {"3\\frac{1}{2}", "7/2"}, {"3 1/2", "3.5"},
      {"-1\\frac12", "-1.5"}, {"\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"}, {"\\sqrt[3]{16}", "2\\sqrt[3]{2}"}, {"\\sqrt{\\frac{1}{2}}", "\\frac{\\sqrt2}{2}"},
      {"\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt2"}, {"\\frac{1}{\\sqrt3-\\sqrt2}", "\\sqrt3+\\sqrt2"}, {"2^{n+1}", "2\\cdot 2^n"}, {"e^{x+1}", "e\\cdot e^x"},
      {"\\log_2 8", "3"}, {"\\ln 4", "2\\ln 2"}, {"\\sin 30^\\circ", "\\frac12"}, {"\\cos\\frac{\\pi}{3}", "0.5"}, {"\\tan^2 x", "\\frac{\\sin^2 x}{\\cos^2 x}"},
      {"\\binom{5}{2}", "10"}, {"\\lfloor 3.7 \\rfloor", "3"}, {"|x-1|", "|1-x|"}, {"|\\sqrt2-2|", "2-\\sqrt2"}, {"5 \\text{ m/s}", "5"}, {"5\\,\\mathrm{cm}", "5"}, {"5 \\mathrm{~m}", "5"}, {"\\frac12\\text{ m}^2", "0.5"},
      {"5 cm", "5"}, {"5 dollars", "5"}, {"\\text{5 apples}", "5"}, {"\\$1{,}250.50", "1250.5"}, {"50\\%", "50"}, {"50\\%", "\\frac12"}, {"0.5", "50\\%"},
      {"1\\,000\\,000", "10^6"}, {"x \\in \\{1,2\\}", "\\{2,1\\}"}, {"\\{1\\pm\\sqrt2\\}", "\\{1-\\sqrt2,1+\\sqrt2\\}"}, {"1\\pm\\sqrt2", "1+\\sqrt2, 1-\\sqrt2"},
      {"\\frac{-1\\pm\\sqrt5}{2}", "\\frac{-1+\\sqrt5}{2},\\frac{-1-\\sqrt5}{2}"}, {"(1,2]\\cup[5,6)", "[5,6)\\cup(1,2]"}, {"\\emptyset", "\\varnothing"}, {"\\{\\}", "\\emptyset"},
      {"x = 3, y = 4", "x=3,y=4"}, {"2x+2y=4", "x+y=2"}, {"2x<4", "x<2"}, {"4>2x", "x<2"}, {"1<x\\le3", "3\\ge x>1"}, {"6:4", "3:2"}, {"f(x)=x+1", "1+x"},
      {"\\text{Area}=12", "12"}, {"\\text{(C)}", "C"}, {"\\text{Yes}", "\\text{yes}"}, {"\\mathrm{odd}", "\\text{odd}"}, {"x_1=2", "2"}, {"\\theta", "θ"}, {"√2", "\\sqrt{2}"},
      {"\\begin{bmatrix}\\frac12\\\\3\\end{bmatrix}", "\\begin{pmatrix}0.5\\\\3\\end{pmatrix}"}, {"a+bi", "bi+a"}, {"(2+i)(2-i)", "5"}, {"\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"},
      {"(x-1)(x+1)", "x^2-1"}, {"\\frac{x^2-1}{x-1}", "x+1"}, {"8\\text{ or }9", "9,8"}, {"8 and 9", "8, 9"}, {"90°", "90"}, {"1.0", "1."}, {"\\left.\\frac12\\right.", "0.5"},
      {"\\dfrac{3}{4}", "\\tfrac34"}, {"3!", "6"}, {"x^{1/2}", "\\sqrt{x}"}, {"\\frac{1}{x}", "x^{-1}"}, {"\\infty", "+∞"}, {"2 \\times 3^2", "18"}, {"100,000", "10^5"},
      {"(100,200)", "(100, 200)"}, {"12{,}345", "12345"}, {"\\boxed{5}", "5"}, {"\\mathbf{x}", "x"}, {"\\text{12}", "12"},
  };
  for (const auto& p : pairs) {
    EXPECT_TRUE(equal(p[0], p[1])) << p[0] << " for " << p[1];
    EXPECT_TRUE(equal(p[1], p[0])) << p[1] << " for " << p[0];
    EXPECT_TRUE(equal(p[0], p[0])) << p[0];
  }
}

TEST(Answer, Different) {
  const char* pairs[][2] = {
      {"0.333", "\\frac13"}, {"3.14", "\\pi"}, {"1.414", "\\sqrt2"}, {"(1,2)", "[1,2]"}, {"(1,2)", "\\{1,2\\}"}, {"1,2", "(1,2)"}, {"(100,200)", "100200"}, {"1,2", "12"},
      {"1,23", "123"}, {"\\{1,1,2\\}", "\\{1,2\\}"}, {"x<2", "x>2"}, {"x<2", "x\\le2"}, {"-2x<4", "x<-2"}, {"x=2", "x\\ne2"}, {"2x+y=4", "x+y=4"}, {"\\frac{1}{12}", "\\frac{11}{2}"},
      {"\\text{Sunday}", "\\text{Monday}"}, {"A", "B"}, {"(A)", "(B)"}, {"1101_2", "1101_3"}, {"1101_2", "1101"}, {"a_{12}", "a_{1}2"}, {"3\\frac{1}{2}", "\\frac32"},
      {"2^{10}", "20"}, {"10^{-3}", "1000"}, {"\\sqrt{x^2}", "x"}, {"\\sin x", "\\cos x"}, {"\\sin 30", "\\frac12"}, {"\\ln 6", "\\ln 2\\ln 3"}, {"5!", "5"}, {"x+y", "x-y"},
      {"1\\pm2", "3"}, {"(1,2]\\cup[5,6)", "(1,2]\\cap[5,6)"}, {"\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"}, {"\\infty", "-\\infty"},
      {"12\\text{ cm}", "12.5\\text{ cm}"}, {"50\\%", "5"}, {"50\\%", "5000"}, {"3:2", "2:3"}, {"x", "y"}, {"i", "-i"}, {"e", "2.718281828"}, {"\\frac10", "\\frac20+1"}, {"7", ""},
      {"10,000", "10"}, {"f", "5"}, {"0", "\\emptyset"}, {"\\text{none}", "0"}, {"9^{9^{9^9}}", "9^{9^{9^8}}"},
  };
  for (const auto& p : pairs) {
    EXPECT_FALSE(equal(p[0], p[1])) << p[0] << " for " << p[1];
    if (p[1][0] == 0) continue;
    EXPECT_FALSE(equal(p[1], p[0])) << p[1] << " for " << p[0];
  }
}

TEST(Answer, EqualAnswersHaveEqualText) {
  const auto text = [](const char* answer) { return grade(GraderKind::standard, std::string("\\boxed{") + answer + "}", "none").pred; };
  EXPECT_EQ(text("0.50"), "1/2");
  EXPECT_EQ(text("x=\\frac{2}{4}"), "1/2");
  EXPECT_EQ(text("y+x"), text("x+y"));
  EXPECT_EQ(text("\\{2,1\\}"), text("1, 2"));
  EXPECT_EQ(text("2\\sqrt3"), text("\\sqrt{12}"));
}

TEST(Answer, NestingHasAnEnd) {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "(";
  Algebra algebra;
  EXPECT_FALSE(parse_answer(deep.substr(0, 5000), algebra).ok);
  EXPECT_FALSE(parse_answer(deep, algebra).ok);
  EXPECT_TRUE(parse_answer("((((((((5))))))))", algebra).ok);
}

}  // namespace
}  // namespace lockstep
