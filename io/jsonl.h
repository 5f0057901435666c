#pragma once
// Reads prompts and worked examples from JSON lines: one object a row, rows ended by the byte 0x0A and by nothing else
// (U+2028, U+0085 and the like may stand inside strings). A carriage return at the end of a row, a byte order mark at the
// start of the file and blank rows are passed over.
//
//   prompt      "prompt", else "text": a string that is not blank. Message lists are refused for now.
//   label       "label", else "reward_model"."ground_truth": a string, or a number, which becomes plain decimal text
//               (34.0 is "34")
//   completion  "completion": a string, the text to learn in supervised training
//   id          "id": a string or an integer; may be missing
// Other members are passed over. A row that breaks a rule is kept as a BadRow; what to do about it is the caller's choice.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

struct PromptRow {
  int64_t line = 0;  // in the file, from 1
  std::string id;    // empty if the row has none
  std::string prompt;
  std::string label;
  std::string completion;
};

struct BadRow {
  int64_t line = 0;
  std::string reason;
};

struct PromptFile {
  std::string path;
  std::vector<PromptRow> rows;
  std::vector<BadRow> bad_rows;
  int64_t duplicate_prompts = 0;  // rows whose prompt stood in an earlier good row
};

struct PromptReaderOptions {
  bool label_required = true;
  bool completion_required = false;
};

Result<PromptFile> read_prompts(const std::string& path, PromptReaderOptions options = {});

// The same from memory; `path` is for messages alone.
PromptFile parse_prompts(std::string_view text, std::string path, PromptReaderOptions options = {});

// Ok if there are no bad rows. Otherwise one error that counts them and lists the first 20 as "FILE:LINE: REASON".
Status bad_rows_status(const PromptFile& file);

}  // namespace lockstep
