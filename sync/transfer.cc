#include "sync/transfer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>

#include <xxhash.h>

#include "core/device.h"
#include "ops/cast/cast.h"
#include "ops/finite/finite.h"
#include "ops/matmul/matmul.h"
#include "ops/rows/rows.h"
#include "sync/delta.h"

namespace lockstep {

namespace {

constexpr int64_t kSumBytes = sizeof(int64_t);  // of a copy's checksum

// What a rank tells the others at the beginning.
using State = std::array<int64_t, Transfer::kBeginBytes / sizeof(int64_t)>;
constexpr size_t kVersion = 0, kSampler = 1, kManifest = 2, kCommitted = 3, kKnowsSent = 4, kFine = 5;

// Of parts of a copy: ops/checksum's add up, whatever their order.
void add_to_sum(int64_t& sum, int64_t part) { sum = std::bit_cast<int64_t>(std::bit_cast<uint64_t>(sum) + std::bit_cast<uint64_t>(part)); }

// Rows of the whole tensor, columns of the box, as a view into the matrix that holds `held` of it. Two numbers of e2m1x2 are one element.
template <typename View>
View part(const View& matrix, const Box& held, const Range& rows, const Range& columns) {
  const int64_t each = matrix.dtype == DType::e2m1x2 ? 2 : 1;
  return matrix.slice(rows.begin - held.rows.begin, rows.size()).cols((columns.begin - held.columns.begin) / each, num_blocks(columns.size(), each));
}

// Into `out`, which has the same dtype or is bf16 for f32. Numbers in a bucket may lie at any address, where a GPU can neither read nor write them as numbers.
void store(Context& c, TensorView out, ConstTensorView in) {
  if (out.dtype == in.dtype) return copy_rows(c, out, in);
  if (!c.on_gpu() || reinterpret_cast<uintptr_t>(out.data) % dtype_bytes(out.dtype) == 0) return cast(c, out, in);
  const ArenaScope scope(*c.workspace);
  const TensorView rounded = c.workspace->tensor(out.dtype, out.shape, "weights rounded");
  cast(c, rounded, in);
  copy_rows(c, out, rounded);
}

ByteRows byte_rows(const TensorView& v) {
  const auto width = static_cast<int64_t>(dtype_bytes(v.dtype));
  return {static_cast<char*>(v.data), v.rows(), v.dim(1) * width, v.row_stride * width};
}

TensorView as_bytes(const TensorView& rows) { return TensorView(rows.data, DType::u8, {static_cast<int64_t>(rows.bytes())}); }

const WantedTensors kEvery = [](const TensorSpec&) { return true; };

Route planned_route(const ModelConfig& config, const Placement& source, const Placement& destination, const WantedTensors& wanted, int rank, int64_t bucket_bytes) {
  SyncPlan plan = make_plan(config, source, destination, wanted);
  const Status covered = check_plan(config, source, destination, wanted, plan);
  CHECK(covered.is_ok(), "weight update: {}", covered.message());
  return make_route(std::move(plan), rank, bucket_bytes);
}

// The most that deltas of a bucket's pieces take beyond the rows.
int64_t bitmaps_of(const Route& route) {
  int64_t most = 0;
  for (const Route::Bucket& bucket : route.buckets)
    for (const auto* pieces : {&bucket.sends, &bucket.receives}) {
      int64_t bytes = 0;
      for (const Route::Piece& piece : *pieces) bytes += delta_bitmap_bytes(piece.rows.size(), route.plan.row_bytes(route.plan.copies[piece.copy]));
      most = std::max(most, bytes);
    }
  return most;
}

// The copies between ranks that `rank` sends or receives, by the other rank, then as in the plan; and how many there are of each.
struct PairedCopies {
  std::vector<size_t> copies;
  std::vector<int64_t> counts;  // by the other rank
};
PairedCopies paired(const SyncPlan& plan, int rank, int Copy::*mine, int Copy::*other) {
  PairedCopies p{.copies = {}, .counts = std::vector<int64_t>(static_cast<size_t>(plan.ranks))};
  for (size_t i = 0; i < plan.copies.size(); ++i) {
    if (plan.copies[i].local() || plan.copies[i].*mine != rank) continue;
    p.copies.push_back(i);
    ++p.counts[static_cast<size_t>(plan.copies[i].*other)];
  }
  std::stable_sort(p.copies.begin(), p.copies.end(), [&](size_t a, size_t b) { return plan.copies[a].*other < plan.copies[b].*other; });
  return p;
}

}  // namespace

const char* sync_stage_name(SyncStage stage) {
  switch (stage) {
    case SyncStage::quiesce: return "quiesce";
    case SyncStage::begin: return "begin";
    case SyncStage::transfer: return "transfer";
    case SyncStage::verify: return "verify";
    case SyncStage::commit: return "commit";
    case SyncStage::finalise: return "finalise";
  }
  return "?";
}

Transfer::Transfer(RankGroup* ranks, const Weights& from, Weights& to, const Placement& source, const Placement& destination, const WantedTensors& changes,
                   Arena& arena, SyncOptions options, int64_t bucket_bytes)
    : ranks_(ranks), from_(from), to_(to), options_(std::move(options)), announced_(make_manifest(from.config(), destination.numerics, kEvery)),
      wanted_(make_manifest(to.config(), to.numerics(), kEvery)), all_(planned_route(from.config(), source, destination, kEvery, rank(), bucket_bytes)),
      changing_(planned_route(from.config(), source, destination, changes, rank(), bucket_bytes)) {
  const auto rank = static_cast<size_t>(this->rank()), size = ranks == nullptr ? 1 : static_cast<size_t>(ranks->size());
  CHECK(source.shards.size() == size, "a placement of {} ranks for {}", source.shards.size(), size);
  CHECK(from.shard() == source.shards[rank] && from.numerics() == source.numerics, "the source is not this rank's shard");
  CHECK(to.shard() == destination.shards[rank] && to.numerics() == destination.numerics, "the destination is not this rank's shard");
  CHECK(options_.full_every >= 1, "one full update in {}", options_.full_every);
  CHECK(!options_.delta || arena.device() == Device::cpu, "deltas are made in the host's memory");
  for (const TensorSpec& spec : to.table()) {
    landing_.push_back(!spec.held() ? TensorView()
                       : reads_panels(spec.id) ? matrix_view(to.rows(spec.id))
                                           : matrix_view(arena.tensor(to.rows(spec.id).dtype, to.rows(spec.id).shape, "weights landing")));
    const Shape scales = to.scales(spec.id).shape;
    landing_scales_.push_back(scales.rank == 0 ? TensorView() : matrix_view(arena.tensor(DType::ue8m0, scales, "weights landing")));
  }
  for (const TensorSpec& spec : from.table()) {
    Quantized& q = quantized_.emplace_back();
    if (!spec.held() || !spec.quant_format(to.numerics())) continue;
    q.used = true;
    q.changes = changes(spec);
    q.counts = std::none_of(source.shards.begin(), source.shards.begin() + static_cast<std::ptrdiff_t>(rank), [&](const Shard& before) {
      return tensor_table(from.config(), before)[static_cast<size_t>(spec.id)].box == spec.box;
    });
    if (!quantizes()) continue;
    q.codes = arena.tensor(spec.weight_dtype(to.numerics()), spec.stored_shape(to.numerics()), "weights in codes");
    q.scales = arena.tensor(DType::ue8m0, spec.scale_shape(to.numerics()), "weights in codes");
  }
  outgoing_ = arena.tensor(DType::u8, {bucket_bytes}, "weights outgoing");
  const int64_t largest = bucket_bytes + (options_.delta ? bitmaps_of(changing_) : 0);
  if (size > 1) incoming_ = arena.tensor(DType::u8, {largest}, "weights incoming");
  if (!options_.delta) return;
  if (size > 1) delta_ = arena.tensor(DType::u8, {largest}, "weights outgoing");
  for (const Copy& copy : changing_.plan.copies) {
    const bool sends = !copy.local() && copy.from == this->rank();
    last_sent_.push_back(sends ? arena.tensor(DType::u8, {changing_.plan.bytes(copy)}, "weights last sent") : TensorView());
  }
}

CommBytes Transfer::bytes() const { return plan_bytes(route().plan, rank()); }
CommBytes Transfer::check_bytes() const { return plan_check_bytes(route().plan, rank()); }

void Transfer::enter(SyncStage stage) {
  if (options_.hooks.enter) refuse(stage, options_.hooks.enter(stage, -1));
}

void Transfer::refuse(SyncStage stage, const Status& why) {
  if (!why && bad_) bad_ = errorf("{}: {}", sync_stage_name(stage), why.message());
}

// The error of the lowest rank that has one, on all.
Status Transfer::vote(const char* purpose) {
  if (ranks_ != nullptr && ranks_->size() > 1) return ranks_->agree(bad_, purpose);
  return bad_ ? bad_ : errorf("rank 0: {}", bad_.message());
}

// Decides, the same on all ranks, which tensors travel and whether their changes are enough.
Transfer::Choice Transfer::begin() {
  enter(SyncStage::begin);
  Manifest announced = announced_;
  if (options_.hooks.announce) options_.hooks.announce(announced);
  refuse(SyncStage::begin, check_manifest(announced, wanted_));

  const State mine = {from_.version(), to_.version(), std::bit_cast<int64_t>(manifest_sum(announced)), committed_, knows_sent_, bad_.is_ok()};
  std::vector<State> states(static_cast<size_t>(all_.plan.ranks), mine);
  if (ranks_ != nullptr) ranks_->all_gather(std::span(states.front().data(), states.size() * mine.size()), std::span(mine), "weights begin");
  Choice choice = {committed_ < 0 ? &all_ : &changing_, options_.delta && deltas_ + 1 < options_.full_every};
  for (size_t r = 0; r < states.size(); ++r) {
    const State& s = states[r];
    const auto same = [&](size_t what) { return s[what] == states[0][what]; };
    if (!same(kVersion)) refuse(SyncStage::begin, errorf("rank {} sends version {} while rank 0 sends version {}", r, s[kVersion], states[0][kVersion]));
    if (!same(kManifest) && states[0][kFine] == 1 && s[kFine] == 1) refuse(SyncStage::begin, errorf("rank {} announces another manifest than rank 0", r));
    if (!same(kCommitted) || s[kSampler] != s[kCommitted]) choice = {&all_, false};  // its sampler was loaded by others
    choice.delta = choice.delta && s[kKnowsSent] == 1;
  }
  return choice;
}

void Transfer::quantize_masters(Context& c, const Route& route, const ReadMaster& master) {
  CHECK(master != nullptr, "an update from {} to {} without masters", numerics_name(from_.numerics()), numerics_name(to_.numerics()));
  for (const TensorSpec& spec : from_.table()) {
    if (!quantizes(route, spec.id)) continue;
    const ArenaScope scope(*c.workspace);
    Quantized& q = quantized_[static_cast<size_t>(spec.id)];
    q.stats = quantize_by_grid(c, q.codes, q.scales, spec.row_grid(to_.numerics()), spec.col_grid(to_.numerics()), master(spec.id));
  }
}

// Codes saturate, and would not say so. Returns what was counted, of the parts that this rank counts.
QuantStats Transfer::check_quantized(const Route& route) {
  QuantStats sum;
  for (const TensorSpec& spec : from_.table()) {
    if (!quantizes(route, spec.id)) continue;
    const Quantized& q = quantized_[static_cast<size_t>(spec.id)];
    const QuantStats& stats = quantizes() ? q.stats : from_.quant_stats(spec.id);
    if (stats.nonfinite > 0 || stats.saturated > 0)
      refuse(SyncStage::transfer, errorf("{} has {} numbers that are not finite and {} that overflow", spec.name, stats.nonfinite, stats.saturated));
    if (q.counts) sum += stats;
  }
  return sum;
}

TensorView Transfer::rows_at(const Route& route, const Piece& piece, void* at) const {
  const Copy& copy = route.plan.copies[piece.copy];
  const DType dtype = route.plan.dtype(copy);
  return TensorView(at, dtype, {piece.rows.size(), dtype == DType::e2m1x2 ? num_blocks(copy.box.columns.size(), 2) : copy.box.columns.size()});
}

TensorView Transfer::landing(const Route& route, const Piece& piece) const {
  const Copy& copy = route.plan.copies[piece.copy];
  const TensorSpec& spec = to_.table()[static_cast<size_t>(copy.tensor)];
  if (!copy.scales) return part(landing_[static_cast<size_t>(copy.tensor)], spec.box, piece.rows, copy.box.columns);
  return part(landing_scales_[static_cast<size_t>(copy.tensor)], blocks_of(spec, to_.numerics(), spec.box), piece.rows, copy.box.columns);
}

// Rows as they travel.
void Transfer::pack(Context& c, const Route& route, const Piece& piece, TensorView out) const {
  const Copy& copy = route.plan.copies[piece.copy];
  const TensorSpec& spec = from_.table()[static_cast<size_t>(copy.tensor)];
  const Quantized& q = quantized_[static_cast<size_t>(copy.tensor)];
  const WeightView& own = from_.view(copy.tensor);
  const ConstTensorView held = matrix_view(q.codes.empty() ? (copy.scales ? own.scales : own.rows) : ConstTensorView(copy.scales ? q.scales : q.codes));
  store(c, out, part(held, copy.scales ? blocks_of(spec, to_.numerics(), spec.box) : spec.box, piece.rows, copy.box.columns));
}

// Packs what leaves or is kept and looks at it. What it is will be known by check_left.
TensorView Transfer::leave(Context& c, const Route& route, const Piece& piece, void* at) {
  const Copy& copy = route.plan.copies[piece.copy];
  const TensorView rows = rows_at(route, piece, at);
  pack(c, route, piece, rows);
  if (options_.hooks.pack) options_.hooks.pack(from_.table()[static_cast<size_t>(copy.tensor)], rows);
  mark_nonfinite(c, marks_.slice(static_cast<int64_t>(left_.size()), 1), rows);
  left_.push_back(piece);
  items_.push_back(item_of(route, piece, rows));
  return rows;
}

// Of what has been packed since the last time, before its memory is used again.
void Transfer::sum_left(Context& c) {
  const auto n = static_cast<int64_t>(items_.size());
  checksum(c, sums_.slice(static_cast<int64_t>(left_.size()) - n, n), items_);
  items_.clear();
}

// Reads what the looks and sums of all that left have found.
void Transfer::check_left(Context& c, const Route& route) {
  const ArenaScope scope(*c.workspace), host_scope(*c.host);
  const auto n = static_cast<int64_t>(left_.size());
  if (n == 0) return;
  const auto* sums = on_host(c, sums_.slice(0, n)).ptr<int64_t>();
  const auto* marks = on_host(c, marks_.slice(0, n)).ptr<int32_t>();
  for (size_t i = 0; i < left_.size(); ++i) add_to_sum(sent_sums_[left_[i].copy], sums[i]);
  const auto bad = static_cast<size_t>(std::find(marks, marks + n, 1) - marks);
  if (bad == left_.size() || !bad_) return;
  // Once more, for its place.
  const Piece piece = left_[bad];
  const Copy& copy = route.plan.copies[piece.copy];
  const TensorSpec& spec = from_.table()[static_cast<size_t>(copy.tensor)];
  const TensorView again = rows_at(route, piece, outgoing_.data);
  pack(c, route, piece, again);
  if (options_.hooks.pack) options_.hooks.pack(spec, again);
  const ConstTensorView rows = on_host(c, again);
  Context host = c.on_host();
  int64_t row = 0;
  for (int32_t mark = 0; row < rows.rows(); ++row) {
    mark_nonfinite(host, TensorView(&mark, DType::i32, {1}), rows.slice(row, 1));
    if (mark != 0) break;
  }
  refuse(SyncStage::transfer, errorf("{} has a number that is not finite in row {} of its {}", spec.name, piece.rows.begin + row, copy.scales ? "scales" : spec.whole.str()));
}

ChecksumItem Transfer::item_of(const Route& route, const Piece& piece, ConstTensorView rows) const {
  return {.rows = rows, .key = piece.copy, .first_row = piece.rows.begin - route.plan.copies[piece.copy].box.rows.begin};
}

bool Transfer::loses(const Route& route, const Piece& piece) const {
  return options_.hooks.lose && options_.hooks.lose(to_.table()[static_cast<size_t>(route.plan.copies[piece.copy].tensor)]);
}

void Transfer::keep(Context& c, const Route& route, int64_t bucket) {
  const std::vector<Piece>& pieces = route.buckets[static_cast<size_t>(bucket)].local;
  std::vector<TensorView> kept;
  char* at = static_cast<char*>(outgoing_.data);
  for (const Piece& piece : pieces) {
    kept.push_back(leave(c, route, piece, at));
    at += kept.back().bytes();
  }
  sum_left(c);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const TensorView &rows = kept[i], to = landing(route, pieces[i]);
    if (options_.hooks.arrive) options_.hooks.arrive(bucket, as_bytes(rows));
    if (loses(route, pieces[i])) continue;
    landed_rows_[pieces[i].copy] += pieces[i].rows.size();
    if (is_delta_) {
      changed_ += overwrite_changed(byte_rows(rows), byte_rows(to));
    } else {
      store(c, to, rows);
    }
  }
}

