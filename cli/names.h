#pragma once
// Misspelt names and what was probably meant.

#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// The known name that is nearest by edit distance, or "" when none is near.
std::string nearest_name(std::string_view name, std::span<const std::string_view> known);

}  // namespace lockstep
