#pragma once
// CHECK for sources that a device compiler reads: the message is printf's, since nvcc does not read the library that CHECK formats with.

#include <cstdio>
#include <string>

namespace lockstep {
[[noreturn]] void check_failed(const char* file, int line, const char* expr, std::string message);
}  // namespace lockstep

#define GPU_CHECK(cond, ...)                                                       \
  do {                                                                             \
    if (!(cond)) {                                                                 \
      char gpu_check_text[256];                                                    \
      std::snprintf(gpu_check_text, sizeof gpu_check_text, __VA_ARGS__);           \
      ::lockstep::check_failed(__FILE__, __LINE__, #cond, gpu_check_text);         \
    }                                                                              \
  } while (0)
