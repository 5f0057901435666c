#include "model/checkpoint_boxes.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>

namespace lockstep {

namespace {

constexpr std::string_view kExtension = ".safetensors";

std::string box_str(const Box& b) { return fmt::format("[{}:{},{}:{}]", b.rows.begin, b.rows.end, b.columns.begin, b.columns.end); }

// Reads "123" and cuts it off.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

// "NAME[r0:r1,c0:c1]" in its two parts; nothing for any text that box_str() would not give.
std::optional<std::pair<std::string, Box>> parse_box_name(std::string_view entry) {
  const size_t bracket = entry.rfind('[');
  if (bracket == std::string_view::npos) return std::nullopt;
  std::string_view rest = entry.substr(bracket);
  Box box;
  for (int64_t* n : {&box.rows.begin, &box.rows.end, &box.columns.begin, &box.columns.end}) {
    rest.remove_prefix(std::min<size_t>(rest.size(), 1));
    const std::optional<int64_t> number = take_number(rest);
    if (!number) return std::nullopt;
    *n = *number;
  }
  if (box_str(box) != entry.substr(bracket) || box.rows.size() <= 0 || box.columns.size() <= 0) return std::nullopt;
  return std::pair(std::string(entry.substr(0, bracket)), box);
}

// Rank and count of a file of the stem: {0, 1} of "STEM.safetensors", {2, 16} of "STEM-00003-of-00016.safetensors".
std::optional<std::pair<int, int>> parse_box_file(std::string_view name, const std::string& stem) {
  if (!name.starts_with(stem) || !name.ends_with(kExtension)) return std::nullopt;
  if (name == box_file(stem, 0, 1)) return std::pair(0, 1);
  constexpr std::string_view kOf = "-of-";
  std::string_view rest = name.substr(stem.size());
  if (!rest.starts_with('-')) return std::nullopt;
  rest.remove_prefix(1);
  const std::optional<int64_t> rank = take_number(rest);
  if (!rank || !rest.starts_with(kOf)) return std::nullopt;
  rest.remove_prefix(kOf.size());
  const std::optional<int64_t> ranks = take_number(rest);
  constexpr int64_t kMaxRanks = 1 << 20;
  if (!ranks || rest != kExtension || *ranks < 2 || *ranks > kMaxRanks || *rank < 1 || *rank > *ranks) return std::nullopt;
  return std::pair(static_cast<int>(*rank) - 1, static_cast<int>(*ranks));
}

// Ranks that the files of the stem say they are of, and how many ranks there were.
struct Listing {
  std::vector<int> ranks;  // sorted
  int of = 0;
};
Result<Listing> list_box_files(const std::string& directory, const std::string& stem) {
  Listing found;
  std::error_code error;
  std::filesystem::directory_iterator it(directory, error);
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const auto parsed = parse_box_file(it->path().filename().string(), stem);
    if (!parsed) continue;
    const auto [rank, of] = *parsed;
    if (found.of != 0 && found.of != of)
      return errorf("{} holds files {} of {} ranks and of {}, which are of different saves; use another checkpoint", directory, stem,
                    std::min(found.of, of), std::max(found.of, of));
    found.of = of;
    found.ranks.push_back(rank);
  }
  if (error) return errorf("cannot list {}: {}", directory, error.message());
  std::sort(found.ranks.begin(), found.ranks.end());
  return found;
}

std::optional<DType> box_dtype(std::string_view name) {
  if (name == "F32") return DType::f32;
  if (name == "I32") return DType::i32;
  return std::nullopt;
}

}  // namespace

std::string box_file(const std::string& stem, int rank, int ranks) {
  CHECK(rank >= 0 && rank < ranks, "rank {} of {}", rank, ranks);
  return ranks == 1 ? fmt::format("{}{}", stem, kExtension) : fmt::format("{}-{:05}-of-{:05}{}", stem, rank + 1, ranks, kExtension);
}

Status write_boxes(const std::string& path, std::span<const BoxView> boxes, const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer;
  for (const auto& [key, value] : metadata) writer.add_metadata(key, value);
  for (const BoxView& b : boxes) {
    if (b.box.empty()) continue;
    const Box whole = whole_box(b.whole);
    CHECK(intersect(b.box, whole) == b.box, "{}{} lies outside {}", b.name, box_str(b.box), b.whole.str());
    CHECK(b.values.dtype == DType::f32 || b.values.dtype == DType::i32, "{} is {}", b.name, dtype_name(b.values.dtype));
    CHECK(b.name.find('[') == std::string::npos, "{} cannot be told from a box", b.name);
    if (b.box == whole) {
      writer.add(b.name, b.values.reshape(b.whole));
    } else {
      const Shape wanted = {b.box.rows.size(), b.box.columns.size()};
      CHECK(b.values.shape == wanted, "{}{}: values {}", b.name, box_str(b.box), b.values.shape.str());
      writer.add(b.name + box_str(b.box), b.values);
    }
  }
  return writer.write(path);
}

