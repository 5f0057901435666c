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

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // The ids of `text` alone: no begin or end token is added. An error names what cannot be encoded.
  virtual Result<std::vector<int32_t>> encode(std::string_view text) const = 0;
  // Total: begin, end and padding give no text, ids outside the vocabulary and broken UTF-8 give U+FFFD.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  virtual int32_t vocab_size() const = 0;
  virtual int32_t bos_id() const = 0;
  virtual int32_t eos_id() const = 0;
  // Writes what load_tokenizer needs into `directory`, so that a checkpoint carries its tokenizer.
  virtual Status save(const std::string& directory) const = 0;
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
  std::string decode(std::span<const int32_t> ids) const override;
  int32_t vocab_size() const override { return kFirstByte + static_cast<int32_t>(bytes_.size()); }
  int32_t bos_id() const override { return kBos; }
  int32_t eos_id() const override { return kEos; }
  Status save(const std::string& directory) const override;

 private:
  bool whole_byte_range() const { return bytes_.size() == 256; }

  std::string bytes_;             // byte of id 3 + i
  std::array<int32_t, 256> ids_;  // of each byte, -1 for none
};

// The file in a checkpoint directory that describes a tokenizer:
//   {"type":"byte","vocab_size":259}   or   {"type":"byte","alphabet":"0123456789+=","vocab_size":15}
inline constexpr const char* kTokenizerFile = "tokenizer_lockstep.json";

// From that file, or from the directory that holds it.
Result<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& path);

}  // namespace lockstep
