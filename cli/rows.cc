#include "cli/rows.h"

#include <cstdio>
#include <iostream>

#include "cli/commands.h"
#include "cli/console.h"

namespace lockstep {

int map_rows(const std::function<Result<std::string>(JsonValue&)>& map) {
  std::ios::sync_with_stdio(false);
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); ++number) {
    const auto bad = [&](std::string_view reason) { return fail(kExitBadInput, errorf("standard input:{}: {}", number, reason)); };
    std::string_view text = line;
    if (number == 1 && text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    Result<JsonValue> row = parse_json(text);
    if (!row) return bad("invalid JSON, " + row.message());
    if (!row.value().is(JsonValue::Kind::object)) return bad(fmt::format("the row is {}, an object is wanted", json_kind_name(row.value().kind)));
    Result<std::string> mapped = map(row.value());
    if (!mapped) return bad(mapped.message());
    mapped.value() += '\n';
    if (std::fwrite(mapped.value().data(), 1, mapped.value().size(), stdout) != mapped.value().size()) break;  // main.cc says so
  }
  if (std::cin.bad()) return fail(kExitFailure, Status::error("standard input cannot be read"));
  return kExitOk;
}

}  // namespace lockstep
