#include "io/bpe_tokenizer.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "io/file.h"
#include "io/unicode.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

constexpr const char* kRemedy = "take the tokenizer.json that the model was released with";

// Vocabularies spell bytes as characters: printable ones of Latin-1 as themselves, the other 68 as U+0100 and on, in order.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      byte_[printable ? b : next++] = static_cast<int16_t>(b);
    }
  }
  // The bytes that `spelled` stands for; nothing if one of its characters stands for none. REQUIRES: UTF-8.
  std::optional<std::string> bytes(std::string_view spelled) const {
    std::string out;
    for (size_t at = 0; at < spelled.size();) {
      const Utf8Char c = utf8_char(spelled, at);
      if (c.code >= kSize || byte_[c.code] < 0) return std::nullopt;
      out += static_cast<char>(byte_[c.code]);
      at += c.length;
    }
    return out;
  }

 private:
  static constexpr size_t kSize = 256 + 68;
  std::array<int16_t, kSize> byte_ = [] {
    std::array<int16_t, kSize> a;
    a.fill(-1);
    return a;
  }();
};

std::string shown(const JsonValue* value) {
  if (value == nullptr) return "missing";
  if (value->is(Kind::string)) return in_quotes(value->text);
  if (value->is(Kind::number)) return value->text;
  if (value->is(Kind::boolean)) return value->boolean ? "true" : "false";
  return json_kind_name(value->kind);
}

bool is_off(const JsonValue* value) {
  return value == nullptr || value->is(Kind::null) || (value->is(Kind::boolean) && !value->boolean);
}

bool is_string(const JsonValue* value, std::string_view text) {
  return value != nullptr && value->is(Kind::string) && value->text == text;
}

// Fields of one file, read into the parts of a tokenizer.
class Reader {
 public:
  Reader(const JsonValue& root, const std::string& file) : root_(root), file_(file) {}

  Status read() {
    for (const char* name : {"truncation", "padding"})
      if (!is_off(root_.find(name))) return bad(name, root_.find(name), "null, as ids would be cut or filled up");
    LOCKSTEP_RETURN_IF_ERROR(read_normalizer());
    LOCKSTEP_RETURN_IF_ERROR(read_pre_tokenizer());
    LOCKSTEP_RETURN_IF_ERROR(read_post_processor());
    if (const JsonValue* decoder = root_.find("decoder"); type_of(decoder) != "ByteLevel")
      return bad("decoder.type", find(decoder, "type"), "\"ByteLevel\"");
    LOCKSTEP_RETURN_IF_ERROR(read_vocabulary());
    LOCKSTEP_RETURN_IF_ERROR(read_merges());
    LOCKSTEP_RETURN_IF_ERROR(read_added_tokens());
    return check_ids();
  }

  struct Added {
    int32_t id;
    std::string content;
    bool special, normalized;
  };
  std::vector<SplitPattern> patterns;
  std::unordered_map<std::string_view, int32_t> vocabulary;  // as spelled
  std::vector<std::string> tokens;                           // bytes of ids that pieces can become, else empty
  std::vector<Merge> merges;
  std::vector<Added> added;
  size_t num_ids = 0;  // of vocabulary and added tokens

 private:
  static const JsonValue* find(const JsonValue* object, std::string_view key) {
    return object == nullptr ? nullptr : object->find(key);
  }
  static std::string_view type_of(const JsonValue* object) {
    const JsonValue* type = find(object, "type");
    return type != nullptr && type->is(Kind::string) ? std::string_view(type->text) : std::string_view();
  }
  Status bad(std::string_view field, const JsonValue* seen, std::string_view wanted) const {
    return errorf("{}: \"{}\" is {}, {} is wanted; {}", file_, field, shown(seen), wanted, kRemedy);
  }
  // A setting that is not at its only known value would change ids.
  Status unsupported(std::string_view field, const JsonValue* seen, std::string_view known) const {
    return errorf("{}: \"{}\" is {}, which is not supported; known is {}", file_, field, shown(seen), known);
  }

  Status read_normalizer() const {
    const JsonValue* n = root_.find("normalizer");
    if (is_off(n)) return Status::ok();
    const JsonValue* list = n->find("normalizers");
    if (type_of(n) == "Sequence" && list != nullptr && list->is(Kind::array) && list->items.empty()) return Status::ok();
    const JsonValue* type = n->find("type");
    return unsupported("normalizer.type", type_of(n) == "Sequence" && list != nullptr && !list->items.empty() ? list->items[0].find("type") : type,
                       "no normalizer at all");
  }

