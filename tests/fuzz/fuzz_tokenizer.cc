// Any bytes as a tokenizer.json: refused with a reason, or a tokenizer whose ids lie in its vocabulary and which streams as it decodes.
// And any bytes as a text for a small tokenizer, under either chain of patterns: refused if not UTF-8, else back to the same text.

#include <cstdint>

#include "io/bpe_tokenizer.h"
#include "io/utf8.h"

namespace {

using namespace lockstep;

void check_round_trip(const Tokenizer& t, std::string_view text, bool same) {
  const Result<std::vector<int32_t>> ids = t.encode(text);
  CHECK_EQ(ids.is_ok(), find_invalid_utf8(text) == std::string::npos);
  if (!ids) return;
  StreamDecoder stream(t, SpecialTokens::show);
  std::string streamed;
  for (const int32_t id : ids.value()) {
    CHECK(id >= 0 && id < t.vocab_size(), "{}", id);
    streamed += stream.push(id);
  }
  streamed += stream.finish();
  const std::string decoded = t.decode(ids.value(), SpecialTokens::show);
  CHECK_EQ(streamed, decoded);
  if (same) CHECK_EQ(decoded, text);
}

Result<std::unique_ptr<BpeTokenizer>> read(std::string_view text) {
  const Result<JsonValue> root = parse_json(text);
  if (!root) return root.status();
  if (!root.value().is(JsonValue::Kind::object)) return Status::error("fuzz: no object");
  return BpeTokenizer::make(root.value(), std::string(text), "fuzz", "", "config");
}

// The bytes, a few merges, an added token; the pre-tokenizer given.
std::unique_ptr<BpeTokenizer> small(std::string_view pre_tokenizer) {
  std::string vocab;
  int next = 256;
  for (int b = 0; b < 256; ++b) {
    const int code = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174 ? b : next++;
    append_json_string(&vocab, code < 0x80 ? std::string(1, static_cast<char>(code))
                                           : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))});
    vocab += fmt::format(":{},", b);
  }
  auto t = read(fmt::format(R"({{"added_tokens":[{{"id":260,"content":"<e>"}}],"pre_tokenizer":{},"decoder":{{"type":"ByteLevel"}},)"
                            R"("model":{{"type":"BPE","vocab":{{{}"aa":256,"ab":257,"aab":258,"Ġa":259}},"merges":["a a","a b","a ab","Ġ a"]}}}})",
                            pre_tokenizer, vocab));
  CHECK(t.is_ok(), "{}", t.message());
  return t.take();
}

constexpr const char* kDeepSeek =
    R"({"type":"Sequence","pretokenizers":[)"
    R"({"type":"Split","pattern":{"Regex":"\\p{N}{1,3}"},"behavior":"Isolated","invert":false},)"
    R"({"type":"Split","pattern":{"Regex":"[一-龥぀-ゟ゠-ヿ]+"},"behavior":"Isolated","invert":false},)"
    R"({"type":"Split","pattern":{"Regex":"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"},"behavior":"Isolated","invert":false},)"
    R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<BpeTokenizer> tokenizers[] = {small(R"({"type":"ByteLevel"})"), small(kDeepSeek)};
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto& t : tokenizers) check_round_trip(*t, text, true);

  const Result<std::unique_ptr<BpeTokenizer>> r = read(text);
  if (!r) {
    CHECK(!r.message().empty() && r.message().size() < size + 2000, "{}", r.message());
    return 0;
  }
  for (const std::string_view sample : {std::string_view("Hello aab 12345 漢字カナ!\r\n\n  it's\te\u0301 \U0001F600<e>"), text.substr(0, 4096)})
    check_round_trip(*r.value(), sample, false);
  return 0;
}
