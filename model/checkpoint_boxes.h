#pragma once
// Tensors of a run saved in boxes, each rank the ones it owns, and read back in other boxes: a run may be resumed under another layout.
//
// A rank's file is a safetensors file whose entries are 2-D boxes of whole tensors: "NAME[r0:r1,c0:c1]", dtype F32 or I32, shape
// [r1 - r0, c1 - c0]; a box that is the whole tensor has the plain NAME and the tensor's own shape, so that one rank alone writes a file
// that any safetensors reader understands. Every number is saved by exactly one rank. All ranks' files of one kind lie in one directory:
// STEM.safetensors alone, or rank 2's STEM-00003-of-00016.safetensors.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/shard.h"

namespace lockstep {

// Stems of a run's checkpoints.
inline constexpr const char* kMastersStem = "masters";
inline constexpr const char* kOptimizerStem = "optimizer";

// One box to write: its numbers, and what it is of.
struct BoxView {
  std::string name;  // of the whole tensor; optimizer moments put "m." or "v." before it
  Shape whole;
  Box box;
  ConstTensorView values;  // f32 or i32, [rows, columns] of the box (or the tensor's own shape if it is whole), rows contiguous
};

// One tensor as a reader expects it: the whole of it.
struct WholeTensor {
  std::string name;
  Shape whole;
  DType dtype;
};

// The file's name of rank `rank` of `ranks`.
std::string box_file(const std::string& stem, int rank, int ranks);

// Written under a temporary name, synced, then renamed. Empty boxes are left out. CHECK: a box outside its tensor, values of another size.
Status write_boxes(const std::string& path, std::span<const BoxView> boxes, const std::map<std::string, std::string>& metadata);

// Whether `directory` holds files of this stem, whole or not.
bool has_box_files(const std::string& directory, const std::string& stem);

// All box files of one stem of a directory, mapped together. Reading is for any number of threads at once.
class BoxFiles {
 public:
  // Error: no file, files of different counts of ranks or one missing, an unreadable or malformed one, boxes that overlap or differ in
  // dtype, metadata that is not the same in all files.
  static Result<BoxFiles> open(const std::string& directory, const std::string& stem);

  const std::string& directory() const;
  std::vector<std::string> paths() const;  // of the files, by rank
  const std::map<std::string, std::string>& metadata() const;
  bool has(const std::string& name) const;
  std::vector<std::string> names() const;  // of whole tensors, sorted

  // The files must hold exactly these tensors, all of each. The error names the first tensor that is missing, incomplete, of another shape or
  // dtype, or not wanted. Looks at headers alone.
  Status check(std::span<const WholeTensor> wanted) const;

  // out [rows, columns] (rows may be strided) gets the box, wherever its parts lie. Error: a part that no file has, or another dtype than
  // out's; it names tensor and box.
  Status read(const std::string& name, const Box& box, TensorView out) const;

  BoxFiles(BoxFiles&&) noexcept;
  BoxFiles& operator=(BoxFiles&&) noexcept;
  ~BoxFiles();

 private:
  struct Impl;
  explicit BoxFiles(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
