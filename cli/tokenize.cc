// lockstep tokenize: rows with a text become rows with its ids, or the other way round.

#include <limits>

#include "cli/console.h"
#include "cli/rows.h"
#include "io/tokenizer.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

Result<JsonValue> encode(const Tokenizer& tokenizer, const JsonValue& text) {
  if (!text.is(Kind::string)) return errorf("\"text\" is {}, a string is wanted", json_kind_name(text.kind));
  Result<std::vector<int32_t>> ids = tokenizer.encode(text.text);
  if (!ids) return ids.status();
  JsonValue out;
  out.kind = Kind::array;
  out.items.resize(ids.value().size());
  for (size_t i = 0; i < out.items.size(); ++i) {
    out.items[i].kind = Kind::number;
    out.items[i].text = fmt::format("{}", ids.value()[i]);
  }
  return out;
}

Result<JsonValue> decode(const Tokenizer& tokenizer, const JsonValue& ids, SpecialTokens special) {
  if (!ids.is(Kind::array)) return errorf("\"ids\" is {}, a list of ids is wanted", json_kind_name(ids.kind));
  std::vector<int32_t> values;
  for (size_t i = 0; i < ids.items.size(); ++i) {
    int64_t id = 0;
    if (!ids.items[i].as_int64(&id) || id < 0 || id >= tokenizer.vocab_size()) {
      return errorf("\"ids\"[{}] is {}, an id from 0 to {} is wanted", i,
                    ids.items[i].is(Kind::number) ? ids.items[i].text : json_kind_name(ids.items[i].kind), tokenizer.vocab_size() - 1);
    }
    values.push_back(static_cast<int32_t>(id));
  }
  JsonValue out;
  out.kind = Kind::string;
  out.text = tokenizer.decode(values, special);
  return out;
}

}  // namespace

int tokenize_command(const TokenizeArgs& args) {
  Result<std::unique_ptr<Tokenizer>> loaded = load_tokenizer(args.tokenizer);
  if (!loaded) return fail(kExitBadInput, loaded.status());
  const Tokenizer& tokenizer = *loaded.value();
  const SpecialTokens special = args.skip_special ? SpecialTokens::hide : SpecialTokens::show;
  const char* from = args.decode ? "ids" : "text";
  const char* to = args.decode ? "text" : "ids";
  return map_rows([&](JsonValue& row) -> Result<std::string> {
    const JsonValue* value = row.find(from);
    if (value == nullptr) return errorf("there is no \"{}\"", from);
    Result<JsonValue> mapped = args.decode ? decode(tokenizer, *value, special) : encode(tokenizer, *value);
    if (!mapped) return mapped.status();
    std::erase_if(row.members, [&](const JsonMember& m) { return m.name == to; });
    for (JsonMember& m : row.members)
      if (m.name == from) m = {to, mapped.take()};
    std::string line;
    append_json(&line, row);
    return line;
  });
}

}  // namespace lockstep
