#pragma once
// The files of a checkpoint: one safetensors file, the shards that model.safetensors.index.json names, or all of a directory.

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace lockstep {

inline constexpr const char* kIndexFile = "model.safetensors.index.json";

// What the index says: in which file each tensor lies.
struct CheckpointIndex {
  std::map<std::string, std::string> files;  // by tensor; names of files beside the index
  int64_t total_bytes = -1;                  // metadata.total_size; -1: not given
};
// `origin` opens every message. Error: no JSON, no weight_map, a file's name that is none of the same directory.
Result<CheckpointIndex> parse_checkpoint_index(std::string_view json, std::string_view origin);
std::string checkpoint_index_json(const CheckpointIndex& index);
// Index and headers must tell the same: every tensor of the index stands in its file and in no other, and the files hold no more.
Status check_checkpoint_index(const CheckpointIndex& index, const std::deque<SafetensorsFile>& files, const std::string& origin);

// Paths, sorted: `path` itself when it is a file, the shards of its index, or every *.safetensors of the directory.
Result<std::vector<std::string>> checkpoint_files(const std::string& path);
// The same, mapped, and checked against the index if there is one.
Result<std::deque<SafetensorsFile>> open_checkpoint_files(const std::string& path);

}  // namespace lockstep
