#include "sync/transfer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include <xxhash.h>

#include "ops/cast/cast.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

namespace {

constexpr int kBytes = 0, kVersion = 1, kHash = 2;  // of a tally

void add_to_hash(int64_t& hash, const void* data, int64_t bytes) {
  hash = std::bit_cast<int64_t>(XXH64(data, static_cast<size_t>(bytes), std::bit_cast<uint64_t>(hash)));
}

// Rows of the whole tensor, columns of the box, as a view into the matrix that holds `held` of it. Two numbers of e2m1x2 are one element.
template <typename View>
View part(const View& matrix, const Box& held, const Range& rows, const Range& columns) {
  const int64_t each = matrix.dtype == DType::e2m1x2 ? 2 : 1;
  return matrix.slice(rows.begin - held.rows.begin, rows.size()).cols((columns.begin - held.columns.begin) / each, num_blocks(columns.size(), each));
}

// Into `out`, which has the same dtype or is bf16 for f32. Numbers in a bucket may lie at any even address.
void store(Context& c, TensorView out, ConstTensorView in) {
  if (out.dtype != in.dtype) return cast(c, out, in);
  char* to = static_cast<char*>(out.data);
  const char* from = static_cast<const char*>(in.data);
  const auto width = static_cast<int64_t>(dtype_bytes(in.dtype));
  if (out.contiguous() && in.contiguous()) {
    parallel_for(c, static_cast<int64_t>(in.bytes()), 1, [&](int64_t b, int64_t e, int) { std::memcpy(to + b, from + b, static_cast<size_t>(e - b)); });
    return;
  }
  const int64_t row_bytes = in.dim(1) * width;
  parallel_for(c, in.rows(), row_bytes, [&](int64_t b, int64_t e, int) {
    for (int64_t r = b; r < e; ++r)
      std::memcpy(to + r * out.row_stride * width, from + r * in.row_stride * width, static_cast<size_t>(row_bytes));
  });
}

// Calls f(first byte, bytes) for the runs that a matrix consists of: its rows, or all of it.
template <typename F>
void for_runs(ConstTensorView v, F f) {
  const char* at = static_cast<const char*>(v.data);
  if (v.contiguous()) return f(at, static_cast<int64_t>(v.bytes()));
  const auto width = static_cast<int64_t>(dtype_bytes(v.dtype));
  for (int64_t r = 0; r < v.rows(); ++r) f(at + r * v.row_stride * width, v.dim(1) * width);
}

// Any of the numbers, which may lie unaligned, has all bits of `exponent` set.
template <typename Bits>
bool any_with(const char* at, int64_t bytes, Bits exponent) {
  Bits found = 0;
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(sizeof(Bits))) {
    Bits bits;
    std::memcpy(&bits, at + i, sizeof(Bits));
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found != 0;
}

// Neither NaN nor infinite.
bool finite(ConstTensorView v) {
  bool ok = true;
  for_runs(v, [&](const char* at, int64_t bytes) {
    if (v.dtype == DType::f32) ok = ok && !any_with<uint32_t>(at, bytes, 0x7f800000u);
    if (v.dtype == DType::bf16) ok = ok && !any_with<uint16_t>(at, bytes, 0x7f80u);
    if (v.dtype == DType::e4m3) ok = ok && !any_with<uint8_t>(at, bytes, 0x7f);
    if (v.dtype == DType::ue8m0) ok = ok && !any_with<uint8_t>(at, bytes, 0xff);
  });
  return ok;
}

}  // namespace