  Status read_pre_tokenizer() {
    const JsonValue* p = root_.find("pre_tokenizer");
    const std::string name = "pre_tokenizer";
    if (type_of(p) == "ByteLevel") return read_byte_level(*p, name);
    const JsonValue* list = find(p, "pretokenizers");
    if (type_of(p) != "Sequence" || list == nullptr || !list->is(Kind::array) || list->items.empty())
      return unsupported(name + ".type", find(p, "type"), "\"ByteLevel\", or a \"Sequence\" of \"Split\" that ends with one");
    for (size_t i = 0; i + 1 < list->items.size(); ++i)
      LOCKSTEP_RETURN_IF_ERROR(read_split(list->items[i], fmt::format("{}.pretokenizers[{}]", name, i)));
    const std::string last = fmt::format("{}.pretokenizers[{}]", name, list->items.size() - 1);
    if (type_of(&list->items.back()) != "ByteLevel")
      return unsupported(last + ".type", list->items.back().find("type"), "\"ByteLevel\" at the end");
    return read_byte_level(list->items.back(), last);
  }

  Status read_split(const JsonValue& split, const std::string& name) {
    if (type_of(&split) != "Split") return unsupported(name + ".type", split.find("type"), "\"Split\"");
    if (!is_string(split.find("behavior"), "Isolated"))
      return unsupported(name + ".behavior", split.find("behavior"), "\"Isolated\"");
    if (!is_off(split.find("invert"))) return unsupported(name + ".invert", split.find("invert"), "false");
    const JsonValue* regex = find(split.find("pattern"), "Regex");
    if (regex == nullptr || !regex->is(Kind::string)) return unsupported(name + ".pattern.Regex", regex, "a regular expression");
    const std::optional<SplitPattern> pattern = find_split_pattern(regex->text);
    if (!pattern) {
      return errorf("{}: \"{}.pattern.Regex\" is {}, which is not supported; known are the patterns of DeepSeek-V3 and V4 and of "
                    "GPT-2 (io/pretokenize.h)",
                    file_, name, in_quotes(regex->text, 400));
    }
    patterns.push_back(*pattern);
    return Status::ok();
  }

  Status read_byte_level(const JsonValue& level, const std::string& name) {
    if (!is_off(level.find("add_prefix_space"))) return unsupported(name + ".add_prefix_space", level.find("add_prefix_space"), "false");
    const JsonValue* use_regex = level.find("use_regex");
    if (use_regex != nullptr && !use_regex->is(Kind::boolean)) return bad(name + ".use_regex", use_regex, "true or false");
    if (use_regex == nullptr || use_regex->boolean) patterns.push_back(SplitPattern::gpt2);  // left out means true
    return Status::ok();
  }

  Status read_post_processor() const {  // ByteLevel here moves offsets alone
    const JsonValue* p = root_.find("post_processor");
    if (is_off(p) || type_of(p) == "ByteLevel") return Status::ok();
    return unsupported("post_processor.type", p->find("type"), "\"ByteLevel\" or none: ids are those of the text alone");
  }

  Status read_vocabulary() {
    const JsonValue* model = root_.find("model");
    if (type_of(model) != "BPE") return unsupported("model.type", find(model, "type"), "\"BPE\"");
    for (const char* name : {"dropout", "byte_fallback", "ignore_merges"})
      if (!is_off(model->find(name))) return unsupported(fmt::format("model.{}", name), model->find(name), "none");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!is_off(model->find(name)) && !is_string(model->find(name), ""))
        return unsupported(fmt::format("model.{}", name), model->find(name), "none");
    const JsonValue* vocab = model->find("vocab");
    if (vocab == nullptr || !vocab->is(Kind::object)) return bad("model.vocab", vocab, "an object of tokens and ids");
    vocabulary.reserve(vocab->members.size());
    
