#include "ops/logprob/logprob.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/logprob/logprob_cpu.h"
#include "ops/testing.h"

namespace lockstep {
namespace {

using testing::Tensor;
using testing::random_tensor;

constexpr size_t kWorkspace = size_t{64} << 20;
constexpr double kUnit = 0x1p-24;  // half an ulp, relative

const int64_t kVocabs[] = {1, 2, 3, 7, 63, 64, 65, 100, 129, 256, 959, 960, 961, 1000, 1023, 1024, 1025, 3000, 5003};

// y, log-sum-exp and entropy of a row in f64.
struct Exact {
  std::vector<double> y;
  double max = -1e300, lse = 0, entropy = 0, largest = 0;
  template <typename Logit>
  Exact(int64_t vocab, double temperature, Logit logit) : y(vocab) {
    for (int64_t v = 0; v < vocab; ++v) {
      y[v] = logit(v) / temperature;
      max = std::max(max, y[v]);
      largest = std::max(largest, std::abs(y[v]));
    }
    double sum = 0, mean = 0;
    for (double x : y) sum += std::exp(x - max);
    lse = max + std::log(sum);
    for (double x : y) mean += std::exp(x - lse) * x;
    entropy = lse - mean;
  }
  double p(int64_t v) const { return std::exp(y[v] - lse); }

