// Settings: every way in which a config file can be wrong has its message, and what was read is written back the same.

#include "cli/options.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cli/names.h"

namespace lockstep {
namespace {

std::string read_error(const std::string& text) {
  ResolvedConfig config = default_config();
  return read_config(config, text, "run.toml").message();
}

TEST(Options, UnknownKeyNamesTheLineAndTheNearestKey) {
  EXPECT_EQ(read_error("# a run\n\n[rollout]\nmax_new_tokens = 8\ntemprature = 1.0\n"),
            "run.toml:5: rollout.temprature is not a known key; did you mean rollout.temperature?");
  EXPECT_EQ(read_error("[rolout]\ntemperature = 1.0\n"),
            "run.toml:2: rolout.temperature is not a known key; did you mean rollout.temperature?");
  EXPECT_EQ(read_error("[run]\nzzzzzzzzzzzzzz = 1\n"),
            "run.toml:2: run.zzzzzzzzzzzzzz is not a known key; `lockstep settings` lists them all");
  EXPECT_EQ(read_error("seed = 1\n"), "run.toml:1: seed is not a known key; `lockstep settings` lists them all");
  EXPECT_EQ(read_error("[optimizer]\nlr.base = 1.0\n"),
            "run.toml:2: optimizer.lr is a table, list or date, expected a single value");
}

TEST(Options, WrongTypesAndRanges) {
  EXPECT_EQ(read_error("[run]\nsteps = \"many\"\n"), "run.toml:2: run.steps is \"many\", expected an integer");
  EXPECT_EQ(read_error("[run]\nsteps = 1.5\n"), "run.toml:2: run.steps is 1.5, expected an integer");
  EXPECT_EQ(read_error("[run]\nsteps = -1\n"), "run.toml:2: run.steps is -1, expected 0 .. 1000000000");
  EXPECT_EQ(read_error("[run]\nseed = -1\n"), "run.toml:2: run.seed is -1, expected >= 0");
  EXPECT_EQ(read_error("[run]\nseed = 9223372036854775807\n"),
            "run.toml:2: run.seed is 9223372036854775807, expected 0 .. 9007199254740992");
  EXPECT_EQ(read_error("[train]\nentropy_coef = 1e31\n"), "run.toml:2: train.entropy_coef is 1e+31, expected -1e+30 .. 1e+30");
  EXPECT_EQ(read_error("[train]\nclip_high = inf\n"), "run.toml:2: train.clip_high is inf, expected 0 .. 1e+30");
  EXPECT_EQ(read_error("[run]\ndir = \"a\\u0000b\"\n").substr(0, 22), "run.toml:2: run.dir is");
  EXPECT_EQ(read_error("run = 3\n"), "run.toml:1: run is a section: write [run], and its keys in the lines below");
  EXPECT_EQ(read_error("[[run]]\ndir = \"x\"\n").substr(0, 30), "run.toml:1: run is a section: ");
  EXPECT_EQ(read_error("[run]\nsave_rollouts = 1\n"), "run.toml:2: run.save_rollouts is 1, expected true or false");
  EXPECT_EQ(read_error("[run]\ndir = 3\n"), "run.toml:2: run.dir is 3, expected a text in quotes");
  EXPECT_EQ(read_error("[rollout]\ntop_p = 1.5\n"), "run.toml:2: rollout.top_p is 1.5, expected 1e-06 .. 1");
  EXPECT_EQ(read_error("[rollout]\ntop_p = nan\n"), "run.toml:2: rollout.top_p is nan, expected 1e-06 .. 1");
  EXPECT_EQ(read_error("[rollout]\ntop_p = true\n"), "run.toml:2: rollout.top_p is true, expected a number");
  EXPECT_EQ(read_error("[train]\nkl = \"k33\"\n"),
            "run.toml:2: train.kl is \"k33\", expected none | k1 | k2 | k3; did you mean k3?");
  EXPECT_EQ(read_error("[train]\nkl = 3\n"), "run.toml:2: train.kl is 3, expected none | k1 | k2 | k3");
}

TEST(Options, SyntaxErrorsNameTheLine) {
  EXPECT_TRUE(read_error("[run]\nsteps = \n").starts_with("run.toml:2: ")) << read_error("[run]\nsteps = \n");
  EXPECT_TRUE(read_error("[run]\nsteps = 1\nsteps = 2\n").starts_with("run.toml:3: "));
  EXPECT_FALSE(read_error("[run\n").empty());
}

TEST(Options, BytesThatAreNotTextAreErrors) {
  using std::string_literals::operator""s;
  for (const std::string& text : {"[\0"s, "[run]\n[\1\1\0x = 1\n"s, "\xff"s, "[run]\ndir = \"\xc3\"\n"s, "\xef\xbb\xbf\0"s})
    EXPECT_TRUE(read_error(text).starts_with("run.toml:")) << read_error(text);
}

TEST(Options, CharactersBeyondAsciiBelongIntoQuotes) {
  constexpr std::string_view kOutside = "a character that is not ASCII outside of quotes";
  EXPECT_TRUE(read_error("[run]\nsteps =\xc2\xa0" "1\n").starts_with(fmt::format("run.toml:2: {}", kOutside)));  // a no-break space
  EXPECT_NE(read_error("\xcc\xaa").find(kOutside), std::string::npos);
  EXPECT_NE(read_error("[run]\ndir = \"a\"\xc3\xa9\n").find(kOutside), std::string::npos);
  EXPECT_EQ(read_error("[run]\ndir = \"\"\"\\\n\xc2\xa7\"\"\"\n"),
            "run.toml:2: strings of several lines are not read; write the text on one line");
  EXPECT_EQ(read_error("[run]\ndir = 0tt's.\xef\xb9\xbf\n"), "run.toml:2: a quote that does not open the value behind the line's =");
  EXPECT_EQ(read_error("[run]\ndir = ='\xef\xb9\xbf'\n"), "run.toml:2: a quote that does not open the value behind the line's =");
  EXPECT_EQ(read_error("[run]\ndir = \"a\\\n\xc3\xa9\"\n"), "run.toml:2: a string must end on its line");

  ResolvedConfig config = default_config();
  ASSERT_TRUE(read_config(config, "\xef\xbb\xbf# \xc3\xa9\n[run]\ndir = \"\\\"#\xc3\xa9'\" # \"\xc3\xa9\n[model]\nconfig = '\\'\n", "run.toml").is_ok());
  EXPECT_EQ(config.values.run.dir, "\"#\xc3\xa9'");
  EXPECT_EQ(config.values.model.config, "\\");
}

TEST(Options, IntegersAreAcceptedForNumbers) {
  ResolvedConfig config = default_config();
  ASSERT_TRUE(read_config(config, "[rollout]\ntemperature = 2\n", "run.toml").is_ok());
  EXPECT_EQ(config.values.rollout.temperature, 2.0f);
  EXPECT_EQ(config.where("rollout.temperature"), "run.toml:2");
  EXPECT_EQ(config.where("rollout.top_p"), "default");
}

TEST(Options, Overrides) {
  ResolvedConfig config = default_config();
  ASSERT_TRUE(apply_override(config, "optimizer.lr=3e-4").is_ok());
  ASSERT_TRUE(apply_override(config, "model.numerics=f32").is_ok());
  ASSERT_TRUE(apply_override(config, "run.dir=a = b").is_ok());
  ASSERT_TRUE(apply_override(config, "run.save_rollouts=false").is_ok());
  EXPECT_EQ(config.values.optimizer.lr, 3e-4f);
  EXPECT_EQ(config.values.model.numerics, Numerics::f32);
  EXPECT_EQ(config.values.run.dir, "a = b");
  EXPECT_FALSE(config.values.run.save_rollouts);
  EXPECT_EQ(config.where("optimizer.lr"), "--set optimizer.lr");
  EXPECT_EQ(apply_override(config, "optimizer.lr").message(), "--set optimizer.lr: expected section.key=value");
  EXPECT_EQ(apply_override(config, "optimiser.lr=1").message(),
            "--set optimiser.lr=1: optimiser.lr is not a known key; did you mean optimizer.lr?");
  EXPECT_EQ(apply_override(config, "run.dir=\"x\"").message(),
            "--set run.dir=\"x\": leave out the quotes, the text behind = is taken as it is");
  EXPECT_EQ(apply_override(config, "run.steps=12x").message(), "--set run.steps=12x: run.steps is \"12x\", expected an integer");
  EXPECT_EQ(apply_override(config, "run.steps=99999999999999999999").message(),
            "--set run.steps=99999999999999999999: run.steps is 1e+20, expected an integer");
}

// Every row away from its default, so that a row that is not written or not read shows.
TEST(Options, ResolvedConfigReadsBackTheSame) {
  ResolvedConfig config = default_config();
  int64_t n = 3;
  for (const Setting& s : settings()) {
    std::string value;
    if (const auto* c = std::get_if<Choice>(&s.field)) {
      value = c->words.back();
    } else if (std::holds_alternative<bool& (*)(RunConfig&)>(s.field)) {
      value = s.default_value == "true" ? "false" : "true";
    } else if (std::holds_alternative<std::string& (*)(RunConfig&)>(s.field)) {
      value = "a \"quoted\" \\ path\twith \x01 bytes and \xc3\xa9";
    } else if (std::holds_alternative<int64_t& (*)(RunConfig&)>(s.field)) {
      value = std::to_string(std::min(n++, static_cast<int64_t>(s.max)));
    } else {
      value = fmt::format(
          "{}", std::max(static_cast<float>(s.min), std::min(0.1f / static_cast<float>(n++), static_cast<float>(s.max))));
    }
    ASSERT_TRUE(apply_override(config, fmt::format("{}={}", s.name, value)).is_ok()) << s.name << " " << value;
  }
  const std::string text = config_toml(config.values);
  ASSERT_NE(text, config_toml(default_config().values));
  ResolvedConfig again = default_config();
  const Status status = read_config(again, text, "config.resolved.toml");
  ASSERT_TRUE(status.is_ok()) << status.message() << "\n" << text;
  EXPECT_EQ(config_toml(again.values), text);
  EXPECT_EQ(again.values.optimizer.lr, config.values.optimizer.lr);
  EXPECT_EQ(again.values.run.dir, config.values.run.dir);
  EXPECT_EQ(again.values.eval.seed, config.values.eval.seed);
  for (const Setting& s : settings()) EXPECT_NE(again.where(s.name), "default") << s.name;
}

TEST(Options, RowsAreDistinctAndListed) {
  std::set<std::string_view> names;
  const std::string help = settings_help(), table = config_table(default_config().values, {});
  for (const Setting& s : settings()) {
    EXPECT_TRUE(names.insert(s.name).second) << s.name;
    EXPECT_FALSE(s.help.empty()) << s.name;
    EXPECT_NE(help.find(s.name), std::string::npos) << s.name;
    EXPECT_NE(table.find(s.name), std::string::npos) << s.name;
  }
}

ResolvedConfig trainable() {
  ResolvedConfig config = default_config();
  const Status s = read_config(config, "[run]\ndir = \"d\"\n[model]\nconfig = \"c\"\n[task]\ntrain_file = \"t\"\n", "run.toml");
  EXPECT_TRUE(s.is_ok()) << s.message();
  EXPECT_TRUE(check_config(config).is_ok());
  EXPECT_TRUE(check_train_config(config).is_ok());
  return config;
}

TEST(Options, TruncatingFiltersAreRefusedInTraining) {
  for (const char* filter : {"rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1"}) {
    ResolvedConfig config = trainable();
    ASSERT_TRUE(apply_override(config, filter).is_ok());
    EXPECT_FALSE(check_train_config(config).is_ok()) << filter;
  }
  ResolvedConfig config = trainable();
  ASSERT_TRUE(read_config(config, "\n[rollout]\ntop_p = 0.9\n", "run.toml").is_ok());
  EXPECT_TRUE(
      check_train_config(config).message().starts_with("run.toml:3: rollout.top_p is 0.9; training rollouts may not truncate"))
      << check_train_config(config).message();
}

TEST(Options, SettingsThatContradictEachOther) {
  const auto error = [](const char* assignment) {
    ResolvedConfig config = trainable();
    EXPECT_TRUE(apply_override(config, assignment).is_ok()) << assignment;
    const Status general = check_config(config);
    return general ? check_train_config(config).message() : general.message();
  };
  EXPECT_FALSE(error("rollout.temperature=0").empty());
  EXPECT_FALSE(error("rollout.temperature=1e-40").empty());
  EXPECT_FALSE(error("eval.temperature=1e-7").empty());
  EXPECT_TRUE(error("eval.temperature=0").empty());
  EXPECT_FALSE(error("rollout.samples_per_prompt=1").empty());
  EXPECT_FALSE(error("train.steps_per_rollout=3").empty());  // of 16 * 8 samples
  EXPECT_TRUE(error("train.steps_per_rollout=4").empty());
  EXPECT_FALSE(error("train.dual_clip=0.5").empty());
  EXPECT_TRUE(error("rollout.over_sample=1.5").empty());
  EXPECT_FALSE(error("train.kl_coef=0.1").empty());
  EXPECT_FALSE(error("train.aggregation=seq_mean_token_sum_norm").empty());
  EXPECT_FALSE(error("run.eval_every=5").empty());
  EXPECT_FALSE(error("model.config=").empty());
  EXPECT_TRUE(check_config(default_config()).message().starts_with("model.config is \"\" by default; random weights need"))
      << check_config(default_config()).message();

  ResolvedConfig config = trainable();
  ASSERT_TRUE(apply_override(config, "rollout.prompts_per_step=1000000").is_ok());
  ASSERT_TRUE(apply_override(config, "rollout.samples_per_prompt=65536").is_ok());
  EXPECT_NE(check_train_config(config).message().find("a step has 65536000000 samples, over"), std::string::npos);

  config = trainable();
  ASSERT_TRUE(apply_override(config, "rollout.over_sample=1.5").is_ok());
  ASSERT_TRUE(apply_override(config, "rollout.ahead=1").is_ok());
  EXPECT_NE(check_train_config(config).message().find("or rollout.ahead = 0"), std::string::npos);

  config = trainable();
  ASSERT_TRUE(apply_override(config, "run.steps=1000000000").is_ok());
  EXPECT_TRUE(check_train_config(config).is_ok());
  ASSERT_TRUE(apply_override(config, "train.steps_per_rollout=4").is_ok());
  EXPECT_NE(check_train_config(config).message().find("more than 1000000000 optimizer steps"), std::string::npos);
}

TEST(Options, TheExampleRunFileIsReady) {
  const Result<ResolvedConfig> config = load_config(LOCKSTEP_SOURCE_DIR "/configs/example.toml", {});
  ASSERT_TRUE(config.is_ok()) << config.message();
  for (const Status& s : {check_sft_config(config.value()), check_train_config(config.value()), check_eval_config(config.value())})
    EXPECT_TRUE(s.is_ok()) << s.message();
}

TEST(Options, NearestName) {
  const std::string_view known[] = {"alpha", "beta"};
  EXPECT_EQ(nearest_name("alpah", known), "alpha");
  EXPECT_EQ(nearest_name("bet", known), "beta");
  EXPECT_EQ(nearest_name("gammagamma", known), "");
  EXPECT_EQ(nearest_name("", known), "");
}

}  // namespace
}  // namespace lockstep
