#include "core/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace lockstep {

namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto l = std::make_shared<spdlog::logger>("lockstep", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    l->set_pattern("%H:%M:%S.%e %^%l%$ %v");
    l->flush_on(spdlog::level::info);
    return l;
  }();
  return *instance;
}

spdlog::level::level_enum convert(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warn: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
    case LogLevel::off: return spdlog::level::off;
  }
  return spdlog::level::info;
}

}  // namespace

void set_log_level(LogLevel level) { logger().set_level(convert(level)); }

Status log_to_file(const std::string& path) {
  try {
    auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
    sink->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
    logger().sinks().push_back(std::move(sink));
    return Status::ok();
  } catch (const spdlog::spdlog_ex& e) {
    return errorf("{}: cannot open the log file: {}", path, e.what());
  }
}

void log_line(LogLevel level, const std::string& text) { logger().log(convert(level), text); }

}  // namespace lockstep
