#include "rl/eval_completions.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

const JsonValue* find_any(const JsonValue& object, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names)
    if (const JsonValue* v = object.find(name); v != nullptr && !v->is(Kind::null)) return v;
  return nullptr;
}

void read_end(const JsonValue& object, EvalSample* s) {
  if (const JsonValue* end = find_any(object, {"status", "finish_reason"}); end != nullptr && end->is(Kind::string) && end->text != "unknown")
    s->status = end->text == "length" || end->text == "truncated" ? AnswerStatus::truncated : AnswerStatus::completed;
  if (const JsonValue* n = object.find("num_tokens"); n != nullptr && (!n->as_int64(&s->num_tokens) || s->num_tokens < 0)) s->num_tokens = -1;
}

class Reader {
 public:
  Reader(std::span<const Prompt> problems) : problems_(problems), next_(problems.size(), 0) {
    for (size_t i = 0; i < problems.size(); ++i) {
      by_row_.emplace(problems[i].row, i);
      if (problems[i].row_id.empty()) continue;
      has_ids_ = true;
      if (!by_id_.emplace(problems[i].row_id, i).second) ambiguous_.insert(problems[i].row_id);
    }
  }

  Status read_row(const JsonValue& row) {
    const auto place = static_cast<int64_t>(num_rows_++);
    if (row.is(Kind::string) || row.is(Kind::array)) {
      const Result<int64_t> problem = by_place(place);
      return problem ? read_responses(problem.value(), row, nullptr) : problem.status();
    }
    if (!row.is(Kind::object)) return errorf("the row is {}, an object is wanted", json_kind_name(row.kind));
    const JsonValue* response = find_any(row, {"response", "responses", "completion", "completions", "output", "outputs", "text", "generation",
                                               "generated_text", "answer_text", "choices"});
    if (response != nullptr && response->is(Kind::object)) {  // of a batch
      const JsonValue* body = response->find("body");
      response = body == nullptr ? response->find("choices") : body->find("choices");
    }
    if (response == nullptr) return Status::error("there is no \"response\"");
    Result<int64_t> problem = find_problem(row, place);
    if (!problem) return problem.status();
    return read_responses(problem.value(), *response, &row);
  }

  Status read_entry(const std::string& id, const JsonValue& responses) {
    Result<int64_t> problem = by_name(id);
    return problem ? read_responses(problem.value(), responses, nullptr) : problem.status();
  }

  Result<std::vector<EvalSample>> finish() {
    std::vector<std::string> without;
    for (size_t i = 0; i < problems_.size(); ++i)
      if (next_[i] == 0) without.push_back(problems_[i].row_id.empty() ? fmt::format("row {}", problems_[i].row) : problems_[i].row_id);
    if (!without.empty()) {
      std::string list;
      for (size_t i = 0; i < without.size() && i < 20; ++i) list += (i > 0 ? ", " : "") + without[i];
      return errorf("{} of {} problems have no answer: {}{}", without.size(), problems_.size(), list, without.size() > 20 ? ", ..." : "");
    }
    std::sort(samples_.begin(), samples_.end(), by_problem_and_sample);
    return std::move(samples_);
  }

 private:
  Result<int64_t> by_place(int64_t row) const {
    const auto at = by_row_.find(row);
    if (at == by_row_.end()) return errorf("there is no problem {}; they are counted from 0 to {}", row, problems_.back().row);
    return static_cast<int64_t>(at->second);
  }
  Result<int64_t> by_name(const std::string& id) const {
    if (ambiguous_.contains(id)) return errorf("several problems have the id {}", in_quotes(id));
    if (const auto at = by_id_.find(id); at != by_id_.end()) return static_cast<int64_t>(at->second);
    JsonValue number;
    number.kind = Kind::number;
    number.text = id;
    int64_t row = 0;
    if (!has_ids_ && number.as_int64(&row)) return by_place(row);
    return errorf("no problem has the id {}", in_quotes(id));
  }
  Result<int64_t> find_problem(const JsonValue& row, int64_t place) const {
    int64_t at = 0;
    for (const char* name : {"index", "row"}) {
      const JsonValue* v = row.find(name);
      if (v == nullptr) continue;
      if (!v->as_int64(&at)) return errorf("\"{}\" is {}, a place from 0 is wanted", name, v->is(Kind::number) ? v->text : json_kind_name(v->kind));
      return by_place(at);
    }
    if (const JsonValue* id = find_any(row, {"custom_id", "id"})) {
      if (!id->is(Kind::string) && !id->as_int64(&at)) return errorf("\"id\" is {}, a string or an integer is wanted", json_kind_name(id->kind));
      return by_name(id->text);
    }
    return by_place(place);
  }