Transfer::Transfer(RankGroup* ranks, const Weights& from, Weights& to, const Placement& source, const Placement& destination,
                   const WantedTensors& changes, Arena& arena, int64_t bucket_bytes)
    : ranks_(ranks), from_(from), to_(to), bucket_bytes_(bucket_bytes),
      all_(make_route(from.config(), source, destination, [](const TensorSpec&) { return true; })),
      changing_(make_route(from.config(), source, destination, changes)) {
  const auto rank = static_cast<size_t>(this->rank()), size = ranks == nullptr ? 1 : static_cast<size_t>(ranks->size());
  CHECK(source.shards.size() == size, "a placement of {} ranks for {}", source.shards.size(), size);
  CHECK(from.shard() == source.shards[rank] && from.numerics() == source.numerics, "the source is not this rank's shard");
  CHECK(to.shard() == destination.shards[rank] && to.numerics() == destination.numerics, "the destination is not this rank's shard");
  for (const TensorSpec& spec : to.table()) {
    landing_.push_back(!spec.held() ? TensorView()
                       : spec.has_panels() ? matrix_view(to.rows(spec.id))
                                           : matrix_view(arena.tensor(spec.weight_dtype(to.numerics()), spec.shape, "weights landing")));
  }
  quantized_.resize(from.table().size());
  for (const int id : all_.quantized) {
    const TensorSpec& spec = from.table()[static_cast<size_t>(id)];
    Quantized& q = quantized_[static_cast<size_t>(id)];
    q.counts = std::none_of(source.shards.begin(), source.shards.begin() + static_cast<std::ptrdiff_t>(rank), [&](const Shard& before) {
      return tensor_table(from.config(), before)[static_cast<size_t>(id)].box == spec.box;
    });
    if (!quantizes()) continue;
    q.codes = arena.tensor(spec.weight_dtype(to.numerics()), spec.stored_shape(to.numerics()), "weights in codes");
    q.scales = arena.tensor(DType::ue8m0, spec.scale_shape(to.numerics()), "weights in codes");
  }
  if (size > 1) {
    outgoing_ = arena.tensor(DType::u8, {bucket_bytes}, "weights outgoing");
    incoming_ = arena.tensor(DType::u8, {bucket_bytes}, "weights incoming");
  }
  sent_.resize(source.shards.size());
  received_.resize(source.shards.size());
}

// All ranks compute the same rounds.
Transfer::Route Transfer::make_route(const ModelConfig& config, const Placement& source, const Placement& destination,
                                     const WantedTensors& wanted) const {
  Route route{.plan = make_plan(config, source, destination, wanted), .rounds = {}, .local = {}, .quantized = {}};
  const SyncPlan& plan = route.plan;
  const Status covered = check_plan(config, source, destination, wanted, plan);
  CHECK(covered.is_ok(), "weight update: {}", covered.message());

  for (const TensorSpec& spec : from_.table())
    if (spec.held() && wanted(spec) && spec.quant_format(destination.numerics)) route.quantized.push_back(spec.id);
  const int me = rank();
  for (size_t i = 0; i < plan.copies.size(); ++i) {
    const Copy& copy = plan.copies[i];
    (copy.local() ? route.local_bytes : route.moved_bytes) += plan.bytes(copy);
    if (copy.local() && copy.to == me) route.local.push_back(i);
  }
  cut_into_rounds(plan, bucket_bytes_, [&](int64_t at, size_t i, const Range& rows) {
    const auto ranks = static_cast<size_t>(plan.ranks);
    if (at == static_cast<int64_t>(route.rounds.size()))
      route.rounds.push_back({.sends = {}, .receives = {}, .send_bytes = std::vector<int64_t>(ranks), .receive_bytes = std::vector<int64_t>(ranks)});
    Round& round = route.rounds.back();
    const Copy& copy = plan.copies[i];
    const int64_t bytes = rows.size() * plan.row_bytes(copy);
    if (copy.from == me) {
      round.sends.push_back({i, rows});
      round.send_bytes[static_cast<size_t>(copy.to)] += bytes;
    }
    if (copy.to == me) {
      round.receives.push_back({i, rows});
      round.receive_bytes[static_cast<size_t>(copy.from)] += bytes;
    }
  });
  for (Round& round : route.rounds) {
    // The exchange has a rank's rows by the other rank.
    std::stable_sort(round.sends.begin(), round.sends.end(),
                     [&](const Piece& a, const Piece& b) { return plan.copies[a.copy].to < plan.copies[b.copy].to; });
    std::stable_sort(round.receives.begin(), round.receives.end(),
                     [&](const Piece& a, const Piece& b) { return plan.copies[a.copy].from < plan.copies[b.copy].from; });
  }
  return route;
}

CommBytes Transfer::bytes() const { return plan_bytes(route().plan, rank()); }
CommBytes Transfer::check_bytes() const { return exchange_counts_bytes(static_cast<int64_t>(std::tuple_size_v<Tally>), static_cast<int>(sent_.size())); }

