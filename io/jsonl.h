#pragma once
// Reads prompts and worked examples from JSON lines, as the users of several training frameworks have them: one object a row, rows
// ended by the byte 0x0A and by nothing else (U+2028, U+0085 and the like may stand inside strings). A carriage return at the end of a
// row, a byte order mark at the start of the file and blank rows are passed over.
//
//   format         prompt                                                label, the first that is there                                id
//   auto           prompt, messages, text, input, question or problem    label, reward_model.ground_truth, answer, solution, ground_truth   id, extra_info.index
//   miles, slime   prompt                                                label                                                         id
//   verl           prompt                                                reward_model.ground_truth                                     extra_info.index
//   openrlhf       input                                                 label                                                         id
//   trl            prompt                                                answer, solution, ground_truth or label                       id
//
// (lockstep's own form is that of miles.) A dot steps into an object; a member whose whole name has the dots comes first.
//   prompt      a string that is not blank, into which PromptStyle's template is filled; or a list of messages
//   label       a string, or a number, which becomes plain decimal text (34.0 is "34"). Where only its name tells that a member is the
//               label (answer, solution), text of several lines is refused: it is a worked solution
//   completion  "completion": the text to learn in supervised training, or a list of messages that follow the prompt. Without it, the last
//               message of the prompt if that is the assistant's
//   id          a string or an integer; may be missing
// Other members are passed over. A row that breaks a rule is kept as a BadRow; what to do about it is the caller's choice.
// Sources: docs/evaluation.md.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

enum class DataFormat : uint8_t { automatic, miles, slime, verl, openrlhf, trl };
inline constexpr std::string_view kDataFormatNames[] = {"auto", "miles", "slime", "verl", "openrlhf", "trl"};

// Whether prompts are written in DeepSeek-V4's chat format (io/chat.h). none: strings are prompts as they stand, and lists of messages
// are refused unless their row has a "thinking_mode". Otherwise a string is one message of the user.
enum class PromptChat : uint8_t { none, chat, thinking };
inline constexpr std::string_view kPromptChatNames[] = {"none", "chat", "thinking"};
enum class ReasoningEffort : uint8_t { none, high, max };
inline constexpr std::string_view kReasoningEffortNames[] = {"none", "high", "max"};

// How rows are read and prompts written.
struct PromptStyle {
  DataFormat format = DataFormat::automatic;
  std::string prompt_key = {}, label_key = {};  // instead of the format's; may have dots
  std::string prompt_template = {};             // name of a template, or text with {} where the prompt goes; empty: the prompt alone
  PromptChat chat = PromptChat::none;
  // Of rows that do not say.
  bool drop_thinking = true;
  ReasoningEffort reasoning_effort = ReasoningEffort::none;
};

// What the names mean: dapo is DAPO-Math's wording in the copy that asks for "Answer: \boxed{...}", dapo_plain the first one, which asks for
// "Answer: ..."; boxed is what is usual for AIME.
std::span<const std::pair<std::string_view, std::string_view>> prompt_templates();
// The text of a name, or `name` itself if it has {} once; an error otherwise.
Result<std::string> find_prompt_template(const std::string& name);

struct PromptRow {
  int64_t line = 0;  // in the file, from 1
  std::string id;    // empty if the row has none
  std::string prompt;    // as the model is given it
  std::string messages;  // JSON list of the messages that it was written from; empty: none
  std::string label;
  std::string completion;
};

struct BadRow {
  int64_t line = 0;
  std::string reason;
};

struct PromptFile {
  static constexpr size_t kListedRows = 20;
  std::string path;
  std::vector<PromptRow> rows;
  std::vector<BadRow> bad_rows;  // the first kListedRows by line
  int64_t num_bad_rows = 0;
  int64_t duplicate_prompts = 0;  // rows whose prompt stood in an earlier good row
  std::string fields;             // where prompts and labels were found: "prompt, label"; several by " | "

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()) + num_bad_rows; }
  void add_bad_row(int64_t line, std::string reason);  // in any order
};

struct PromptReaderOptions {
  bool label_required = true;
  bool completion_required = false;
  PromptStyle style = {};
};

// A path may end in @[FIRST:END], of which either may be missing: only these rows, bad ones counted, from 0.
Result<PromptFile> read_prompts(const std::string& path, const PromptReaderOptions& options = {});

// The same from memory; `path` is for messages alone. REQUIRES a template that find_prompt_template() knows.
PromptFile parse_prompts(std::string_view text, std::string path, const PromptReaderOptions& options = {});

// "FILE:LINE: REASON" lines of the first bad rows, each behind a newline.
std::string bad_rows_list(const PromptFile& file);
// Ok if there are no bad rows. Otherwise one error that counts them and lists the first.
Status bad_rows_status(const PromptFile& file);

}  // namespace lockstep
