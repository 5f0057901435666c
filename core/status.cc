#include "core/status.h"

#include <cstdio>
#include <cstdlib>

namespace lockstep {

void check_failed(const char* file, int line, const char* expr, std::string message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %s\n", file, line, expr, message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace lockstep
