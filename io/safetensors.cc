#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "io/json.h"
#include "io/utf8.h"

static_assert(std::endian::native == std::endian::little, "the format is little endian and is mapped as it is");

namespace lockstep {

namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr size_t kHeaderAlign = 8;

struct DTypeRow {
  std::string_view name;
  size_t bytes;
  bool viewable;
  DType dtype;  // of views
};
constexpr DTypeRow kDTypes[] = {
    {"F64", 8, true, DType::f64},      {"F32", 4, true, DType::f32},      {"BF16", 2, true, DType::bf16},
    {"I64", 8, true, DType::i64},      {"I32", 4, true, DType::i32},      {"U8", 1, true, DType::u8},
    {"F8_E4M3", 1, true, DType::e4m3}, {"F8_E5M2", 1, true, DType::e5m2}, {"F8_E8M0", 1, true, DType::ue8m0},
    {"I8", 1, true, DType::e2m1x2},  // released checkpoints store packed E2M1 under this name; nothing of ours is a signed byte
    {"F16", 2, false, DType::u8},      {"I16", 2, false, DType::u8},      {"BOOL", 1, false, DType::u8},
    {"U64", 8, false, DType::u8},      {"U32", 4, false, DType::u8},      {"U16", 2, false, DType::u8},
};

const DTypeRow* find_dtype(std::string_view name) {
  for (const DTypeRow& row : kDTypes)
    if (row.name == name) return &row;
  return nullptr;
}

std::string_view safetensors_name(DType dtype) {
  for (const DTypeRow& row : kDTypes)
    if (row.viewable && row.dtype == dtype) return row.name;
  return "?";
}

std::string tensor_label(std::string_view name) { return "tensor " + in_quotes(name); }

// A member of a tensor's object as a list of integers >= 0.
Status read_integers(const JsonValue& object, std::string_view tensor, const char* key, std::vector<int64_t>* out) {
  const JsonValue* list = object.find(key);
  if (list == nullptr) return errorf("{} has no \"{}\"", tensor_label(tensor), key);
  if (!list->is(JsonValue::Kind::array))
    return errorf("{}: \"{}\" is {}, a list of integers is wanted", tensor_label(tensor), key, json_kind_name(list->kind));
  for (size_t i = 0; i < list->items.size(); ++i) {
    const JsonValue& item = list->items[i];
    int64_t value = 0;
    if (!item.as_int64(&value) || value < 0)
      return errorf("{}: {}[{}] is {}, an integer from 0 to 2^63 - 1 is wanted", tensor_label(tensor), key, i,
                    item.is(JsonValue::Kind::number) ? item.text.substr(0, 40) : json_kind_name(item.kind));
    out->push_back(value);
  }
  return Status::ok();
}

Status read_entry(const JsonValue& object, uint64_t data_bytes, SafetensorsEntry* entry) {
  const std::string& name = entry->name;
  if (!object.is(JsonValue::Kind::object))
    return errorf("{} is {}, an object with dtype, shape and data_offsets is wanted", tensor_label(name),
                  json_kind_name(object.kind));
  for (const auto& [key, value] : object.members) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      return errorf("{}: {} is not a known field; dtype, shape and data_offsets are", tensor_label(name), in_quotes(key));
  }
  const JsonValue* dtype = object.find("dtype");
  if (dtype == nullptr) return errorf("{} has no \"dtype\"", tensor_label(name));
  if (!dtype->is(JsonValue::Kind::string))
    return errorf("{}: \"dtype\" is {}, a string is wanted", tensor_label(name), json_kind_name(dtype->kind));
  entry->dtype = dtype->text;
  LOCKSTEP_RETURN_IF_ERROR(read_integers(object, name, "shape", &entry->shape));
  std::vector<int64_t> offsets;
  LOCKSTEP_RETURN_IF_ERROR(read_integers(object, name, "data_offsets", &offsets));
  if (offsets.size() != 2)
    return errorf("{}: \"data_offsets\" has {} numbers, [begin, end] is wanted", tensor_label(name), offsets.size());
  entry->begin = static_cast<uint64_t>(offsets[0]);
  entry->end = static_cast<uint64_t>(offsets[1]);
  if (entry->begin > entry->end)
    return errorf("{}: data_offsets [{}, {}] end before they begin", tensor_label(name), entry->begin, entry->end);
  if (entry->end > data_bytes)
    return errorf("{}: data_offsets [{}, {}] reach beyond the {} bytes of data; is the file cut off?", tensor_label(name),
                  entry->begin, entry->end, data_bytes);

