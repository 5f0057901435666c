// lockstep inspect PATH [--headers-only]: what a safetensors file, a checkpoint directory or a config.json holds, and whether it is whole.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "core/formats.h"
#include "io/safetensors.h"
#include "io/utf8.h"
#include "model/checkpoint_boxes.h"
#include "model/checkpoint_index.h"
#include "model/checkpoint_tensors.h"
#include "model/config.h"
#include "model/weights.h"
#include "rl/checkpoint.h"

namespace lockstep {

namespace {

void print(const std::string& text) { std::fputs(without_controls(text).c_str(), stdout); }

std::string format_bytes(uint64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

void print_config(const ModelConfig& m) {
  std::map<std::string, int> kinds;
  int hash_routed = 0;
  for (const LayerConfig& l : m.layers) {
    ++kinds[l.ratio > 0 ? fmt::format("{} (ratio {})", attention_kind_name(l.attention), l.ratio)
                        : attention_kind_name(l.attention)];
    hash_routed += l.hash_routed ? 1 : 0;
  }
  std::string layers;
  for (const auto& [name, count] : kinds) layers += fmt::format("{}{} {}", layers.empty() ? "" : ", ", count, name);
  print(
      fmt::format("model\n"
                  "  layers       {}: {}; {} hash-routed\n"
                  "  width        {}, vocabulary {}, positions {}\n"
                  "  attention    {} heads x {} ({} rotated), q rank {}, {} output groups of rank {}, window {}\n"
                  "  indexer      {} heads x {}, top {}\n"
                  "  experts      {} of {} a token, inner {}, plus 1 shared\n"
                  "  streams      {}, {} Sinkhorn iterations\n"
                  "  page unit    {} positions\n"
                  "  draft blocks {} (carried, not run)\n",
                  m.num_layers(), layers, hash_routed, m.hidden_size, m.vocab_size, m.max_positions, m.num_heads, m.head_dim,
                  m.rope_dim, m.q_rank, m.o_groups, m.o_rank, m.window, m.index_heads, m.index_head_dim, m.index_topk,
                  m.experts_per_token, m.num_experts, m.expert_dim, m.hc_mult, m.sinkhorn_iters, m.page_unit(), m.num_drafts));
}

// How the tensors are stored, by id of the table: "F8_E4M3", or several with commas, and the bytes with their scales.
struct StoredForm {
  std::set<std::string> dtypes;
  uint64_t bytes = 0;
  std::string str() const {
    std::string s;
    for (const std::string& d : dtypes) s += (s.empty() ? "" : ",") + d;
    return s.empty() ? "-" : s;
  }
};
std::vector<StoredForm> stored_forms(const CheckpointTensors& tensors) {
  std::vector<StoredForm> forms;
  for (const TensorSpec& t : tensors.table()) {
    StoredForm form;
    const auto add = [&](const StoredTensor* s) {
      if (s == nullptr) return;
      form.dtypes.insert(s->entry->dtype);
      form.bytes += s->entry->bytes() / (s->gate_up_half < 0 ? 1 : 2) + (s->scale == nullptr ? 0 : s->scale->bytes());
    };
    add(tensors.stored(t.id, -1));
    if (t.role == TensorRole::expert)
      for (int64_t e = 0; e < t.whole[0]; ++e) add(tensors.stored(t.id, e));
    forms.push_back(std::move(form));
  }
  return forms;
}

// `forms` may be empty: a config alone stores nothing.
void print_table(const std::vector<TensorSpec>& table, const std::vector<StoredForm>& forms) {
  std::map<std::string, int64_t> by_role;
  int64_t total = 0;
  print(fmt::format("\n{:<48} {:<22} {:<12} {:>14}", "tensor", "shape", "role", "elements"));
  print(forms.empty() ? "\n" : fmt::format("  {:<10} {:>14}\n", "stored", "bytes"));
  for (size_t i = 0; i < table.size(); ++i) {
    const TensorSpec& t = table[i];
    print(fmt::format("{:<48} {:<22} {:<12} {:>14}", t.name, t.shape.str(), tensor_role_name(t.role), t.shape.elements()));
    print(forms.empty() ? "\n" : fmt::format("  {:<10} {:>14}\n", forms[i].str(), forms[i].bytes));
    by_role[tensor_role_name(t.role)] += t.shape.elements();
    total += t.shape.elements();
  }
  print("\nelements by role\n");
  for (const auto& [role, count] : by_role)
    print(fmt::format("  {:<12} {:>14}  {:5.1f}%\n", role, count, 100.0 * static_cast<double>(count) / static_cast<double>(total)));
  print(fmt::format("  {:<12} {:>14}  {} in f32, {} in bf16\n", "total", total, format_bytes(static_cast<uint64_t>(total) * 4),
                    format_bytes(static_cast<uint64_t>(total) * 2)));
}

// Binary exponents of the scales of one class of tensors.
struct ScaleRange {
  int64_t tensors = 0, scales = 0;
  int min = 1 << 20, max = -(1 << 20);
  int64_t not_powers = 0;  // f32 scales that are no power of two
  int64_t unusable = 0;    // NaN, Inf or not positive
  void add(float scale) {
    ++scales;
    if (!(scale > 0) || !std::isfinite(scale)) {
      ++unusable;
      return;
    }
    int exponent = 0;
    not_powers += std::frexp(scale, &exponent) != 0.5f;
    min = std::min(min, exponent - 1);
    max = std::max(max, exponent - 1);
  }
};

std::string scale_class(const TensorSpec& t, int64_t num_layers) {
  const std::string of = t.layer >= num_layers ? "draft " : "";
  if (t.role == TensorRole::expert) return of + "routed experts";
  if (t.name.find(".shared_experts.") != std::string::npos) return of + "shared expert";
  return of + (t.indexer ? "indexer" : t.name.find(".attn.") != std::string::npos ? "attention" : "projections");
}

void print_scales(const CheckpointTensors& tensors) {
  std::map<std::pair<std::string, std::string>, ScaleRange> ranges;
  for (const TensorSpec& t : tensors.table()) {
    const auto add = [&](const StoredTensor* s) {
      if (s == nullptr || s->scale == nullptr) return;
      ScaleRange& r = ranges[{scale_class(t, tensors.config().num_layers()), s->entry->dtype + " x " + s->scale->dtype}];
      ++r.tensors;
      const size_t width = dtype_bytes(s->scale_dtype);
      for (size_t i = 0; i < s->scale->bytes(); i += width) {
        float scale;
        if (s->scale_dtype == DType::f32) std::memcpy(&scale, s->scale_bytes() + i, width);
        else scale = to_f32(ue8m0{s->scale_bytes()[i]});
        r.add(scale);
      }
    };
    add(tensors.stored(t.id, -1));
    if (t.role == TensorRole::expert)
      for (int64_t e = 0; e < t.whole[0]; ++e) add(tensors.stored(t.id, e));
  }
  if (!ranges.empty()) print("\nscales\n");
  for (const auto& [key, r] : ranges) {
    print(fmt::format("  {:<22} {:<18} {:>8} tensors {:>12} scales", key.first, key.second, r.tensors, r.scales));
    if (r.min <= r.max) print(fmt::format(", 2^{} to 2^{}", r.min, r.max));
    if (r.not_powers > 0) print(fmt::format(", {} no power of two", r.not_powers));
    if (r.unusable > 0) print(fmt::format(", {} NaN, Inf or not positive", r.unusable));
    print("\n");
  }
}

void print_list(const char* title, const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  if (names.empty()) return;
  print(fmt::format("{} {}\n", names.size(), title));
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) print("  " + names[i] + "\n");
  if (names.size() > kShown) print(fmt::format("  and {} more\n", names.size() - kShown));
}

// Tensors and bytes by dtype.
void print_totals(const std::string& what, const std::deque<SafetensorsFile>& files) {
  std::map<std::string, std::pair<size_t, uint64_t>> by_dtype;
  uint64_t total = 0;
  size_t tensors = 0;
  for (const SafetensorsFile& file : files) {
    for (const SafetensorsEntry& e : file.tensors()) {
      auto& [count, bytes] = by_dtype[e.dtype];
      ++count;
      bytes += e.bytes();
      total += e.bytes();
    }
    tensors += file.tensors().size();
  }
  print(fmt::format("{}: {} tensors, {} ({} bytes)", what, tensors, format_bytes(total), total));
  for (const auto& [dtype, n] : by_dtype) print(fmt::format("; {} {} {}", n.first, dtype, format_bytes(n.second)));
  print("\n");
}

Status print_file(const std::string& path, bool tensors) {
  Result<SafetensorsFile> opened = SafetensorsFile::open(path);
  if (!opened) return opened.status();
  std::deque<SafetensorsFile> one;
  one.push_back(opened.take());
  const SafetensorsFile& file = one.front();
  if (tensors) print(fmt::format("{:<56} {:<10} {:<22} {:>12}\n", "tensor", "dtype", "shape", "bytes"));
  if (tensors)
    for (const SafetensorsEntry& e : file.tensors()) print(fmt::format("{:<56} {:<10} {:<22} {:>12}\n", e.name, e.dtype, e.shape_str(), e.bytes()));
  print_totals(path, one);
  for (const auto& [key, value] : file.metadata()) {
    print(fmt::format("  {} = {}\n", key, value.size() > 100 ? value.substr(0, 100) + "..." : value));
  }
  return Status::ok();
}

Status inspect_masters(const std::string& path, const ModelConfig& config) {
  const std::vector<TensorSpec> table = tensor_table(config);
  print_table(table, {});
  print("\n");
  Result<BoxFiles> masters = BoxFiles::open(path, kMastersStem);
  if (!masters) return masters.status();
  for (const std::string& f : masters.value().paths()) LOCKSTEP_RETURN_IF_ERROR(print_file(f, false));
  std::vector<WholeTensor> wanted;
  for (const TensorSpec& t : table) wanted.push_back({t.name, t.whole, t.master_dtype()});
  LOCKSTEP_RETURN_IF_ERROR(masters.value().check(wanted));
  print("every tensor of the model is there, and nothing else\n");
  return Status::ok();
}

Status inspect_released(const std::string& path, const ModelConfig& config, bool headers_only) {
  Result<std::deque<SafetensorsFile>> files = open_checkpoint_files(path);
  if (!files) return files.status();
  Result<std::shared_ptr<const CheckpointTensors>> scanned = CheckpointTensors::scan(files.take(), "", config);
  if (!scanned) return scanned.status();
  const CheckpointTensors& tensors = *scanned.value();
  print_table(tensors.table(), stored_forms(tensors));
  print("\n");
  constexpr size_t kShownFiles = 8;
  if (tensors.files().size() <= kShownFiles)
    for (const SafetensorsFile& f : tensors.files()) LOCKSTEP_RETURN_IF_ERROR(print_file(f.path(), false));
  if (tensors.files().size() > 1) print_totals(fmt::format("{} files", tensors.files().size()), tensors.files());
  if (!headers_only) print_scales(tensors);
  print("\n");
  print_list("missing", tensors.missing());
  print_list("unexpected", tensors.unexpected());
  if (tensors.missing().empty() && tensors.unexpected().empty()) print("every tensor of the model is there, and nothing else\n");
  if (tensors.num_draft_tensors() > 0) {
    print(fmt::format("{} tensors of draft blocks (mtp.*), which are converted but not run\n", tensors.num_draft_tensors()));
    print_list("of the draft missing", tensors.draft_missing());
    print_list("of the draft unexpected", tensors.draft_unknown());
  }
  return tensors.missing().empty() ? Status::ok() : errorf("{} tensors of the model are missing", tensors.missing().size());
}

Status inspect_directory(const std::string& given, bool headers_only) {
  Result<std::string> checkpoint = find_checkpoint(given);
  if (!checkpoint) return checkpoint.status();
  const std::string& path = checkpoint.value();
  Result<ModelConfig> config = load_model_config(path + "/config.json");
  if (!config) return config.status();
  print(path + "\n");
  print_config(config.value());
  // A run's checkpoint holds masters and, in other files, the optimizer's moments; only the first are the model.
  LOCKSTEP_RETURN_IF_ERROR(has_box_files(path, kMastersStem) ? inspect_masters(path, config.value()) : inspect_released(path, config.value(), headers_only));
  return check_checkpoint(path);
}

}  // namespace

int inspect_command(const InspectArgs& args) {
  const std::string& path = args.path;
  std::error_code error;
  Status status;
  if (std::filesystem::is_directory(path, error)) {
    status = inspect_directory(path, args.headers_only);
  } else if (path.ends_with(".json")) {
    Result<ModelConfig> config = load_model_config(path);
    if (config) {
      print_config(config.value());
      print_table(tensor_table(config.value()), {});
    }
    status = config.status();
  } else {
    status = print_file(path, true);
  }
  return status ? kExitOk : fail(kExitBadInput, status);
}

}  // namespace lockstep
