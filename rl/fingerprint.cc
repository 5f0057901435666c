#include "rl/fingerprint.h"

#include <fmt/core.h>
#include <xxhash.h>

namespace lockstep {

void Fingerprint::add(std::string_view bytes) { hash_ = XXH64(bytes.data(), bytes.size(), hash_); }

void Fingerprint::add(std::span<const int32_t> ids) {
  add(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size_bytes()));
}

std::string Fingerprint::str() const { return fmt::format("{:016x}", hash_); }

}  // namespace lockstep
