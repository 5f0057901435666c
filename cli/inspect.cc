// lockstep inspect PATH: what a safetensors file, a checkpoint directory or a config.json holds, and whether it is whole.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "io/safetensors.h"
#include "io/utf8.h"
#include "model/checkpoint_boxes.h"
#include "model/checkpoint_io.h"
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
                  "  page unit    {} positions\n",
                  m.num_layers(), layers, hash_routed, m.hidden_size, m.vocab_size, m.max_positions, m.num_heads, m.head_dim,
                  m.rope_dim, m.q_rank, m.o_groups, m.o_rank, m.window, m.index_heads, m.index_head_dim, m.index_topk,
                  m.experts_per_token, m.num_experts, m.expert_dim, m.hc_mult, m.sinkhorn_iters, m.page_unit()));
}

void print_table(const std::vector<TensorSpec>& table) {
  std::map<std::string, int64_t> by_role;
  int64_t total = 0;
  print(fmt::format("\n{:<48} {:<22} {:<12} {:>14}\n", "tensor", "shape", "role", "elements"));
  for (const TensorSpec& t : table) {
    print(fmt::format("{:<48} {:<22} {:<12} {:>14}\n", t.name, t.shape.str(), tensor_role_name(t.role), t.shape.elements()));
    by_role[tensor_role_name(t.role)] += t.shape.elements();
    total += t.shape.elements();
  }
  print("\nelements by role\n");
  for (const auto& [role, count] : by_role)
    print(
        fmt::format("  {:<12} {:>14}  {:5.1f}%\n", role, count, 100.0 * static_cast<double>(count) / static_cast<double>(total)));
  print(fmt::format("  {:<12} {:>14}  {} in f32, {} in bf16\n", "total", total, format_bytes(static_cast<uint64_t>(total) * 4),
                    format_bytes(static_cast<uint64_t>(total) * 2)));
}

void print_list(const char* title, const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  if (names.empty()) return;
  print(fmt::format("{} {}\n", names.size(), title));
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) print("  " + names[i] + "\n");
  if (names.size() > kShown) print(fmt::format("  and {} more\n", names.size() - kShown));
}

Status print_file(const std::string& path, bool tensors) {
  Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.status();
  std::map<std::string, std::pair<size_t, uint64_t>> by_dtype;
  uint64_t total = 0;
  if (tensors) print(fmt::format("{:<56} {:<10} {:<22} {:>12}\n", "tensor", "dtype", "shape", "bytes"));
  for (const SafetensorsEntry& e : file.value().tensors()) {
    if (tensors) print(fmt::format("{:<56} {:<10} {:<22} {:>12}\n", e.name, e.dtype, e.shape_str(), e.bytes()));
    auto& [count, bytes] = by_dtype[e.dtype];
    ++count;
    bytes += e.bytes();
    total += e.bytes();
  }
  print(fmt::format("{}: {} tensors, {}", path, file.value().tensors().size(), format_bytes(total)));
  for (const auto& [dtype, n] : by_dtype) print(fmt::format("; {} {} {}", n.first, dtype, format_bytes(n.second)));
  print("\n");
  for (const auto& [key, value] : file.value().metadata()) {
    print(fmt::format("  {} = {}\n", key, value.size() > 100 ? value.substr(0, 100) + "..." : value));
  }
  return Status::ok();
}

// Names of tensors in the files of a checkpoint against the table of the config: which are missing, which have no use.
Status print_match(const std::vector<std::string>& in_files, const std::vector<TensorSpec>& table) {
  const TensorNames names(table);
  std::set<std::pair<int, int64_t>> found;
  std::vector<std::string> unexpected, missing;
  for (const std::string& name : in_files) {
    const std::vector<TensorPiece> pieces = names.pieces(name);
    if (pieces.empty() && !name.starts_with("mtp.")) unexpected.push_back(name);
    for (const TensorPiece& p : pieces) found.emplace(p.id, p.expert);
  }
  for (const TensorSpec& t : table) {
    if (found.contains({t.id, -1})) continue;
    if (t.role != TensorRole::expert) {
      missing.push_back(t.name);
      continue;
    }
    for (int64_t e = 0; e < t.shape[0]; ++e) {
      if (!found.contains({t.id, e})) missing.push_back(fmt::format("{} expert {}", t.name, e));
    }
  }
  print_list("missing", missing);
  print_list("unexpected", unexpected);
  if (missing.empty() && unexpected.empty()) print("every tensor of the model is there, and nothing else\n");
  return missing.empty() ? Status::ok() : errorf("{} tensors of the model are missing", missing.size());
}

Status inspect_directory(const std::string& given) {
  Result<std::string> checkpoint = find_checkpoint(given);
  if (!checkpoint) return checkpoint.status();
  const std::string& path = checkpoint.value();
  Result<ModelConfig> config = load_model_config(path + "/config.json");
  if (!config) return config.status();
  print(path + "\n");
  print_config(config.value());
  const std::vector<TensorSpec> table = tensor_table(config.value());
  print_table(table);
  // A run's checkpoint holds masters and, in other files, the optimizer's moments; only the first are the model.
  print("\n");
  if (has_box_files(path, kMastersStem)) {
    Result<BoxFiles> masters = BoxFiles::open(path, kMastersStem);
    if (!masters) return masters.status();
    for (const std::string& f : masters.value().paths()) LOCKSTEP_RETURN_IF_ERROR(print_file(f, false));
    LOCKSTEP_RETURN_IF_ERROR(print_match(masters.value().names(), table));
    std::vector<WholeTensor> wanted;
    for (const TensorSpec& t : table) wanted.push_back({t.name, t.whole, t.master_dtype()});
    LOCKSTEP_RETURN_IF_ERROR(masters.value().check(wanted));
  } else {
    Result<std::vector<std::string>> files = checkpoint_files(path);
    if (!files) return files.status();
    std::vector<std::string> names;
    for (const std::string& f : files.value()) {
      LOCKSTEP_RETURN_IF_ERROR(print_file(f, false));
      Result<SafetensorsFile> file = SafetensorsFile::open(f);
      if (!file) return file.status();
      for (const SafetensorsEntry& e : file.value().tensors()) names.push_back(e.name);
    }
    LOCKSTEP_RETURN_IF_ERROR(print_match(names, table));
  }
  return check_checkpoint(path);
}

}  // namespace

int inspect_command(const std::string& path) {
  std::error_code error;
  Status status;
  if (std::filesystem::is_directory(path, error)) {
    status = inspect_directory(path);
  } else if (path.ends_with(".json")) {
    Result<ModelConfig> config = load_model_config(path);
    if (config) {
      print_config(config.value());
      print_table(tensor_table(config.value()));
    }
    status = config.status();
  } else {
    status = print_file(path, true);
  }
  return status ? kExitOk : fail(kExitBadInput, status);
}

}  // namespace lockstep