bool has_box_files(const std::string& directory, const std::string& stem) {
  const Result<Listing> found = list_box_files(directory, stem);
  std::error_code error;
  return found ? found.value().of > 0 : std::filesystem::is_directory(directory, error);  // open() will say what is wrong
}

struct BoxFiles::Impl {
  struct Part {
    size_t file = 0;
    const uint8_t* bytes = nullptr;  // of the box, row-major
    Box box;
    DType dtype = DType::f32;
    Shape whole;  // rank 0: the entry is a box, which does not say
  };
  std::string directory;
  std::vector<SafetensorsFile> files;
  std::map<std::string, std::vector<Part>> tensors;  // parts by first row

  Status index(size_t file);
  Status check_parts(const std::string& name, std::vector<Part>& parts) const;
};

Status BoxFiles::Impl::index(size_t f) {
  const SafetensorsFile& file = files[f];
  for (const SafetensorsEntry& e : file.tensors()) {
    const std::optional<DType> dtype = box_dtype(e.dtype);
    if (!dtype) return errorf("{}: {} is {}, boxes are F32 or I32", file.path(), e.name, e.dtype);
    Part part = {.file = f, .bytes = file.bytes(e).data(), .box = {}, .dtype = *dtype, .whole = {}};
    std::string name = e.name;
    if (e.name.find('[') == std::string::npos) {
      if (e.shape.empty() || e.shape.size() > Shape::kMaxRank || e.bytes() == 0)
        return errorf("{}: {} has shape {}, 1 to {} dimensions are wanted, none of them 0", file.path(), e.name, e.shape_str(), Shape::kMaxRank);
      for (const int64_t d : e.shape) part.whole.dims[static_cast<size_t>(part.whole.rank++)] = d;
      part.box = whole_box(part.whole);
    } else {
      const auto parsed = parse_box_name(e.name);
      if (!parsed) return errorf("{}: {} is no box; NAME[r0:r1,c0:c1] is wanted", file.path(), e.name);
      std::tie(name, part.box) = *parsed;
      if (e.shape != std::vector<int64_t>{part.box.rows.size(), part.box.columns.size()})
        return errorf("{}: {} has shape {}, its name says [{}, {}]", file.path(), e.name, e.shape_str(), part.box.rows.size(),
                      part.box.columns.size());
    }
    tensors[name].push_back(part);
  }
  return Status::ok();
}

Status BoxFiles::Impl::check_parts(const std::string& name, std::vector<Part>& parts) const {
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.box.rows.begin < b.box.rows.begin; });
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& a = parts[i];
    if (a.dtype != parts.front().dtype)
      return errorf("{} is {} in {} and {} in {}", name, dtype_name(parts.front().dtype), files[parts.front().file].path(), dtype_name(a.dtype),
                    files[a.file].path());
    for (size_t k = i + 1; k < parts.size() && parts[k].box.rows.begin < a.box.rows.end; ++k)
      if (!intersect(a.box, parts[k].box).empty())
        return errorf("{}{} in {} and {}{} in {} overlap; the files are not of one save", name, box_str(a.box), files[a.file].path(), name,
                      box_str(parts[k].box), files[parts[k].file].path());
  }
  return Status::ok();
}

Result<BoxFiles> BoxFiles::open(const std::string& directory, const std::string& stem) {
  Result<Listing> listed = list_box_files(directory, stem);
  if (!listed) return listed.status();
  const auto& [ranks, of] = listed.value();
  if (of == 0) return errorf("{} holds no {}", directory, box_file(stem, 0, 1));
  for (int r = 0; r < of; ++r)
    if (!std::binary_search(ranks.begin(), ranks.end(), r))
      return errorf("{}/{} is missing; {} ranks wrote this checkpoint", directory, box_file(stem, r, of), of);

  auto impl = std::make_unique<Impl>();
  impl->directory = directory;
  for (int r = 0; r < of; ++r) {
    Result<SafetensorsFile> file = SafetensorsFile::open(directory + "/" + box_file(stem, r, of));
    if (!file) return file.status();
    impl->files.push_back(file.take());
    const SafetensorsFile &first = impl->files.front(), &last = impl->files.back();
    if (last.metadata() != first.metadata())
      return errorf("{} and {} have different metadata, so they are not of one save; use another checkpoint", first.path(), last.path());
  }
  for (size_t f = 0; f < impl->files.size(); ++f) LOCKSTEP_RETURN_IF_ERROR(impl->index(f));
  for (auto& [name, parts] : impl->tensors) LOCKSTEP_RETURN_IF_ERROR(impl->check_parts(name, parts));
  return BoxFiles(std::move(impl));
}

