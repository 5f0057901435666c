#pragma once
// One sample's text as its tokens come, ended by stop strings. Text that may yet become part of one is held back, so what has been given out is
// never taken back. It depends on the tokens alone, not on when they come.

#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace lockstep {

class StopText {
 public:
  // `tokenizer` must outlive this. Empty stop strings are passed over.
  StopText(const Tokenizer& tokenizer, std::vector<std::string> stops, SpecialTokens special = SpecialTokens::hide);

  // The text that is certain by now, further than before; "" often. Nothing more comes once matched().
  std::string push(int32_t id);
  // What was held back, at the end of a sample that no stop string ended.
  std::string finish();
  // The stop string that ended the text, which ends before it: the first to be complete, and of several with one token the one that begins first.
  // Null: none yet.
  const std::string* matched() const { return matched_ < 0 ? nullptr : &stops_[static_cast<size_t>(matched_)]; }

 private:
  std::string advance(std::string text);

  StreamDecoder decoder_;
  std::vector<std::string> stops_;
  std::string held_;
  int matched_ = -1;
};

}  // namespace lockstep
