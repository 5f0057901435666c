#include "sync/plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace lockstep {

namespace {

// The tables of all ranks, by rank.
std::vector<std::vector<TensorSpec>> tables_of(const ModelConfig& config, const Placement& p) {
  std::vector<std::vector<TensorSpec>> tables;
  for (const Shard& shard : p.shards) tables.push_back(tensor_table(config, shard));
  return tables;
}

// One part of a tensor and the ranks that hold it, ascending.
struct Part {
  Box box;
  std::vector<int> holders;
};

// A layout cuts a tensor into parts that do not overlap, each on one rank or several.
std::vector<Part> parts_of(const std::vector<std::vector<TensorSpec>>& tables, size_t id) {
  std::vector<Part> parts;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    const TensorSpec& spec = tables[rank][id];
    if (!spec.held()) continue;
    auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.box == spec.box; });
    if (part == parts.end()) {
      for (const Part& p : parts) CHECK(intersect(p.box, spec.box).empty(), "{}: ranks {} and {} hold parts that overlap", spec.name, p.holders[0], rank);
      part = parts.insert(part, {spec.box, {}});
    }
    part->holders.push_back(static_cast<int>(rank));
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::pair(a.box.rows.begin, a.box.columns.begin) < std::pair(b.box.rows.begin, b.box.columns.begin);
  });
  return parts;
}

}  // namespace

std::string box_str(const Box& b) {
  return fmt::format("rows [{}, {}) columns [{}, {})", b.rows.begin, b.rows.end, b.columns.begin, b.columns.end);
}

Placement placement_of(const ModelConfig& config, const Grid& grid, const StageLayers& stages, Numerics numerics) {
  Placement p{.shards = {}, .numerics = numerics};
  for (int rank = 0; rank < grid.ranks(); ++rank) p.shards.push_back(shard_of(config, grid, stages, rank));
  return p;
}

void place_apart(Placement& trainer, Placement& sampler) {
  const Shard nothing{.layers = {}, .embedding = false, .head = false, .experts = {}};
  sampler.shards.insert(sampler.shards.begin(), trainer.shards.size(), nothing);
  trainer.shards.resize(sampler.shards.size(), nothing);
}

Box blocks_of(const TensorSpec& spec, Numerics n, const Box& box) {
  const BlockGrid rows = spec.row_grid(n), columns = spec.col_grid(n);
  return {{rows.blocks_in(box.rows.begin), rows.blocks_in(box.rows.end)}, {columns.blocks_in(box.columns.begin), columns.blocks_in(box.columns.end)}};
}

int64_t SyncPlan::row_bytes(const Copy& c) const {
  const int64_t columns = c.box.columns.size();
  return dtype(c) == DType::e2m1x2 ? num_blocks(columns, 2) : columns * static_cast<int64_t>(dtype_bytes(dtype(c)));
}

SyncPlan make_plan(const ModelConfig& config, const Placement& from, const Placement& to, const WantedTensors& wanted) {
  CHECK(!from.shards.empty() && from.shards.size() == to.shards.size(), "{} ranks to {}", from.shards.size(), to.shards.size());
  CHECK(can_follow(from.numerics, to.numerics), "{} to {}", numerics_name(from.numerics), numerics_name(to.numerics));
  SyncPlan plan;
  plan.ranks = static_cast<int>(from.shards.size());
  std::vector<int64_t> sent(from.shards.size());
  const auto sources = tables_of(config, from), destinations = tables_of(config, to);
  for (const TensorSpec& whole : tensor_table(config)) {
    plan.from_dtype.push_back(whole.weight_dtype(from.numerics));
    plan.to_dtype.push_back(whole.weight_dtype(to.numerics));
    if (!wanted(whole)) continue;
    const std::vector<Part> parts = parts_of(sources, static_cast<size_t>(whole.id));
    for (int rank = 0; rank < plan.ranks; ++rank) {
      const TensorSpec& needed = destinations[static_cast<size_t>(rank)][static_cast<size_t>(whole.id)];
      if (!needed.held()) continue;
      for (const Part& part : parts) {
        Copy copy{.tensor = whole.id, .box = intersect(part.box, needed.box), .from = rank, .to = rank};
        if (copy.box.empty()) continue;
        if (!std::binary_search(part.holders.begin(), part.holders.end(), rank)) {
          copy.from = *std::min_element(part.holders.begin(), part.holders.end(),
                                        [&](int a, int b) { return sent[static_cast<size_t>(a)] < sent[static_cast<size_t>(b)]; });
          sent[static_cast<size_t>(copy.from)] += plan.bytes(copy);
        }
        plan.copies.push_back(copy);
        if (!whole.quant_format(to.numerics)) continue;
        copy.box = blocks_of(whole, to.numerics, copy.box);
        copy.scales = true;
        if (!copy.local()) sent[static_cast<size_t>(copy.from)] += plan.bytes(copy);
        plan.copies.push_back(copy);
      }
    }
  }
  return plan;
}

