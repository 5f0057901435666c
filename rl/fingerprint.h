#pragma once
// A fingerprint of the rows that a run learns from, in order: a run that is resumed must see the same ones.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

class Fingerprint {
 public:
  // Where one piece ends and the next begins counts too.
  void add(std::string_view bytes);
  void add(std::span<const int32_t> ids);
  std::string str() const;  // 16 hexadecimal digits

 private:
  uint64_t hash_ = 0;
};

}  // namespace lockstep