    for (const auto& [name, value] : vocab->members) {
      int64_t id = -1;
      if (!value.as_int64(&id) || id < 0 || id >= kMaxIds) return bad_id(fmt::format("model.vocab[{}]", in_quotes(name)), value);
      vocabulary.emplace(name, static_cast<int32_t>(id));
    }
    return Status::ok();
  }

  Status bad_id(const std::string& field, const JsonValue& value) const {
    return errorf("{}: {} is {}, an id from 0 to {} is wanted; {}", file_, field, shown(&value), kMaxIds - 1, kRemedy);
  }

  // Either "left right" or ["left","right"].
  bool read_merge(const JsonValue& value, std::string_view* left, std::string_view* right) const {
    if (value.is(Kind::string)) {
      const size_t space = value.text.find(' ');
      if (space == std::string::npos || value.text.find(' ', space + 1) != std::string::npos) return false;
      *left = std::string_view(value.text).substr(0, space);
      *right = std::string_view(value.text).substr(space + 1);
      return true;
    }
    if (!value.is(Kind::array) || value.items.size() != 2 || !value.items[0].is(Kind::string) || !value.items[1].is(Kind::string))
      return false;
    *left = value.items[0].text;
    *right = value.items[1].text;
    return true;
  }

  Status read_merges() {
    const JsonValue* list = root_.find("model")->find("merges");
    if (list == nullptr || !list->is(Kind::array)) return bad("model.merges", list, "a list of pairs");
    merges.reserve(list->items.size());
    std::unordered_set<uint64_t> seen;
    seen.reserve(list->items.size());
    std::string joined;
    for (size_t i = 0; i < list->items.size(); ++i) {
      const JsonValue& value = list->items[i];
      std::string_view left, right;
      if (!read_merge(value, &left, &right)) return bad(fmt::format("model.merges[{}]", i), &value, "\"LEFT RIGHT\" or two strings");
      joined.assign(left).append(right);
      Merge merge;
      for (const auto& [spelled, id] : {std::pair<std::string_view, int32_t*>{left, &merge.left}, {right, &merge.right}, {joined, &merge.result}}) {
        const auto found = vocabulary.find(spelled);
        if (found == vocabulary.end() || spelled.empty() || !alphabet_.bytes(spelled)) {
          return errorf("{}: model.merges[{}] needs the token {}, which is {}; {}", file_, i, in_quotes(spelled),
                        found == vocabulary.end() ? "not in model.vocab" : "not spelled in the byte alphabet", kRemedy);
        }
        *id = found->second;
      }
      if (!seen.insert(static_cast<uint64_t>(merge.left) << 32 | static_cast<uint32_t>(merge.right)).second)
        return errorf("{}: model.merges[{}] repeats an earlier one, {} {}; {}", file_, i, in_quotes(left), in_quotes(right), kRemedy);
      merges.push_back(merge);
    }
    return Status::ok();
  }

  Status read_added_tokens() {
    const JsonValue* list = root_.find("added_tokens");
    if (list == nullptr || list->is(Kind::null)) return Status::ok();
    if (!list->is(Kind::array)) return bad("added_tokens", list, "a list");
    std::unordered_set<std::string_view> seen;
    for (size_t i = 0; i < list->items.size(); ++i) {
      const JsonValue& t = list->items[i];
      const std::string name = fmt::format("added_tokens[{}]", i);
      const JsonValue* content = t.find("content");
      if (content == nullptr || !content->is(Kind::string) || content->text.empty())
        return bad(name + ".content", content, "a string that is not empty");
      int64_t id = -1;
      const JsonValue* id_value = t.find("id");
      if (id_value == nullptr || !id_value->as_int64(&id) || id < 0 || id >= kMaxIds)
        return bad_id(name + ".id", id_value == nullptr ? JsonValue() : *id_value);
      for (const char* flag : {"single_word", "lstrip", "rstrip"})
        if (!is_off(t.find(flag))) return unsupported(fmt::format("{}.{}", name, flag), t.find(flag), "false");
      if (const auto found = vocabulary.find(content->text); found != vocabulary.end() && found->second != id) {
        return errorf("{}: {} {} has the id {}, in model.vocab it has {}; {}", file_, name, in_quotes(content->text), id, found->second,
                      kRemedy);
      }
      if (!seen.insert(content->text).second)
        return errorf("{}: {} {} stands twice in the list; {}", file_, name, in_quotes(content->text), kRemedy);
      const bool special = !is_off(t.find("special"));
      const JsonValue* normalized = t.find("normalized");
      added.push_back({static_cast<int32_t>(id), content->text, special, normalized == nullptr ? !special : !is_off(normalized)});
    }
    return Status::ok();
  }

  // Every id from 0 on is one token's, and every byte is a token.
  Status check_ids() {
    std::vector<std::string_view> spelled(vocabulary.size() + added.size());
    const auto place = [&](std::string_view token, int32_t id) {
      if (static_cast<size_t>(id) >= spelled.size() || (!spelled[static_cast<size_t>(id)].empty() && spelled[static_cast<size_t>(id)] != token))
        return errorf("{}: {} has the id {}, which {}; {}", file_, in_quotes(token), id,
                      static_cast<size_t>(id) >= spelled.size() ? "leaves a gap below it" : "another token has too", kRemedy);
      spelled[static_cast<size_t>(id)] = token;
      return Status::ok();
    };
    // In the order of the file, so that the same file gives the same message.
    for (const auto& [name, value] : root_.find("model")->find("vocab")->members)
      if (name.empty()) {
        return errorf("{}: model.vocab has a token without text; {}", file_, kRemedy);
      } else {
        LOCKSTEP_RETURN_IF_ERROR(place(name, vocabulary.at(name)));
      }
    for (const Added& a : added) LOCKSTEP_RETURN_IF_ERROR(place(a.content, a.id));
    num_ids = spelled.size();
    while (num_ids > 0 && spelled[num_ids - 1].empty()) --num_ids;
    tokens.resize(num_ids);
    std::array<bool, 256> have{};
    for (size_t id = 0; id < num_ids; ++id) {
      if (spelled[id].empty()) return errorf("{}: no token has the id {}; {}", file_, id, kRemedy);
      if (!vocabulary.contains(spelled[id])) continue;
      if (std::optional<std::string> bytes = alphabet_.bytes(spelled[id])) {
        if (bytes->size() == 1) have[static_cast<uint8_t>((*bytes)[0])] = true;
        tokens[id] = std::move(*bytes);
      }
    }
    for (int b = 0; b < 256; ++b)
      if (!have[static_cast<size_t>(b)]) return errorf("{}: model.vocab has no token for the byte 0x{:02x}; {}", file_, b, kRemedy);
    return Status::ok();
  }

  static constexpr int64_t kMaxIds = 1 << 24;

  const JsonValue& root_;
  const std::string& file_;
  const ByteAlphabet alphabet_;
};

