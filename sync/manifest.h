#pragma once
// What an update announces before anything travels, and what the destination says to it. Pure.
//
// Every tensor of the update is an entry, hash tables and biases too, as the destination will store it. The destination derives its own list from its own
// table: what is missing, unexpected or of another kind is refused by name, before a byte has moved.
//
// Source: rl spec 20.1 (begin), 20.2.

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/weights.h"

namespace lockstep {

// Which tensors are copied; all of them for a first update.
using WantedTensors = std::function<bool(const TensorSpec&)>;

struct ManifestEntry {
  std::string name;
  Shape shape;  // of the whole tensor, in numbers
  DType dtype = DType::f32;
  Shape scales;                             // ue8m0, of the whole tensor; rank 0: not quantised
  int64_t block_rows = 0, block_cols = 0;   // of a scale
  int64_t bytes = 0;                        // of numbers and scales
  std::string str() const;                  // all but the name
  bool operator==(const ManifestEntry&) const = default;
};
using Manifest = std::vector<ManifestEntry>;  // in the order of the table

Manifest make_manifest(const ModelConfig& config, Numerics numerics, const WantedTensors& wanted);
// The error names the first tensor that is missing, unexpected or not as wanted.
Status check_manifest(const Manifest& announced, const Manifest& wanted);
uint64_t manifest_sum(const Manifest& manifest);  // XXH64 of all that it says

}  // namespace lockstep
