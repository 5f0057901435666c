// An index and the header of one quantised file, over data that follow from it: refused with a reason, or every box of every whole tensor
// can be read, alone and as a part of the whole.
// Input: the index's JSON, a zero byte, the header. The data are as long as the header asks for, up to 64 KiB.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "io/json.h"
#include "model/checkpoint_index.h"
#include "model/checkpoint_tensors.h"

namespace lockstep {
namespace {

constexpr int64_t kMaxData = 1 << 16;

const ModelConfig& tiny_config() {
  static const ModelConfig config =
      parse_model_config(R"({"vocab_size": 4, "hidden_size": 34, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4, "qk_rope_head_dim": 2,
        "q_lora_rank": 2, "o_groups": 1, "o_lora_rank": 2, "sliding_window": 2, "compress_ratios": [0, 0], "n_routed_experts": 2,
        "num_experts_per_tok": 1, "num_hash_layers": 1, "moe_intermediate_size": 2, "hc_mult": 1, "max_position_embeddings": 4,
        "num_nextn_predict_layers": 1})", "fuzz").take();
  return config;
}

void check_message(const Status& s, size_t size) { CHECK(!s.message().empty() && s.message().size() < 2000 + 8 * size, "{}", s.message()); }

void check_index(std::string_view json) {
  const Result<CheckpointIndex> index = parse_checkpoint_index(json, "index");
  if (!index) return check_message(index.status(), json.size());
  const Result<CheckpointIndex> again = parse_checkpoint_index(checkpoint_index_json({index.value().files, std::max<int64_t>(index.value().total_bytes, 0)}), "again");
  CHECK(again.is_ok(), "{}", again.message());
  CHECK(again.value().files == index.value().files, "an index reads back differently");
}

bool is_whole(const CheckpointTensors& tensors, const TensorSpec& t) {
  const auto usable = [](const StoredTensor* s) { return s != nullptr && (!s->quantised() || s->scale != nullptr); };
  if (usable(tensors.stored(t.id, -1))) return true;
  if (t.role != TensorRole::expert) return false;
  for (int64_t e = 0; e < t.whole[0]; ++e)
    if (!usable(tensors.stored(t.id, e))) return false;
  return true;
}

void read_boxes(const CheckpointTensors& tensors, const TensorSpec& t) {
  const Box all = whole_box(t.whole);
  const int64_t rows = all.rows.size(), columns = all.columns.size();
  std::vector<float> whole(static_cast<size_t>(rows * columns)), part(whole.size());
  const bool read = tensors.read(t, all, TensorView(whole.data(), t.master_dtype(), {rows, columns})).is_ok();
  const Box box = {{rows / 3, rows - rows / 4}, {columns / 3, columns - columns / 4}};
  const TensorView out(part.data(), t.master_dtype(), {box.rows.size(), box.columns.size()});
  if (!tensors.read(t, box, out)) CHECK(!read, "a part of {} cannot be read, the whole can", t.name);
  if (!read) return;
  for (int64_t r = 0; r < box.rows.size(); ++r)
    CHECK(std::memcmp(part.data() + r * box.columns.size(), whole.data() + (box.rows.begin + r) * columns + box.columns.begin,
                      static_cast<size_t>(box.columns.size()) * 4) == 0, "{} row {}", t.name, r);
}

// The header with as many bytes behind it as its largest offset says; empty if that is over 64 KiB, or it is no JSON.
std::vector<uint8_t> make_file(std::string_view header) {
  const Result<JsonValue> json = parse_json(header);
  if (!json) return {};
  int64_t data_bytes = 0;
  for (const auto& [name, entry] : json.value().members) {
    const JsonValue* offsets = entry.find("data_offsets");
    int64_t end = 0;
    if (offsets != nullptr && offsets->items.size() == 2 && offsets->items[1].as_int64(&end)) data_bytes = std::max(data_bytes, end);
  }
  if (data_bytes > kMaxData) return {};
  const uint64_t header_bytes = header.size();
  std::vector<uint8_t> file(8);
  std::memcpy(file.data(), &header_bytes, 8);
  file.insert(file.end(), header.begin(), header.end());
  for (int64_t i = 0; i < data_bytes; ++i) file.push_back(static_cast<uint8_t>(i % 97));  // no NaN in any dtype
  return file;
}

}  // namespace
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  check_index(input.substr(0, zero));
  if (zero == std::string_view::npos) return 0;
  const std::string_view header = input.substr(zero + 1);
  const std::vector<uint8_t> file = make_file(header);
  if (file.empty()) return 0;
  static const int memory = ::memfd_create("checkpoint", 0);
  CHECK(::ftruncate(memory, 0) == 0 && ::pwrite(memory, file.data(), file.size(), 0) == static_cast<ssize_t>(file.size()), "no memory file");
  Result<SafetensorsFile> opened = SafetensorsFile::open("/proc/self/fd/" + std::to_string(memory));
  if (!opened) {
    check_message(opened.status(), size);
    return 0;
  }
  std::deque<SafetensorsFile> files;
  files.push_back(opened.take());
  const Result<std::shared_ptr<const CheckpointTensors>> scanned = CheckpointTensors::scan(std::move(files), "", tiny_config());
  if (!scanned) {
    check_message(scanned.status(), size);
    return 0;
  }
  const CheckpointTensors& tensors = *scanned.value();
  if (const Status s = tensors.check("fuzz"); !s) check_message(s, size);
  for (const TensorSpec& t : tensors.table())
    if (is_whole(tensors, t)) read_boxes(tensors, t);
  return 0;
}
