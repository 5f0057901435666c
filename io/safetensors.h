#pragma once
// The safetensors format: 8 bytes header length (little endian), a JSON header, then the tensors' bytes.
// Reading maps the file and believes nothing: once open() succeeds, every byte range lies inside the file, has the
// size its dtype and shape ask for, and the ranges cover the data without overlap or gap. Writing is deterministic:
// the same tensors and metadata in the same order give the same file.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/tensor.h"
#include "io/file.h"

namespace lockstep {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file spells it: "F32", "BF16", "F8_E4M3", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes [begin, end) of the data, which starts behind the header

  uint64_t bytes() const { return end - begin; }
  std::string shape_str() const;
};

// Bytes of one element of a dtype by the format's name, 0 for an unknown one.
size_t safetensors_dtype_bytes(std::string_view dtype);

// An open file. Views point into the mapping and must not outlive this object; moving it is fine.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  // Checks a header against the number of bytes that follow it; the part of open() that needs no file.
  static Result<std::vector<SafetensorsEntry>> parse_header(std::string_view header, uint64_t data_bytes,
                                                            std::map<std::string, std::string>* metadata);

  const std::string& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& tensors() const { return tensors_; }  // in the order of the header
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafetensorsEntry* find(std::string_view name) const;  // nullptr if there is none

  // The tensor's bytes as stored, whatever its dtype.
  std::span<const uint8_t> bytes(const SafetensorsEntry& entry) const;
  // For readers who pass over more than fits in memory: the tensor's bytes have been read (MappedFile::release).
  void release(const SafetensorsEntry& entry) const {
    const std::span<const uint8_t> b = bytes(entry);
    file_.release({reinterpret_cast<const char*>(b.data()), b.size()});
  }

  // A view into the mapping: F32, BF16, F64, I32, I64, U8, F8_E4M3, F8_E5M2, F8_E8M0 (ue8m0) and I8 (e2m1x2, two FP4 numbers
  // a byte, as released checkpoints have it), up to 4 dimensions ([] is seen as [1]). The format promises no alignment; where the data is not aligned for its dtype, this is an error that says so: use copy_to().
  Result<ConstTensorView> view(std::string_view name) const;

  // Copies the tensor into `out`, which must have its dtype and shape (rows may be strided). Needs no alignment.
  Status copy_to(std::string_view name, TensorView out) const;

 private:
  SafetensorsFile(MappedFile file, size_t data_offset) : file_(std::move(file)), data_offset_(data_offset) {}
  // The entry as a view type that need not be aligned; errors name file and tensor.
  Result<ConstTensorView> layout(std::string_view name) const;

  MappedFile file_;
  size_t data_offset_ = 0;
  std::vector<SafetensorsEntry> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Collects views and writes them in one go. The views must stay valid until write() has returned; nothing is copied.
// Tensors are laid out by falling element size, then in the order they were added, so each is aligned for its dtype.
class SafetensorsWriter {
 public:
  void add(std::string name, ConstTensorView tensor);  // CHECK: a name twice, or the reserved "__metadata__"
  void add_metadata(std::string key, std::string value);
  // Replaces `path` atomically.
  Status write(const std::string& path) const;

 private:
  struct Item {
    std::string name;
    ConstTensorView tensor;
  };
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file whose bytes arrive piece by piece: all tensors are declared first, in the order in which they will lie in the file.
class SafetensorsStream {
 public:
  // Name, dtype and shape of each entry count, begin and end are set here. CHECK: a name twice or reserved, an unknown dtype.
  static Result<SafetensorsStream> create(const std::string& path, std::vector<SafetensorsEntry> entries,
                                          const std::map<std::string, std::string>& metadata);
  Status write(std::span<const uint8_t> bytes);
  // Replaces the path atomically, once it is synced. CHECK: exactly the bytes that were declared were written.
  Status commit();

 private:
  SafetensorsStream(AtomicFile file, uint64_t missing) : file_(std::move(file)), missing_(missing) {}

  AtomicFile file_;
  uint64_t missing_;  // bytes
};

}  // namespace lockstep