  const DTypeRow* row = find_dtype(entry->dtype);
  if (row == nullptr) return Status::ok();  // listed, though nothing more can be said about it
  uint64_t size = row->bytes;
  for (const int64_t d : entry->shape) {
    if (__builtin_mul_overflow(size, static_cast<uint64_t>(d), &size))
      return errorf("{}: the size of {} {} does not fit 64 bits", tensor_label(name), entry->dtype, entry->shape_str());
  }
  if (size != entry->bytes())
    return errorf("{}: {} {} takes {} bytes, but data_offsets [{}, {}] hold {}", tensor_label(name), entry->dtype,
                  entry->shape_str(), size, entry->begin, entry->end, entry->bytes());
  return Status::ok();
}

// The tensors must tile the data: bytes that belong to two tensors or to none are a sign of a damaged header.
Status check_tiling(const std::vector<SafetensorsEntry>& tensors, uint64_t data_bytes) {
  std::vector<const SafetensorsEntry*> order;
  order.reserve(tensors.size());
  for (const SafetensorsEntry& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t covered = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry* t : order) {
    if (t->begin != covered) {
      const std::string what = t->begin < covered ? "overlaps" : "leaves a gap behind";
      const std::string neighbour = before ? tensor_label(before->name) + ", which ends" : "the start of the data";
      return errorf("{} begins at {} and {} {} at {}", tensor_label(t->name), t->begin, what, neighbour, covered);
    }
    covered = t->end;
    before = t;
  }
  if (covered != data_bytes)
    return errorf("the tensors end at {}, but {} bytes of data follow the header; is the file the one that was written?",
                  covered, data_bytes);
  return Status::ok();
}

// Sets begin and end, one entry behind the other; returns the bytes of all.
uint64_t place(std::vector<SafetensorsEntry>* entries) {
  uint64_t offset = 0;
  for (SafetensorsEntry& e : *entries) {
    uint64_t bytes = safetensors_dtype_bytes(e.dtype);
    CHECK(bytes != 0, "tensor {} has the unknown dtype {}", e.name, e.dtype);
    for (const int64_t d : e.shape) bytes *= static_cast<uint64_t>(d);
    e.begin = offset;
    e.end = offset += bytes;
  }
  return offset;
}

Status write_header(AtomicFile& file, std::span<const SafetensorsEntry> entries, const std::map<std::string, std::string>& metadata) {
  JsonLine header;
  if (!metadata.empty()) {
    JsonLine object;
    for (const auto& [key, value] : metadata) object.add(key, value);
    header.add(kMetadataKey, object);
  }
  for (const SafetensorsEntry& e : entries) {
    const int64_t offsets[2] = {static_cast<int64_t>(e.begin), static_cast<int64_t>(e.end)};
    header.add(e.name, JsonLine()
                           .add("dtype", e.dtype)
                           .add("shape", std::span<const int64_t>(e.shape))
                           .add("data_offsets", std::span<const int64_t>(offsets)));
  }
  std::string text = header.str();
  text.append((kHeaderAlign - text.size() % kHeaderAlign) % kHeaderAlign, ' ');
  if (text.size() > kMaxHeaderBytes)
    return errorf("cannot write {}: its header would take {} bytes, over the format's limit of {}", file.path(), text.size(), kMaxHeaderBytes);
  const uint64_t header_bytes = text.size();
  char length[kLengthBytes];
  std::memcpy(length, &header_bytes, kLengthBytes);
  LOCKSTEP_RETURN_IF_ERROR(file.write({length, kLengthBytes}));
  return file.write(text);
}

}  // namespace

