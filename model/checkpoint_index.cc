#include "model/checkpoint_index.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "io/json.h"
#include "io/utf8.h"

namespace lockstep {

namespace {

namespace fs = std::filesystem;

// Nothing if there is none.
Result<std::optional<CheckpointIndex>> read_index(const std::string& directory) {
  const std::string path = directory + "/" + kIndexFile;
  std::error_code error;
  if (!fs::exists(path, error)) return std::optional<CheckpointIndex>();
  Result<std::string> text = read_file(path);
  if (!text) return text.status();
  Result<CheckpointIndex> index = parse_checkpoint_index(text.value(), path);
  if (!index) return index.status();
  return std::optional<CheckpointIndex>(index.take());
}

}  // namespace

Result<CheckpointIndex> parse_checkpoint_index(std::string_view json, std::string_view origin) {
  const Result<JsonValue> root = parse_json(json);
  if (!root) return errorf("{}: {}", origin, root.message());
  const JsonValue* map = root.value().find("weight_map");
  if (map == nullptr || !map->is(JsonValue::Kind::object)) return errorf("{}: weight_map is missing or no object", origin);
  CheckpointIndex index;
  for (const auto& [tensor, file] : map->members) {
    if (!file.is(JsonValue::Kind::string) || file.text.empty() || file.text.find('/') != std::string::npos || !file.text.ends_with(".safetensors"))
      return errorf("{}: weight_map.{} must be the name of a .safetensors file in the same directory", origin, in_quotes(tensor));
    index.files[tensor] = file.text;
  }
  if (index.files.empty()) return errorf("{}: weight_map lists no tensor", origin);
  const JsonValue* metadata = root.value().find("metadata");
  const JsonValue* total = metadata == nullptr ? nullptr : metadata->find("total_size");
  if (total != nullptr && (!total->as_int64(&index.total_bytes) || index.total_bytes < 0))
    return errorf("{}: metadata.total_size must be a number of bytes", origin);
  return index;
}

std::string checkpoint_index_json(const CheckpointIndex& index) {
  std::string text = fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", index.total_bytes);
  const char* separator = "\n    ";
  for (const auto& [tensor, file] : index.files) {
    text += separator;
    append_json_string(&text, tensor);
    text += ": ";
    append_json_string(&text, file);
    separator = ",\n    ";
  }
  return text + "\n  }\n}\n";
}

Status check_checkpoint_index(const CheckpointIndex& index, const std::deque<SafetensorsFile>& files, const std::string& origin) {
  std::map<std::string, const SafetensorsFile*> by_name;
  for (const SafetensorsFile& file : files) by_name[fs::path(file.path()).filename().string()] = &file;
  for (const auto& [tensor, name] : index.files) {
    const auto file = by_name.find(name);
    if (file == by_name.end() || file->second->find(tensor) == nullptr)
      return errorf("{}: tensor {} should be in {}, which does not hold it; are index and shards of one checkpoint?", origin, in_quotes(tensor), name);
  }
  for (const auto& [name, file] : by_name) {
    for (const SafetensorsEntry& e : file->tensors()) {
      const auto listed = index.files.find(e.name);
      if (listed == index.files.end())
        return errorf("{}: tensor {} is not in {}; are index and shards of one checkpoint?", file->path(), in_quotes(e.name), kIndexFile);
      if (listed->second != name)
        return errorf("{}: tensor {} is in {} a second time, and the index names that one", file->path(), in_quotes(e.name), listed->second);
    }
  }
  return Status::ok();
}

Result<std::vector<std::string>> checkpoint_files(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return errorf("{}: no such file or directory", path);
  if (!fs::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  Result<std::optional<CheckpointIndex>> index = read_index(path);
  if (!index) return index.status();
  if (index.value().has_value()) {
    std::set<std::string> shards;
    for (const auto& [tensor, file] : index.value()->files) shards.insert(file);
    for (const std::string& s : shards) files.push_back(path + "/" + s);
  } else {
    for (const auto& entry : fs::directory_iterator(path, error))
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
  }
  if (error) return errorf("{}: {}", path, error.message());
  if (files.empty()) return errorf("{}: the directory holds no .safetensors file", path);
  return files;
}

Result<std::deque<SafetensorsFile>> open_checkpoint_files(const std::string& path) {
  Result<std::vector<std::string>> paths = checkpoint_files(path);
  if (!paths) return paths.status();
  std::deque<SafetensorsFile> files;
  for (const std::string& p : paths.value()) {
    Result<SafetensorsFile> file = SafetensorsFile::open(p);
    if (!file) return file.status();
    files.push_back(file.take());
  }
  std::error_code error;
  if (!fs::is_directory(path, error)) return files;
  Result<std::optional<CheckpointIndex>> index = read_index(path);
  if (!index) return index.status();
  if (index.value().has_value()) LOCKSTEP_RETURN_IF_ERROR(check_checkpoint_index(*index.value(), files, path + "/" + kIndexFile));
  return files;
}

}  // namespace lockstep