  // What f32 may lose of lse, in half ulps: y (|y|) and y - m (twice |y|); exp 4; the tree chunk / 16 + 4; scaling by the chunk's
  // exp(m - M) 5 + 2|y|; an addition for each merge, 64; 5 for each of the at most 64 changes of the maximum, whose differences
  // sum to at most 2|y|; then log 4 |log S| and the last addition |lse|.
  double lse_bound() const {
    double changes = 0, running = -1e300;
    const int64_t vocab = static_cast<int64_t>(y.size()), chunk = vocab_chunk(vocab);
    for (int64_t b = 0; b < vocab; b += chunk) {
      const double m = *std::max_element(y.begin() + b, y.begin() + std::min(vocab, b + chunk));
      changes += m > running;
      running = std::max(running, m);
    }
    return kUnit * (7 * largest + 4 + chunk / 16.0 + 4 + 5 + 64 + 5 * changes + 4 * (lse - max) + std::abs(lse)) * 1.01;
  }
  // E[y] sums p y, each off by lse's error, y - lse (4 |y| + log V), exp 4, the product's y 1, tree and 64 additions; and
  // the last subtraction.
  double entropy_bound() const {
    double weight = 0;
    for (size_t v = 0; v < y.size(); ++v) weight += p(static_cast<int64_t>(v)) * std::abs(y[v]);
    const double chunk = static_cast<double>(vocab_chunk(static_cast<int64_t>(y.size())));
    const double relative = lse_bound() + kUnit * (4 * largest + std::log(y.size()) + 4 + 1 + chunk / 16 + 4 + 64);
    return (lse_bound() + weight * relative + kUnit * (std::abs(lse) + std::abs(entropy))) * 1.01;
  }
};

struct Outputs {
  Tensor logprob, lse, entropy;
  explicit Outputs(int64_t rows) : logprob(DType::f32, {rows}), lse(DType::f32, {rows}), entropy(DType::f32, {rows}) {}
};

struct Case {
  Tensor hidden, head, target, temperature;
  Case(int64_t rows, int64_t vocab, int64_t width, DType hidden_type, DType head_type)
      : hidden(random_tensor(1, hidden_type, {rows, width}, 2.0f)), head(random_tensor(2, head_type, {vocab, width}, 1.0f)),
        target(testing::random_ints(3, {rows}, static_cast<int32_t>(vocab))), temperature(DType::f32, {rows}) {
    for (int64_t r = 0; r < rows; ++r) temperature.set(r, r % 3 == 0 ? 1.0 : r % 3 == 1 ? 0.8 : 1.7);
  }
  WeightView weight() const { return {head, {}}; }
  int64_t rows() const { return hidden.view().rows(); }
  Outputs forward(Context& c) const {
    Outputs o(rows());
    select_logprob(c, o.logprob, o.lse, o.entropy, hidden, weight(), target, temperature);
    return o;
  }
};

TEST(RowStats, SpecVector) {
  const float logits[] = {2, 1, 0};
  const RowStats one = row_stats(logits, 3, 1.0f), warm = row_stats(logits, 3, 0.8f);
  EXPECT_EQ(one.max, 2.0f);
  EXPECT_NEAR(2 - one.lse, -0.4076059644, 4e-7);
  EXPECT_NEAR(0 - one.lse, -2.4076059644, 4e-7);
  EXPECT_NEAR(2.5 - warm.lse, -0.3137808633, 4e-7);
  EXPECT_NEAR(1.25 - warm.lse, -1.5637808633, 4e-7);
  EXPECT_NEAR(simd::row_entropy(logits, 3, 1.0f, one.lse), 0.8323955818, 6e-7);
  EXPECT_NEAR(simd::row_entropy(logits, 3, 0.8f, warm.lse), 0.7254041960, 6e-7);
}

TEST(RowStats, WithinTheDerivedBoundOfF64) {
  for (const int64_t vocab : kVocabs)
    for (const float magnitude : {0.1f, 4.0f, 60.0f})
      for (const float temperature : {1.0f, 0.8f}) {
        const Tensor x = random_tensor(static_cast<uint64_t>(vocab), DType::f32, {vocab}, magnitude);
        const Exact exact(vocab, temperature, [&](int64_t v) { return x.get(v); });
        const RowStats s = row_stats(x.ptr<float>(), vocab, temperature);
        EXPECT_NEAR(s.max, exact.max, kUnit * std::abs(exact.max));
        EXPECT_NEAR(s.lse, exact.lse, exact.lse_bound()) << vocab << " magnitude " << magnitude;
        EXPECT_NEAR(simd::row_entropy(x.ptr<float>(), vocab, temperature, s.lse), exact.entropy, exact.entropy_bound()) << vocab;
      }
}

TEST(RowStats, VectorsGiveTheReferencesBits) {
  for (const int64_t vocab : kVocabs)
    for (const float magnitude : {1.0f, 30.0f, 200.0f})
      for (const float temperature : {1.0f, 0.8f, 3.0f}) {
        Tensor x = random_tensor(static_cast<uint64_t>(vocab) + 1, DType::f32, {vocab}, magnitude);
        if (magnitude == 30.0f)  // far below zero, where exp(0 - lse) of a lane past the end would overflow
          for (int64_t v = 0; v < vocab; ++v) x.set(v, x.get(v) - 400.0);
        const RowStats want = reference::row_stats(x.ptr<float>(), vocab, temperature);
        const float want_entropy = reference::row_entropy(x.ptr<float>(), vocab, temperature, want.lse);
        const reference::RowGradient g = {.target = vocab / 2, .temperature = temperature, .lse = want.lse,
                                          .entropy = want_entropy, .dlogprob = 0.7f, .dentropy = -0.3f};
        Tensor want_dlogits = testing::to_dtype(x, DType::f32);
        reference::row_backward(want_dlogits.ptr<float>(), vocab, g);
        testing::for_each_simd_target([&](const std::string& target) {
          const RowStats s = row_stats(x.ptr<float>(), vocab, temperature);
          EXPECT_EQ(s.max, want.max) << target << " V " << vocab;
          EXPECT_EQ(std::bit_cast<uint32_t>(s.lse), std::bit_cast<uint32_t>(want.lse)) << target << " V " << vocab;
          const float entropy = simd::row_entropy(x.ptr<float>(), vocab, temperature, s.lse);
          EXPECT_EQ(std::bit_cast<uint32_t>(entropy), std::bit_cast<uint32_t>(want_entropy)) << target << " V " << vocab;
          Tensor dlogits = testing::to_dtype(x, DType::f32);
          simd::row_backward(dlogits.ptr<float>(), vocab, g);
          EXPECT_EQ(testing::count_bit_differences(dlogits, want_dlogits), 0) << target << " V " << vocab;
        });
      }
}

TEST(RowStats, BadLogitsShow) {
  for (const int64_t vocab : {5, 256, 2000}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Tensor x = random_tensor(1, DType::f32, {vocab});
      x.set(vocab / 3, bad);
      testing::for_each_simd_target([&](const std::string& target) {
        EXPECT_TRUE(std::isnan(row_stats(x.ptr<float>(), vocab, 1.0f).lse)) << target << " V " << vocab;
      });
    }
  }
}

// A logit is a chain of D fused steps: D half ulps of sum |h w|. A log-probability sees the worst logit twice (its own and
// through lse), divided by the temperature, then what RowStats may lose, the division and the subtraction.
TEST(SelectLogprob, MatchesF64) {
  for (const DType hidden_type : {DType::f32, DType::bf16})
    for (const DType head_type : {DType::f32, DType::bf16})
      for (const auto& [rows, vocab, width] :
           {std::array<int64_t, 3>{0, 5, 3}, {1, 3, 8}, {9, 256, 64}, {300, 70, 24}, {3, 2100, 40}}) {
        const Case p(rows, vocab, width, hidden_type, head_type);
        CpuContext c(2, kWorkspace);
        const Outputs o = p.forward(c);
        for (int64_t r = 0; r < rows; ++r) {
          const double t = p.temperature.get(r);
          double worst = 0;
          const Exact exact(vocab, t, [&](int64_t v) {
            double dot = 0, size = 0;
            for (int64_t k = 0; k < width; ++k) {
              const double term = double(p.hidden.get(r * width + k)) * p.head.get(v * width + k);
              dot += term;
              size += std::abs(term);
            }
            worst = std::max(worst, size);
            return dot;
          });
          const double logit_bound = width * kUnit * worst / t, want = exact.y[p.target.ptr<int32_t>()[r]] - exact.lse;
          ASSERT_NEAR(o.lse.get(r), exact.lse, exact.lse_bound() + logit_bound);
          ASSERT_NEAR(o.logprob.get(r), want, exact.lse_bound() + 2 * logit_bound + kUnit * (exact.largest + std::abs(want)))
              << r;
          // A shift of y by delta moves the entropy by at most 2 |delta| (|y| + lse).
          ASSERT_NEAR(o.entropy.get(r), exact.entropy,
                      exact.entropy_bound() + 2 * logit_bound * (exact.largest + std::abs(exact.lse)));
        }
      }
}

// The statement the sampler rests on: the op's numbers are row_stats of matmul's logits.
TEST(SelectLogprob, IsRowStatsOfTheMatmul) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Case p(270, 131, 32, type, type);
    CpuContext c(3, kWorkspace);
    Tensor logits(DType::f32, {p.rows(), 131});
    matmul(c, logits, p.hidden, p.weight());
    Outputs want(p.rows());
    for (int64_t r = 0; r < p.rows(); ++r) {
      const float* x = logits.view().row<float>(r);
      const RowStats s = reference::row_stats(x, 131, p.temperature.get(r));
      want.lse.set(r, s.lse);
      want.logprob.set(r, x[p.target.ptr<int32_t>()[r]] / p.temperature.get(r) - s.lse);
      want.entropy.set(r, reference::row_entropy(x, 131, p.temperature.get(r), s.lse));
    }
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext many(threads, kWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        const Outputs o = p.forward(many);
        EXPECT_EQ(testing::count_bit_differences(o.logprob, want.logprob), 0) << target;
        EXPECT_EQ(testing::count_bit_differences(o.lse, want.lse), 0) << target;
        EXPECT_EQ(testing::count_bit_differences(o.entropy, want.entropy), 0) << target;
      });
    }
  }
}

