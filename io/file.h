#pragma once
// Files: whole reads, read-only mappings and atomic replacement. Every failure names the path and the system's reason.
// Nothing here is shared between threads; one object belongs to one thread at a time.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "core/status.h"

namespace lockstep {

// The error "WHAT PATH: REASON" of the errno given.
Status errno_status(std::string_view what, const std::string& path, int error);

// Owns a file descriptor; -1 is none. Files, run directories and locks hold theirs in one of these.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& o) noexcept {
    if (this != &o) {
      reset();
      fd_ = std::exchange(o.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { reset(); }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Writes every byte, resuming after short writes. `path` is for the error alone.
Status write_fully(int fd, std::string_view bytes, const std::string& path);
// Writes at the end of a file opened with O_APPEND, all or nothing: after an error the file is cut back to what it was.
Status append_whole(int fd, std::string_view bytes, const std::string& path);

// The whole of a regular file (or of a pipe, up to its end, which must come within 256 MiB).
Result<std::string> read_file(const std::string& path);

// A file mapped read-only. Views into it must not outlive it; moving it does not move the bytes. A file that another
// process shortens while it is mapped ends this process with SIGBUS: replace files (below) rather than rewriting them.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& o) noexcept;
  MappedFile& operator=(MappedFile&& o) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view bytes() const { return {data_, size_}; }

  // Gives back the memory of the pages that lie wholly in these bytes of the file. They are read from it again when they are looked at again.
  void release(std::string_view bytes) const;

 private:
  MappedFile(std::string path, const char* data, size_t size) : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

// When a replaced file is safe against a power cut: as soon as commit() has returned, or (faster by the wait for the disk)
// whenever the system gets to it or sync_file() and sync_directory() are called. A crash of this process harms neither.
enum class Durability { now, later };

// Writes a file that appears whole or not at all. Bytes go to "PATH.tmp-PID-N" in the same directory; commit() syncs it,
// renames it over `path` and syncs the directory. Without commit(), or when anything fails, the temporary is removed and
// whatever stood at `path` is untouched. After a failed write every later call returns that failure.
class AtomicFile {
 public:
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&&) noexcept = default;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  const std::string& path() const { return path_; }
  Status write(std::string_view bytes);
  Status commit(Durability durability = Durability::now);

 private:
  AtomicFile(std::string path, std::string temporary, FileDescriptor fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(std::move(fd)) {}
  Status fail(Status status);
  Status flush();

  std::string path_;
  std::string temporary_;
  FileDescriptor fd_;  // closed once committed or failed
  std::string buffer_;
  Status failure_;
};

Status atomic_write(const std::string& path, std::string_view contents, Durability durability = Durability::now);

// True for the names that AtomicFile gives its temporaries, so that leftovers of a killed process can be swept.
bool is_temporary_name(std::string_view name);

// Makes `path` and its missing parents. Fine if it exists already.
Status make_directories(const std::string& path);

// Makes a rename or creation inside `directory` survive a power cut.
Status sync_directory(const std::string& directory);

// Makes the contents of the file at `path` survive a power cut.
Status sync_file(const std::string& path);

// "a/b" of "a/b/c", "." of "c", "/" of "/c".
std::string parent_directory(const std::string& path);

}  // namespace lockstep
