// The program as its user meets it: exit codes, and what it says when something is wrong.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/core.h>

#include "core/device.h"
#include "core/sanitizer.h"
#include "io/json.h"

namespace {

using lockstep::JsonMember;
using lockstep::JsonValue;
using lockstep::kAddressSanitizer;
using lockstep::parse_json;
using lockstep::Result;
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;  // 128 and more: a signal
  std::string said;    // on both streams
};

class CommandLine : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("lockstep_command_line_{}_{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), ::getpid());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string path(const std::string& name) const { return root_ / name; }

  // `before` and `after` are shell: limits and redirections.
  Outcome lockstep(const std::string& arguments, const std::string& before = "", const std::string& after = "2>&1") const {
    const std::string line = fmt::format("cd '{}'; {} {} {} {}", root_.string(), before, LOCKSTEP_PROGRAM, arguments, after);
    FILE* pipe = ::popen(line.c_str(), "r");
    Outcome outcome;
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.said.append(buffer, n);
    const int status = ::pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
  }
  void expect(const Outcome& outcome, int exit_code, const std::string& said) const {
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.said;
    EXPECT_NE(outcome.said.find(said), std::string::npos) << outcome.said << "\nwanted: " << said;
  }
  // A task and settings for one short run in run/.
  void prepare() const {
    expect(lockstep("make-task data --train 20 --eval 5 --sft 20 --difficulty-max 1"), 0, "20 worked examples");
    std::ofstream(path("run.toml")) << "[run]\ndir = \"run\"\nsteps = 1\nthreads = 1\n[model]\nconfig = \"" LOCKSTEP_SOURCE_DIR
                                       "/configs/demo.config.json\"\ntokenizer = \"data\"\n[task]\ntrain_file = \"data/train.jsonl\"\n"
                                       "eval_file = \"data/eval.jsonl\"\nmax_prompt_tokens = 24\n[rollout]\nprompts_per_step = 2\n"
                                       "samples_per_prompt = 2\nmax_new_tokens = 4\n[eval]\nsamples = 2\nmax_new_tokens = 4\n";
  }

  std::string text_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Those that are not blank.
  int lines_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    int count = 0;
    for (std::string line; std::getline(file, line);) count += line.empty() ? 0 : 1;
    return count;
  }

  fs::path root_;
};

TEST_F(CommandLine, WrongUsageIsTwo) {
  expect(lockstep(""), 2, "lockstep: ");
  expect(lockstep("trian run.toml"), 2, "did you mean train?");
  expect(lockstep("train run.toml --resum"), 2, "did you mean --resume?");
  expect(lockstep("train none.toml"), 2, "none.toml: No such file or directory");
  expect(lockstep("train /dev/zero"), 2, "not a regular file");
  expect(lockstep("make-task data --train 0"), 2, "not in range 1 to 1000000");
  expect(lockstep("make-task data --train 9223372036854775807 --sft 9223372036854775807"), 2, "not in range");
  expect(lockstep("make-task data --seed 99999999999999999999"), 2, "not in range");
  expect(lockstep("serve"), 2, "serve needs either RUN.toml or --model DIR");
  expect(lockstep("serve --model none"), 2, "no such checkpoint");
  expect(lockstep("serve --model none --port 65536"), 2, "not in range");
  expect(lockstep("verify --golden none.safetensors"), 2, "none.safetensors");
  std::ofstream(path("run.toml")) << "[run]\ndir = \"a\\u0000b\"\n";
  expect(lockstep("train run.toml"), 2, "run.toml:2: run.dir is \"a\\x00b\", expected a text without NUL bytes");
  EXPECT_FALSE(fs::exists(path("a")));
}

TEST_F(CommandLine, ServeAnswersUntilSigterm) {
  prepare();
  const std::string serve = fmt::format("{} serve run.toml --set model.init=random --name tiny > said 2>&1 & pid=$!; ", LOCKSTEP_PROGRAM);
  // Waits for the line with the address, and ends it.
  expect(lockstep("settings >/dev/null; " + serve + "n=0; while ! grep -q '^serving tiny at http://127.0.0.1:' said && [ $n -lt 600 ]; do sleep 0.1; n=$((n+1)); done; "
                  "kill -TERM $pid; wait $pid; echo code $?; cat said", "", ""),
         0, "code 0\nserving tiny at http://127.0.0.1:");
}