TEST(SelectLogprob, RowContract) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const int64_t rows = 600, vocab = 100, width = 20;
    const Case p(rows, vocab, width, type, type);
    Tensor wide(type, {rows, width + 7});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < width; ++k) wide.set(r * (width + 7) + 4 + k, p.hidden.get(r * width + k));
    const ConstTensorView hidden = ConstTensorView(wide).cols(4, width);
    CpuContext c(3, kWorkspace);
    const Outputs all = p.forward(c);
    Philox rng(5, RngPurpose::test);
    for (int i = 0; i < 30; ++i) {
      const int64_t begin = rng.below(rows),
                    count = 1 + rng.below(static_cast<uint32_t>(std::min<int64_t>(rows - begin, i < 20 ? 5 : 400)));
      Outputs part(count);
      select_logprob(c, part.logprob, {}, part.entropy, hidden.slice(begin, count), p.weight(),
                     ConstTensorView(p.target).slice(begin, count), ConstTensorView(p.temperature).slice(begin, count));
      EXPECT_EQ(testing::count_bit_differences(part.logprob, all.logprob.view().slice(begin, count)), 0);
      EXPECT_EQ(testing::count_bit_differences(part.entropy, all.entropy.view().slice(begin, count)), 0);
    }
  }
}

// The steps of ranks that share a vocabulary, put together: the op's own bits, wherever the chunks are cut.
TEST(SelectLogprob, IsItsPartsMerged) {
  for (const int64_t vocab : {3, 63, 64, 131, 1000, 3000}) {
    const int64_t rows = 9, width = 16, chunk = vocab_chunk(vocab), chunks = vocab_chunks(vocab);
    const Case p(rows, vocab, width, DType::f32, DType::bf16);
    CpuContext c(2, kWorkspace);
    const Outputs want = p.forward(c);
    Outputs o(rows);
    for (const int64_t cut : {int64_t{0}, int64_t{1}, chunks / 3, chunks - 1}) {
      Tensor partials(DType::f32, {rows, kChunkPartials * chunks}), means(DType::f32, {rows, chunks});
      const std::pair<int64_t, int64_t> parts[] = {{0, cut}, {cut, chunks}};
      const auto part = [&](int64_t begin, int64_t end, const auto& f) {
        const int64_t first = begin * chunk, count = std::min(end * chunk, vocab) - first;
        Tensor logits(DType::f32, {rows, count});
        if (count > 0) matmul(c, logits, p.hidden, {p.head.view().slice(first, count), {}});
        f(logits, VocabPart{first, vocab});
      };
      for (const auto& [begin, end] : parts)
        part(begin, end, [&, begin = begin, end = end](const Tensor& logits, VocabPart where) {
          Tensor piece(DType::f32, {rows, kChunkPartials * (end - begin)});
          logprob_partials(c, piece, logits, p.target, p.temperature, where);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < kChunkPartials * (end - begin); ++i)
              partials.set(r * kChunkPartials * chunks + kChunkPartials * begin + i, piece.get(r * kChunkPartials * (end - begin) + i));
        });
      logprob_merge(c, o.logprob, o.lse, partials, p.target, vocab);
      for (const auto& [begin, end] : parts)
        part(begin, end, [&, begin = begin, end = end](const Tensor& logits, VocabPart where) {
          entropy_partials(c, means.view().cols(begin, end - begin), logits, p.temperature, o.lse, where);
        });
      entropy_merge(c, o.entropy, means, o.lse);
      EXPECT_EQ(testing::count_bit_differences(o.logprob, want.logprob), 0) << vocab << " cut at " << cut;
      EXPECT_EQ(testing::count_bit_differences(o.lse, want.lse), 0) << vocab << " cut at " << cut;
      EXPECT_EQ(testing::count_bit_differences(o.entropy, want.entropy), 0) << vocab << " cut at " << cut;
    }
  }
}

