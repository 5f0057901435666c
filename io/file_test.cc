#include "io/file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;
using testing::TemporaryDirectory;

TEST(File, ReadsWhatWasWritten) {
  TemporaryDirectory d;
  for (size_t n : {size_t{0}, size_t{1}, size_t{65535}, size_t{65536}, size_t{300000}}) {
    std::string text(n, 'x');
    if (n > 2) text[n - 2] = '\0';
    ASSERT_TRUE(succeeds(atomic_write(d.file("a"), text)));
    EXPECT_EQ(get(d.file("a")), text);
  }
  EXPECT_EQ(d.count(), 1u);
}

TEST(File, FilesWhoseSizeIsNotKnownAreReadToTheirEnd) {
  const Result<std::string> status = read_file("/proc/self/status");  // its size is given as 0
  ASSERT_TRUE(succeeds(status));
  EXPECT_NE(status.value().find("Pid:"), std::string::npos);
}

TEST(File, DevicesThatNeverEndAreGivenUp) {
  EXPECT_TRUE(fails_with(read_file("/dev/zero"), "cannot read /dev/zero: it is not a regular file and gives more than"));
}

TEST(File, MissingFileAndDirectoryAreNamed) {
  TemporaryDirectory d;
  EXPECT_TRUE(fails_with(read_file(d.file("none")), "cannot open " + d.file("none") + ": No such file or directory"));
  EXPECT_TRUE(fails_with(read_file(d.path()), "cannot read " + d.path() + ": it is a directory"));
  EXPECT_TRUE(fails_with(MappedFile::open(d.file("none")), d.file("none") + ": No such file or directory"));
  EXPECT_TRUE(fails_with(MappedFile::open(d.path()), "it is not a regular file"));
}

TEST(File, MappingShowsTheBytesAndMoves) {
  TemporaryDirectory d;
  put(d.file("a"), "hello");
  put(d.file("b"), "");
  Result<MappedFile> a = MappedFile::open(d.file("a"));
  Result<MappedFile> b = MappedFile::open(d.file("b"));
  ASSERT_TRUE(succeeds(a));
  ASSERT_TRUE(succeeds(b));
  EXPECT_EQ(b.value().size(), 0u);
  MappedFile m = a.take();
  const char* before = m.data();
  MappedFile n = std::move(m);
  EXPECT_EQ(n.data(), before);
  EXPECT_EQ(n.bytes(), "hello");
  n = b.take();
  EXPECT_EQ(n.bytes(), "");
}

TEST(File, ReleasedBytesAreReadAgain) {
  TemporaryDirectory d;
  std::string text(100000, '.');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 % 251);
  put(d.file("a"), text);
  Result<MappedFile> a = MappedFile::open(d.file("a"));
  ASSERT_TRUE(succeeds(a));
  for (const auto& [from, count] : {std::pair<size_t, size_t>{0, 100000}, {5000, 3}, {4095, 4098}, {100000, 0}}) {
    EXPECT_EQ(a.value().bytes(), text);
    a.value().release(a.value().bytes().substr(from, count));
    EXPECT_EQ(a.value().bytes(), text);
  }
}

TEST(File, MappingKeepsTheOldFileAfterReplacement) {
  TemporaryDirectory d;
  put(d.file("a"), "old");
  Result<MappedFile> m = MappedFile::open(d.file("a"));
  ASSERT_TRUE(succeeds(m));
  put(d.file("a"), "new!");
  EXPECT_EQ(m.value().bytes(), "old");
  EXPECT_EQ(get(d.file("a")), "new!");
}

TEST(AtomicFile, WithoutCommitNothingHappens) {
  TemporaryDirectory d;
  put(d.file("a"), "old");
  {
    Result<AtomicFile> f = AtomicFile::create(d.file("a"));
    ASSERT_TRUE(succeeds(f));
    EXPECT_TRUE(succeeds(f.value().write("new")));
    EXPECT_EQ(d.count(), 2u);
  }
  EXPECT_EQ(d.count(), 1u);
  EXPECT_EQ(get(d.file("a")), "old");
}

TEST(AtomicFile, ManyWritesOfManySizesStayInOrder) {
  TemporaryDirectory d;
  Result<AtomicFile> f = AtomicFile::create(d.file("a"));
  ASSERT_TRUE(succeeds(f));
  std::string expected;
  for (size_t i = 0; i < 300; ++i) {
    const std::string piece((i * 7919) % 140000, static_cast<char>('a' + i % 26));
    ASSERT_TRUE(succeeds(f.value().write(piece)));
    expected += piece;
  }
  ASSERT_TRUE(succeeds(f.value().commit()));
  EXPECT_EQ(get(d.file("a")), expected);
}

