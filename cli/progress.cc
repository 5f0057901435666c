#include "cli/progress.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>

#include <fmt/core.h>

namespace lockstep {

namespace {
constexpr double kTerminalPeriodS = 0.1;
constexpr double kPlainPeriodS = 10.0;
}  // namespace

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s >= 172800) return fmt::format("{}d {}h", s / 86400, s % 86400 / 3600);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s % 3600 / 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string format_count(double count) {
  if (count < 9999.5) return fmt::format("{:.0f}", count);
  if (count < 999.95e3) return fmt::format("{:.1f}k", count / 1e3);
  if (count < 999.5e6) return fmt::format("{:.2f}M", count / 1e6);
  return fmt::format("{:.2f}G", count / 1e9);
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::update(const std::string& label, int64_t done, int64_t total, double amount, const std::string& rate_unit) {
  const auto now = Clock::now();
  if (label != label_) {
    label_ = label;
    start_ = shown_ = now;
  }
  const double since_shown = std::chrono::duration<double>(now - shown_).count();
  if (since_shown < (terminal_ ? kTerminalPeriodS : kPlainPeriodS)) return;
  shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string line = total > 0 ? fmt::format("{}  {}/{}", label, done, total) : fmt::format("{}  {}", label, done);
  if (!rate_unit.empty() && elapsed > 0) line += fmt::format("  {} {}/s", format_count(amount / elapsed), rate_unit);
  if (total > 0 && done > 0) {
    line += fmt::format("  {} left", format_duration(elapsed * static_cast<double>(total - done) / static_cast<double>(done)));
  }
  if (terminal_) {
    std::fprintf(stderr, "\r\x1b[K%s", line.c_str());
    drawn_ = true;
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace lockstep