void Transfer::exchange(Context& c, const Route& route, int64_t index) {
  const Route::Bucket& bucket = route.buckets[static_cast<size_t>(index)];
  std::vector<int64_t> send_bytes = bucket.send_bytes, receive_bytes = bucket.receive_bytes;
  const TensorView out = is_delta_ ? delta_ : outgoing_;
  char* at = static_cast<char*>(out.data);        // where what travels lies
  char* packed = static_cast<char*>(outgoing_.data);  // and the rows; without deltas the same
  if (is_delta_) std::fill(send_bytes.begin(), send_bytes.end(), 0);
  for (const Piece& piece : bucket.sends) {
    const TensorView rows = leave(c, route, piece, packed);
    auto bytes = static_cast<int64_t>(rows.bytes());
    packed += bytes;
    if (is_delta_) {
      const TensorView before = rows_at(route, piece, last_sent(route, piece));
      bytes = make_delta(at, byte_rows(rows), byte_rows(before));
      changed_ += bytes - delta_bitmap_bytes(rows.rows(), byte_rows(rows).row_bytes);
      send_bytes[static_cast<size_t>(route.plan.copies[piece.copy].to)] += bytes;
    }
    at += bytes;
  }
  sum_left(c);
  const int64_t sent = at - static_cast<char*>(out.data);
  moved_ += sent;
  if (is_delta_) ranks_->exchange_counts(std::span(receive_bytes), std::span<const int64_t>(send_bytes), "weights sizes");
  int64_t received = 0;
  for (const int64_t bytes : receive_bytes) received += bytes;
  CHECK(received <= incoming_.rows(), "bucket {}: {} bytes come, there is room for {}", index, received, incoming_.rows());
  const TensorView in = incoming_.slice(0, received);
  ranks_->all_to_all(c, in, receive_bytes, out.slice(0, sent), send_bytes, "weights");
  if (options_.hooks.arrive && received > 0) options_.hooks.arrive(index, in);

  std::span<const char> came(static_cast<const char*>(in.data), static_cast<size_t>(received));
  size_t piece = 0;
  for (int from = 0; from < route.plan.ranks; ++from) {
    std::span<const char> bytes = came.first(static_cast<size_t>(receive_bytes[static_cast<size_t>(from)]));
    came = came.subspan(bytes.size());
    bool readable = true;
    for (; piece < bucket.receives.size() && route.plan.copies[bucket.receives[piece].copy].from == from; ++piece)
      readable = readable && land(c, route, bucket.receives[piece], &bytes);
    if (readable && !bytes.empty()) refuse(SyncStage::transfer, errorf("bucket {}: {} bytes more than wanted came from rank {}", index, bytes.size(), from));
  }
}

