// A safetensors header over any number of data bytes: refused, or every promise of the reader holds.
// Input: 2 bytes for the length of the data, then the header.

#include <cstdint>
#include <map>
#include <vector>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  if (size < 2) return 0;
  const uint64_t data_bytes = data[0] | uint64_t{data[1]} << 8;
  const std::string_view header(reinterpret_cast<const char*>(data) + 2, size - 2);
  std::map<std::string, std::string> metadata;
  Result<std::vector<SafetensorsEntry>> r = SafetensorsFile::parse_header(header, data_bytes, &metadata);
  if (!r) {
    CHECK(!r.message().empty() && r.message().size() < 2000, "a message of {} bytes", r.message().size());
    return 0;
  }
  std::vector<int> owners(data_bytes);
  for (const SafetensorsEntry& t : r.value()) {
    CHECK(t.begin <= t.end && t.end <= data_bytes, "[{}, {}] of {}", t.begin, t.end, data_bytes);
    uint64_t bytes = safetensors_dtype_bytes(t.dtype);
    if (bytes != 0) {
      for (const int64_t d : t.shape) {
        CHECK_GE(d, 0);
        bytes *= static_cast<uint64_t>(d);
      }
      CHECK_EQ(bytes, t.bytes());
    }
    for (uint64_t i = t.begin; i < t.end; ++i) ++owners[i];
  }
  for (const int n : owners) CHECK_EQ(n, 1);
  return 0;
}