TEST_F(CommandLine, TheDoctorTellsAndChecks) {
  expect(lockstep("doctor --machine"), 0, "of open files");
  const Outcome checked = lockstep("doctor");
  expect(checked, 0, "cpu            golden csa_hash  f32   logits within");
  expect(checked, 0, "cpu            golden hca_yarn  bf16  logits within");
  expect(checked, 0, "cpu            G1   bf16");
  expect(checked, 0, "doctor: all is well");
}

TEST_F(CommandLine, ABenchPrintsALineAMeasurement) {
  const Outcome done = lockstep("bench generate train rl --config " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json --batch 4 --prompt 8 --new 4 --tokens 64 --row 32 --repeat 1");
  expect(done, 0, "{\"what\":\"generate\",\"device\":\"cpu\"");
  expect(done, 0, "\"logprobs_differing\":0");
  expect(lockstep("bench --config missing.json"), 2, "missing.json");
  expect(lockstep("bench kernel --config missing.json"), 2, "kernel not in {generate,train,rl,decode,prefill,sync,kernels}");
  expect(lockstep("bench --config " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json --prompt 250"), 2, "max_position_embeddings 256");
  const std::string demo = " --config " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json --prompt 8 --new 4 --repeat 1 ";
  expect(lockstep("bench train --tokens 33 --row 32" + demo), 0, "\"tokens\":32,");  // a token alone predicts nothing
  expect(lockstep("bench train --tokens 1 --row 32" + demo), 2, "--tokens 1 and --row 32 leave 1 token");
  expect(lockstep("bench train --tokens 32 --row 1" + demo), 2, "raise them to 2 or more");
  expect(lockstep("bench generate --threads -1" + demo), 2, "--threads: Value -1 not in range 0 to 1024");
  expect(lockstep("bench generate --batch 16777216 --new 200" + demo.substr(0, demo.find(" --new"))), 2, "state of 16777216 samples");
  expect(lockstep("bench train --config " LOCKSTEP_SOURCE_DIR "/configs/pro.config.json"), 2, "take a smaller --config");
  expect(lockstep("bench decode --config " LOCKSTEP_SOURCE_DIR "/configs/pro.config.json"), 2, "take a smaller --config");
}

TEST_F(CommandLine, ABenchOfKernelsHasALineForEveryOperatorAndStepsHaveFloors) {
  const std::string config = " --config " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json --threads 1 --repeat 1";
  const std::string kernels = "bench kernels --decode 3 --tokens 40 --row 32 --context 64 --warm" + config;
  const Outcome steps = lockstep("bench decode prefill sync --numerics fp8 --decode 2,4 --prompt 16 --new 2 --microbatch 64" + config, "", "");
  std::istringstream said(lockstep(kernels, "", "").said + steps.said);
  std::set<std::string> ops, kinds;
  int lines = 0;
  for (std::string line; std::getline(said, line); ++lines) {
    const Result<JsonValue> read = parse_json(line);
    ASSERT_TRUE(read.is_ok()) << read.message() << "\n" << line;
    for (const JsonMember& member : read.value().members) {
      const std::string& text = member.value.text;
      EXPECT_FALSE(member.value.is(JsonValue::Kind::string) && (text == "nan" || text == "inf" || text == "-inf")) << line;
      if (member.name == "us" || member.name == "ms" || member.name == "floor_us" || member.name == "floor_ms" || member.name == "share") EXPECT_GT(std::stod(text), 0) << line;
      if (member.name == "op") ops.insert(text);
      if (member.name == "bench" || member.name == "what" || member.name == "path") kinds.insert(text);
    }
  }
  EXPECT_GT(lines, 150);
  EXPECT_EQ(kinds, (std::set<std::string>{"ceiling", "kernel", "decode", "prefill", "sync", "convert", "transfer"}));
  for (const fs::directory_entry& folder : fs::directory_iterator(LOCKSTEP_SOURCE_DIR "/ops"))
    if (folder.is_directory()) EXPECT_TRUE(ops.count(folder.path().filename())) << folder.path() << " is in no line";
  expect(lockstep(kernels + " --only 'wq_a dx'"), 0, "\"name\":\"wq_a\",\"pass\":\"dx\"");
  expect(lockstep(kernels + " --only wq_z"), 2, "--only \"wq_z\" finds no kernel; there are\n  adamw adamw update f32\n");
  expect(lockstep(kernels + " --only '('"), 2, "--only \"(\" is no regular expression");
  expect(lockstep("bench kernels --context 512" + config), 2, "max_position_embeddings 256; lower --context");
}

TEST_F(CommandLine, GatesAndWeightsOfARun) {
  prepare();
  expect(lockstep("train run.toml --set model.init=random"), 0, "largest gap 0");
  const Outcome gates = lockstep("gates --checkpoint run --tokens 500 --numerics fp8 --set run.threads=1 --out gates.json");
  expect(gates, 0, "gates: pass");
  expect(gates, 0, "scaled down");
  expect(gates, 0, "G6   fp8          0 tokens         0 different  n/a");
  EXPECT_NE(text_of("gates.json").find("\"failed\":0,"), std::string::npos);
  expect(lockstep("gates --config x --checkpoint run"), 2, "--config or --checkpoint, not both");
  expect(lockstep("gates --config missing.json --tokens 500"), 2, "missing.json");

  for (const char* numerics : {"", "--numerics f32", "--numerics bf16", "--numerics fp8", "--numerics fp4"})
    expect(lockstep(fmt::format("check-weights run {}", numerics)), 0, "equal the trainer's export bit for bit");
  expect(lockstep("check-weights data"), 2, "neither a run");
  expect(lockstep("check-weights run --server http://127.0.0.1:1"), 2, "/weights_checksums");
  // A server of another checkpoint.
  expect(lockstep("train run.toml --set model.init=random --set run.dir=other --set run.seed=5"), 0, "largest gap 0");
  expect(lockstep("serve --model run --port 0 > serve.log & pid=$!; for i in $(seq 300); do grep -q serving serve.log && break; sleep 0.1; done; "
                  "url=$(sed 's/.* at //' serve.log); " LOCKSTEP_PROGRAM " check-weights run --server $url; " LOCKSTEP_PROGRAM
                  " check-weights other --server $url; code=$?; kill $pid; wait $pid; exit $code"),
         1, "first embed.weight row 0, column 0");
}

TEST_F(CommandLine, AFullDiskFailsTheWorkAndResumes) {
  prepare();
  // A limit on the size of files stands for the full disk: the checkpoint does not fit.
  expect(lockstep("train run.toml", "ulimit -f 200;"), 1, "File too large");
  EXPECT_FALSE(fs::exists(path("run/checkpoints/step_000001/COMPLETE")));
  for (const auto& entry : fs::recursive_directory_iterator(path("run")))
    EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path();
  expect(lockstep("train run.toml --resume"), 0, "checkpoint run/checkpoints/step_000001");
}

// Two trainers and two samplers, as four ranks, against two ranks that do both.
// Under the executor every kernel has the CPU's bits, so a whole run on the GPU leaves the CPU's files: rollouts, metrics, checkpoints.
TEST_F(CommandLine, ARunOnTheGpuIsTheCpusRun) {
  if (!lockstep::device_info().emulated) GTEST_SKIP() << "matrix units add in their own order";
  prepare();
  const auto compare = [&](const std::string& settings, int ranks) {
    if (ranks > 1 && std::string_view(MPIRUN_COMMAND).empty()) return;
    const std::string launcher = ranks == 1 ? "" : fmt::format(MPIRUN_COMMAND " -n {}", ranks);
    for (const char* device : {"cpu", "gpu"}) {
      fs::remove_all(path(device));
      expect(lockstep(fmt::format("train run.toml --set run.steps=2 --set train.entropy_coef=0.01 --set device={} --set run.dir={} {}", device, device, settings), launcher), 0,
             "steps 0 to 2");
    }
    int files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(path("cpu"))) {
      const std::string name = fs::relative(entry.path(), path("cpu"));
      if (!entry.is_regular_file() || name.ends_with("config.resolved.toml") || name.ends_with("checksums.json")) continue;
      if (!name.starts_with("rollouts/") && !name.starts_with("checkpoints/") && name != "metrics.jsonl") continue;
      EXPECT_TRUE(text_of("cpu/" + name) == text_of("gpu/" + name)) << name << " differs with " << settings;
      ++files;
    }
    EXPECT_GE(files, 5) << settings;
  };
  compare("--set model.numerics=fp8", 1);
  compare("--set rollout.numerics=fp8 --set train.tis=token --set train.replay=routing+index", 1);
  compare("--set parallel.pp=2 --set parallel.ep=2 --set parallel.rollout_tp=2", 4);
  compare("--set parallel.tp=2 --set parallel.rollout_ranks=1", 3);
}

TEST_F(CommandLine, SamplersOnOtherRanksLeaveTheSameRun) {
  if (std::string_view(MPIRUN_COMMAND).empty()) return;
  prepare();
  const std::string train = "train run.toml --set run.steps=3 --set run.eval_every=2 --set train.entropy_coef=0.01 ";
  const auto compare = [&](const std::string& layout, const std::string& sampler) {
    fs::remove_all(path("run"));
    fs::remove_all(path("apart"));
    expect(lockstep(train + layout, MPIRUN_COMMAND " -n 2"), 0, "largest gap 0;");
    expect(lockstep(train + layout + "--set run.dir=apart --set parallel.rollout_ranks=2 " + sampler, MPIRUN_COMMAND " -n 4"), 0, "largest gap 0;");
    int files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(path("run"))) {
      const std::string name = fs::relative(entry.path(), path("run"));
      const bool settings = name.ends_with("config.resolved.toml") || name.ends_with("checksums.json");
      if (!entry.is_regular_file() || settings || (!name.starts_with("rollouts/") && !name.starts_with("evals/") && !name.starts_with("checkpoints/") && name != "metrics.jsonl")) continue;
      EXPECT_TRUE(text_of("run/" + name) == text_of("apart/" + name)) << name << " differs";
      ++files;
    }
    EXPECT_GE(files, 10) << "metrics, three steps' rollouts, two evaluations, the last checkpoint's two of each rank";
  };
  compare("", "--set parallel.rollout_tp=2");
  compare("--set parallel.pp=2 ", "--set parallel.rollout_ep=2");
  compare("--set parallel.ep=2 ", "");
  expect(lockstep(train + "--set run.dir=none --set parallel.rollout_ranks=2", MPIRUN_COMMAND " -n 2"), 2, "parallel.rollout_ranks is 2 of 2 ranks");
}

TEST_F(CommandLine, OutputThatIsLostIsNotSuccess) {
  prepare();
  EXPECT_EQ(lockstep("train run.toml").exit_code, 0);
  expect(lockstep("eval run.toml --json"), 0, "\"problems\":5,\"samples\":2");
  expect(lockstep("eval run.toml --json", "", "2>&1 >/dev/full"), 1, "cannot write to standard output");
  expect(lockstep("settings", "", "2>&1 >/dev/full"), 1, "cannot write to standard output");
}

TEST_F(CommandLine, DamagedWeightsAnswerNothing) {
  prepare();
  EXPECT_EQ(lockstep("train run.toml").exit_code, 0);
  expect(lockstep("generate run '1+1:' --set eval.temperature=1e-30"), 2, "use 0 for greedy");
  expect(lockstep("inspect run"), 0, "every tensor of the model is there");
  const std::string weights = path("run/checkpoints/step_000001/masters.safetensors");
  std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-2, std::ios::end);
  file.put('\x41');
  file.close();
  for (const char* command : {"generate run '1+1:'", "eval run.toml", "inspect run", "export run out"})
    expect(lockstep(command), 2, "masters.safetensors is damaged");
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(CommandLine, CheckpointsInReleasedLayouts) {
  prepare();
  fs::create_directories(path("model"));
  fs::copy(LOCKSTEP_SOURCE_DIR "/configs/demo.config.json", path("model/config.json"));
  fs::copy(path("data/tokenizer_lockstep.json"), path("model/tokenizer_lockstep.json"));
  expect(lockstep("synth model/config.json --headers-only"), 0, "released-fp4, 340 tensors in 1 file, 625446 bytes");
  expect(lockstep("synth model/config.json"), 2, "DST is required");
  expect(lockstep("synth model/config.json fp4 --shard-size 200KB"), 0, "fp4: released-fp4, 340 tensors in 4 files, 625446 bytes");
  expect(lockstep("inspect fp4"), 0, "routed experts         I8 x F8_E8M0");
  expect(lockstep("inspect fp4 --headers-only"), 0, "every tensor of the model is there, and nothing else");
  expect(lockstep("generate fp4 1+1: --set eval.max_new_tokens=2"), 0, "");
  expect(lockstep("convert fp4 fp8 --to released-fp8"), 0, "all as in the source (34 tensors copied byte for byte)");
  expect(lockstep("convert fp4 fp8 --to released-fp8"), 2, "fp8 exists and is not empty");
  expect(lockstep("convert fp4 other --to fp5"), 2, "fp5 not in");
  expect(lockstep("convert nowhere other --to bf16"), 2, "nowhere: there is no such checkpoint or run");
  // The same numbers by another way: the same samples.
  expect(lockstep("convert fp8/ bf16/ --to transformers-bf16"), 0, "bf16/: transformers-bf16, ");
  EXPECT_EQ(lockstep("generate bf16 1+1: --json").said, lockstep("generate fp4 1+1: --json").said);
  fs::resize_file(path("fp4/model-00002-of-00004.safetensors"), 100);
  for (const char* command : {"generate fp4 1+1:", "inspect fp4", "convert fp4 other --to bf16"}) expect(lockstep(command), 2, "fp4/model-00002-of-00004.safetensors: ");
  EXPECT_FALSE(fs::exists(path("other")));
}

TEST_F(CommandLine, Grade) {
  std::ofstream(path("rows.jsonl")) << R"({"id":5,"response":"so \\boxed{\\frac{1}{2}}","label":0.50})" << "\n\n" << "nonsense\n"
                                    << R"({"id":"b","response":"\\boxed{3}","label":"4"})" << "\n" << R"({"response":3,"label":"4"})";
  const std::string wanted = R"({"id":5,"score":1,"correct":true,"pred":"1/2","reason":"correct"})"
                             "\n"
                             R"({"score":null,"correct":false,"pred":"","reason":"error","error":"line 1, column 2)";
  const Outcome mixed = lockstep("grade < rows.jsonl", "", "2>err");
  expect(mixed, 2, wanted);
  expect(mixed, 2, "\n" R"({"id":"b","score":0,"correct":false,"pred":"3","reason":"wrong"})" "\n");
  EXPECT_EQ(std::count(mixed.said.begin(), mixed.said.end(), '\n'), 4);
  expect(lockstep("grade < rows.jsonl", "", "2>&1 >/dev/null"), 2, "standard input:5: \"response\" is a number, a string is wanted");
  std::ofstream(path("good.jsonl")) << R"({"id":5,"response":"Answer: 7","label":"7"})" << "\n";
  expect(lockstep("grade --grader dapo < good.jsonl"), 0, R"({"id":5,"score":1,"correct":true,"pred":"7","reason":"correct"})");
  expect(lockstep("grade --grader math < good.jsonl"), 0, R"("score":0,"correct":false,"pred":"","reason":"no_answer")");
  // It answers rows as they come, so it can be the command of another one.
  expect(lockstep("grade --command '" LOCKSTEP_PROGRAM " grade --grader dapo' < good.jsonl"), 0, R"({"id":5,"score":1,"correct":true,"pred":"7")");
  expect(lockstep("grade --command 'exit 3' < good.jsonl"), 1, "standard input:1: not judged: the command grader failed 2 times on this row");
  expect(lockstep("grade --grader maths < good.jsonl"), 2, "maths not in");
  expect(lockstep("grade --grader command < good.jsonl"), 2, "needs a command");
  expect(lockstep("grade --grader math --command x < good.jsonl"), 2, "--command is for --grader command");
  expect(lockstep("grade < /dev/null"), 0, "");
}

