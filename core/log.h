#pragma once
// Levelled log lines. The sink is spdlog behind a narrow door, so that only log.cc pays for its headers.
// log_to_file adds a file beside standard error; lines carry the time and the level.

#include <string>

#include <fmt/core.h>

#include "core/status.h"

namespace lockstep {

enum class LogLevel { debug, info, warn, error, off };

void set_log_level(LogLevel level);
Status log_to_file(const std::string& path);
void log_line(LogLevel level, const std::string& text);

template <typename... A>
void log_info(fmt::format_string<A...> format, A&&... args) {
  log_line(LogLevel::info, fmt::format(format, std::forward<A>(args)...));
}
template <typename... A>
void log_warn(fmt::format_string<A...> format, A&&... args) {
  log_line(LogLevel::warn, fmt::format(format, std::forward<A>(args)...));
}
template <typename... A>
void log_error(fmt::format_string<A...> format, A&&... args) {
  log_line(LogLevel::error, fmt::format(format, std::forward<A>(args)...));
}

}  // namespace lockstep