// Writes the rows of a piece, with which `bytes` begins, and takes them off. False: what follows cannot be read any more.
bool Transfer::land(Context& c, const Route& route, const Piece& piece, std::span<const char>* bytes) {
  const bool lost = loses(route, piece);
  const TensorView to = lost ? rows_at(route, piece, outgoing_.data) : landing(route, piece);
  if (!lost) landed_rows_[piece.copy] += piece.rows.size();
  auto length = static_cast<int64_t>(to.bytes());
  if (is_delta_) {
    const Result<int64_t> applied = apply_delta(byte_rows(to), *bytes);
    if (!applied) {
      const Copy& copy = route.plan.copies[piece.copy];
      refuse(SyncStage::transfer, errorf("{} from rank {} is damaged: {}", name_of(copy), copy.from, applied.message()));
      return false;
    }
    length = applied.value();
  } else {
    store(c, to, rows_at(route, piece, const_cast<char*>(bytes->data())));
  }
  *bytes = bytes->subspan(static_cast<size_t>(length));
  return true;
}

// Reads back what landed. Sums are told by the ranks that sent.
void Transfer::verify(Context& c, const Route& route) {
  enter(SyncStage::verify);
  const SyncPlan& plan = route.plan;
  std::vector<Piece> landed;
  for (const Route::Bucket& bucket : route.buckets)
    for (const auto* pieces : {&bucket.local, &bucket.receives}) landed.insert(landed.end(), pieces->begin(), pieces->end());
  for (const Piece& piece : landed) items_.push_back(item_of(route, piece, landing(route, piece)));
  {
    const ArenaScope scope(*c.workspace), host_scope(*c.host);
    const TensorView sums = c.workspace->tensor(DType::i64, {static_cast<int64_t>(landed.size())}, "weights sums");
    checksum(c, sums, items_);
    items_.clear();
    const auto* of_piece = on_host(c, sums).ptr<int64_t>();
    for (size_t i = 0; i < landed.size(); ++i) add_to_sum(landed_sums_[landed[i].copy], of_piece[i]);
  }
  std::vector<int64_t> wanted = sent_sums_;  // by copy
  if (ranks_ != nullptr) {
    const PairedCopies sends = paired(plan, rank(), &Copy::from, &Copy::to), receives = paired(plan, rank(), &Copy::to, &Copy::from);
    std::vector<int64_t> told, heard(receives.copies.size());
    for (const size_t i : sends.copies) told.push_back(sent_sums_[i]);
    const auto view = [](std::vector<int64_t>& sums) { return TensorView(sums.data(), DType::u8, {static_cast<int64_t>(sums.size()), kSumBytes}); };
    Context host = c.on_host();
    ranks_->all_to_all(host, view(heard), receives.counts, view(told), sends.counts, "weights check");
    for (size_t i = 0; i < heard.size(); ++i) wanted[receives.copies[i]] = heard[i];
  }
  for (size_t i = 0; i < plan.copies.size(); ++i) {
    const Copy& copy = plan.copies[i];
    if (copy.to != rank()) continue;
    if (landed_rows_[i] != copy.box.rows.size())
      refuse(SyncStage::verify, errorf("{} from rank {}: {} of its {} rows are missing", name_of(copy), copy.from, copy.box.rows.size() - landed_rows_[i], copy.box.rows.size()));
    if (landed_sums_[i] != wanted[i])
      refuse(SyncStage::verify, errorf("{} from rank {} is damaged: checksum {:016x} was sent, {:016x} landed", name_of(copy), copy.from, std::bit_cast<uint64_t>(wanted[i]),
                                       std::bit_cast<uint64_t>(landed_sums_[i])));
  }
}