// The name of the begin or end token in tokenizer_config.json: a string, or an object with "content". Empty: none.
Result<std::string> configured_name(const JsonValue& config, const char* key, const std::string& file) {
  const JsonValue* value = config.find(key);
  if (value == nullptr || value->is(Kind::null)) return std::string();
  if (value->is(Kind::object)) value = value->find("content");
  if (value == nullptr || !value->is(Kind::string))
    return errorf("{}: \"{}\" is {}, a token's text is wanted; take the file that the model was released with", file, key, shown(value));
  return value->text;
}

}  // namespace

void StringSet::add(std::string_view s, int32_t value) {
  CHECK(!s.empty());
  begins_[static_cast<uint8_t>(s[0])] = true;
  int32_t node = 0;
  for (const char c : s) {
    int32_t next = child(node, c);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_[static_cast<size_t>(node)].children.emplace_back(c, next);
      nodes_.emplace_back();
    }
    node = next;
  }
  nodes_[static_cast<size_t>(node)].value = value;
}

int32_t StringSet::child(int32_t node, char c) const {
  for (const auto& [byte, next] : nodes_[static_cast<size_t>(node)].children)
    if (byte == c) return next;
  return -1;
}

StringSet::Hit StringSet::find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<uint8_t>(text[begin])]) continue;
    Hit hit{begin, begin, -1};
    int32_t node = 0;
    for (size_t at = begin; at < text.size() && (node = child(node, text[at])) >= 0; ++at) {
      if (const int32_t value = nodes_[static_cast<size_t>(node)].value; value >= 0) hit = {begin, at + 1, value};
    }
    if (hit.value >= 0) return hit;
  }
  return {std::string_view::npos, std::string_view::npos, -1};
}