struct Gradients {
  Tensor dlogprob, dentropy;
  explicit Gradients(int64_t rows)
      : dlogprob(random_tensor(21, DType::f32, {rows})), dentropy(random_tensor(22, DType::f32, {rows})) {}
};

// sum_r dlogprob_r logprob_r + dentropy_r entropy_r over rows [first, last), with hidden and head moved by h at one element.
double loss(const Case& p, const Gradients& g, int64_t first, int64_t last, int64_t hidden_at, int64_t head_at, double h) {
  const int64_t width = p.hidden.view().dim(1);
  double sum = 0;
  for (int64_t r = first; r < last; ++r) {
    const Exact e(p.head.view().rows(), p.temperature.get(r), [&](int64_t v) {
      double dot = 0;
      for (int64_t k = 0; k < width; ++k)
        dot += (p.hidden.get(r * width + k) + (r * width + k == hidden_at ? h : 0)) *
               (p.head.get(v * width + k) + (v * width + k == head_at ? h : 0));
      return dot;
    });
    sum += g.dlogprob.get(r) * (e.y[p.target.ptr<int32_t>()[r]] - e.lse) + g.dentropy.get(r) * e.entropy;
  }
  return sum;
}

// What f32 may lose of dlogits[r, v]: p is off by delta = error of y - lse, plus exp 4 and its products; the entropy term also by
// the entropy's error. delta: the logits' chain and lse_bound, as above.
double dlogit_bound(const Case& p, const Gradients& g, int64_t r, int64_t v, const Exact& e) {
  const int64_t width = p.hidden.view().dim(1);
  double size = 0;
  for (int64_t k = 0; k < width; ++k) size = std::max(size, std::abs(double(p.hidden.get(r * width + k))));
  double head = 0;
  for (int64_t i = 0; i < p.head.elements(); ++i) head = std::max(head, std::abs(double(p.head.get(i))));
  const double t = p.temperature.get(r), chain = width * kUnit * width * size * head / t;
  const double delta = 2 * chain + e.lse_bound() + kUnit * (2 * e.largest + std::abs(e.lse));
  const double entropy_error = e.entropy_bound() + 2 * chain * (e.largest + std::abs(e.lse));
  const double p_v = e.p(v), target = v == p.target.ptr<int32_t>()[r];
  const double selection = std::abs(g.dlogprob.get(r)) * (p_v * (delta + 7 * kUnit) + 4 * kUnit * target);
  const double spread =
      std::abs(g.dentropy.get(r)) * p_v *
      (std::abs(e.y[v] - e.lse + e.entropy) * (delta + 9 * kUnit) + delta + entropy_error + kUnit * 2 * e.largest);
  return (selection + spread) / t;
}