TEST_F(CommandLine, EvalGoesOnAfterAKill) {
  prepare();
  const std::string eval = "eval run.toml --set eval.samples=64 --set eval.max_new_tokens=40 --set model.init=random --out ";
  expect(lockstep(eval + "whole"), 0, "5 problems x 64");
  EXPECT_EQ(lines_of("whole/judged.jsonl"), 320);
  EXPECT_EQ(lines_of("whole/samples_0.jsonl"), 320);
  EXPECT_NE(text_of("whole/report.md").find("| pass@64 |"), std::string::npos);
  EXPECT_NE(text_of("whole/report.json").find("\"eval/eval-pass@1\":"), std::string::npos);

  // Killed as soon as the first samples are there, and what it was writing cut off.
  const Outcome killed = lockstep(eval + "cut", "", "2>/dev/null & p=$!; while kill -0 $p && ! [ -s cut/samples_0.jsonl ]; do :; done; kill -9 $p; wait $p; echo ended $?");
  ASSERT_TRUE(fs::exists(path("cut/samples_0.jsonl"))) << killed.said;
  const std::string left = text_of("cut/samples_0.jsonl");
  std::ofstream(path("cut/samples_0.jsonl"), std::ios::trunc) << left.substr(0, left.size() - 20);
  expect(lockstep(eval + "cut"), 0, " samples are there already, 1 damaged lines are passed over");
  EXPECT_EQ(text_of("cut/judged.jsonl"), text_of("whole/judged.jsonl"));
  EXPECT_EQ(lines_of("cut/samples_0.jsonl"), 321) << "320 and the one cut off: none is drawn twice";

  expect(lockstep(eval + "cut"), 0, "cut: 320 samples are there already");
  EXPECT_EQ(text_of("cut/judged.jsonl"), text_of("whole/judged.jsonl"));
  expect(lockstep(eval + "cut --set eval.temperature=0.5"), 1, "cut holds 320 samples of other weights, settings or problems and none of these; name another directory");
}

