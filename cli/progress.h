#pragma once
// One line that says how far long work is: rewritten in place on a terminal, a plain line every few seconds otherwise.
//
//   rollout step 12  37/64 samples  812 tokens/s  0:03 left
//
// Not thread-safe. Writes to standard error, so that standard output stays for results.

#include <chrono>
#include <cstdint>
#include <string>

namespace lockstep {

// "0:07", "12:40", "3:02:11", "2d 4h".
std::string format_duration(double seconds);
// "812", "12.3k", "4.56M".
std::string format_count(double count);

class Progress {
 public:
  Progress();  // on standard error; a terminal or not is found out here
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `label` names the work and opens a new estimate when it changes. total <= 0: unknown. `rate_unit` names what `amount` counts
  // ("tokens"); empty: no rate.
  void update(const std::string& label, int64_t done, int64_t total, double amount, const std::string& rate_unit);
  // Removes the line, so that a log line can be written; the next update draws it again.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool drawn_ = false;
  std::string label_;
  Clock::time_point start_, shown_;
};

}  // namespace lockstep
