// Throughput of a tokenizer on one core: tokenizer_bench TOKENIZER FILE.jsonl, rows with "text". Every row is encoded three times; the
// fastest round counts. One JSON line.

#include <chrono>
#include <cstdio>

#include "io/file.h"
#include "io/json.h"
#include "io/tokenizer.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  if (argc != 3) {
    std::fprintf(stderr, "usage: tokenizer_bench TOKENIZER FILE.jsonl\n");
    return 2;
  }
  const Clock::time_point start = Clock::now();
  Result<std::unique_ptr<Tokenizer>> tokenizer = load_tokenizer(argv[1]);
  const double load_s = seconds_since(start);
  Result<std::string> file = read_file(argv[2]);
  for (const Status& s : {tokenizer.status(), file.status()}) {
    if (!s) {
      std::fprintf(stderr, "tokenizer_bench: %s\n", s.message().c_str());
      return 2;
    }
  }
  std::vector<std::string> texts;
  size_t bytes = 0, ids = 0;
  for (std::string_view rest = file.value(); !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size() - 1);
    const Result<JsonValue> row = parse_json(rest.substr(0, end));
    rest.remove_prefix(end + 1);
    const JsonValue* text = row ? row.value().find("text") : nullptr;
    if (text == nullptr) continue;
    texts.push_back(text->text);
    bytes += text->text.size();
  }
  double best_s = 1e30;
  for (int round = 0; round < 3; ++round) {
    const Clock::time_point begin = Clock::now();
    ids = 0;
    for (const std::string& t : texts) ids += tokenizer.value()->encode(t).value().size();
    best_s = std::min(best_s, seconds_since(begin));
  }
  std::printf("%s\n", JsonLine()
                          .add("texts", texts.size())
                          .add("bytes", bytes)
                          .add("ids", ids)
                          .add("load_s", static_cast<float>(load_s))
                          .add("encode_s", static_cast<float>(best_s))
                          .add("mb_per_s", static_cast<float>(static_cast<double>(bytes) / best_s / 1e6))
                          .str()
                          .c_str());
  return 0;
}