TEST(AtomicFile, WithoutWaitingForTheDiskItIsStillWholeOrNothing) {
  TemporaryDirectory d;
  ASSERT_TRUE(succeeds(atomic_write(d.file("a"), "old", Durability::later)));
  {
    Result<AtomicFile> f = AtomicFile::create(d.file("a"));
    ASSERT_TRUE(succeeds(f));
    ASSERT_TRUE(succeeds(f.value().write("new")));
    EXPECT_EQ(get(d.file("a")), "old");
    ASSERT_TRUE(succeeds(f.value().commit(Durability::later)));
  }
  EXPECT_EQ(get(d.file("a")), "new");
  EXPECT_EQ(d.count(), 1u);
}

TEST(AtomicFile, MissingDirectoryIsNamed) {
  TemporaryDirectory d;
  EXPECT_TRUE(fails_with(atomic_write(d.file("no/where"), "x"),
                         "cannot write " + d.file("no/where") + ": No such file or directory"));
}

TEST(AtomicFile, ADirectoryInTheWayIsNamedAndTheTemporaryGoes) {
  TemporaryDirectory d;
  ASSERT_TRUE(succeeds(make_directories(d.file("a"))));
  EXPECT_TRUE(fails_with(atomic_write(d.file("a"), "x"), "cannot replace " + d.file("a") + ": Is a directory"));
  EXPECT_EQ(d.count(), 1u);
}

TEST(AtomicFile, NewFilesHaveOrdinaryPermissions) {
  TemporaryDirectory d;
  const mode_t mask = ::umask(022);
  put(d.file("a"), "x");
  ::umask(mask);
  struct stat info {};
  ASSERT_EQ(::stat(d.file("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0644u);
}

// A real refusal by the kernel in the middle of writing, as a full disk gives: a limit on the size of files.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    old_handler_ = ::signal(SIGXFSZ, SIG_IGN);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

TEST(AtomicFile, AFailedWriteLeavesTheOldFileAndNoTemporary) {
  TemporaryDirectory d;
  put(d.file("a"), "old");
  {
    FileSizeLimit limit(100000);
    EXPECT_TRUE(fails_with(atomic_write(d.file("a"), std::string(300000, 'x')),
                           "cannot write " + d.file("a") + ": File too large"));
    EXPECT_EQ(d.count(), 1u);
    // Small writes fail as the buffer goes out, and the file stays failed.
    Result<AtomicFile> f = AtomicFile::create(d.file("a"));
    ASSERT_TRUE(succeeds(f));
    Status first;
    for (int i = 0; i < 300 && first.is_ok(); ++i) first = f.value().write(std::string(1000, 'y'));
    EXPECT_TRUE(fails_with(first, "File too large"));
    EXPECT_EQ(d.count(), 1u);
    EXPECT_TRUE(fails_with(f.value().write("z"), "File too large"));
    EXPECT_TRUE(fails_with(f.value().commit(), "File too large"));
  }
  EXPECT_EQ(get(d.file("a")), "old");
  EXPECT_EQ(d.count(), 1u);
}

TEST(AtomicFile, AFailureInCommitLeavesTheOldFile) {
  TemporaryDirectory d;
  put(d.file("a"), "old");
  FileSizeLimit limit(1000);
  Result<AtomicFile> f = AtomicFile::create(d.file("a"));
  ASSERT_TRUE(succeeds(f));
  EXPECT_TRUE(succeeds(f.value().write(std::string(2000, 'x'))));  // buffered
  EXPECT_TRUE(fails_with(f.value().commit(), "cannot write " + d.file("a") + ": File too large"));
  EXPECT_EQ(d.count(), 1u);
  EXPECT_EQ(get(d.file("a")), "old");
}

TEST(File, AFullDeviceIsNamed) {
  const FileDescriptor fd(::open("/dev/full", O_WRONLY));
  if (!fd.is_open()) GTEST_SKIP() << "no /dev/full here";
  EXPECT_TRUE(fails_with(write_fully(fd.get(), "x", "/dev/full"), "cannot write /dev/full: No space left on device"));
}

TEST(File, NamesOfTemporaries) {
  EXPECT_TRUE(is_temporary_name("metrics.jsonl.tmp-123-0"));
  for (const char* name : {"metrics.jsonl", "a.tmp-", "a.tmp-12", "a.tmp-12-", "a.tmp--3", "a.tmp-1-2.txt", "tmp-1-2"})
    EXPECT_FALSE(is_temporary_name(name)) << name;
}

TEST(File, Parents) {
  EXPECT_EQ(parent_directory("a/b/c"), "a/b");
  EXPECT_EQ(parent_directory("c"), ".");
  EXPECT_EQ(parent_directory("/c"), "/");
}

TEST(File, DirectoriesAreMadeOnceAndFilesInTheWayAreNamed) {
  TemporaryDirectory d;
  EXPECT_TRUE(succeeds(make_directories(d.file("x/y/z"))));
  EXPECT_TRUE(succeeds(make_directories(d.file("x/y/z"))));
  put(d.file("f"), "");
  EXPECT_TRUE(fails_with(make_directories(d.file("f")), d.file("f")));
  EXPECT_TRUE(fails_with(make_directories(d.file("f/g")), d.file("f/g")));
}

}  // namespace
}  // namespace lockstep