TEST(SelectLogprobBackward, MatchesFiniteDifferences) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const int64_t rows = 5, vocab = 70, width = 6;
    const Case p(rows, vocab, width, type, type);
    const Gradients g(rows);
    std::vector<Exact> exact;
    for (int64_t r = 0; r < rows; ++r)
      exact.emplace_back(vocab, p.temperature.get(r), [&](int64_t v) {
        double dot = 0;
        for (int64_t k = 0; k < width; ++k) dot += double(p.hidden.get(r * width + k)) * p.head.get(v * width + k);
        return dot;
      });
    CpuContext c(2, kWorkspace);
    const Outputs o = p.forward(c);
    Tensor dhidden = random_tensor(1, DType::f32, {rows, width}), dhead(DType::f32, {vocab, width});  // dhidden is overwritten
    select_logprob_backward(c, dhidden, dhead, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse,
                            o.entropy);
    const double h = 1e-5, noise = 1e-8;  // of the f64 differences
    // Sums of products: each dlogit's own error, and one half ulp of the sum of magnitudes (at most 1.5 / t + ... each) per fused
    // step.
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < width; ++k) {
        double bound = 0;
        for (int64_t v = 0; v < vocab; ++v) {
          const double dy =
              std::abs(g.dlogprob.get(r)) * std::abs((v == p.target.ptr<int32_t>()[r]) - exact[r].p(v)) +
              std::abs(g.dentropy.get(r)) * exact[r].p(v) * std::abs(exact[r].y[v] - exact[r].lse + exact[r].entropy);
          bound += std::abs(p.head.get(v * width + k)) *
                   (dlogit_bound(p, g, r, v, exact[r]) + vocab * kUnit * dy / p.temperature.get(r));
        }
        const double want = (loss(p, g, r, r + 1, r * width + k, -1, h) - loss(p, g, r, r + 1, r * width + k, -1, -h)) / (2 * h);
        EXPECT_NEAR(dhidden.get(r * width + k), want, bound + noise) << r << " " << k;
      }
    for (int64_t v = 0; v < vocab; ++v)
      for (int64_t k = 0; k < width; ++k) {
        double bound = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const double dy = std::abs(g.dlogprob.get(r)) +
                            std::abs(g.dentropy.get(r)) * std::abs(exact[r].y[v] - exact[r].lse + exact[r].entropy);
          bound += std::abs(p.hidden.get(r * width + k)) *
                   (dlogit_bound(p, g, r, v, exact[r]) + rows * kUnit * dy / p.temperature.get(r));
        }
        const double want = (loss(p, g, 0, rows, -1, v * width + k, h) - loss(p, g, 0, rows, -1, v * width + k, -h)) / (2 * h);
        EXPECT_NEAR(dhead.get(v * width + k), want, bound + noise) << v << " " << k;
      }
  }
}

