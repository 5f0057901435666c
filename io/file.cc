#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace lockstep {

namespace {

// Collects small writes; a tensor goes to the file directly.
constexpr size_t kBufferBytes = 1 << 16;
constexpr std::string_view kTemporaryMark = ".tmp-";
// A pipe gives what its writer has; a device may give for ever.
constexpr size_t kMaxStreamBytes = size_t{256} << 20;

// open(2), restarted when a signal interrupts it.
FileDescriptor open_file(const std::string& path, int flags) {
  int fd;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (fd < 0 && errno == EINTR);
  return FileDescriptor(fd);
}

Status sync_path(const std::string& path, int flags) {
  const FileDescriptor fd = open_file(path, flags);
  if (!fd.is_open()) return errno_status("cannot open", path, errno);
  if (::fsync(fd.get()) != 0) return errno_status("cannot sync", path, errno);
  return Status::ok();
}

}  // namespace

Status errno_status(std::string_view what, const std::string& path, int error) {
  return errorf("{} {}: {}", what, path, std::generic_category().message(error));
}

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status write_fully(int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_status("cannot write", path, errno);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return Status::ok();
}

Status append_whole(int fd, std::string_view bytes, const std::string& path) {
  struct stat before {};
  if (::fstat(fd, &before) != 0) return errno_status("cannot look at", path, errno);
  const Status written = write_fully(fd, bytes, path);
  if (!written && ::ftruncate(fd, before.st_size) != 0) return errorf("{}; a cut-off line stays behind", written.message());
  return written;
}

Result<std::string> read_file(const std::string& path) {
  const FileDescriptor fd = open_file(path, O_RDONLY);
  if (!fd.is_open()) return errno_status("cannot open", path, errno);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("cannot look at", path, errno);
  if (S_ISDIR(info.st_mode)) return errorf("cannot read {}: it is a directory, a file was expected", path);
  std::string text;
  size_t used = 0;
  // One byte more than the size says, so that the end is seen without growing; grows if the file did.
  text.resize(static_cast<size_t>(std::max<off_t>(info.st_size, 0)) + 1);
  for (;;) {
    if (used == text.size()) text.resize(text.size() * 2 + kBufferBytes);
    const ssize_t n = ::read(fd.get(), text.data() + used, text.size() - used);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_status("cannot read", path, errno);
    if (n == 0) break;
    used += static_cast<size_t>(n);
    if (!S_ISREG(info.st_mode) && used > kMaxStreamBytes)
      return errorf("cannot read {}: it is not a regular file and gives more than {} bytes", path, kMaxStreamBytes);
  }
  text.resize(used);
  return text;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  const FileDescriptor fd = open_file(path, O_RDONLY);
  if (!fd.is_open()) return errno_status("cannot open", path, errno);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status("cannot look at", path, errno);
  if (!S_ISREG(info.st_mode)) return errorf("cannot map {}: it is not a regular file", path);
  const size_t size = static_cast<size_t>(info.st_size);
  if (size == 0) return MappedFile(path, nullptr, 0);  // mmap refuses a length of 0
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return errno_status("cannot map", path, errno);
  return MappedFile(path, static_cast<const char*>(data), size);
}

MappedFile::MappedFile(MappedFile&& o) noexcept
    : path_(std::move(o.path_)), data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(path_, o.path_);
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

void MappedFile::release(std::string_view bytes) const {
  const uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)), first = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t begin = (first + page - 1) / page * page, end = (first + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // a hint: if it fails, nothing is lost
}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  for (;;) {
    std::string temporary = fmt::format("{}{}{}-{}", path, kTemporaryMark, ::getpid(), counter.fetch_add(1));
    FileDescriptor fd = open_file(temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (fd.is_open()) return AtomicFile(path, std::move(temporary), std::move(fd));
    if (errno != EEXIST) return errno_status("cannot write", path, errno);  // EEXIST: a killed process had our id
  }
}

AtomicFile::~AtomicFile() {
  if (fd_.is_open()) ::unlink(temporary_.c_str());
}

Status AtomicFile::fail(Status status) {
  fd_.reset();
  ::unlink(temporary_.c_str());
  failure_ = status;
  return status;
}

Status AtomicFile::flush() {
  if (Status s = write_fully(fd_.get(), buffer_, path_); !s) return fail(s);
  buffer_.clear();
  return Status::ok();
}

Status AtomicFile::write(std::string_view bytes) {
  if (!failure_) return failure_;
  CHECK(fd_.is_open(), "{} was written to after its commit", path_);
  if (buffer_.size() + bytes.size() > kBufferBytes) LOCKSTEP_RETURN_IF_ERROR(flush());
  if (bytes.size() < kBufferBytes) {
    buffer_ += bytes;
  } else if (Status s = write_fully(fd_.get(), bytes, path_); !s) {
    return fail(s);
  }
  return Status::ok();
}

Status AtomicFile::commit(Durability durability) {
  if (!failure_) return failure_;
  CHECK(fd_.is_open(), "{} was committed twice", path_);
  LOCKSTEP_RETURN_IF_ERROR(flush());
  const bool sync = durability == Durability::now;
  if (sync && ::fsync(fd_.get()) != 0) return fail(errno_status("cannot sync", path_, errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return fail(errno_status("cannot replace", path_, errno));
  fd_.reset();
  return sync ? sync_directory(parent_directory(path_)) : Status::ok();
}

Status atomic_write(const std::string& path, std::string_view contents, Durability durability) {
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file) return file.status();
  LOCKSTEP_RETURN_IF_ERROR(file.value().write(contents));
  return file.value().commit(durability);
}

bool is_temporary_name(std::string_view name) {
  const size_t mark = name.rfind(kTemporaryMark);
  if (mark == std::string_view::npos) return false;
  const std::string_view tail = name.substr(mark + kTemporaryMark.size());
  const size_t dash = tail.find('-');
  const auto digits = [](std::string_view s) {
    return !s.empty() && s.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && digits(tail.substr(0, dash)) && digits(tail.substr(dash + 1));
}

Status make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return errorf("cannot make the directory {}: {}", path, error.message());
  if (!std::filesystem::is_directory(path, error)) return errorf("{} is not a directory", path);
  return Status::ok();
}

Status sync_directory(const std::string& directory) { return sync_path(directory, O_RDONLY | O_DIRECTORY); }

Status sync_file(const std::string& path) { return sync_path(path, O_RDONLY); }

std::string parent_directory(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

}  // namespace lockstep