Status check_plan(const ModelConfig& config, const Placement& from, const Placement& to, const WantedTensors& wanted, const SyncPlan& plan) {
  const auto sources = tables_of(config, from), destinations = tables_of(config, to);
  if (static_cast<size_t>(plan.ranks) != sources.size()) return errorf("a plan for {} ranks, there are {}", plan.ranks, sources.size());
  // Copies of one tensor to one rank, whatever their order in the plan.
  std::vector<const Copy*> copies;
  for (const Copy& c : plan.copies) {
    const bool known = c.tensor >= 0 && c.tensor < static_cast<int>(sources[0].size()) && c.from >= 0 && c.from < plan.ranks && c.to >= 0 && c.to < plan.ranks;
    if (!known) return errorf("a copy of tensor {} from rank {} to rank {}, which do not exist", c.tensor, c.from, c.to);
    copies.push_back(&c);
  }
  std::stable_sort(copies.begin(), copies.end(),
                   [](const Copy* a, const Copy* b) { return std::tuple(a->tensor, a->to, a->scales) < std::tuple(b->tensor, b->to, b->scales); });
  size_t next = 0;
  for (const TensorSpec& whole : tensor_table(config)) {
    const auto id = static_cast<size_t>(whole.id);
    const bool quantized = whole.quant_format(to.numerics).has_value();
    const auto box_of = [&](const TensorSpec& spec, bool scales) { return scales && spec.held() ? blocks_of(whole, to.numerics, spec.box) : spec.box; };
    for (int turn = 0; turn < 2 * plan.ranks; ++turn) {
      const int rank = turn / 2;
      const bool scales = turn % 2 == 1;
      const Box held = box_of(destinations[static_cast<size_t>(rank)][id], scales && quantized);
      const size_t first = next;
      int64_t covered = 0;
      for (; next < copies.size() && copies[next]->tensor == whole.id && copies[next]->to == rank && copies[next]->scales == scales; ++next) {
        const Copy& c = *copies[next];
        const std::string what = fmt::format("{}: the copy of {}{} from rank {} to rank {}", whole.name, scales ? "scales in " : "", box_str(c.box), c.from, rank);
        if (scales && !quantized) return errorf("{} is of a tensor without", what);
        if (c.box.empty() || intersect(c.box, box_of(sources[static_cast<size_t>(c.from)][id], scales)) != c.box)
          return errorf("{} is not of what rank {} holds", what, c.from);
        if (intersect(c.box, held) != c.box) return errorf("{} is not of what rank {} needs", what, rank);
        for (size_t other = first; other < next; ++other)
          if (!intersect(c.box, copies[other]->box).empty()) return errorf("{} overlaps one of {}", what, box_str(copies[other]->box));
        covered += c.box.elements();
      }
      const int64_t needed = wanted(whole) && (quantized || !scales) ? held.elements() : 0;
      if (covered != needed) return errorf("{}: rank {} is given {} {} of {}", whole.name, rank, covered, scales ? "scales" : "numbers", needed);
    }
  }
  return Status::ok();
}

int64_t cut_into_rounds(const SyncPlan& plan, int64_t bucket_bytes, const std::function<void(int64_t, size_t, const Range&)>& f) {
  struct Queue {
    std::vector<size_t> copies;
    size_t next = 0;
    int64_t rows_done = 0;  // of copies[next]
  };
  std::map<std::pair<int, int>, Queue> queues;  // by (to - from) modulo the ranks, then from
  for (size_t i = 0; i < plan.copies.size(); ++i) {
    const Copy& copy = plan.copies[i];
    CHECK(plan.row_bytes(copy) <= bucket_bytes, "a bucket of {} bytes for rows of {}", bucket_bytes, plan.row_bytes(copy));
    if (!copy.local()) queues[{(copy.to - copy.from + plan.ranks) % plan.ranks, copy.from}].copies.push_back(i);
  }
  int64_t round = 0;
  for (; !queues.empty(); ++round) {
    std::vector<int64_t> send_room(static_cast<size_t>(plan.ranks), bucket_bytes), receive_room = send_room;
    for (auto at = queues.begin(); at != queues.end();) {
      Queue& q = at->second;
      const int from = at->first.second, to = (from + at->first.first) % plan.ranks;
      int64_t &out = send_room[static_cast<size_t>(from)], &in = receive_room[static_cast<size_t>(to)];
      while (q.next < q.copies.size()) {
        const Copy& copy = plan.copies[q.copies[q.next]];
        const int64_t row_bytes = plan.row_bytes(copy), left = copy.box.rows.size() - q.rows_done;
        const int64_t rows = std::min(left, std::min(out, in) / row_bytes);
        if (rows == 0) break;
        const int64_t first = copy.box.rows.begin + q.rows_done;
        f(round, q.copies[q.next], {first, first + rows});
        out -= rows * row_bytes;
        in -= rows * row_bytes;
        q.rows_done += rows;
        if (rows < left) break;
        q.rows_done = 0;
        ++q.next;
      }
      at = q.next == q.copies.size() ? queues.erase(at) : std::next(at);
    }
  }
  return round;
}

namespace {

template <typename Bytes>
CommBytes copied_bytes(const SyncPlan& plan, int rank, Bytes bytes) {
  CommBytes b;
  for (const Copy& c : plan.copies) {
    if (c.local()) continue;
    if (c.from == rank) b.sent += bytes(c);
    if (c.to == rank) b.received += bytes(c);
  }
  return b;
}

}  // namespace

CommBytes plan_bytes(const SyncPlan& plan, int rank) {
  return copied_bytes(plan, rank, [&](const Copy& c) { return plan.bytes(c); });
}
CommBytes plan_check_bytes(const SyncPlan& plan, int rank) {
  return copied_bytes(plan, rank, [](const Copy&) { return static_cast<int64_t>(sizeof(int64_t)); });
}

}  // namespace lockstep
