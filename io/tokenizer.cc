#include "io/tokenizer.h"

#include <filesystem>
#include <utility>

#include "io/bpe_tokenizer.h"
#include "io/file.h"
#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

constexpr std::string_view kNoUtf8 = "\xFF";  // comes out as U+FFFD

}  // namespace

std::string Tokenizer::decode(std::span<const int32_t> ids, SpecialTokens special) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += token_bytes(id, special);
  return replace_invalid_utf8(bytes);
}

std::string StreamDecoder::push(int32_t id) {
  held_ += tokenizer_.token_bytes(id, special_);
  const size_t tail = incomplete_utf8_tail(held_);
  std::string text = replace_invalid_utf8(std::string_view(held_).substr(0, held_.size() - tail));
  held_.erase(0, held_.size() - tail);
  return text;
}

std::string StreamDecoder::finish() { return replace_invalid_utf8(std::exchange(held_, {})); }

ByteTokenizer::ByteTokenizer() {
  for (int b = 0; b < 256; ++b) {
    bytes_ += static_cast<char>(b);
    ids_[static_cast<size_t>(b)] = kFirstByte + b;
  }
}

ByteTokenizer::ByteTokenizer(std::string alphabet) : bytes_(std::move(alphabet)) {
  const Status valid = check_alphabet(bytes_);
  CHECK(valid.is_ok(), "{}", valid.message());
  ids_.fill(-1);
  for (size_t i = 0; i < bytes_.size(); ++i) ids_[static_cast<uint8_t>(bytes_[i])] = kFirstByte + static_cast<int32_t>(i);
}

Status ByteTokenizer::check_alphabet(std::string_view alphabet) {
  if (alphabet.empty()) return Status::error("the alphabet is empty");
  std::array<bool, 256> seen{};
  for (size_t i = 0; i < alphabet.size(); ++i) {
    const uint8_t b = static_cast<uint8_t>(alphabet[i]);
    if (b >= 0x80) return errorf("the alphabet has the byte 0x{:02x} at offset {}, only ASCII is allowed", b, i);
    if (seen[b]) return errorf("the alphabet has {} twice, again at offset {}", in_quotes(alphabet.substr(i, 1)), i);
    seen[b] = true;
  }
  return Status::ok();
}

Result<std::vector<int32_t>> ByteTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    ids[i] = ids_[static_cast<uint8_t>(text[i])];
    if (ids[i] < 0)
      return errorf("byte 0x{:02x} ({}) at offset {} of {} is not in the tokenizer's alphabet {}",
                    static_cast<uint8_t>(text[i]), in_quotes(text.substr(i, 1)), i, in_quotes(text), in_quotes(bytes_, 256));
  }
  return ids;
}

std::string_view ByteTokenizer::token_bytes(int32_t id, SpecialTokens) const {
  if (id < 0 || id >= vocab_size()) return kNoUtf8;
  if (id < kFirstByte) return {};
  return std::string_view(bytes_).substr(static_cast<size_t>(id - kFirstByte), 1);
}

Status ByteTokenizer::save(const std::string& directory) const {
  JsonLine line;
  line.add("type", "byte");
  if (!whole_byte_range()) line.add("alphabet", bytes_);
  line.add("vocab_size", vocab_size());
  return atomic_write(directory + "/" + kTokenizerFile, line.str() + "\n");
}

namespace {

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

Result<std::unique_ptr<Tokenizer>> read_byte_tokenizer(const JsonValue& root, const std::string& file) {
  for (const auto& [key, value] : root.members) {
    if (key != "type" && key != "alphabet" && key != "vocab_size")
      return errorf("{}: {} is not a known key; type, alphabet and vocab_size are", file, in_quotes(key));
  }
  const JsonValue* type = root.find("type");
  if (type == nullptr || type->text != "byte")
    return errorf("{}: \"type\" is {}, \"byte\" is wanted", file, type == nullptr ? "missing" : in_quotes(type->text));
  std::unique_ptr<Tokenizer> tokenizer;
  if (const JsonValue* alphabet = root.find("alphabet")) {
    if (!alphabet->is(JsonValue::Kind::string))
      return errorf("{}: \"alphabet\" is {}, a string is wanted", file, json_kind_name(alphabet->kind));
    if (Status s = ByteTokenizer::check_alphabet(alphabet->text); !s) return errorf("{}: {}", file, s.message());
    tokenizer = std::make_unique<ByteTokenizer>(alphabet->text);
  } else {
    tokenizer = std::make_unique<ByteTokenizer>();
  }
  if (const JsonValue* size = root.find("vocab_size")) {
    int64_t value = 0;
    if (!size->as_int64(&value) || value != tokenizer->vocab_size())
      return errorf("{}: \"vocab_size\" is {}, the alphabet gives {}", file,
                    size->is(JsonValue::Kind::number) ? size->text : json_kind_name(size->kind), tokenizer->vocab_size());
  }
  return tokenizer;
}

}  // namespace

bool has_tokenizer(const std::string& directory) {
  return exists(directory + "/" + kTokenizerFile) || exists(directory + "/" + kBpeTokenizerFile);
}

Result<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& path) {
  std::error_code error;
  std::string file = path;
  if (std::filesystem::is_directory(path, error)) {
    file = path + "/" + kTokenizerFile;
    if (!exists(file) && exists(path + "/" + kBpeTokenizerFile)) file = path + "/" + kBpeTokenizerFile;
  }
  Result<std::string> text = read_file(file);
  if (!text) return text.status();
  Result<JsonValue> parsed = parse_json(text.value());
  if (!parsed) return errorf("{}: invalid JSON, {}", file, parsed.message());
  const JsonValue& root = parsed.value();
  if (!root.is(JsonValue::Kind::object)) return errorf("{}: {}, an object is wanted", file, json_kind_name(root.kind));
  if (root.find("model") == nullptr) return read_byte_tokenizer(root, file);

  std::string config;
  const std::string config_file = parent_directory(file) + "/" + kTokenizerConfigFile;
  if (exists(config_file)) {
    Result<std::string> read = read_file(config_file);
    if (!read) return read.status();
    config = read.take();
  }
  Result<std::unique_ptr<BpeTokenizer>> tokenizer = BpeTokenizer::make(root, text.take(), file, std::move(config), config_file);
  if (!tokenizer) return tokenizer.status();
  return std::unique_ptr<Tokenizer>(tokenizer.take());
}

}  // namespace lockstep
