// Any bytes as a prompt file: every row is good or has a reason, and what was read can be written and read again.

#include <cstdint>

#include "io/json.h"
#include "io/jsonl.h"
#include "io/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const PromptFile file = parse_prompts(text, "fuzz");
  int64_t line = 0;
  std::string again;
  for (const PromptRow& row : file.rows) {
    CHECK_GT(row.line, line);
    line = row.line;
    CHECK(!row.prompt.empty() && !row.label.empty());
    CHECK(find_invalid_utf8(row.prompt) == std::string::npos);
    again += JsonLine().add("id", row.id).add("prompt", row.prompt).add("label", row.label).str() + "\n";
  }
  line = 0;
  for (const BadRow& row : file.bad_rows) {
    CHECK_GT(row.line, line);
    line = row.line;
    CHECK(!row.reason.empty());
  }
  CHECK_EQ(bad_rows_status(file).is_ok(), file.bad_rows.empty());
  CHECK_LE(file.bad_rows.size(), PromptFile::kListedRows);
  const PromptFile second = parse_prompts(again, "again");
  CHECK_EQ(second.bad_rows.size(), 0u);
  CHECK_EQ(second.rows.size(), file.rows.size());
  CHECK_EQ(second.duplicate_prompts, file.duplicate_prompts);
  for (size_t i = 0; i < file.rows.size(); ++i) {
    CHECK_EQ(second.rows[i].id, file.rows[i].id);
    CHECK_EQ(second.rows[i].prompt, file.rows[i].prompt);
    CHECK_EQ(second.rows[i].label, file.rows[i].label);
  }
  return 0;
}