TEST(SelectLogprobBackward, AccumulatesOverBlocksAndCalls) {
  // Two blocks of rows give what two calls give: the same chain of additions continued.
  const int64_t rows = kLogprobRowBlock + 44, vocab = 65, width = 16;
  const Case p(rows, vocab, width, DType::f32, DType::f32);
  const Gradients g(rows);
  CpuContext c(2, kWorkspace);
  const Outputs o = p.forward(c);
  const Tensor start = random_tensor(9, DType::f32, {vocab, width});
  Tensor whole = testing::to_dtype(start, DType::f32), parts = testing::to_dtype(start, DType::f32);
  Tensor dhidden(DType::f32, {rows, width}), dhidden_parts(DType::f32, {rows, width});
  select_logprob_backward(c, dhidden, whole, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse,
                          o.entropy);
  for (const auto& [at, n] : {std::pair<int64_t, int64_t>{0, kLogprobRowBlock}, {kLogprobRowBlock, 44}}) {
    const auto part = [at = at, n = n](ConstTensorView v) { return v.slice(at, n); };
    select_logprob_backward(c, dhidden_parts.view().slice(at, n), parts, part(g.dlogprob), part(g.dentropy), part(p.hidden),
                            p.weight(), part(p.target), part(p.temperature), part(o.lse), part(o.entropy));
  }
  EXPECT_EQ(testing::count_bit_differences(whole, parts), 0);
  EXPECT_EQ(testing::count_bit_differences(dhidden, dhidden_parts), 0);
  // What was there stays: the gradient from zero plus the start, to the rounding of `rows` additions on numbers below 1 + sum
  // |dlogit h|.
  Tensor alone(DType::f32, {vocab, width});
  select_logprob_backward(c, dhidden, alone, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse,
                          o.entropy);
  double largest = 0, difference = 0;
  for (int64_t i = 0; i < alone.elements(); ++i) {
    largest = std::max<double>(largest, std::abs(alone.get(i)));
    difference = std::max(difference, std::abs(double(whole.get(i)) - start.get(i) - alone.get(i)));
  }
  EXPECT_GT(largest, 0.1);
  EXPECT_LT(difference, 2 * rows * kUnit * (1 + largest));
}

TEST(SelectLogprobBackward, SameBitsForAllThreadsAndVectors) {
  const int64_t rows = 290, vocab = 131, width = 24;
  for (const DType type : {DType::f32, DType::bf16}) {
    const Case p(rows, vocab, width, type, type);
    const Gradients g(rows);
    CpuContext one(1, kWorkspace);
    const Outputs o = p.forward(one);
    Tensor want(DType::f32, {rows, width}), want_head(DType::f32, {vocab, width});
    select_logprob_backward(one, want, want_head, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse,
                            o.entropy);
    for (int threads = 1; threads <= 4; ++threads) {
      CpuContext c(threads, kWorkspace);
      testing::for_each_simd_target([&](const std::string& target) {
        Tensor dhidden(DType::f32, {rows, width}), dhead(DType::f32, {vocab, width});
        select_logprob_backward(c, dhidden, dhead, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse,
                                o.entropy);
        EXPECT_EQ(testing::count_bit_differences(dhidden, want), 0) << target << " threads " << threads;
        EXPECT_EQ(testing::count_bit_differences(dhead, want_head), 0) << target << " threads " << threads;
      });
    }
  }
}