std::string SafetensorsEntry::shape_str() const {
  constexpr size_t kShown = 8;  // a file may say any number of dimensions, and a message stays readable
  std::string s = "[";
  for (size_t i = 0; i < std::min(shape.size(), kShown); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (shape.size() > kShown ? fmt::format(", ... {} dimensions]", shape.size()) : "]");
}

size_t safetensors_dtype_bytes(std::string_view dtype) {
  const DTypeRow* row = find_dtype(dtype);
  return row ? row->bytes : 0;
}

Result<std::vector<SafetensorsEntry>> SafetensorsFile::parse_header(std::string_view header, uint64_t data_bytes,
                                                                    std::map<std::string, std::string>* metadata) {
  if (!header.starts_with('{'))
    return errorf("the header begins with {}, \"{{\" is wanted", in_quotes(header.substr(0, 1)));
  Result<JsonValue> root = parse_json(header);
  if (!root) return errorf("the header is not valid JSON: {}", root.message());
  std::vector<SafetensorsEntry> tensors;
  for (const auto& [name, value] : root.value().members) {
    if (name == kMetadataKey) {
      if (!value.is(JsonValue::Kind::object))
        return errorf("{} is {}, an object of strings is wanted", kMetadataKey, json_kind_name(value.kind));
      for (const auto& [key, text] : value.members) {
        if (!text.is(JsonValue::Kind::string))
          return errorf("{}: {} is {}, a string is wanted", kMetadataKey, in_quotes(key), json_kind_name(text.kind));
        (*metadata)[key] = text.text;
      }
      continue;
    }
    SafetensorsEntry entry;
    entry.name = name;
    LOCKSTEP_RETURN_IF_ERROR(read_entry(value, data_bytes, &entry));
    tensors.push_back(std::move(entry));
  }
  LOCKSTEP_RETURN_IF_ERROR(check_tiling(tensors, data_bytes));
  return tensors;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  Result<MappedFile> mapped = MappedFile::open(path);
  if (!mapped) return mapped.status();
  const std::string_view bytes = mapped.value().bytes();
  if (bytes.size() < kLengthBytes)
    return errorf("{}: {} bytes, a safetensors file has at least {}", path, bytes.size(), kLengthBytes + 2);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes)
    return errorf("{}: the header's length is given as {} bytes, over the limit of {}; is this a safetensors file?", path,
                  header_bytes, kMaxHeaderBytes);
  if (header_bytes > bytes.size() - kLengthBytes)
    return errorf("{}: the header's length is given as {} bytes, but {} follow; is the file cut off?", path, header_bytes,
                  bytes.size() - kLengthBytes);
  const size_t data_offset = kLengthBytes + static_cast<size_t>(header_bytes);
  std::map<std::string, std::string> metadata;
  Result<std::vector<SafetensorsEntry>> tensors =
      parse_header(bytes.substr(kLengthBytes, header_bytes), bytes.size() - data_offset, &metadata);
  if (!tensors) return errorf("{}: {}", path, tensors.message());
  SafetensorsFile file(mapped.take(), data_offset);
  file.tensors_ = tensors.take();
  file.metadata_ = std::move(metadata);
  for (size_t i = 0; i < file.tensors_.size(); ++i) file.index_.emplace(file.tensors_[i].name, i);
  return file;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

std::span<const uint8_t> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return {reinterpret_cast<const uint8_t*>(file_.data()) + data_offset_ + entry.begin, static_cast<size_t>(entry.bytes())};
}

Result<ConstTensorView> SafetensorsFile::layout(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) return errorf("{}: there is no {}", path(), tensor_label(name));
  const DTypeRow* row = find_dtype(entry->dtype);
  if (row == nullptr || !row->viewable)
    return errorf("{}: {} has dtype {}, views are F64, F32, BF16, I64, I32, U8, F8_E4M3, F8_E5M2, F8_E8M0 or I8", path(), tensor_label(name),
                  in_quotes(entry->dtype));
  if (entry->shape.size() > Shape::kMaxRank)
    return errorf("{}: {} has {} dimensions {}, views have up to {}", path(), tensor_label(name), entry->shape.size(),
                  entry->shape_str(), Shape::kMaxRank);
  Shape shape;
  for (const int64_t d : entry->shape) shape.dims[static_cast<size_t>(shape.rank++)] = d;
  if (shape.rank == 0) shape = {1};  // a scalar: our shapes count nothing in []
  return ConstTensorView(bytes(*entry).data(), row->dtype, shape);
}

Result<ConstTensorView> SafetensorsFile::view(std::string_view name) const {
  Result<ConstTensorView> v = layout(name);
  if (!v) return v;
  const size_t align = dtype_bytes(v.value().dtype);
  if (v.value().bytes() != 0 && reinterpret_cast<uintptr_t>(v.value().data) % align != 0)
    return errorf("{}: {} stands at byte {} of the file, a view of {} needs a multiple of {}; copy it instead", path(),
                  tensor_label(name), data_offset_ + find(name)->begin, find(name)->dtype, align);
  return v;
}