void Transfer::quantize_masters(Context& c, const Route& route, const ReadMaster& master) {
  CHECK(master != nullptr, "an update from {} to {} without masters", numerics_name(from_.numerics()), numerics_name(to_.numerics()));
  for (const int id : route.quantized) {
    const ArenaScope scope(*c.workspace);
    const TensorSpec& spec = from_.table()[static_cast<size_t>(id)];
    Quantized& q = quantized_[static_cast<size_t>(id)];
    q.stats = quantize_by_grid(c, q.codes, q.scales, spec.row_grid(to_.numerics()), spec.col_grid(to_.numerics()), master(id));
  }
}

QuantStats Transfer::count(const Route& route) const {
  QuantStats sum;
  for (const int id : route.quantized)
    if (const Quantized& q = quantized_[static_cast<size_t>(id)]; q.counts) sum += q.stats;
  return sum;
}

TensorView Transfer::landing(const Copy& copy, const Range& rows) const {
  const TensorSpec& spec = to_.table()[static_cast<size_t>(copy.tensor)];
  if (!copy.scales) return part(landing_[static_cast<size_t>(copy.tensor)], spec.box, rows, copy.box.columns);
  return part(matrix_view(to_.scales(copy.tensor)), blocks_of(spec, to_.numerics(), spec.box), rows, copy.box.columns);
}

void Transfer::read(Context& c, const Copy& copy, const Range& rows, TensorView out) {
  const TensorSpec& spec = from_.table()[static_cast<size_t>(copy.tensor)];
  const Quantized& q = quantized_[static_cast<size_t>(copy.tensor)];
  const WeightView& own = from_.view(copy.tensor);
  const ConstTensorView held = matrix_view(q.codes.empty() ? (copy.scales ? own.scales : own.rows) : ConstTensorView(copy.scales ? q.scales : q.codes));
  store(c, out, part(held, copy.scales ? blocks_of(spec, to_.numerics(), spec.box) : spec.box, rows, copy.box.columns));
  if (bad_.is_ok() && !finite(out)) {
    int64_t row = 0;
    while (finite(out.slice(row, 1))) ++row;
    bad_ = errorf("{} has a number that is not finite in row {} of its {}", spec.name, rows.begin + row, copy.scales ? "scales" : spec.whole.str());
  }
}

void Transfer::run_round(Context& c, const Route& route, const Round& round) {
  const auto view = [&](const Copy& copy, const Piece& piece, char* at) {
    const DType dtype = route.plan.dtype(copy);
    return TensorView(at, dtype, {piece.rows.size(), dtype == DType::e2m1x2 ? num_blocks(copy.box.columns.size(), 2) : copy.box.columns.size()});
  };
  char *out = static_cast<char*>(outgoing_.data), *const first_out = out;
  for (const Piece& piece : round.sends) {
    const Copy& copy = route.plan.copies[piece.copy];
    const TensorView packed = view(copy, piece, out);
    read(c, copy, piece.rows, packed);
    out += packed.bytes();
  }
  char* in = static_cast<char*>(incoming_.data);
  int64_t num_in = 0;
  for (size_t r = 0, at = 0; r < sent_.size(); ++r) {
    add_to_hash(sent_[r][kHash], first_out + at, round.send_bytes[r]);
    sent_[r][kBytes] += round.send_bytes[r];
    at += static_cast<size_t>(round.send_bytes[r]);
    num_in += round.receive_bytes[r];
  }
  ranks_->all_to_all(c, incoming_.slice(0, num_in), round.receive_bytes, outgoing_.slice(0, out - first_out), round.send_bytes, "weights");
  for (size_t r = 0, at = 0; r < received_.size(); ++r) {
    add_to_hash(received_[r][kHash], in + at, round.receive_bytes[r]);
    received_[r][kBytes] += round.receive_bytes[r];
    at += static_cast<size_t>(round.receive_bytes[r]);
  }
  for (const Piece& piece : round.receives) {
    const Copy& copy = route.plan.copies[piece.copy];
    const TensorView packed = view(copy, piece, in);
    store(c, landing(copy, piece.rows), packed);
    in += packed.bytes();
  }
}

