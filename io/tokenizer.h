#pragma once
// Text to token ids and back. A tokenizer never changes after it is made, so threads may share one.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

// Whether decoding shows the tokens that a vocabulary marks as special: begin, end, padding, placeholders.
enum class SpecialTokens : uint8_t { hide, show };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // The ids of `text` alone: no begin or end token is added. An error names what cannot be encoded.
  virtual Result<std::vector<int32_t>> encode(std::string_view text) const = 0;
  // What one token adds to a text; a character's bytes may be spread over tokens. An id outside the vocabulary gives a byte that is
  // no UTF-8. Lives as long as the tokenizer.
  virtual std::string_view token_bytes(int32_t id, SpecialTokens special = SpecialTokens::hide) const = 0;
  // Total: ids outside the vocabulary and broken UTF-8 give U+FFFD.
  std::string decode(std::span<const int32_t> ids, SpecialTokens special = SpecialTokens::hide) const;
  virtual int32_t vocab_size() const = 0;
  // -1: the tokenizer's files name none.
  virtual int32_t bos_id() const = 0;
  virtual int32_t eos_id() const = 0;
  // Writes what load_tokenizer needs into `directory`, so that a checkpoint carries its tokenizer.
  virtual Status save(const std::string& directory) const = 0;
};

// decode() as the ids come: bytes of a character that is not complete are held back. The texts of all calls joined are those of
// decode() over all ids.
class StreamDecoder {
 public:
  // `tokenizer` must outlive this.
  explicit StreamDecoder(const Tokenizer& tokenizer, SpecialTokens special = SpecialTokens::hide)
      : tokenizer_(tokenizer), special_(special) {}
  std::string push(int32_t id);
  std::string finish();  // U+FFFD for what is still held back

 private:
  const Tokenizer& tokenizer_;
  SpecialTokens special_;
  std::string held_;  // at most 3 bytes
};

// One token a byte: ids 0 begin, 1 end, 2 padding, then 3 + b for byte b (259 ids). With an alphabet only its characters
// have ids, 3 + their place in it, which keeps the vocabulary of a tiny task tiny.
class ByteTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kBos = 0, kEos = 1, kPadding = 2, kFirstByte = 3;

  ByteTokenizer();
  explicit ByteTokenizer(std::string alphabet);  // CHECKs what check_alphabet() says

  // An alphabet is ASCII, not empty, and has no character twice.
  static Status check_alphabet(std::string_view alphabet);

  Result<std::vector<int32_t>> encode(std::string_view text) const override;
  std::string_view token_bytes(int32_t id, SpecialTokens special = SpecialTokens::hide) const override;
  int32_t vocab_size() const override { return kFirstByte + static_cast<int32_t>(bytes_.size()); }
  int32_t bos_id() const override { return kBos; }
  int32_t eos_id() const override { return kEos; }
  Status save(const std::string& directory) const override;

 private:
  bool whole_byte_range() const { return bytes_.size() == 256; }

  std::string bytes_;             // byte of id 3 + i
  std::array<int32_t, 256> ids_;  // of each byte, -1 for none
};

// The files in a checkpoint directory that describe a tokenizer. The first is ours:
//   {"type":"byte","vocab_size":259}   or   {"type":"byte","alphabet":"0123456789+=","vocab_size":15}
// the second is that of released models (io/bpe_tokenizer.h).
inline constexpr const char* kTokenizerFile = "tokenizer_lockstep.json";
inline constexpr const char* kBpeTokenizerFile = "tokenizer.json";

bool has_tokenizer(const std::string& directory);

// From a file of either kind, which its contents tell, or from a directory that holds one.
Result<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& path);

}  // namespace lockstep