Status SafetensorsFile::copy_to(std::string_view name, TensorView out) const {
  Result<ConstTensorView> v = layout(name);
  if (!v) return v.status();
  const ConstTensorView& in = v.value();
  if (in.dtype != out.dtype || !(in.shape == out.shape))
    return errorf("{}: {} is {} {}, {} {} is wanted", path(), tensor_label(name), find(name)->dtype,
                  find(name)->shape_str(), safetensors_name(out.dtype), out.shape.str());
  const size_t row_bytes = static_cast<size_t>(in.shape.row_elements()) * dtype_bytes(in.dtype);
  if (in.bytes() == 0) return Status::ok();
  for (int64_t r = 0; r < in.rows(); ++r)
    std::memcpy(static_cast<char*>(out.data) + static_cast<size_t>(r * out.row_stride) * dtype_bytes(out.dtype),
                static_cast<const char*>(in.data) + static_cast<size_t>(r) * row_bytes, row_bytes);
  return Status::ok();
}

void SafetensorsWriter::add(std::string name, ConstTensorView tensor) {
  CHECK(name != kMetadataKey, "{} is reserved", name);
  CHECK(find_invalid_utf8(name) == std::string::npos, "the name {} is not UTF-8", in_quotes(name));
  CHECK(tensor.shape.rank >= 1, "tensor {} has no dimensions", name);
  CHECK(tensor.data != nullptr || tensor.shape.elements() == 0, "tensor {} {} has no data", name, tensor.shape.str());
  CHECK(index_.emplace(name, items_.size()).second, "tensor {} was added twice", name);
  items_.push_back({std::move(name), tensor});
}

void SafetensorsWriter::add_metadata(std::string key, std::string value) { metadata_[std::move(key)] = std::move(value); }

Status SafetensorsWriter::write(const std::string& path) const {
  std::vector<size_t> order(items_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return dtype_bytes(items_[a].tensor.dtype) > dtype_bytes(items_[b].tensor.dtype);
  });

  std::vector<SafetensorsEntry> entries;
  for (const size_t i : order) {
    const ConstTensorView& t = items_[i].tensor;
    entries.push_back({.name = items_[i].name, .dtype = std::string(safetensors_name(t.dtype)), .shape = {t.shape.dims.begin(), t.shape.dims.begin() + t.shape.rank}});
  }
  place(&entries);
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file) return file.status();
  LOCKSTEP_RETURN_IF_ERROR(write_header(file.value(), entries, metadata_));
  for (const size_t i : order) {
    const ConstTensorView& t = items_[i].tensor;
    if (t.bytes() == 0) continue;
    const char* data = static_cast<const char*>(t.data);
    if (t.contiguous()) {
      LOCKSTEP_RETURN_IF_ERROR(file.value().write({data, t.bytes()}));
      continue;
    }
    const size_t row_bytes = static_cast<size_t>(t.shape.row_elements()) * dtype_bytes(t.dtype);
    for (int64_t r = 0; r < t.rows(); ++r)
      LOCKSTEP_RETURN_IF_ERROR(
          file.value().write({data + static_cast<size_t>(r * t.row_stride) * dtype_bytes(t.dtype), row_bytes}));
  }
  return file.value().commit();
}

Result<SafetensorsStream> SafetensorsStream::create(const std::string& path, std::vector<SafetensorsEntry> entries,
                                                    const std::map<std::string, std::string>& metadata) {
  std::unordered_set<std::string_view> names;
  for (const SafetensorsEntry& e : entries) CHECK(e.name != kMetadataKey && names.insert(e.name).second, "tensor {} twice, or reserved", e.name);
  const uint64_t bytes = place(&entries);
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file) return file.status();
  LOCKSTEP_RETURN_IF_ERROR(write_header(file.value(), entries, metadata));
  return SafetensorsStream(file.take(), bytes);
}

Status SafetensorsStream::write(std::span<const uint8_t> bytes) {
  CHECK(bytes.size() <= missing_, "{}: {} bytes, {} were declared", file_.path(), bytes.size(), missing_);
  missing_ -= bytes.size();
  return file_.write({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

Status SafetensorsStream::commit() {
  CHECK(missing_ == 0, "{}: {} bytes were declared and not written", file_.path(), missing_);
  return file_.commit();
}

}  // namespace lockstep