Status Transfer::verify() {
  if (ranks_ == nullptr) return bad_;
  constexpr size_t kWidth = std::tuple_size_v<Tally>;
  std::vector<Tally> told(sent_.size());
  ranks_->exchange_counts(std::span(told.front().data(), told.size() * kWidth), std::span(sent_.front().data(), sent_.size() * kWidth), "weights check");
  LOCKSTEP_RETURN_IF_ERROR(bad_);
  for (size_t r = 0; r < told.size(); ++r) {
    if (static_cast<int>(r) == rank()) continue;
    if (told[r][kVersion] != received_[r][kVersion])
      return errorf("rank {} sends version {} while this one has version {}", r, told[r][kVersion], received_[r][kVersion]);
    if (told[r][kBytes] != received_[r][kBytes]) return errorf("rank {} sent {} bytes, {} arrived", r, told[r][kBytes], received_[r][kBytes]);
    if (told[r][kHash] != received_[r][kHash]) {
      return errorf("what came from rank {} is damaged: XXH64 {:016x} was sent, {:016x} arrived", r, std::bit_cast<uint64_t>(told[r][kHash]),
                    std::bit_cast<uint64_t>(received_[r][kHash]));
    }
  }
  return Status::ok();
}

Result<SyncReceipt> Transfer::update(Context& c, const ReadMaster& master) {
  const auto start = std::chrono::steady_clock::now();
  const Route& route = this->route();
  const int64_t version = from_.version();
  for (Tally& t : sent_) t = {0, version, 0};
  for (Tally& t : received_) t = {0, version, 0};
  int64_t local_hash = 0;
  bad_ = Status::ok();

  if (quantizes()) quantize_masters(c, route, master);
  for (const int id : route.quantized) {  // codes saturate, and would not say so
    Quantized& q = quantized_[static_cast<size_t>(id)];
    if (!quantizes()) q.stats = from_.quant_stats(id);
    if (q.stats.nonfinite == 0 && q.stats.saturated == 0) continue;
    bad_ = errorf("{} has {} numbers that are not finite and {} that overflow", from_.table()[static_cast<size_t>(id)].name, q.stats.nonfinite, q.stats.saturated);
    break;
  }
  for (const size_t i : route.local) {
    const Copy& copy = route.plan.copies[i];
    const TensorView to = landing(copy, copy.box.rows);
    read(c, copy, copy.box.rows, to);
    for_runs(to, [&](const char* at, int64_t bytes) { add_to_hash(local_hash, at, bytes); });
  }
  for (const Round& round : route.rounds) run_round(c, route, round);
  const Status verified = verify();
  if (const Status agreed = ranks_ == nullptr ? verified : ranks_->agree(verified, "weights agreed"); !agreed)
    return errorf("the update to version {} was refused: {}; the sampler stays at version {}", version, agreed.message(), to_.version());

  for (const TensorSpec& spec : to_.table()) {
    const TensorView& landed = landing_[static_cast<size_t>(spec.id)];
    if (spec.held() && !spec.has_panels()) store(c, matrix_view(to_.rows(spec.id)), landed);
  }
  to_.commit(c, version);
  complete_ = true;

  std::vector<int64_t> hashes(received_.size());
  int64_t mine = local_hash;
  for (const Tally& t : received_) add_to_hash(mine, &t[kHash], sizeof(t[kHash]));
  QuantStats counts = count(route);
  if (ranks_ == nullptr) {
    hashes.front() = mine;
  } else {
    ranks_->all_gather(std::span(hashes), std::span<const int64_t>(&mine, 1), "weights agreed");
    if (is_quantized(to_.numerics())) {
      int64_t sums[] = {counts.elements, counts.saturated, counts.underflowed};
      ranks_->all_reduce(std::span(sums), Reduction::sum, "weights agreed");
      counts = {.elements = sums[0], .saturated = sums[1], .underflowed = sums[2]};
    }
  }
  return SyncReceipt{.version = version,
                     .copies = static_cast<int64_t>(route.plan.copies.size()),
                     .rounds = static_cast<int64_t>(route.rounds.size()),
                     .moved_bytes = route.moved_bytes,
                     .local_bytes = route.local_bytes,
                     .quantized = counts,
                     .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                     .checksum = XXH64(hashes.data(), hashes.size() * sizeof(int64_t), 0)};
}

}  // namespace lockstep
