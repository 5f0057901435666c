#pragma once
// GET /weights_checksums, and the client that compares what a server says there with a trainer's export. A checksum is the XXH64 of numbers as little-endian f32,
// row after row: of what the forward reads, de-quantised (rl/weights_check.h), so it depends on neither layout nor packing.
//
//   /weights_checksums           {"weight_version", "numerics", "tensors": [{"name", "rows", "columns", "xxh64"}, ...]} in table order
//   /weights_checksums?id=7      {"rows": ["xxh64", ...]} of tensor 7 of the table
//   /weights_checksums?id=7&row=2   {"bits": [...]} of its row 2: the numbers' bits as 32-bit integers

#include <optional>
#include <string>
#include <string_view>

#include "rl/weights_check.h"

namespace lockstep {

// c: of the weights' device.
std::string checksums_json(Context& c, const Weights& served, std::string_view weight_version);
std::string row_checksums_json(Context& c, const Weights& served, int id);
std::string row_bits_json(Context& c, const Weights& served, int id, int64_t row);

struct WeightsServer {
  std::string url;  // http://HOST:PORT
  std::string key;  // bearer token; empty: none
};
struct ServedWeights {
  Numerics numerics = Numerics::f32;
  std::string version;
  WeightsComparison comparison;
};
// What serves there against masters of a model of the same config. An error: no server, or one of another model.
Result<ServedWeights> compare_served_weights(CpuContext& c, const WeightsServer& server, const ModelConfig& config, const ReadBox& masters);

}  // namespace lockstep