std::string Transfer::name_of(const Copy& copy) const {
  return fmt::format("{} ({}{})", to_.table()[static_cast<size_t>(copy.tensor)].name, copy.scales ? "scales, " : "", box_str(copy.box));
}

// Rows and copies as the sampler reads them.
void Transfer::restore(Context& c) {
  for (const TensorSpec& spec : to_.table()) {
    if (!spec.held()) continue;
    const auto id = static_cast<size_t>(spec.id);
    if (reads_panels(spec.id)) {
      to_.restore_rows(c, spec.id);
    } else {
      store(c, landing_[id], matrix_view(to_.rows(spec.id)));
    }
    if (!landing_scales_[id].empty()) store(c, landing_scales_[id], matrix_view(to_.scales(spec.id)));
  }
}

void Transfer::finalise(Context& c) {
  if (options_.hooks.enter) {
    const Status left = options_.hooks.enter(SyncStage::finalise, -1);
    CHECK(left.is_ok(), "the update to version {} was agreed upon: {}", from_.version(), left.message());
  }
  for (const TensorSpec& spec : to_.table()) {
    if (!spec.held()) continue;
    const auto id = static_cast<size_t>(spec.id);
    if (!reads_panels(spec.id)) store(c, matrix_view(to_.rows(spec.id)), landing_[id]);
    if (!landing_scales_[id].empty()) store(c, matrix_view(to_.scales(spec.id)), landing_scales_[id]);
  }
  to_.commit(c, from_.version());
  committed_ = from_.version();
}