TEST_F(CommandLine, EvalOfAnswersFromElsewhere) {
  std::ofstream(path("problems.jsonl")) << R"({"problem":"p","answer":25,"id":"a"})" << "\n" << R"({"problem":"q","answer":"3","id":"b"})" << "\n";
  std::ofstream(path("answers.json")) << R"({"a":["\\boxed{025}","\\boxed{26}"],"b":["so \\boxed{3}","\\boxed{3.0}"]})";
  expect(lockstep("eval --completions answers.json --data problems.jsonl --json --out out"), 0, "\"eval/problems-pass@1\":0.75,\"eval/problems-pass@2\":1,");
  EXPECT_NE(text_of("out/report.md").find("| 0 | a | 25 | 1/2 | "), std::string::npos);
  expect(lockstep("eval --completions out/judged.jsonl --data problems.jsonl --json"), 0, "\"eval/problems-pass@1\":0.75,");
  expect(lockstep("eval --completions answers.json --data problems.jsonl --set task.label_key=problem"), 0, "pass@1 0.000");
  std::ofstream(path("answers.json")) << R"({"a":"\\boxed{25}"})";
  expect(lockstep("eval --completions answers.json --data problems.jsonl"), 2, "answers.json: 1 of 2 problems have no answer: b");
  expect(lockstep("eval --completions answers.json"), 2, "task.eval_file is \"\" by default; an evaluation needs problems");
  expect(lockstep("eval --completions answers.json --checkpoint x --data problems.jsonl"), 2, "leave one out");
  expect(lockstep("eval --completions answers.json --data problems.jsonl --set task.prompt_template=dapo_plain"), 2,
         "task.reward = default does not look for the form that it asks for");
  expect(lockstep("eval --completions answers.json --data '" LOCKSTEP_SOURCE_DIR "/tests/data/prompts/verl.jsonl'"), 2,
         "verl.jsonl:1: \"prompt\" is a list of messages; say how to write them, with task.chat");
  const std::string server = "eval --data problems.jsonl --out asked --retries 0 --server ";
  expect(lockstep(server + "http://127.0.0.1:1"), 2, "--model-name");
  expect(lockstep(server + "127.0.0.1:1 --model-name m"), 2, "is no address of a server");
  expect(lockstep(server + "http://127.0.0.1:1 --model-name m"), 1, "0 of 16 samples are kept in asked: the same command goes on from there");
  expect(lockstep("eval --data problems.jsonl --concurrency 3"), 2, "--concurrency requires --server");
}