Result<std::unique_ptr<BpeTokenizer>> BpeTokenizer::make(const JsonValue& root, std::string text, const std::string& file,
                                                         std::string config, const std::string& config_file) {
  Reader reader(root, file);
  LOCKSTEP_RETURN_IF_ERROR(reader.read());
  std::unique_ptr<BpeTokenizer> t(new BpeTokenizer);
  t->patterns_ = std::move(reader.patterns);
  t->bpe_ = std::make_unique<Bpe>(reader.tokens, reader.merges);
  t->tokens_.resize(reader.num_ids);
  for (size_t id = 0; id < reader.num_ids; ++id) t->tokens_[id].bytes = std::move(reader.tokens[id]);
  std::unordered_map<std::string_view, int32_t>& ids = reader.vocabulary;
  const ByteAlphabet alphabet;
  // A token that is not spelled in the byte alphabet stands for its own characters.
  const auto show = [&](std::string_view spelled, int32_t id) {
    t->tokens_[static_cast<size_t>(id)].bytes = alphabet.bytes(spelled).value_or(std::string(spelled));
  };
  for (const auto& [spelled, id] : ids)
    if (t->tokens_[static_cast<size_t>(id)].bytes.empty()) show(spelled, id);
  for (const Reader::Added& a : reader.added) {
    show(a.content, a.id);
    t->tokens_[static_cast<size_t>(a.id)].special = a.special;
    t->added_[a.normalized ? 1 : 0].add(a.content, a.id);
    ids.emplace(a.content, a.id);
  }

  const auto id_of = [&](std::string_view name) {
    const auto found = ids.find(name);
    return found == ids.end() ? -1 : found->second;
  };
  if (config.empty()) {
    t->bos_id_ = id_of("<｜begin▁of▁sentence｜>");
    t->eos_id_ = id_of("<｜end▁of▁sentence｜>");
    if (t->bos_id_ < 0 && t->eos_id_ < 0) t->bos_id_ = t->eos_id_ = id_of("<|endoftext|>");
  } else {
    Result<JsonValue> parsed = parse_json(config);
    if (!parsed) return errorf("{}: invalid JSON, {}", config_file, parsed.message());
    for (const auto& [key, id] : {std::pair<const char*, int32_t*>{"bos_token", &t->bos_id_}, {"eos_token", &t->eos_id_}}) {
      Result<std::string> name = configured_name(parsed.value(), key, config_file);
      if (!name) return name.status();
      if (name.value().empty()) continue;
      *id = id_of(name.value());
      if (*id < 0) return errorf("{}: \"{}\" is {}, which {} does not have; take both files from one model", config_file, key, in_quotes(name.value()), file);
    }
  }
  t->text_ = std::move(text);
  t->config_ = std::move(config);
  return t;
}

Result<std::vector<int32_t>> BpeTokenizer::encode(std::string_view text) const {
  if (const size_t at = find_invalid_utf8(text); at != std::string_view::npos) {
    return errorf("byte 0x{:02x} at offset {} of {} is not UTF-8, which the tokenizer reads", static_cast<uint8_t>(text[at]), at,
                  in_quotes(text));
  }
  std::vector<int32_t> ids;
  std::vector<std::string_view> pieces;
  // Calls between(part) for what lies between the strings of a set, and appends their ids.
  const auto around = [&ids](const StringSet& set, std::string_view part, const auto& between) {
    for (size_t at = 0; at < part.size();) {
      const StringSet::Hit hit = set.find(part, at);
      if (hit.value < 0) return between(part.substr(at));
      if (hit.begin > at) between(part.substr(at, hit.begin - at));
      ids.push_back(hit.value);
      at = hit.end;
    }
  };
  around(added_[0], text, [&](std::string_view part) {
    around(added_[1], part, [&](std::string_view plain) { encode_plain(plain, &pieces, &ids); });
  });
  return ids;
}

void BpeTokenizer::encode_plain(std::string_view text, std::vector<std::string_view>* pieces, std::vector<int32_t>* ids) const {
  pieces->clear();
  split_text(text, patterns_, pieces);
  for (const std::string_view piece : *pieces) bpe_->encode(piece, ids);
}

std::string_view BpeTokenizer::token_bytes(int32_t id, SpecialTokens special) const {
  if (id < 0 || id >= vocab_size()) return "\xFF";
  const Token& token = tokens_[static_cast<size_t>(id)];
  if (token.special && special == SpecialTokens::hide) return {};
  return token.bytes;
}

Status BpeTokenizer::save(const std::string& directory) const {
  if (!config_.empty()) LOCKSTEP_RETURN_IF_ERROR(atomic_write(directory + "/" + kTokenizerConfigFile, config_));
  return atomic_write(directory + "/" + kBpeTokenizerFile, text_);
}

}  // namespace lockstep
