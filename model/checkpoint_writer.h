#pragma once
// Writes whole checkpoints in any layout of model/checkpoint_layout.h, from anything that gives boxes: shards of bounded size with an index,
// config.json, and the tokenizer's files of the source. Tensors pass one after the other in strips of rows, so memory stays at some strips and
// the mapped pages of one tensor, whatever the model's size. Every number that is stored is read back and compared: what the layout cannot represent is counted.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/context.h"
#include "model/checkpoint_layout.h"
#include "model/checkpoint_tensors.h"

namespace lockstep {

struct WriteSource {
  ModelConfig config;                                // with num_drafts 0 if `read` gives no draft blocks
  std::string config_json;                           // that it was read from: fields that we do not know are kept where its spelling is
  std::string directory;                             // whose tokenizer files are copied; "": none
  ReadBox read;                                      // of checkpoint_table(config)
  std::shared_ptr<const CheckpointTensors> tensors;  // behind `read`: codes that fit the layout are copied byte for byte; or null
};
// Opens a checkpoint of released or other accepted names, quantised or not, or the masters of a run. Draft blocks come along if the files
// hold all of them and are left out if they hold none; a part of them, or tensors of one that the config does not describe, is an error.
Result<WriteSource> open_write_source(const std::string& directory);
// Random numbers (model/weights.h, random_boxes; draft blocks likewise). `config_path` is a config.json.
Result<WriteSource> random_write_source(const std::string& config_path, uint64_t seed);

struct WriteOptions {
  CheckpointLayout layout = CheckpointLayout::released_fp8;
  uint64_t shard_bytes = uint64_t{4} << 30;  // a shard holds at least one tensor with its scales
  std::function<void(int64_t shard, int64_t shards)> on_shard;  // written; or none
};

// What became of the numbers of one storage. A block is that of the format; without blocks, a tensor.
struct StorageReport {
  int64_t tensors = 0, inexact_tensors = 0;
  int64_t copied = 0;  // tensors whose codes were taken over
  int64_t blocks = 0, inexact_blocks = 0;
  int64_t elements = 0, inexact_elements = 0;
};
struct WriteReport {
  int64_t tensors = 0, shards = 0;  // tensors with scales
  uint64_t bytes = 0;               // of all tensors' data
  StorageReport by_storage[5];      // by Storage
};

// Tensors and bytes alone, without reading anything. shards counts files.
WriteReport plan_checkpoint(const ModelConfig& config, const WriteOptions& options);

// Ok if write_checkpoint may make it: it does not exist, or is an empty directory.
Status check_new_directory(const std::string& directory);
// `directory` appears whole or not at all: everything is written and synced under a temporary name beside it first. A
// failure leaves nothing behind.
Result<WriteReport> write_checkpoint(Context& c, const std::string& directory, const WriteSource& source, const WriteOptions& options);

}  // namespace lockstep
