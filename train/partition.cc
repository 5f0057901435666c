#include "train/partition.h"

#include <algorithm>

#include "core/device.h"

namespace lockstep {

namespace {

int64_t columns_of(const TensorSpec& spec) { return whole_box(spec.shape).columns.size(); }

// The part of `piece` that lies in elements `window` of the run, as elements of the shard's tensor.
Range within(const Piece& piece, const Range& window) {
  const int64_t begin = std::clamp(window.begin, piece.flat.begin, piece.flat.end), end = std::clamp(window.end, piece.flat.begin, piece.flat.end);
  const int64_t shift = piece.elements.begin - piece.flat.begin;
  return {begin + shift, end + shift};
}

}  // namespace

CutRun cut_run(const std::vector<TensorSpec>& table, std::span<const int64_t> begins, int64_t total, int parts) {
  struct Placed {
    const TensorSpec* spec;
    int64_t begin, end, columns;  // in the run
  };
  std::vector<Placed> tensors;
  for (const TensorSpec& spec : table) {
    const int64_t begin = begins[static_cast<size_t>(spec.id)];
    if (begin >= 0) tensors.push_back({&spec, begin, begin + spec.shape.elements(), columns_of(spec)});
  }

  // The cut nearest to where equal parts would end.
  const auto cut_at = [&](int64_t wanted) {
    for (const Placed& t : tensors)
      if (wanted > t.begin && wanted < t.end) return t.begin + (wanted - t.begin + t.columns / 2) / t.columns * t.columns;
    return wanted;
  };
  CutRun cut;
  int64_t begin = 0;
  for (int part = 0; part < parts; ++part) {
    const int64_t end = part + 1 == parts ? total : cut_at(part_of(total, parts, part).end);
    cut.parts.push_back({begin, end});
    begin = end;
    std::vector<Piece>& pieces = cut.pieces.emplace_back();
    for (const Placed& t : tensors) {
      const Range flat = {std::max(t.begin, cut.parts.back().begin), std::min(t.end, end)};
      if (flat.begin >= flat.end) continue;
      const Range rows = {(flat.begin - t.begin) / t.columns, (flat.end - t.begin) / t.columns};
      const Box& held = t.spec->box;
      pieces.push_back({.id = t.spec->id,
                        .rows = rows,
                        .elements = {rows.begin * t.columns, rows.end * t.columns},
                        .flat = flat,
                        .box = {{held.rows.begin + rows.begin, held.rows.begin + rows.end}, held.columns}});
    }
  }
  return cut;
}

CutRun cut_run(const std::vector<TensorSpec>& table, const TensorSet& gradients, ConstTensorView run, int parts) {
  const int64_t length = run.empty() ? 0 : run.rows();
  std::vector<int64_t> begins(table.size(), -1);
  for (const TensorSpec& spec : table) {
    const TensorView& g = gradients.views[static_cast<size_t>(spec.id)];
    if (g.empty() || length == 0) continue;
    const int64_t begin = g.ptr<float>() - run.ptr<float>();
    if (begin >= 0 && begin < length) begins[static_cast<size_t>(spec.id)] = begin;
  }
  return cut_run(table, begins, length, parts);
}

bool is_copy(const TensorSpec& spec, int tp_index) { return tp_index > 0 && (spec.cut == Cut::none || spec.cut == Cut::experts); }

Partition::Partition(const Gradients& gradients, Groups* groups) : table_(gradients.table) {
  const auto run = [&](const TensorView& flat, RankGroup* ranks) {
    return Run{flat, ranks, cut_run(gradients.table, gradients.set, flat, ranks == nullptr ? 1 : ranks->size())};
  };
  dense_ = run(gradients.dense, groups == nullptr ? nullptr : &groups->dp);
  experts_ = run(gradients.experts, groups == nullptr ? nullptr : &groups->expert_replicas);
  if (groups != nullptr) {
    tp_index_ = groups->tp.rank();
    dense_index_ = groups->dp.rank();
    expert_index_ = groups->expert_replicas.rank();
  }
  const std::vector<Piece>& a = dense_.cut.pieces[static_cast<size_t>(dense_index_)];
  const std::vector<Piece>& b = experts_.cut.pieces[static_cast<size_t>(expert_index_)];
  std::merge(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(own_), [](const Piece& x, const Piece& y) { return x.id < y.id; });
}

TensorView Partition::gradient(const Piece& piece) const {
  const TensorSpec& spec = table_[static_cast<size_t>(piece.id)];
  const Run& run = spec.cut == Cut::experts ? experts_ : dense_;
  return TensorView(run.gradients.ptr<float>() + piece.flat.begin, DType::f32, {piece.rows.size(), columns_of(spec)});
}

bool Partition::saves(const TensorSpec& spec) const { return counts(spec) && (spec.cut == Cut::experts ? expert_index_ : dense_index_) == 0; }

void Partition::sum_gradients(Context& c) const {
  for (const Run* run : {&dense_, &experts_}) {
    if (run->ranks == nullptr || run->ranks->size() == 1 || run->gradients.empty()) continue;
    const Range own = run->cut.parts[static_cast<size_t>(run->ranks->rank())];
    run->ranks->reduce_scatter(c, run->gradients.slice(own.begin, own.size()), run->gradients, run->cut.parts, "gradients");
  }
}

void Partition::share_rows(Context& c, Weights& weights) const {
  for (const Run* run : {&dense_, &experts_})
    if (run->ranks != nullptr && run->ranks->size() > 1 && !run->gradients.empty()) share_run(c, weights, *run);
}

ConstTensorView Partition::gather_master(Context& c, int id, ConstTensorView own) const {
  const TensorSpec& spec = table_[static_cast<size_t>(id)];
  const Run& run = spec.cut == Cut::experts ? experts_ : dense_;
  if (run.ranks == nullptr || run.ranks->size() == 1) return own.reshape(spec.shape);
  const TensorView whole = c.workspace->tensor(DType::f32, {spec.shape.elements()}, "masters together");
  std::vector<int64_t> counts(static_cast<size_t>(run.ranks->size()));
  for (size_t part = 0; part < counts.size(); ++part)
    for (const Piece& piece : run.cut.pieces[part])
      if (piece.id == id) counts[part] += piece.elements.size();
  const ConstTensorView mine = own.empty() ? ConstTensorView(whole.data, DType::f32, {0}) : own.reshape({own.shape.elements()});
  run.ranks->all_gather(c, whole, mine, counts, "masters");
  return whole.reshape(spec.shape);
}

// In rounds: of each part as many elements of the run, in their weight dtypes, as bytes one behind the other.
void Partition::share_run(Context& c, Weights& weights, const Run& run) const {
  const int size = run.ranks->size(), me = run.ranks->rank();
  const int64_t step = round_elements(size);
  int64_t longest = 0;
  for (const Range& part : run.cut.parts) longest = std::max(longest, part.size());

  const ArenaScope scope(*c.workspace);
  const TensorView bucket = c.workspace->tensor(DType::u8, {step * size * static_cast<int64_t>(sizeof(float))}, "weights on their way");
  std::vector<int64_t> bytes(static_cast<size_t>(size));
  for (int64_t at = 0; at < longest; at += step) {
    // f(rows of weights, their bytes) for what `part` gives in this round.
    const auto for_each = [&](int part, const auto& f) {
      const Range& all = run.cut.parts[static_cast<size_t>(part)];
      const Range window = {std::min(all.begin + at, all.end), std::min(all.begin + at + step, all.end)};
      for (const Piece& piece : run.cut.pieces[static_cast<size_t>(part)]) {
        const Range elements = within(piece, window);
        const TensorView rows = weights.rows(piece.id);
        if (!weights.scales(piece.id).empty()) continue;
        const int64_t width = static_cast<int64_t>(dtype_bytes(rows.dtype));
        if (elements.size() > 0) f(static_cast<char*>(rows.data) + elements.begin * width, elements.size() * width);
      }
    };
    int64_t total = 0, own_begin = 0;
    for (int r = 0; r < size; ++r) {
      int64_t& b = bytes[static_cast<size_t>(r)];
      b = 0;
      for_each(r, [&](char*, int64_t n) { b += n; });
      if (r == me) own_begin = total;
      total += b;
    }
    char* to = static_cast<char*>(bucket.data) + own_begin;
    for_each(me, [&](const char* rows, int64_t n) {
      copy_bytes(c, to, rows, static_cast<size_t>(n));
      to += n;
    });
    run.ranks->all_gather(c, bucket.slice(0, total), bucket.slice(own_begin, bytes[static_cast<size_t>(me)]), bytes, "weights");
    const char* from = static_cast<const char*>(bucket.data);
    for (int r = 0; r < size; ++r) {
      for_each(r, [&](char* rows, int64_t n) {
        if (r != me) copy_bytes(c, rows, from, static_cast<size_t>(n));
        from += n;
      });
    }
  }
}

}  // namespace lockstep
