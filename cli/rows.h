#pragma once
// Commands that map JSON lines to JSON lines, standard input to standard output, one line a row, in order.

#include <functional>
#include <string>

#include "io/json.h"

namespace lockstep {

// `map` gets each row, which is an object, and returns the line to write, without its newline. Blank lines are passed over. The first
// bad line ends the work: it is named with the reason on standard error; lines before it have been written. Returns the exit code.
int map_rows(const std::function<Result<std::string>(JsonValue&)>& map);

}  // namespace lockstep
