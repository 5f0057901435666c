#include "serve/weights.h"

#include <algorithm>
#include <bit>
#include <vector>

#include <httplib.h>
#include <xxhash.h>

#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

constexpr const char* kPath = "/weights_checksums";
constexpr time_t kDeadlineS = 600;  // for a large model's checksums

// f32 numbers of a tensor, in c.host, whose scope the caller holds.
TensorView box_numbers(Context& c, const TensorSpec& spec) {
  return c.host->tensor(DType::f32, {spec.box.rows.size(), spec.box.columns.size()}, "numbers");
}

std::string xxh64_text(const void* data, size_t bytes) { return fmt::format("{:016x}", XXH64(data, bytes, 0)); }
std::string xxh64_text(const TensorView& numbers) { return xxh64_text(numbers.data, numbers.bytes()); }
std::vector<std::string> row_checksums(const TensorView& numbers) {
  std::vector<std::string> rows;
  for (int64_t r = 0; r < numbers.rows(); ++r) rows.push_back(xxh64_text(numbers.row<float>(r), static_cast<size_t>(numbers.dim(1)) * sizeof(float)));
  return rows;
}

class Client {
 public:
  explicit Client(const WeightsServer& server) : url_(server.url), client_(server.url) {
    client_.set_read_timeout(kDeadlineS, 0);
    if (!server.key.empty()) client_.set_bearer_token_auth(server.key);
  }
  Result<JsonValue> get(const std::string& query) {
    if (!client_.is_valid()) return errorf("{} is no address of a server; http://HOST:PORT is wanted", in_quotes(url_));
    const httplib::Result answer = client_.Get(kPath + query);
    if (!answer) return errorf("{}{}: {}", url_, kPath, httplib::to_string(answer.error()));
    if (answer->status != 200) return errorf("{}{}: status {}: {}", url_, kPath, answer->status, in_quotes(answer->body.substr(0, 300)));
    Result<JsonValue> json = parse_json(answer->body);
    if (!json) return errorf("{}{}: its answer is no JSON: {}", url_, kPath, json.message());
    return json;
  }
  Status strange(const char* what) const { return errorf("{}{}: its answer has {}; is it a lockstep of this version?", url_, kPath, what); }

 private:
  const std::string url_;
  httplib::Client client_;
};

const JsonValue* list(const JsonValue& v, const char* name, int64_t size) {
  const JsonValue* found = v.find(name);
  return found != nullptr && found->is(Kind::array) && static_cast<int64_t>(found->items.size()) == size ? found : nullptr;
}
std::string text(const JsonValue& v, const char* name) {
  const JsonValue* found = v.find(name);
  return found == nullptr ? "" : found->text;
}

// The first number of a tensor that differs: its row by the rows' checksums, then that row.
Result<std::optional<WeightDifference>> find_difference(Client& client, const TensorSpec& spec, const TensorView& exported) {
  const std::vector<std::string> own = row_checksums(exported);
  const Result<JsonValue> rows = client.get(fmt::format("?id={}", spec.id));
  if (!rows) return rows.status();
  const JsonValue* theirs = list(rows.value(), "rows", exported.rows());
  if (theirs == nullptr) return client.strange("other rows");
  for (int64_t r = 0; r < exported.rows(); ++r) {
    if (theirs->items[static_cast<size_t>(r)].text == own[static_cast<size_t>(r)]) continue;
    const Result<JsonValue> row = client.get(fmt::format("?id={}&row={}", spec.id, r));
    if (!row) return row.status();
    const JsonValue* bits = list(row.value(), "bits", exported.dim(1));
    if (bits == nullptr) return client.strange("other columns");
    std::vector<float> served;
    for (const JsonValue& b : bits->items) {
      int64_t word = 0;
      if (!b.as_int64(&word)) return client.strange("no bits");
      served.push_back(std::bit_cast<float>(static_cast<int32_t>(word)));
    }
    return first_difference(spec, spec.box.rows.begin + r, spec.box.columns.begin, served, {exported.row<float>(r), served.size()});
  }
  return client.strange("other checksums of a tensor than of its rows; its weights were replaced meanwhile, or");
}

}  // namespace

std::string checksums_json(Context& c, const Weights& served, std::string_view weight_version) {
  std::string out = "{\"weight_version\":";
  append_json_string(&out, weight_version);
  out += fmt::format(",\"numerics\":\"{}\",\"tensors\":[", numerics_name(served.numerics()));
  for (const TensorSpec& spec : served.table()) {
    const ArenaScope scope(*c.host);
    const TensorView numbers = box_numbers(c, spec);
    served_numbers(c, served, spec.id, numbers);
    if (spec.id > 0) out += ',';
    out += JsonLine().add("name", spec.name).add("rows", numbers.rows()).add("columns", numbers.dim(1)).add("xxh64", xxh64_text(numbers)).str();
  }
  return out + "]}";
}

std::string row_checksums_json(Context& c, const Weights& served, int id) {
  const ArenaScope scope(*c.host);
  const TensorView numbers = box_numbers(c, served.table()[static_cast<size_t>(id)]);
  served_numbers(c, served, id, numbers);
  return JsonLine().add("rows", std::span<const std::string>(row_checksums(numbers))).str();
}

std::string row_bits_json(Context& c, const Weights& served, int id, int64_t row) {
  const ArenaScope scope(*c.host);
  const TensorView numbers = box_numbers(c, served.table()[static_cast<size_t>(id)]);
  served_numbers(c, served, id, numbers);
  std::vector<int32_t> bits;
  for (int64_t k = 0; k < numbers.dim(1); ++k) bits.push_back(std::bit_cast<int32_t>(numbers.row<float>(row)[k]));
  return JsonLine().add("bits", std::span<const int32_t>(bits)).str();
}

Result<ServedWeights> compare_served_weights(CpuContext& c, const WeightsServer& server, const ModelConfig& config, const ReadBox& masters) {
  Client client(server);
  const Result<JsonValue> answer = client.get("");
  if (!answer) return answer.status();
  ServedWeights result;
  result.version = text(answer.value(), "weight_version");
  const auto named = std::find_if(std::begin(kAllNumerics), std::end(kAllNumerics), [&](Numerics n) { return text(answer.value(), "numerics") == numerics_name(n); });
  const std::vector<TensorSpec> table = tensor_table(config);
  const JsonValue* tensors = list(answer.value(), "tensors", static_cast<int64_t>(table.size()));
  if (named == std::end(kAllNumerics) || tensors == nullptr) return client.strange("other numerics or tensors than the checkpoint's model");
  result.numerics = *named;
  for (const TensorSpec& spec : table) {
    const JsonValue& theirs = tensors->items[static_cast<size_t>(spec.id)];
    const ArenaScope scope(c.workspace());
    const TensorView exported = box_numbers(c, spec);
    if (text(theirs, "name") != spec.name || text(theirs, "rows") != std::to_string(exported.rows()) || text(theirs, "columns") != std::to_string(exported.dim(1)))
      return client.strange("a tensor that is not the checkpoint's");
    LOCKSTEP_RETURN_IF_ERROR(exported_numbers(c, spec, result.numerics, masters, exported));
    WeightsComparison& r = result.comparison;
    ++r.tensors;
    r.numbers += exported.shape.elements();
    if (text(theirs, "xxh64") == xxh64_text(exported)) continue;
    ++r.different;
    if (r.first) continue;
    Result<std::optional<WeightDifference>> found = find_difference(client, spec, exported);
    if (!found) return found.status();
    r.first = found.value();
  }
  return result;
}

}  // namespace lockstep
