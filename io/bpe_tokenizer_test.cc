// Against Hugging Face tokenizers: tests/data/tokenizer.

#include "io/bpe_tokenizer.h"

#include <map>
#include <thread>

#include "io/testing.h"
#include "io/utf8.h"

namespace lockstep {
namespace {

using testing::fails_with;
using testing::get;
using testing::put;
using testing::succeeds;
using testing::TemporaryDirectory;

const std::string kUnpacked = LOCKSTEP_TOKENIZERS;
const std::string kData = LOCKSTEP_SOURCE_DIR "/tests/data/tokenizer";

const Tokenizer& released(const std::string& path) {
  static std::map<std::string, std::unique_ptr<Tokenizer>> loaded;
  std::unique_ptr<Tokenizer>& t = loaded[path];
  if (!t) {
    Result<std::unique_ptr<Tokenizer>> r = load_tokenizer(path);
    CHECK(r.is_ok(), "{}", r.message());
    t = r.take();
  }
  return *t;
}
const Tokenizer& v4() { return released(kUnpacked); }
const Tokenizer& gpt2() { return released(kUnpacked + "/gpt2/tokenizer.json"); }

std::vector<JsonValue> rows_of(const std::string& path) {
  std::vector<JsonValue> rows;
  const std::string text = get(path);
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = rest.find('\n');
    Result<JsonValue> row = parse_json(rest.substr(0, end));
    CHECK(row.is_ok(), "{}: {}", path, row.message());
    rows.push_back(row.take());
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  return rows;
}

std::vector<int32_t> ids_of(const JsonValue& row) {
  std::vector<int32_t> ids;
  for (const JsonValue& v : row.find("ids")->items) ids.push_back(std::stoi(v.text));
  return ids;
}

std::string decode_in_steps(const Tokenizer& t, std::span<const int32_t> ids, SpecialTokens special) {
  StreamDecoder stream(t, special);
  std::string text;
  for (const int32_t id : ids) {
    text += stream.push(id);
    EXPECT_EQ(text.find("\uFFFD"), replace_invalid_utf8(text).find("\uFFFD"));  // never half a character
  }
  return text + stream.finish();
}

void expect_cases(const Tokenizer& t, const std::string& path, size_t count) {
  const std::vector<JsonValue> rows = rows_of(path);
  EXPECT_EQ(rows.size(), count);
  for (const JsonValue& row : rows) {
    const std::string& text = row.find("text")->text;
    Result<std::vector<int32_t>> ids = t.encode(text);
    ASSERT_TRUE(succeeds(ids));
    EXPECT_EQ(ids.value(), ids_of(row)) << row.find("group")->text << ": " << in_quotes(text, 200);
    EXPECT_EQ(t.decode(ids.value(), SpecialTokens::show), text);
    EXPECT_EQ(decode_in_steps(t, ids.value(), SpecialTokens::show), text);
  }
}

TEST(BpeTokenizer, CasesOfV4) { expect_cases(v4(), kData + "/cases.jsonl", 200); }
TEST(BpeTokenizer, LongCasesOfV4) { expect_cases(v4(), kUnpacked + "/long_cases.jsonl", 6); }
TEST(BpeTokenizer, CasesOfGpt2) { expect_cases(gpt2(), kData + "/gpt2_cases.jsonl", 193); }

TEST(BpeTokenizer, CasesWithCompetitionProblems) {  // which are not kept here: all of the files they stand in
  const std::string shared = LOCKSTEP_SOURCE_DIR "/../shared/data/tokenizer";
  if (!std::filesystem::exists(shared)) GTEST_SKIP() << shared << " is not there";
  expect_cases(v4(), shared + "/cases.jsonl", 202);
  expect_cases(gpt2(), shared + "/gpt2/cases.jsonl", 196);
}

TEST(BpeTokenizer, DecodeCases) {
  const std::vector<JsonValue> rows = rows_of(kData + "/decode_cases.jsonl");
  EXPECT_EQ(rows.size(), 70u);
  for (const JsonValue& row : rows) {
    const std::vector<int32_t> ids = ids_of(row);
    for (const auto& [key, special] : {std::pair("text", SpecialTokens::show), std::pair("text_skip_special", SpecialTokens::hide)}) {
      EXPECT_EQ(v4().decode(ids, special), row.find(key)->text) << row.find("group")->text;
      EXPECT_EQ(decode_in_steps(v4(), ids, special), row.find(key)->text) << row.find("group")->text;
    }
  }
}

TEST(BpeTokenizer, WhatTheFilesSay) {
  EXPECT_EQ(v4().vocab_size(), 129280);
  EXPECT_EQ(v4().bos_id(), 0);
  EXPECT_EQ(v4().eos_id(), 1);
  EXPECT_EQ(gpt2().vocab_size(), 50257);
  EXPECT_EQ(gpt2().bos_id(), 50256);
  EXPECT_TRUE(fails_with(v4().encode("ab\xFF"), "byte 0xff at offset 2"));
  const int32_t outside[] = {33310, -1, 129280};
  EXPECT_EQ(v4().decode(outside), "hello\uFFFD\uFFFD");
}

TEST(BpeTokenizer, StreamHoldsBackWhatIsCut) {
  const std::vector<int32_t> ids = v4().encode("\U0001F9FF").value();  // no token of its own
  ASSERT_GT(ids.size(), 1u);
  StreamDecoder stream(v4());
  for (size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(stream.push(ids[i]), "");
  EXPECT_EQ(stream.push(ids.back()), "\U0001F9FF");
  EXPECT_EQ(stream.push(ids[0]), "");
  EXPECT_EQ(stream.push(33310), "\uFFFDhello");
  EXPECT_EQ(stream.push(ids[0]), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(BpeTokenizer, ThreadsShareOne) {
  const std::string text = get(LOCKSTEP_SOURCE_DIR "/io/bpe_tokenizer.cc");
  Result<std::unique_ptr<Tokenizer>> fresh = load_tokenizer(kUnpacked);
  ASSERT_TRUE(succeeds(fresh));
  std::vector<std::vector<int32_t>> ids(4);
  std::vector<std::thread> threads;
  for (auto& out : ids) threads.emplace_back([&] { out = fresh.value()->encode(text).value(); });
  for (std::thread& t : threads) t.join();
  for (const auto& out : ids) EXPECT_EQ(out, v4().encode(text).value());
}

TEST(BpeTokenizer, LongRunsNeedNoStack) {
  // Recursion a character deep would not survive the stack of a thread; quadratic work would not end.
  for (const char* unit : {"a", " ", "\n ", "=-", "漢字", "1", "<", "\U0001F600", "<｜place▁holder▁no▁", "e\u0301"}) {
    std::string text;
    while (text.size() < 200'000) text += unit;
    Result<std::vector<int32_t>> ids = v4().encode(text);
    ASSERT_TRUE(succeeds(ids));
    EXPECT_EQ(v4().decode(ids.value(), SpecialTokens::show), text) << unit;
  }
}

TEST(BpeTokenizer, SavesWhatItWasReadFrom) {
  TemporaryDirectory d;
  ASSERT_TRUE(succeeds(v4().save(d.path())));
  for (const char* name : {kBpeTokenizerFile, kTokenizerConfigFile}) EXPECT_EQ(get(d.file(name)), get(kUnpacked + "/" + name));
  EXPECT_TRUE(has_tokenizer(d.path()));
  Result<std::unique_ptr<Tokenizer>> again = load_tokenizer(d.path());
  ASSERT_TRUE(succeeds(again));
  EXPECT_EQ(again.value()->encode("Hello world").value(), (std::vector<int32_t>{19923, 2058}));
}

// A small file: the bytes, spelled in the byte alphabet, "ab", and one added token.
std::string spelled(int b) {
  static const std::vector<std::string> spelling = [] {
    std::vector<std::string> s;
    int next = 256;
    for (int c = 0; c < 256; ++c) {
      const int code = (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || c >= 174 ? c : next++;
      s.push_back(code < 0x80 ? std::string(1, static_cast<char>(code))
                              : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))});
    }
    return s;
  }();
  return spelling[static_cast<size_t>(b)];
}
std::string small_file() {
  std::string vocab;
  for (int b = 0; b < 256; ++b) {
    append_json_string(&vocab, spelled(b));
    vocab += fmt::format(":{},", b);
  }
  return R"({"added_tokens":[{"id":257,"content":"<end>","special":true}],"normalizer":null,)"
         R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},"decoder":{"type":"ByteLevel"},)"
         R"("model":{"type":"BPE","dropout":null,"vocab":{)" +
         vocab + R"("ab":256},"merges":["a b"]}})";
}

TEST(BpeTokenizer, SmallFile) {
  TemporaryDirectory d;
  const std::string file = d.file("tokenizer.json");
  put(file, small_file());
  Result<std::unique_ptr<Tokenizer>> t = load_tokenizer(d.path());
  ASSERT_TRUE(succeeds(t));
  EXPECT_EQ(t.value()->encode("abc<end>").value(), (std::vector<int32_t>{256, 'c', 257}));
  EXPECT_EQ(t.value()->bos_id(), -1);
  put(d.file(kTokenizerConfigFile), R"({"bos_token":null,"eos_token":{"content":"<end>"}})");
  EXPECT_EQ(load_tokenizer(file).value()->eos_id(), 257);
  put(d.file(kTokenizerConfigFile), R"({"eos_token":"<stop>"})");
  EXPECT_TRUE(fails_with(load_tokenizer(file), d.file(kTokenizerConfigFile) + ": \"eos_token\" is \"<stop>\", which " + file + " does not have"));
  put(d.file(kTokenizerConfigFile), R"({"eos_token":5})");
  EXPECT_TRUE(fails_with(load_tokenizer(file), "\"eos_token\" is 5, a token's text is wanted"));
}

TEST(BpeTokenizer, BadFilesAreNamed) {
  TemporaryDirectory d;
  const std::string file = d.file("tokenizer.json");
  const auto refuses = [&](const std::string& from, const std::string& to, const std::string& part) {
    std::string text = small_file();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    put(file, text.replace(at, from.size(), to));
    EXPECT_TRUE(fails_with(load_tokenizer(file), file + ": " + part)) << to;
  };
  refuses(R"("type":"BPE")", R"("type":"Unigram")", R"("model.type" is "Unigram", which is not supported; known is "BPE")");
  refuses(R"("dropout":null)", R"("dropout":0.1)", R"("model.dropout" is 0.1)");
  refuses(R"("normalizer":null)", R"("normalizer":{"type":"NFC"})", R"("normalizer.type" is "NFC", which is not supported)");
  refuses(R"("normalizer":null)", R"("normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"}]})", R"("normalizer.type" is "NFC")");
  refuses(R"("normalizer":null)", R"("truncation":{"max_length":8})", R"("truncation" is an object, null)");
  refuses(R"("normalizer":null)", R"("post_processor":{"type":"TemplateProcessing"})", R"("post_processor.type" is "TemplateProcessing")");
  refuses(R"("add_prefix_space":false)", R"("add_prefix_space":true)", R"("pre_tokenizer.add_prefix_space" is true)");
  refuses(R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":true})", R"({"type":"Whitespace"})", R"("pre_tokenizer.type" is "Whitespace")");
  refuses(R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":true})",
          R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\d+"},"behavior":"Isolated"},{"type":"ByteLevel"}]})",
          R"("pre_tokenizer.pretokenizers[0].pattern.Regex" is "\d+", which is not supported; known are)");
  refuses(R"("decoder":{"type":"ByteLevel"})", R"("decoder":null)", R"("decoder.type" is missing, "ByteLevel" is wanted; take the)");
  refuses(R"("special":true)", R"("lstrip":true)", R"("added_tokens[0].lstrip" is true)");
  refuses(R"("content":"<end>")", R"("content":"")", R"("added_tokens[0].content" is "", a string that is not empty)");
  refuses(R"("content":"<end>")", R"("content":"ab")", R"(added_tokens[0] "ab" has the id 257, in model.vocab it has 256)");
  refuses(R"("id":257)", R"("id":256)", R"("<end>" has the id 256, which another token has too)");
  refuses(R"("id":257)", R"("id":258)", R"("<end>" has the id 258, which leaves a gap below it)");
  refuses(R"("id":257)", R"("id":-1)", "added_tokens[0].id is -1, an id from 0 to");
  refuses(R"("ab":256)", R"("ab":1.5)", R"(model.vocab["ab"] is 1.5, an id from 0 to)");
  refuses(R"("ab":256)", R"("ac":256)", R"(model.merges[0] needs the token "ab", which is not in model.vocab)");
  refuses(R"("ab":256)", R"("ab":256,"":258)", "model.vocab has a token without text");
  refuses(R"("a b")", R"("a b","a b")", R"(model.merges[1] repeats an earlier one, "a" "b")");
  refuses(R"("a b")", R"("ab")", R"("model.merges[0]" is "ab", "LEFT RIGHT" or two strings is wanted)");
  refuses(R"("!":33,)", R"("!!":33,)", R"(model.vocab has no token for the byte 0x21)");
  refuses(R"({"added)", R"({"added_tokens":[],"added)", "invalid JSON, line 1, column");
  put(file, small_file().substr(0, 2000));
  EXPECT_TRUE(fails_with(load_tokenizer(file), file + ": invalid JSON, line 1, column"));
  std::string pairs = small_file();
  pairs.replace(pairs.find(R"("a b")"), 5, R"(["a","b"])");
  put(file, pairs);
  EXPECT_TRUE(succeeds(load_tokenizer(file)));
}

}  // namespace
}  // namespace lockstep
