#include "sync/manifest.h"

#include <map>
#include <string_view>

#include <xxhash.h>

namespace lockstep {

std::string ManifestEntry::str() const {
  std::string text = fmt::format("{} {}", dtype_name(dtype), shape.str());
  if (scales.rank > 0) text += fmt::format(" in blocks of {}x{}, scales {}", block_rows, block_cols, scales.str());
  return text + fmt::format(", {} bytes", bytes);
}

Manifest make_manifest(const ModelConfig& config, Numerics numerics, const WantedTensors& wanted) {
  Manifest manifest;
  for (const TensorSpec& spec : tensor_table(config)) {
    if (!wanted(spec)) continue;
    const Shape scales = spec.scale_shape(numerics);
    const DType dtype = spec.weight_dtype(numerics);
    ManifestEntry entry{.name = spec.name, .shape = spec.whole, .dtype = dtype, .scales = scales};
    entry.bytes = spec.stored_shape(numerics).elements() * static_cast<int64_t>(dtype_bytes(dtype)) + scales.elements();
    if (const auto format = spec.quant_format(numerics)) {
      entry.block_rows = format->block_rows;
      entry.block_cols = format->block_cols;
    }
    manifest.push_back(entry);
  }
  return manifest;
}

Status check_manifest(const Manifest& announced, const Manifest& wanted) {
  std::map<std::string_view, const ManifestEntry*> by_name;
  for (const ManifestEntry& entry : announced)
    if (!by_name.emplace(entry.name, &entry).second) return errorf("{} is announced twice", entry.name);
  for (const ManifestEntry& entry : wanted) {
    const auto found = by_name.find(entry.name);
    if (found == by_name.end()) return errorf("{} is missing from what is announced", entry.name);
    if (*found->second != entry) return errorf("{} is announced as {}; wanted is {}", entry.name, found->second->str(), entry.str());
    by_name.erase(found);
  }
  if (!by_name.empty()) return errorf("{} is announced, but no part of this update", by_name.begin()->first);
  return Status::ok();
}

uint64_t manifest_sum(const Manifest& manifest) {
  std::string text;
  for (const ManifestEntry& entry : manifest) text += fmt::format("{} {}\n", entry.name, entry.str());
  return XXH64(text.data(), text.size(), 0);
}

}  // namespace lockstep
