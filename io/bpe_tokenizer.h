#pragma once
// The byte-level BPE tokenizers of released models, as Hugging Face tokenizers writes them to tokenizer.json: DeepSeek-V4's and
// GPT-2's, and others that differ from them in vocabulary and merges alone. What would change ids and is not known here (another
// regular expression, a normalizer, added tokens that swallow spaces) is an error that names it, never passed over.

#include <memory>
#include <string>
#include <vector>

#include "io/bpe.h"
#include "io/json.h"
#include "io/pretokenize.h"
#include "io/tokenizer.h"

namespace lockstep {

// Beside tokenizer.json: names the begin and end tokens.
inline constexpr const char* kTokenizerConfigFile = "tokenizer_config.json";

// Finds strings of a set in text: at every place the longest one, from left to right. Steps: at most the longest string's bytes
// for each byte of text.
class StringSet {
 public:
  void add(std::string_view s, int32_t value);
  // The first place at or after `from` where a string of the set begins; npos if there is none.
  struct Hit {
    size_t begin, end;
    int32_t value;
  };
  Hit find(std::string_view text, size_t from) const;

 private:
  struct Node {
    int32_t value = -1;  // of the string that ends here
    std::vector<std::pair<char, int32_t>> children;
  };
  int32_t child(int32_t node, char c) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  bool begins_[256] = {};  // bytes that a string begins with
};

class BpeTokenizer : public Tokenizer {
 public:
  // `root` is the parsed `text` of tokenizer.json. `config` is the text of tokenizer_config.json, empty if there is none: begin and
  // end are then the tokens that DeepSeek or GPT-2 call so. The file names are for messages. Both texts are kept, for save().
  static Result<std::unique_ptr<BpeTokenizer>> make(const JsonValue& root, std::string text, const std::string& file,
                                                    std::string config, const std::string& config_file);

  // An error for text that is not UTF-8. Added tokens are found wherever they stand and never cut.
  Result<std::vector<int32_t>> encode(std::string_view text) const override;
  std::string_view token_bytes(int32_t id, SpecialTokens special = SpecialTokens::hide) const override;
  int32_t vocab_size() const override { return static_cast<int32_t>(tokens_.size()); }
  int32_t bos_id() const override { return bos_id_; }
  int32_t eos_id() const override { return eos_id_; }
  Status save(const std::string& directory) const override;

 private:
  BpeTokenizer() = default;
  void encode_plain(std::string_view text, std::vector<std::string_view>* pieces, std::vector<int32_t>* ids) const;

  struct Token {
    std::string bytes;
    bool special = false;
  };
  std::vector<Token> tokens_;  // by id
  // Added tokens, in two passes over the text: those to be found before normalisation, then the others in what is left.
  StringSet added_[2];
  std::vector<SplitPattern> patterns_;
  std::unique_ptr<Bpe> bpe_;
  int32_t bos_id_ = -1, eos_id_ = -1;
  std::string text_, config_;
};

}  // namespace lockstep
