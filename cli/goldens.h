#pragma once
// Reference numbers that are part of the program: files of tests/golden, so that `lockstep doctor` needs none beside it.

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct BuiltInGolden {
  const char* name;
  std::string_view bytes;  // of the file
};
std::vector<BuiltInGolden> built_in_goldens();  // between them every kind of attention and of routing

}  // namespace lockstep
