#pragma once
// For tests of this room: a directory that goes away, and short ways to write and to look.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "io/file.h"

namespace lockstep::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lockstep_test_XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr, "cannot make {}", pattern);
    path_ = pattern;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  size_t count() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

 private:
  std::string path_;
};

inline void put(const std::string& path, std::string_view contents) {
  const Status s = atomic_write(path, contents);
  ASSERT_TRUE(s.is_ok()) << s.message();
}

inline std::string get(const std::string& path) {
  Result<std::string> r = read_file(path);
  EXPECT_TRUE(r.is_ok()) << (r ? "" : r.message());
  return r ? r.take() : "";
}

// EXPECT_TRUE(fails_with(status or result, "part of the message")).
inline ::testing::AssertionResult fails_with(const Status& status, std::string_view part) {
  if (status.is_ok()) return ::testing::AssertionFailure() << "it succeeded; wanted the error: " << part;
  if (status.message().find(part) == std::string::npos)
    return ::testing::AssertionFailure() << "the error is: " << status.message() << "\nwanted in it: " << part;
  return ::testing::AssertionSuccess();
}
template <typename T>
::testing::AssertionResult fails_with(const Result<T>& result, std::string_view part) {
  return fails_with(result.status(), part);
}
inline ::testing::AssertionResult succeeds(const Status& status) {
  if (status.is_ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status.message();
}
template <typename T>
::testing::AssertionResult succeeds(const Result<T>& result) {
  return succeeds(result.status());
}

}  // namespace lockstep::testing