BoxFiles::BoxFiles(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BoxFiles::BoxFiles(BoxFiles&&) noexcept = default;
BoxFiles& BoxFiles::operator=(BoxFiles&&) noexcept = default;
BoxFiles::~BoxFiles() = default;

const std::string& BoxFiles::directory() const { return impl_->directory; }
const std::map<std::string, std::string>& BoxFiles::metadata() const { return impl_->files.front().metadata(); }
bool BoxFiles::has(const std::string& name) const { return impl_->tensors.contains(name); }

std::vector<std::string> BoxFiles::paths() const {
  std::vector<std::string> paths;
  for (const SafetensorsFile& f : impl_->files) paths.push_back(f.path());
  return paths;
}

std::vector<std::string> BoxFiles::names() const {
  std::vector<std::string> names;
  for (const auto& [name, parts] : impl_->tensors) names.push_back(name);
  return names;
}

Status BoxFiles::check(std::span<const WholeTensor> wanted) const {
  for (const WholeTensor& w : wanted) {
    const auto it = impl_->tensors.find(w.name);
    if (it == impl_->tensors.end())
      return errorf("{}: tensor {} {} is missing; does the checkpoint belong to this config?", directory(), w.name, w.whole.str());
    const Box whole = whole_box(w.whole);
    int64_t covered = 0;
    for (const Impl::Part& p : it->second) {
      const std::string& path = impl_->files[p.file].path();
      if (p.dtype != w.dtype) return errorf("{}: tensor {} is {}, this config wants {}", path, w.name, dtype_name(p.dtype), dtype_name(w.dtype));
      if (p.whole.rank > 0 && !(p.whole == w.whole))
        return errorf("{}: tensor {} has shape {}, the config asks for {}", path, w.name, p.whole.str(), w.whole.str());
      if (!(intersect(p.box, whole) == p.box))
        return errorf("{}: tensor {} reaches to row {} and column {}, the config asks for {}", path, w.name, p.box.rows.end, p.box.columns.end,
                      w.whole.str());
      covered += p.box.elements();
    }
    if (covered != whole.elements())
      return errorf("{}: of tensor {} {} the files hold {} of {} numbers; does the checkpoint belong to this config?", directory(), w.name,
                    w.whole.str(), covered, whole.elements());
  }
  if (impl_->tensors.size() == wanted.size()) return Status::ok();
  for (const auto& [name, parts] : impl_->tensors)
    if (std::none_of(wanted.begin(), wanted.end(), [&name = name](const WholeTensor& w) { return w.name == name; }))
      return errorf("{}: tensor {} is not one of this config", impl_->files[parts.front().file].path(), name);
  return Status::ok();
}

Status BoxFiles::read(const std::string& name, const Box& box, TensorView out) const {
  const Shape wanted = {box.rows.size(), box.columns.size()};
  CHECK(out.shape == wanted, "{}{} into {}", name, box_str(box), out.shape.str());
  if (box.empty()) return Status::ok();
  const auto it = impl_->tensors.find(name);
  if (it == impl_->tensors.end()) return errorf("{}: tensor {} is missing", directory(), name);
  int64_t copied = 0;
  for (const Impl::Part& p : it->second) {
    const Box common = intersect(p.box, box);
    if (common.empty()) continue;
    if (p.dtype != out.dtype)
      return errorf("{}: tensor {} is {}, {} is wanted", impl_->files[p.file].path(), name, dtype_name(p.dtype), dtype_name(out.dtype));
    const size_t element = dtype_bytes(p.dtype), bytes = static_cast<size_t>(common.columns.size()) * element;
    for (int64_t r = common.rows.begin; r < common.rows.end; ++r) {
      const int64_t from = (r - p.box.rows.begin) * p.box.columns.size() + common.columns.begin - p.box.columns.begin;
      const int64_t to = (r - box.rows.begin) * out.row_stride + common.columns.begin - box.columns.begin;
      std::memcpy(static_cast<char*>(out.data) + static_cast<size_t>(to) * element, p.bytes + static_cast<size_t>(from) * element, bytes);
    }
    copied += common.elements();
  }
  if (copied != box.elements())
    return errorf("{}: of {}{} the files hold {} of {} numbers", directory(), name, box_str(box), copied, box.elements());
  return Status::ok();
}

}  // namespace lockstep
