// Stop strings over bytes as tokens: what is given out, when, and that it never depends on how the text is cut.

#include "rollout/stop_text.h"

#include <gtest/gtest.h>

#include "core/rng.h"

namespace lockstep {
namespace {

struct Outcome {
  std::string text, stop;
  std::vector<std::string> parts;
};

Outcome run(std::string_view text, std::vector<std::string> stops) {
  const ByteTokenizer tokenizer;
  StopText t(tokenizer, std::move(stops));
  Outcome o;
  const std::vector<int32_t> ids = tokenizer.encode(text).value();
  for (const int32_t id : ids) {
    o.parts.push_back(t.push(id));
    o.text += o.parts.back();
    if (t.matched() != nullptr) break;
  }
  if (t.matched() == nullptr) o.text += t.finish();
  if (t.matched() != nullptr) o.stop = *t.matched();
  return o;
}

TEST(StopText, EndsBeforeTheStopString) {
  EXPECT_EQ(run("one\n\ntwo", {"\n\n"}).text, "one");
  EXPECT_EQ(run("one\ntwo", {"\n\n"}).text, "one\ntwo");
  EXPECT_EQ(run("one\n", {"\n\n"}).text, "one\n") << "what was held back comes at the end";
  EXPECT_EQ(run("abc", {}).text, "abc");
  EXPECT_EQ(run("abc", {""}).text, "abc");
  EXPECT_EQ(run("aaab", {"aab"}).text, "a") << "a stop string that begins inside a part of itself";
  EXPECT_EQ(run("xaby", {"b", "ab"}).stop, "ab");
  EXPECT_EQ(run("größe", {"ß"}).text, "grö");
}

TEST(StopText, HoldsBackOnlyWhatMayStillStop) {
  const Outcome o = run("ab#c##d", {"##x"});
  EXPECT_EQ(o.parts, (std::vector<std::string>{"a", "b", "", "#c", "", "", "##d"}));
  EXPECT_EQ(run("aä", {"xyz"}).parts, (std::vector<std::string>{"a", "", "ä"})) << "a character comes whole";
}

TEST(StopText, AgreesWithASearchOfTheWholeText) {
  Philox rng(3, RngPurpose::test);
  int64_t matches = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto word = [&](uint32_t length) {
      std::string s;
      for (uint32_t n = 0; n < length; ++n) s += static_cast<char>('a' + rng.below(2));
      return s;
    };
    const std::string text = word(rng.below(12)), stop = word(1 + rng.below(4));
    const Outcome o = run(text, {stop});
    EXPECT_EQ(o.text, text.substr(0, text.find(stop))) << text << " " << stop;
    matches += !o.stop.empty();
  }
  EXPECT_GT(matches, 5000);
}

}  // namespace
}  // namespace lockstep