// What deltas will be made against.
void Transfer::remember_sent(Context& c) {
  for (size_t i = 0; i < last_sent_.size(); ++i)
    if (const Piece whole = {i, changing_.plan.copies[i].box.rows}; !last_sent_[i].empty()) pack(c, changing_, whole, rows_at(changing_, whole, last_sent_[i].data));
  knows_sent_ = options_.delta;
}

char* Transfer::last_sent(const Route& route, const Piece& piece) const {
  const Copy& copy = route.plan.copies[piece.copy];
  return static_cast<char*>(last_sent_[piece.copy].data) + (piece.rows.begin - copy.box.rows.begin) * route.plan.row_bytes(copy);
}

Result<SyncReceipt> Transfer::update(Context& c, const ReadMaster& master, const Status& quiet) {
  const auto start = std::chrono::steady_clock::now();
  bad_ = Status::ok();
  refuse(SyncStage::quiesce, quiet);
  enter(SyncStage::quiesce);
  const auto [route, delta] = begin();
  const auto refused = [&](const Status& why) {
    knows_sent_ = false;
    return errorf("the update to version {} was refused: {}; the sampler stays at version {}", from_.version(), why.message(), to_.version());
  };
  if (const Status all = vote("weights begin"); !all) return refused(all);

  is_delta_ = delta;
  moved_ = changed_ = 0;
  const size_t copies = route->plan.copies.size();
  sent_sums_.assign(copies, 0);
  landed_sums_.assign(copies, 0);
  landed_rows_.assign(copies, 0);
  const ArenaScope scope(*c.workspace);
  int64_t pieces = 0;
  for (const Route::Bucket& bucket : route->buckets) pieces += static_cast<int64_t>(bucket.local.size() + bucket.sends.size());
  left_.clear();
  marks_ = zeros(c, DType::i32, {pieces}, "weights marks");
  sums_ = c.workspace->tensor(DType::i64, {pieces}, "weights sums");
  if (quantizes()) quantize_masters(c, *route, master);
  QuantStats counts = check_quantized(*route);
  for (int64_t i = 0; i < static_cast<int64_t>(route->buckets.size()); ++i) {
    const Route::Bucket& bucket = route->buckets[static_cast<size_t>(i)];
    if (options_.hooks.enter) {
      const auto& some = !bucket.local.empty() ? bucket.local : !bucket.sends.empty() ? bucket.sends : bucket.receives;
      const std::string where = some.empty() ? "" : ", from " + name_of(route->plan.copies[some.front().copy]) + " on";
      if (const Status s = options_.hooks.enter(SyncStage::transfer, i); !s) refuse(SyncStage::transfer, errorf("bucket {}{}: {}", i, where, s.message()));
    }
    keep(c, *route, i);
    if (i < route->exchanges) exchange(c, *route, i);
  }
  check_left(c, *route);
  verify(c, *route);
  enter(SyncStage::commit);
  if (const Status all = vote("weights agreed"); !all) {
    restore(c);
    return refused(all);
  }
  finalise(c);
  deltas_ = delta ? deltas_ + 1 : 0;
  if (!delta) remember_sent(c);

  // What all ranks tell of it.
  SyncReceipt receipt;
  receipt.version = committed_;
  receipt.delta = delta;
  receipt.copies = static_cast<int64_t>(copies);
  receipt.rounds = route->exchanges;
  receipt.moved_bytes = receipt.full_bytes = route->moved_bytes;
  receipt.local_bytes = route->local_bytes;
  receipt.changed_bytes = route->moved_bytes + route->local_bytes;
  uint64_t hash = 0;
  for (size_t i = 0; i < copies; ++i)
    if (route->plan.copies[i].to == rank()) hash = XXH64(&landed_sums_[i], sizeof(int64_t), hash);
  const auto sum = std::bit_cast<int64_t>(hash);
  std::vector<int64_t> sums(static_cast<size_t>(route->plan.ranks), sum);
  int64_t totals[kTotals] = {counts.elements, counts.saturated, counts.underflowed, moved_, changed_};
  if (ranks_ != nullptr) {
    ranks_->all_gather(std::span(sums), std::span<const int64_t>(&sum, 1), "weights agreed");
    if (is_quantized(to_.numerics()) || delta) ranks_->all_reduce(std::span(totals), Reduction::sum, "weights agreed");
  }
  receipt.checksum = XXH64(sums.data(), sums.size() * sizeof(int64_t), 0);
  receipt.quantized = {.elements = totals[0], .saturated = totals[1], .underflowed = totals[2]};
  if (delta) receipt.moved_bytes = totals[3], receipt.changed_bytes = totals[4];
  receipt.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return receipt;
}

}  // namespace lockstep
