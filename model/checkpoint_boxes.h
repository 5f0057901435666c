#pragma once
// Tensors of a run saved in boxes, each rank the ones it owns, and read back in other boxes: a run may be resumed under another layout.
//
// A rank's file is a safetensors file whose entries are 2-D boxes of whole tensors: "NAME[r0:r1,c0:c1]", dtype F32 or I32, shape
// [r1 - r0, c1 - c0]; a box that is the whole tensor has the plain NAME and the tensor's own shape, so that one rank alone writes a file
// that any safetensors reader understands. All ranks' files of one kind lie in one directory: STEM.safetensors alone, or
// STEM-00003-of-00016.safetensors.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/weights.h"

namespace lockstep {

// One box to write: its numbers [rows, columns], and what it is of.
struct BoxView {
  std::string name;  // of the whole tensor; optimizer moments put "m." or "v." before it
  Shape whole;
  Box box;
  ConstTensorView values;
};

// The file's name of rank `rank` of `ranks`.
std::string box_file(const std::string& stem, int rank, int ranks);

// Written under a temporary name, synced, then renamed.
Status write_boxes(const std::string& path, std::span<const BoxView> boxes, const std::map<std::string, std::string>& metadata);

// All box files STEM*.safetensors of a directory, opened (mapped) together.
class BoxFiles {
 public:
  // Error: no file, files of different counts of ranks or one missing, an unreadable or malformed one, boxes outside their tensor or
  // overlapping differently typed entries, metadata that is not the same in all files.
  static Result<BoxFiles> open(const std::string& directory, const std::string& stem);

  bool has(const std::string& name) const;
  std::vector<std::string> names() const;
  // Of the whole tensor as far as the boxes tell: the extent that they cover together.
  const std::map<std::string, std::string>& metadata() const;
  const std::string& directory() const;
  // out [rows, columns] f32 or i32 gets the box, wherever its parts lie. Error: a part that no file has, or another dtype; it names tensor and box.
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
