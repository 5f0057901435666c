#include "rollout/stop_text.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace lockstep {

namespace {

// How many of the last bytes of `text` a stop string could begin with.
size_t undecided(std::string_view text, const std::vector<std::string>& stops) {
  size_t most = 0;
  for (const std::string& stop : stops)
    for (size_t n = std::min(stop.size() - 1, text.size()); n > most; --n)
      if (text.ends_with(std::string_view(stop).substr(0, n))) most = n;
  return most;
}

}  // namespace

StopText::StopText(const Tokenizer& tokenizer, std::vector<std::string> stops, SpecialTokens special)
    : decoder_(tokenizer, special), stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& s) { return s.empty(); });
}

std::string StopText::advance(std::string text) {
  if (matched_ >= 0) return "";
  held_ += text;
  size_t first = std::string::npos;
  for (size_t i = 0; i < stops_.size(); ++i) {
    const size_t at = held_.find(stops_[i]);
    if (at < first) {
      first = at;
      matched_ = static_cast<int>(i);
    }
  }
  const size_t sure = matched_ >= 0 ? first : held_.size() - undecided(held_, stops_);
  std::string out = held_.substr(0, sure);
  held_.erase(0, matched_ >= 0 ? std::string::npos : sure);
  return out;
}

std::string StopText::push(int32_t id) { return advance(decoder_.push(id)); }

std::string StopText::finish() {
  std::string out = advance(decoder_.finish());
  if (matched_ < 0) out += std::exchange(held_, "");
  return out;
}

}  // namespace lockstep
