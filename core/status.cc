#include "core/status.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace lockstep {

namespace {
std::atomic<CheckHandler> check_handler{nullptr};
}  // namespace

void set_check_handler(CheckHandler handler) { check_handler.store(handler); }

void check_failed(const char* file, int line, const char* expr, std::string message) {
  const std::string text = fmt::format("{}:{}: CHECK failed: {} {}", file, line, expr, message);
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
  if (const CheckHandler handler = check_handler.load()) handler(text.c_str());
  std::abort();
}

}  // namespace lockstep
