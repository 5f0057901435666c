// The picture of design.md as a test: who may include whom. Reads the include lines of every source file.
//
//   core <- ops <- model <- sync, rollout, train        core <- io <- model, parallel
//   everything below <- rl <- serve <- cli              sync, rollout and train never include each other

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// Rooms that a room may include, besides itself.
const std::map<std::string, std::set<std::string>>& allowed() {
  static const std::map<std::string, std::set<std::string>> table = {
      {"core", {}},
      {"ops", {"core"}},
      {"io", {"core"}},
      {"parallel", {"core", "ops", "io"}},
      {"model", {"core", "ops", "io", "parallel"}},
      {"sync", {"core", "ops", "io", "parallel", "model"}},
      {"rollout", {"core", "ops", "io", "parallel", "model"}},
      {"train", {"core", "ops", "io", "parallel", "model"}},
      {"rl", {"core", "ops", "io", "parallel", "model", "sync", "rollout", "train"}},
      {"serve", {"core", "ops", "io", "parallel", "model", "sync", "rollout", "train", "rl"}},
      {"cli", {"core", "ops", "io", "parallel", "model", "sync", "rollout", "train", "rl", "serve"}},
  };
  return table;
}

// Libraries that are seen in few places, so that replacing one stays a small change: text of the include line to files that may
// have it.
const std::map<std::string, std::set<std::string>>& confined() {
  static const std::map<std::string, std::set<std::string>> table = {
      {"CLI/", {"cli/main.cc"}},
      {"toml++/", {"cli/options.cc"}},
      {"spdlog/", {"core/log.cc"}},
      {"utf8proc.h", {"io/unicode.cc"}},
      {"gmpxx.h", {"rl/grader/algebra.h"}},
      {"httplib.h", {"rl/eval_server.cc", "rl/eval_server_test.cc", "rl/grader/http.cc", "rl/grader/http_test.cc", "serve/load_bench.cc", "serve/server.cc",
                     "serve/server_test.cc", "serve/weights.cc"}},
      {"mpi.h", {"parallel/mpi_channel.cc"}},
  };
  return table;
}

struct Include {
  std::string file;  // from the source root
  int line = 0;
  std::string target;
};

bool is_source(const fs::path& path) {
  static const std::set<std::string> extensions = {".h", ".cc", ".cu"};
  return extensions.contains(path.extension().string());
}

std::vector<Include> includes_of(const std::string& room) {
  const fs::path root = LOCKSTEP_SOURCE_DIR;
  std::vector<Include> found;
  for (const auto& entry : fs::recursive_directory_iterator(root / room)) {
    if (!entry.is_regular_file() || !is_source(entry.path())) continue;
    std::ifstream in(entry.path());
    int number = 0;
    for (std::string line; std::getline(in, line);) {
      ++number;
      const size_t hash = line.find_first_not_of(" \t");
      if (hash == std::string::npos || line[hash] != '#' || line.find("include") == std::string::npos) continue;
      const size_t open = line.find_first_of("\"<"), close = line.find_last_of("\">");
      if (open == std::string::npos || close <= open) continue;
      found.push_back({fs::relative(entry.path(), root).string(), number, line.substr(open + 1, close - open - 1)});
    }
  }
  return found;
}

TEST(Layering, NoRoomIncludesAHigherOne) {
  for (const auto& [room, below] : allowed()) {
    const std::vector<Include> includes = includes_of(room);
    EXPECT_FALSE(includes.empty()) << room << " has no include line at all: is the test looking in the right place?";
    for (const Include& i : includes) {
      const std::string target = i.target.substr(0, i.target.find('/'));
      if (target == i.target || target == room || !allowed().contains(target)) continue;  // its own room, or a library
      EXPECT_TRUE(below.contains(target)) << i.file << ":" << i.line << ": " << room << " may not include " << i.target;
    }
  }
}

TEST(Layering, IncludesNameTheRoom) {
  // "x.h" and "../x/y.h" would hide where a header comes from.
  for (const auto& [room, below] : allowed()) {
    for (const Include& i : includes_of(room)) {
      EXPECT_EQ(i.target.find(".."), std::string::npos) << i.file << ":" << i.line << ": " << i.target;
      EXPECT_FALSE(fs::exists((fs::path(LOCKSTEP_SOURCE_DIR) / i.file).parent_path() / i.target) &&
                   i.target.find('/') == std::string::npos)
          << i.file << ":" << i.line << ": write the path from the source root, not " << i.target;
    }
  }
}

TEST(Layering, ConfinedLibraries) {
  for (const auto& [room, below] : allowed()) {
    for (const Include& i : includes_of(room)) {
      for (const auto& [library, files] : confined()) {
        if (i.target.starts_with(library)) {
          EXPECT_TRUE(files.contains(i.file))
              << i.file << ":" << i.line << ": only " << *files.begin() << " may include " << i.target;
        }
      }
    }
  }
}

TEST(Layering, EveryHeaderSaysOnce) {
  for (const auto& [room, below] : allowed()) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(LOCKSTEP_SOURCE_DIR) / room)) {
      const std::string name = entry.path().filename().string();
      // Highway's -inl.h files are read once for every target.
      if (!entry.is_regular_file() || entry.path().extension() != ".h" || name.ends_with("-inl.h")) continue;
      std::ifstream in(entry.path());
      std::string first;
      std::getline(in, first);
      EXPECT_EQ(first, "#pragma once") << entry.path();
    }
  }
}

}  // namespace
