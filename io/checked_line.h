#pragma once
// JSON lines that say whether they are whole: the last member "sum" is XXH64 of the line without it. Logs that a crash may cut off, or a disk
// damage, are made of them: what does not check is passed over, and so is whatever stands around it.

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "io/json.h"

namespace lockstep {

std::string checked_line(const JsonLine& line);  // without a newline. REQUIRES at least one member
// The object without "sum"; nothing if the two do not belong together.
std::optional<std::string> uncheck_line(std::string_view line);
// f(object) for every line of `text` that is not empty, without its "sum"; null for one that is damaged.
void for_each_checked_line(std::string_view text, const std::function<void(const JsonValue* object)>& f);

}  // namespace lockstep
