// A rank is killed in the middle of an update, at every stage. The others must end and name it, nobody may have served anything of the new version, and the
// same job started again must get through.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "io/file.h"
#include "parallel/watchdog.h"
#include "sync/transfer.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  const Result<std::string> text = read_file(path);
  return text ? text.value() : text.message();
}

TEST(TransferDeath, OfOneRankIsTheEndOfAllAndNoneServesTheNewVersion) {
  if (std::string_view(MPIRUN_COMMAND).empty()) GTEST_SKIP() << "mpirun is missing (openmpi-bin)";
  const fs::path root = fs::temp_directory_path() / fmt::format("lockstep_transfer_death_{}", ::getpid());
  const auto run = [&](int ranks, const std::string& stage, int victim) {
    fs::create_directories(root);
    const std::string command = fmt::format("timeout 100 {} -n {} {} {} {} {} > {} 2>&1", MPIRUN_COMMAND, ranks, TRANSFER_RANK, root.string(), stage, victim, (root / "output").string());
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const auto served = [&](int ranks) {
    std::vector<std::string> lines;
    for (int r = 0; r < ranks; ++r) lines.push_back(contents(root / std::to_string(r)));
    return lines;
  };
  for (const int ranks : {2, 4}) {
    for (const SyncStage stage : {SyncStage::quiesce, SyncStage::begin, SyncStage::transfer, SyncStage::verify, SyncStage::commit, SyncStage::finalise}) {
      SCOPED_TRACE(fmt::format("{} ranks, {}", ranks, sync_stage_name(stage)));
      const int victim = static_cast<int>(stage) % ranks;
      const int code = run(ranks, sync_stage_name(stage), victim);
      const std::string output = contents(root / "output");
      EXPECT_TRUE(code == kExitStalled || code == 128 + SIGKILL) << code << "\n" << output;
      EXPECT_NE(output.find(fmt::format("rank {}", victim)), std::string::npos) << output;
      EXPECT_NE(output.find("is gone"), std::string::npos) << output;
      for (const std::string& line : served(ranks)) EXPECT_TRUE(line.starts_with("1 ")) << line;
      fs::remove_all(root);
    }
    EXPECT_EQ(run(ranks, "none", 0), 0) << contents(root / "output");
    for (const std::string& line : served(ranks)) {
      EXPECT_TRUE(line.starts_with("2 ")) << line;
      EXPECT_EQ(line, served(ranks).front());  // all hold the whole model
    }
    fs::remove_all(root);
  }
}

}  // namespace
}  // namespace lockstep