TEST_F(CommandLine, RewardsThatAreAllEqualAreNamed) {
  prepare();
  expect(lockstep("train run.toml --set run.steps=2"), 0, "step 2: all rewards are 0 (2 in a row): there is nothing to learn");
  expect(lockstep("train run.toml --set run.dir=asked --set task.reward=command"), 2, "task.reward_command is \"\" by default; task.reward = command needs a program");
  expect(lockstep("train run.toml --set run.dir=asked --set task.reward=command --set 'task.reward_command=exit 3'"), 1, "not judged: the command grader failed 2 times");
}

TEST_F(CommandLine, Ranks) {
  prepare();
  expect(lockstep("train run.toml --set parallel.pp=2"), 2, "tp 1 x pp 2 = 2 does not divide the 1 ranks that were started");
  expect(lockstep("train run.toml --set parallel.dp=2"), 2, "tp 1 x pp 1 x dp 2 is 2 ranks, but 1 was started");
  EXPECT_FALSE(fs::exists(path("run")));
  expect(lockstep("train run.toml --set parallel.dp=1"), 0, "steps 0 to 1");
  expect(lockstep("stall run"), 2, "run holds no flight records");
  expect(lockstep("eval --checkpoint gone --data data/eval.jsonl"), 2, "gone: there is no such checkpoint or run");
  const std::string train = "train run.toml --set model.init=random --set run.dir=other ";
  expect(lockstep(train + "--set model.init=gone"), 2, "model.init: gone: no such file or directory");
  expect(lockstep(train + "--set model.tokenizer=gone"), 2, "model.tokenizer: cannot open gone");
  expect(lockstep(train + "--set task.train_file=gone"), 2, "task.train_file: cannot open gone");
  expect(lockstep(train + "--set task.eval_file=gone --set run.eval_every=1"), 2, "task.eval_file: cannot open gone");
  expect(lockstep(train + "--set run.dir=run.toml"), 2, "run.dir: cannot make the directory run.toml");
  expect(lockstep("sft run.toml --set model.init=random --set run.dir=other --set sft.file=gone"), 2, "sft.file: cannot open gone");
  expect(lockstep("train run.toml --set run.dir=other --set model.config= --set model.init=gone"), 2, "model.init is gone, which is no directory");
  if (std::string_view(MPIRUN_COMMAND).empty()) return;
  for (const char* writes : {"convert run out --to bf16", "export run out", "synth " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json out"})
    expect(lockstep(writes, MPIRUN_COMMAND " -n 2"), 2, "is for one process and 2 were started");
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(CommandLine, Tokenize) {
  std::ofstream(path("tokenizer_lockstep.json")) << R"({"type":"byte","alphabet":"0123456789+=","vocab_size":15})";
  std::ofstream(path("rows")) << "{\"id\":7,\"text\":\"1+9=\",\"x\":[1.50]}\n\n{\"text\":\"\"}\n";
  const Outcome encoded = lockstep("tokenize --tokenizer . < rows | tee ids");
  EXPECT_EQ(encoded.said, "{\"id\":7,\"ids\":[4,13,12,14],\"x\":[1.50]}\n{\"ids\":[]}\n");
  EXPECT_EQ(lockstep("tokenize --tokenizer . --decode --skip-special < ids").said, "{\"id\":7,\"text\":\"1+9=\",\"x\":[1.50]}\n{\"text\":\"\"}\n");
  expect(lockstep("tokenize --tokenizer . --decode < rows"), 2, "standard input:1: there is no \"ids\"");
  std::ofstream(path("bad")) << "{\"text\":\"1\"}\n{\"text\":\"a\"}\n";
  expect(lockstep("tokenize --tokenizer . < bad"), 2, "standard input:2: byte 0x61");
  std::ofstream(path("bad")) << "{\"ids\":[15]}\n";
  expect(lockstep("tokenize --tokenizer . --decode < bad"), 2, "standard input:1: \"ids\"[0] is 15, an id from 0 to 14 is wanted");
  expect(lockstep("tokenize --tokenizer none < bad"), 2, "none: No such file");
  expect(lockstep("tokenize --tokenizer . --skip-special < bad"), 2, "--decode");
}

TEST_F(CommandLine, ChatEncode) {
  std::ofstream(path("rows")) << R"({"id":1,"messages":[{"role":"user","content":"q"}]})" << "\n";
  expect(lockstep("chat-encode < rows"), 2, "standard input:1: \"thinking_mode\" is missing");
  EXPECT_EQ(lockstep("chat-encode --thinking-mode thinking < rows").said,
            "{\"id\":1,\"prompt\":\"<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>\"}\n");
  std::ofstream(path("done")) << R"({"completion":"r</think>a<｜end▁of▁sentence｜>"})" << "\n" << R"({"completion":"cut"})" << "\n";
  EXPECT_EQ(lockstep("chat-encode --parse --thinking-mode thinking < done").said,
            "{\"message\":{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"r\",\"tool_calls\":[]}}\n"
            "{\"message\":null,\"reason\":\"the reasoning does not end with </think>\"}\n");
  std::ofstream(path("rows")) << "{\"messages\":[{\"role\":\"user\"}],\"thinking_mode\":\"chat\"}\n{\"messages\":5,\"thinking_mode\":\"chat\"}\n";
  expect(lockstep("chat-encode < rows"), 2, "standard input:2: \"messages\" is a number, a list is wanted");
}

TEST_F(CommandLine, ATokenizerJsonGoesWithTheWeights) {
  fs::create_directories(path("model"));
  fs::copy_file(LOCKSTEP_SOURCE_DIR "/tests/fuzz/seeds/tokenizer/deepseek.json", path("model/tokenizer.json"));  // bytes, "ab", "<e>"
  std::ofstream(path("model/tokenizer_config.json")) << R"({"bos_token":"<e>","eos_token":"<e>"})";
  std::ifstream in(LOCKSTEP_SOURCE_DIR "/configs/demo.config.json");
  std::string config{std::istreambuf_iterator<char>(in), {}};
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"\"vocab_size\": 35", "\"vocab_size\": 258"},
                                 {"\"bos_token_id\": 0", "\"bos_token_id\": 257"},
                                 {"\"eos_token_id\": 1", "\"eos_token_id\": 257"}})
    config.replace(config.find(from), from.size(), to);
  std::ofstream(path("model/config.json")) << config;
  std::ofstream(path("rows")) << R"({"prompt":"2+2?","label":"4","completion":"four"})" << "\n";
  std::ofstream(path("run.toml")) << "[run]\nsteps = 1\nthreads = 1\n[model]\nconfig = \"model\"\n[task]\ntrain_file = \"rows\"\neval_file = \"rows\"\n"
                                     "max_prompt_tokens = 8\n[sft]\nfile = \"rows\"\nsteps = 1\n[rollout]\nprompts_per_step = 1\n"
                                     "samples_per_prompt = 2\nmax_new_tokens = 4\n[eval]\nsamples = 1\nmax_new_tokens = 4\n";
  expect(lockstep("sft run.toml --set run.dir=sft --set model.init=random"), 0, "checkpoint sft/checkpoints/step_000001");
  expect(lockstep("train run.toml --set run.dir=run --set model.init=sft"), 0, "largest gap 0");
  expect(lockstep("eval --checkpoint run --data rows"), 0, "1 problems x");
  expect(lockstep("generate run ab --set eval.max_new_tokens=2"), 0, "");
  expect(lockstep("export run out"), 0, "out: ");
  EXPECT_EQ(std::system(fmt::format("cmp '{}' '{}'", path("out/tokenizer.json"), path("model/tokenizer.json")).c_str()), 0);
  expect(lockstep("train run.toml --set run.dir=other --set model.init=sft --set model.tokenizer=bytes"), 2, "the tokenizer has 259 ids, the model's vocab_size is 258");
}