  // A text, a choice of an OpenAI-compatible answer, or a list of either.
  Status read_responses(int64_t problem, const JsonValue& v, const JsonValue* row) {
    if (v.is(Kind::array)) {
      for (const JsonValue& item : v.items) LOCKSTEP_RETURN_IF_ERROR(read_one(problem, item, nullptr));
      return v.items.empty() ? Status::error("\"response\" is an empty list") : Status::ok();
    }
    return read_one(problem, v, row);
  }

  Status read_one(int64_t problem, const JsonValue& v, const JsonValue* row) {
    EvalSample s{.problem = problem, .response = {}};
    if (v.is(Kind::string)) {
      s.response = v.text;
    } else if (v.is(Kind::object)) {
      const JsonValue* message = v.find("message");
      const JsonValue& holder = message == nullptr ? v : *message;
      const JsonValue *content = find_any(holder, {"content", "text", "response"}), *reasoning = find_any(holder, {"reasoning_content", "reasoning"});
      if (reasoning != nullptr && reasoning->is(Kind::string)) s.response = reasoning->text + (content == nullptr ? "" : "</think>");
      if (content == nullptr && reasoning == nullptr) return Status::error("a choice has no content");
      if (content != nullptr && !content->is(Kind::string)) return errorf("a choice's content is {}, a string is wanted", json_kind_name(content->kind));
      if (content != nullptr) s.response += content->text;
      read_end(v, &s);
    } else {
      return errorf("\"response\" is {}, a string is wanted", json_kind_name(v.kind));
    }
    if (row != nullptr) read_end(*row, &s);
    int64_t& next = next_[static_cast<size_t>(problem)];
    s.sample = next;
    if (const JsonValue* number = row == nullptr ? nullptr : row->find("sample")) {
      if (!number->as_int64(&s.sample)) return errorf("\"sample\" is {}, an integer is wanted", json_kind_name(number->kind));
    }
    if (!seen_.emplace(problem, s.sample).second) return errorf("sample {} of problem {} stands twice", s.sample, problems_[static_cast<size_t>(problem)].row);
    ++next;
    samples_.push_back(std::move(s));
    return Status::ok();
  }

  std::span<const Prompt> problems_;
  std::vector<int64_t> next_;  // sample of each problem
  std::unordered_map<int64_t, size_t> by_row_;
  std::unordered_map<std::string, size_t> by_id_;
  std::set<std::string> ambiguous_;
  std::set<std::pair<int64_t, int64_t>> seen_;
  bool has_ids_ = false;
  size_t num_rows_ = 0;
  std::vector<EvalSample> samples_;
};

// A row of lines that `lockstep eval` writes, or any other object with members of a row.
bool is_row(const JsonValue& object) {
  for (const char* name : {"id", "index", "row", "custom_id", "response", "responses", "completion", "choices"})
    if (object.find(name) != nullptr) return true;
  return false;
}

}  // namespace

Result<std::vector<EvalSample>> parse_completions(std::string_view text, const std::string& path, std::span<const Prompt> problems) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  Reader reader(problems);
  const auto finish = [&]() -> Result<std::vector<EvalSample>> {
    Result<std::vector<EvalSample>> samples = reader.finish();
    if (!samples) return errorf("{}: {}", path, samples.message());
    return samples;
  };
  // A file of one value, over as many lines as it likes; a single line that is an object may be one row.
  if (const Result<JsonValue> whole = parse_json(text); whole && (whole.value().is(Kind::array) || (whole.value().is(Kind::object) && !is_row(whole.value())))) {
    const JsonValue& v = whole.value();
    const bool by_place = v.is(Kind::array);
    for (size_t i = 0; i < (by_place ? v.items.size() : v.members.size()); ++i) {
      const Status s = by_place ? reader.read_row(v.items[i]) : reader.read_entry(v.members[i].name, v.members[i].value);
      if (!s) return errorf("{}: {}: {}", path, by_place ? fmt::format("item {}", i) : in_quotes(v.members[i].name), s.message());
    }
    return finish();
  }
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Result<JsonValue> row = parse_json(line);
    const Status s = row ? reader.read_row(row.value()) : errorf("invalid JSON, {}", row.message());
    if (!s) return errorf("{}:{}: {}", path, number, s.message());
  }
  return finish();
}

}  // namespace lockstep
