#pragma once
// How long work tells its caller how far it is. Any of them may be empty.

#include <cstdint>
#include <functional>
#include <string>

namespace lockstep {

struct Hooks {
  // label "step 12 rollout"; done of total; amount counts `unit` ("tokens") since the label began. Called often: must be cheap.
  std::function<void(const std::string& label, int64_t done, int64_t total, double amount, const std::string& unit)> progress;
  // One finished step or event worth a line.
  std::function<void(const std::string& text)> line;

  // All input was read and accepted; errors from here on are failures of the work itself.
  std::function<void()> started;

  void report(const std::string& label, int64_t done, int64_t total, double amount = 0, const std::string& unit = {}) const {
    if (progress) progress(label, done, total, amount, unit);
  }
  void say(const std::string& text) const {
    if (line) line(text);
  }
  void begin() const {
    if (started) started();
  }
};

}  // namespace lockstep