TEST_F(CommandLine, Plan) {
  const std::string flash =
      "plan --model flash --device mi355x --ranks 16 --tp 1 --pp 4 --ep 4 --rollout-ranks 16 --rollout-ep 8 --rollout-numerics fp8 --microbatch-tokens 5120 ";
  const Outcome fits = lockstep(flash + "--offload-optimizer");
  // The worked example of the documentation is what the program says.
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/docs/plan.md");
  const std::string document{std::istreambuf_iterator<char>(file), {}};
  if (!kAddressSanitizer) {  // whose arenas have guards
    EXPECT_NE(document.find(fits.said), std::string::npos) << fits.said;
  }
  expect(fits, 0, "flash: 284.332 B parameters, 13.270 B active; draft block 6.610 B, with it 290.942 B");
  expect(fits, 0, "trainer   16 ranks: tp 1, pp 4, ep 4, dp 4");
  expect(fits, 0, "\nit fits\n");
  expect(lockstep(flash + "--offload-optimizer --ahead"), 0, "rollout beside training, and 0.000 s");
  expect(lockstep("plan --model flash --device mi355x --ranks 16 --pp 4 --ep 4 --rollout-ranks 16 --rollout-ep 8 --offload-optimizer --ahead"), 0, "rollout beside training, and 1.");
  const Outcome large = lockstep(flash);
  expect(large, 1, "it does not fit: the trainer needs");
  expect(large, 1, "its largest owner: masters and moments (");
  expect(large, 1, "--offload-optimizer takes");
  expect(large, 1, "suggested trainer: ");
  expect(lockstep(flash + "--json --offload-optimizer --recompute"), 0, "\"parameters\":284332240471");

  prepare();
  expect(lockstep("plan run.toml --device cpu --ranks 2 --pp 2 --set parallel.stages=1,3"), 0, "dp 1; layers 1,3;");
  expect(lockstep("plan run.toml --device cpu --ranks 2 --pp 2 --set parallel.stages=1,4"), 2, "parallel.stages is \"1,4\"");

  expect(lockstep("plan --device mi355"), 2, "--device mi355: not a known device, did you mean mi355x?");
  expect(lockstep("plan --model none.json"), 2, "neither flash nor pro");
  expect(lockstep("plan --model flash --ranks 6 --pp 4"), 2, "trainer: parallel: tp 1 x pp 4 = 4 does not divide the 6 ranks that were started; nearest layouts for 6 ranks:");
  expect(lockstep("plan --model " LOCKSTEP_SOURCE_DIR "/configs/demo.config.json --device cpu --ranks 4 --tp 4 --prompt-tokens 20 --response-tokens 20"), 2, "suggested trainer: tp 1, pp 1,");
  expect(lockstep("plan --prompt-tokens 0"), 2, "--prompt-tokens");
  expect(lockstep("plan --model flash --response-tokens 2000000"), 2, "is longer than the model's 1048576 positions");
  expect(lockstep("plan " LOCKSTEP_SOURCE_DIR "/configs/example.toml --set model.config=" LOCKSTEP_SOURCE_DIR "/configs/example.config.json --device cpu --ranks 2"), 0, "tp 1, pp 1, ep 1, dp 2");
}

}  // namespace
