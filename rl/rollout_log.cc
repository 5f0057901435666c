#include "rl/rollout_log.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include <xxhash.h>

#include "io/checked_line.h"

namespace lockstep {

namespace {

uint64_t sampling_sum(const SamplingOptions& s) {
  std::string text = fmt::format("{:08x} {:08x} {:08x} {} {} {}", std::bit_cast<uint32_t>(s.temperature), std::bit_cast<uint32_t>(s.top_p),
                                 std::bit_cast<uint32_t>(s.min_p), s.top_k, s.max_new_tokens, s.min_new_tokens);
  for (const int32_t id : s.stop_ids) text += fmt::format(" {}", id);
  return XXH64(text.data(), text.size(), 0);
}

uint64_t request_key(int64_t step, uint64_t weights, const Request& r) {
  std::string text = fmt::format("{} {:016x} {} {} {:016x}", step, weights, r.seed, r.prompt_id, sampling_sum(r.sampling));
  if (r.record != ReplayKind::none) text += fmt::format(" {}", static_cast<int>(r.record));  // a line without choices is of no use then
  return XXH64(r.prompt.data(), r.prompt.size() * sizeof(int32_t), XXH64(text.data(), text.size(), 0));
}

// Numbers one behind the other, as many digits each.
template <typename T>
std::string hex_of(const std::vector<T>& numbers) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * sizeof(T) * numbers.size());
  for (const T n : numbers)
    for (int shift = 8 * static_cast<int>(sizeof(T)) - 4; shift >= 0; shift -= 4) text += kDigits[static_cast<uint32_t>(n) >> shift & 15];
  return text;
}

template <typename T>
bool read_hex(const JsonValue& object, const char* name, std::vector<T>* out) {
  const JsonValue* v = object.find(name);
  if (v == nullptr) return true;
  constexpr size_t kDigits = 2 * sizeof(T);
  if (!v->is(JsonValue::Kind::string) || v->text.size() % kDigits != 0) return false;
  for (size_t at = 0; at < v->text.size(); at += kDigits) {
    uint32_t n = 0;
    const char *from = v->text.data() + at, *to = from + kDigits;
    if (const auto [end, error] = std::from_chars(from, to, n, 16); error != std::errc() || end != to) return false;
    out->push_back(static_cast<T>(n));
  }
  return true;
}

JsonLine completion_line(uint64_t key, const Completion& c) {
  std::vector<int32_t> bits;
  bits.reserve(c.logprobs.size());
  for (const float l : c.logprobs) bits.push_back(std::bit_cast<int32_t>(l));
  JsonLine line;
  line.add("key", hex_digits(key))
      .add("prompt_id", c.prompt_id)
      .add("sample_idx", c.sample_idx)
      .add("reason", finish_reason_name(c.reason))
      .add("tokens", std::span<const int32_t>(c.tokens))
      .add("logprob_bits", std::span<const int32_t>(bits))
      .add("versions", std::span<const int32_t>(c.versions));
  if (!c.choices.experts.empty()) line.add("experts", hex_of(c.choices.experts));
  if (!c.choices.entries.empty()) line.add("entries", hex_of(c.choices.entries));
  return line;
}

bool read_number(const JsonValue& object, const char* name, int64_t* out) {
  const JsonValue* v = object.find(name);
  return v != nullptr && v->as_int64(out);
}

bool read_numbers(const JsonValue& object, const char* name, std::vector<int32_t>* out) {
  const JsonValue* v = object.find(name);
  if (v == nullptr || !v->is(JsonValue::Kind::array)) return false;
  for (const JsonValue& item : v->items) {
    int64_t n = 0;
    if (!item.as_int64(&n) || n != static_cast<int32_t>(n)) return false;
    out->push_back(static_cast<int32_t>(n));
  }
  return true;
}

// A completion and its key, from a line whose sum was right; nothing for any line that append() does not write.
std::optional<std::pair<Completion, std::string>> parse_completion(const JsonValue& line) {
  Completion c;
  int64_t prompt_id = 0, sample_idx = 0;
  std::vector<int32_t> bits;
  const JsonValue *key = line.find("key"), *reason = line.find("reason");
  if (key == nullptr || reason == nullptr || !read_number(line, "prompt_id", &prompt_id) || !read_number(line, "sample_idx", &sample_idx) ||
      !read_numbers(line, "tokens", &c.tokens) || !read_numbers(line, "logprob_bits", &bits) || !read_numbers(line, "versions", &c.versions) ||
      !read_hex(line, "experts", &c.choices.experts) || !read_hex(line, "entries", &c.choices.entries) ||
      c.tokens.empty() || bits.size() != c.tokens.size() || c.versions.size() != c.tokens.size())
    return std::nullopt;
  c.prompt_id = static_cast<uint64_t>(prompt_id);
  c.sample_idx = static_cast<int32_t>(sample_idx);
  for (const int32_t b : bits) c.logprobs.push_back(std::bit_cast<float>(b));
  if (reason->text == finish_reason_name(FinishReason::stop)) {
    c.reason = FinishReason::stop;
  } else if (reason->text == finish_reason_name(FinishReason::length)) {
    c.reason = FinishReason::length;
  } else if (reason->text == finish_reason_name(FinishReason::abort)) {
    c.reason = FinishReason::abort;
  } else {
    return std::nullopt;
  }
  return std::pair(std::move(c), key->text);
}