TEST(SelectLogprobBackward, PartsOfTheVocabulary) {
  const int64_t rows = 290, vocab = 131, width = 24, first = 66;  // 22 of 44 chunks of 3
  const Case p(rows, vocab, width, DType::bf16, DType::f32);
  const Gradients g(rows);
  CpuContext c(2, kWorkspace);
  const Outputs o = p.forward(c);
  Tensor whole(DType::f32, {rows, width}), dhead(DType::f32, {vocab, width}), dhead_parts(DType::f32, {vocab, width});
  select_logprob_backward(c, whole, dhead, g.dlogprob, g.dentropy, p.hidden, p.weight(), p.target, p.temperature, o.lse, o.entropy);
  Tensor low(DType::f32, {rows, width}), high(DType::f32, {rows, width});
  for (const auto& [begin, count, dhidden] : {std::tuple<int64_t, int64_t, Tensor*>{0, first, &low}, {first, vocab - first, &high}})
    select_logprob_backward(c, *dhidden, dhead_parts.view().slice(begin, count), g.dlogprob, g.dentropy, p.hidden,
                            {p.head.view().slice(begin, count), {}}, p.target, p.temperature, o.lse, o.entropy, {begin, vocab});
  EXPECT_EQ(testing::count_bit_differences(dhead, dhead_parts), 0);
  // The two shares add up to the whole chain but for its V roundings and theirs, each at most half an ulp of sum_v |dlogit_v head|.
  // sum_v |dlogit_v| <= (2 |dlogprob| + 2 log V |dentropy|) / t, because sum_v p_v |log p_v + entropy| <= 2 entropy.
  double head = 0, dlogits = 0;
  for (int64_t i = 0; i < p.head.elements(); ++i) head = std::max(head, std::abs(double(p.head.get(i))));
  for (int64_t r = 0; r < rows; ++r)
    dlogits = std::max(dlogits, (2 * std::abs(double(g.dlogprob.get(r))) + 2 * std::log(vocab) * std::abs(double(g.dentropy.get(r)))) /
                                    p.temperature.get(r));
  double apart = 0, largest = 0;
  for (int64_t i = 0; i < whole.elements(); ++i) {
    apart = std::max(apart, std::abs(double(low.get(i)) + high.get(i) - whole.get(i)));
    largest = std::max(largest, std::abs(double(whole.get(i))));
  }
  EXPECT_GT(largest, 0.1);
  EXPECT_LT(apart, 2 * (vocab + 1) * kUnit * dlogits * head);
}

TEST(SelectLogprobBackward, EmptyViewsMeanZeroAndNotWanted) {
  const Case p(7, 33, 8, DType::f32, DType::f32);
  const Gradients g(7);
  CpuContext c(1, kWorkspace);
  const Outputs o = p.forward(c);
  const Tensor zero(DType::f32, {7});
  Tensor with(DType::f32, {7, 8}), without(DType::f32, {7, 8}), dhead(DType::f32, {33, 8});
  select_logprob_backward(c, with, dhead, g.dlogprob, zero, p.hidden, p.weight(), p.target, p.temperature, o.lse, o.entropy);
  select_logprob_backward(c, without, {}, g.dlogprob, {}, p.hidden, p.weight(), p.target, p.temperature, o.lse, {});
  EXPECT_EQ(testing::max_abs_difference(with, without), 0);
}

TEST(SelectLogprobDeathTest, NamesWhatIsWrong) {
  CpuContext c(1, kWorkspace);
  Case p(3, 10, 4, DType::f32, DType::f32);
  Outputs o(3), two(2);
  EXPECT_DEATH(select_logprob(c, two.logprob, {}, {}, p.hidden, p.weight(), p.target, p.temperature),
               "logprob is f32 \\[2\\], wanted f32 \\[3\\]");
  p.target.set(2, 10);
  EXPECT_DEATH(p.forward(c), "target 10 in row 2, the vocabulary has 10");
  p.target.set(2, 9);
  p.temperature.set(1, 0);
  EXPECT_DEATH(p.forward(c), "temperature 0 in row 1");
  Tensor partials(DType::f32, {3, 3});
  const Tensor logits(DType::f32, {3, 2});
  EXPECT_DEATH(logprob_partials(c, partials, logits, p.target, p.temperature, {3, 100}), "ids \\[3, 5\\) of 100 are not whole chunks of 2");
  const Tensor head(DType::f32, {10, 5});
  EXPECT_DEATH(select_logprob(c, o.logprob, {}, {}, p.hidden, {head, {}}, p.target, p.temperature),
               "hidden is \\[3, 4\\], head \\[10, 5\\]");
}

}  // namespace
}  // namespace lockstep