// By prompt id and sample index, the first of each.
void keep_one_each(std::vector<Completion>& completions) {
  std::stable_sort(completions.begin(), completions.end(), by_prompt_and_sample);
  completions.erase(std::unique(completions.begin(), completions.end(), [](const Completion& a, const Completion& b) { return place_of(a) == place_of(b); }),
                    completions.end());
}

}  // namespace

RolloutLog::RolloutLog(std::string directory, int64_t step, uint64_t weights, std::span<const Request> requests, int rank)
    : directory_(std::move(directory)), path_(fmt::format("{}/rank_{}.jsonl", directory_, rank)) {
  for (const Request& r : requests) {
    const Wanted wanted = {request_key(step, weights, r), r.first_sample, r.num_samples};
    CHECK(requests_.emplace(r.prompt_id, wanted).second, "two requests for prompt {}", r.prompt_id);
  }
  JsonLine header;
  header.add("step", step).add("seed", requests.empty() ? 0 : requests.front().seed).add("weights", hex_digits(weights));
  if (!requests.empty()) header.add("sampling", hex_digits(sampling_sum(requests.front().sampling)));
  header_ = checked_line(header) + "\n";
}

Result<LoggedRollout> RolloutLog::read() const {
  LoggedRollout found;
  std::vector<std::string> paths;
  std::error_code error;
  std::filesystem::directory_iterator it(directory_, error);
  if (error == std::errc::no_such_file_or_directory) return found;
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) paths.push_back(it->path().string());
  if (error) return errorf("cannot list {}: {}", directory_, error.message());
  std::sort(paths.begin(), paths.end());

  for (const std::string& path : paths) {
    Result<std::string> text = read_file(path);
    if (!text) return text.status();
    take(text.value(), false, found);
  }
  keep_one_each(found.completions);
  return found;
}

LoggedRollout RolloutLog::read_text(std::string_view text, bool unfinished) const {
  LoggedRollout found;
  take(text, unfinished, found);
  keep_one_each(found.completions);
  return found;
}

void RolloutLog::take(std::string_view text, bool unfinished, LoggedRollout& found) const {
  for_each_checked_line(text, [&](const JsonValue* object) {
    if (object != nullptr && object->find("key") == nullptr) return;  // a header
    auto parsed = object != nullptr ? parse_completion(*object) : std::nullopt;
    if (!parsed || (parsed->first.reason == FinishReason::abort && !unfinished)) {
      ++found.damaged_lines;
      return;
    }
    Completion& c = parsed->first;
    const auto wanted = requests_.find(c.prompt_id);
    if (wanted == requests_.end() || parsed->second != hex_digits(wanted->second.key)) {
      ++found.foreign_lines;
      return;
    }
    const int64_t place = int64_t{c.sample_idx} - wanted->second.first_sample;
    if (place >= 0 && place < wanted->second.num_samples) found.completions.push_back(std::move(c));  // else there were more samples a prompt
  });
}

std::string RolloutLog::text(std::span<const Completion> finished, bool unfinished) const {
  std::string text;
  for (const Completion& c : finished) {
    if (c.reason == FinishReason::abort && (!unfinished || c.tokens.empty())) continue;
    const auto wanted = requests_.find(c.prompt_id);
    CHECK(wanted != requests_.end(), "prompt {} is not of this step", c.prompt_id);
    text += checked_line(completion_line(wanted->second.key, c)) + "\n";
  }
  return text;
}

Status RolloutLog::append(std::span<const Completion> finished) {
  std::string text = this->text(finished);
  if (text.empty()) return Status::ok();
  if (!file_.is_open()) {
    LOCKSTEP_RETURN_IF_ERROR(make_directories(directory_));
    file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
    if (!file_.is_open()) return errno_status("cannot open", path_, errno);
    text = "\n" + header_ + text;  // an earlier start's last line may have been cut off
  }
  return append_whole(file_.get(), text, path_);
}

std::vector<Request> missing_requests(std::span<const Request> requests, std::span<const Completion> have) {
  std::set<std::pair<uint64_t, int32_t>> there;
  for (const Completion& c : have) there.emplace(c.prompt_id, c.sample_idx);
  std::vector<Request> missing;
  for (const Request& r : requests) {
    bool open = false;  // the last request of `missing` ends just before this sample
    for (int32_t s = r.first_sample; s < r.first_sample + r.num_samples; ++s) {
      if (there.contains({r.prompt_id, s})) {
        open = false;
        continue;
      }
      if (!open) {
        missing.push_back(r);
        missing.back().first_sample = s;
        missing.back().num_samples = 0;
      }
      ++missing.back().num_samples;
      open = true;
    }
  }
  return missing;
}

}  // namespace lockstep
