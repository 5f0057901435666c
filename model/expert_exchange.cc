#include "model/expert_exchange.h"

#include <algorithm>

#include "core/device.h"
#include "model/experts.h"
#include "ops/cast/cast.h"
#include "ops/moe_permute/moe_permute.h"

namespace lockstep {

namespace {

// counts [ep, E] of a group, and sums of them.
struct Counts {
  std::span<const int64_t> rows;
  int ep;

  int64_t experts() const { return static_cast<int64_t>(rows.size()) / ep; }
  Range experts_of(int rank) const { return part_of(experts(), ep, rank); }
  int64_t of(int source, int64_t expert) const { return rows[static_cast<size_t>(source * experts() + expert)]; }
  int64_t between(int source, int owner) const {
    int64_t sum = 0;
    const Range own = experts_of(owner);
    for (int64_t e = own.begin; e < own.end; ++e) sum += of(source, e);
    return sum;
  }
};

std::span<int64_t> take_ints(Arena& arena, int64_t n, const char* name) { return {arena.tensor(DType::i64, {n}, name).ptr<int64_t>(), static_cast<size_t>(n)}; }

// The rounds of one layer as one rank sees them. Round i moves rows [i B, (i + 1) B) of what each rank has for each other. The host plans them: numbers
// lie in c's host scratch, what kernels read is copied to c's device. The caller holds scopes around both.
class Rounds {
 public:
  Rounds(Context& c, const RankGroup& group, std::span<const int64_t> counts, int64_t exchange_rows)
      : c_(c), counts_{counts, group.size()}, me_(group.rank()), width_(exchange_rows), count_(expert_exchange_rounds(counts, group.size(), exchange_rows)) {
    Arena& ws = *c.host;
    const int ep = group.size();
    const int64_t capacity = ep * exchange_rows;
    first_ = take_ints(ws, ep + 1, "exchange.first");
    arriving_ = take_ints(ws, ep, "exchange.arriving");
    send_rows = take_ints(ws, ep, "exchange.send_rows");
    recv_rows = take_ints(ws, ep, "exchange.recv_rows");
    passed_ = take_ints(ws, ep, "exchange.passed");
    planned_ = {ws, counts_.experts_of(me_).size(), capacity};
    device_ = c.on_gpu() ? Indices{*c.workspace, counts_.experts_of(me_).size(), capacity} : planned_;
    first_[0] = 0;
    for (int r = 0; r < ep; ++r) {
      first_[r + 1] = first_[r] + counts_.between(me_, r);
      arriving_[r] = counts_.between(r, me_);
    }
  }

  int64_t count() const { return count_; }
  int64_t arriving() const {
    int64_t sum = 0;
    for (const int64_t n : arriving_) sum += n;
    return sum;
  }

  void enter(int64_t round) {
    begin_ = round * width_;
    num_sent = num_received = 0;
    for (int r = 0; r < counts_.ep; ++r) {
      num_sent += send_rows[r] = std::clamp<int64_t>(first_[r + 1] - first_[r] - begin_, 0, width_);
      num_received += recv_rows[r] = std::clamp<int64_t>(arriving_[r] - begin_, 0, width_);
    }
    // A source's rows come by expert; here they stand by expert, then source.
    int32_t* const from = planned_.order.ptr<int32_t>();
    int32_t* const to = planned_.place.ptr<int32_t>();
    int32_t* const ends = planned_.offsets.ptr<int32_t>();
    const Range own = counts_.experts_of(me_);
    std::fill(passed_.begin(), passed_.end(), 0);
    int32_t at = 0;
    ends[0] = 0;
    for (int64_t e = own.begin; e < own.end; ++e) {
      int64_t received = 0;  // of the sources before
      for (int s = 0; s < counts_.ep; ++s) {
        const int64_t rows = counts_.of(s, e), low = std::max(passed_[s], begin_), high = std::min(passed_[s] + rows, begin_ + recv_rows[s]);
        for (int64_t i = low; i < high; ++i, ++at) {
          from[at] = static_cast<int32_t>(received + i - begin_);
          to[from[at]] = at;
        }
        passed_[s] += rows;
        received += recv_rows[s];
      }
      ends[e - own.begin + 1] = at;
    }
    CHECK_EQ(int64_t{at}, num_received);
    offsets = device_.offsets;
    order = device_.order.slice(0, num_received);
    place = device_.place.slice(0, num_received);
    if (!c_.on_gpu()) return;
    upload(c_, offsets, planned_.offsets);
    upload(c_, order, planned_.order.slice(0, num_received));
    upload(c_, place, planned_.place.slice(0, num_received));
  }

  // f(first of the sorted rows at home, first in the message, how many) for every rank that this one sends to in the round.
  template <typename F>
  void for_each_piece(F f) const {
    int64_t at = 0;
    for (int r = 0; r < counts_.ep; ++r) {
      if (send_rows[r] > 0) f(first_[r] + begin_, at, send_rows[r]);
      at += send_rows[r];
    }
  }

  static size_t workspace(int ep, int64_t experts, int64_t exchange_rows) {
    const auto ints = [](int64_t n) { return Arena::footprint(static_cast<size_t>(n) * sizeof(int64_t)); };
    const auto indices = [](int64_t n) { return Arena::footprint(static_cast<size_t>(n) * sizeof(int32_t)); };
    return ints(ep + 1) + 4 * ints(ep) + indices(part_of(experts, ep, 0).size() + 1) + 2 * indices(ep * exchange_rows);
  }

  // Of the round that was entered.
  std::span<int64_t> send_rows, recv_rows;
  int64_t num_sent = 0, num_received = 0;
  TensorView offsets;       // of the rows received, by expert
  TensorView order, place;  // row i by expert came as row order[i]; row i that came stands at place[i]

 private:
  struct Indices {
    TensorView offsets, order, place;
    Indices() = default;
    Indices(Arena& arena, int64_t experts, int64_t capacity)
        : offsets(arena.tensor(DType::i32, {experts + 1}, "exchange.offsets")), order(arena.tensor(DType::i32, {capacity}, "exchange.order")),
          place(arena.tensor(DType::i32, {capacity}, "exchange.place")) {}
  };
  Context& c_;
  const Counts counts_;
  const int me_;
  const int64_t width_, count_;
  int64_t begin_ = 0;
  std::span<int64_t> first_;     // of the sorted rows at home that go to each rank
  std::span<int64_t> arriving_;  // from each rank, in all rounds
  std::span<int64_t> passed_;    // rows of each source that belong to experts before
  Indices planned_, device_;  // on the host, and where kernels read them
};

// Two buffers of `capacity` rows; what was sent from one comes back into it.
struct Messages {
  TensorView home, owner;
  Messages(Arena& ws, DType dtype, int64_t capacity, int64_t width)
      : home(ws.tensor(dtype, {capacity, width}, "exchange.home")), owner(ws.tensor(dtype, {capacity, width}, "exchange.owner")) {}
};
// The beginning of a buffer as n rows of `width`.
TensorView message(const TensorView& buffer, int64_t n, int64_t width) { return TensorView(buffer.data, buffer.dtype, {n, width}); }

// f32 values [n] as n rows of the elements that they take in a message.
template <typename View>
View as_rows(const View& values, DType dtype) {
  return View(values.data, dtype, {values.rows(), static_cast<int64_t>(sizeof(float) / dtype_bytes(dtype))});
}

void check_group(const Model& model) {
  const Weights& w = *model.weights;
  CHECK(w.shard().experts == part_of(w.config().num_experts, model.ep->size(), model.ep->rank()), "experts [{}, {}) of {} on rank {} of {}",
        w.shard().experts.begin, w.shard().experts.end, w.config().num_experts, model.ep->rank(), model.ep->size());
  CHECK(model.exchange_rows >= 1 && model.ep->size() * model.exchange_rows <= INT32_MAX, "{} rows a round", model.exchange_rows);
}

std::span<const int64_t> counts_of(Context& c, const SavedMoe& saved) {
  return {on_host(c, saved.counts).ptr<int64_t>(), static_cast<size_t>(saved.counts.shape.elements())};
}

}  // namespace

void exchange_forward(Context& c, const Model& model, int layer, TensorView rows, ConstTensorView u, ConstTensorView rho, SavedMoe& saved, Arena& keep) {
  check_group(model);
  const ModelConfig& m = model.weights->config();
  RankGroup& ep = *model.ep;
  const int64_t E = m.num_experts, D = m.hidden_size, I = m.expert_dim, capacity = ep.size() * model.exchange_rows;
  const DType dtype = u.dtype;
  const bool kept = &keep != c.workspace;
  Arena& ws = *c.workspace;
  const ArenaScope scope(ws), host_scope(*c.host);

  const TensorView counts = (c.on_gpu() ? *c.host : keep).tensor(DType::i64, {ep.size(), E}, "moe.counts");
  const std::span<int64_t> mine(counts.row<int64_t>(ep.rank()), static_cast<size_t>(E));
  const int32_t* const ends = on_host(c, saved.offsets).ptr<int32_t>();
  for (int64_t e = 0; e < E; ++e) mine[static_cast<size_t>(e)] = ends[e + 1] - ends[e];
  ep.all_gather(std::span(counts.ptr<int64_t>(), static_cast<size_t>(ep.size() * E)), mine, "expert counts");
  saved.counts = on_device(c, counts, keep);

  // Without keeping, every round's rows take the place of the last one's.
  Rounds rounds(c, ep, {counts.ptr<int64_t>(), static_cast<size_t>(counts.shape.elements())}, model.exchange_rows);
  const int64_t room = kept ? rounds.arriving() : capacity;
  const TensorView results = ws.tensor(dtype, {capacity, D}, "exchange.results");
  saved.x = kept ? keep.tensor(dtype, {room, D}, "moe.x") : results;
  saved.rho = keep.tensor(DType::f32, {room}, "moe.rho");
  saved.g = keep.tensor(dtype, {room, I}, "moe.g");
  saved.u = keep.tensor(dtype, {room, I}, "moe.u");
  const int64_t behind = as_rows(rho, dtype).dim(1);  // elements of the routing weight
  const Messages messages(ws, dtype, capacity, D + behind);

  int64_t begin = 0;
  for (int64_t i = 0; i < rounds.count(); ++i) {
    rounds.enter(i);
    const int64_t n = rounds.num_received;
    const TensorView out = message(messages.home, rounds.num_sent, D + behind), in = message(messages.owner, n, D + behind);
    rounds.for_each_piece([&](int64_t row, int64_t at, int64_t count) {
      const TensorView piece = out.slice(at, count);
      moe_gather(c, piece.cols(0, D), u, saved.row_token.slice(row, count));
      cast(c, piece.cols(D, behind), as_rows(rho.slice(row, count), dtype));
    });
    ep.all_to_all(c, in, rounds.recv_rows, out, rounds.send_rows, "expert dispatch");

    const TensorView x = saved.x.slice(begin, n), weight = saved.rho.slice(begin, n), y = results.slice(0, n);
    moe_gather(c, x, in.cols(0, D), rounds.order);
    moe_gather(c, as_rows(weight, dtype), in.cols(D, behind), rounds.order);
    experts_forward(c, model, layer, y, saved.g.slice(begin, n), saved.u.slice(begin, n), x, weight, rounds.offsets);

    const TensorView back = message(messages.owner, n, D), home = message(messages.home, rounds.num_sent, D);
    moe_gather(c, back, y, rounds.place);
    ep.all_to_all(c, home, rounds.send_rows, back, rounds.recv_rows, "expert combine");
    rounds.for_each_piece([&](int64_t row, int64_t at, int64_t count) { cast(c, rows.slice(row, count), home.slice(at, count)); });
    if (kept) begin += n;
  }
}

void exchange_backward(Context& c, const Model& model, int layer, TensorView drows, TensorView drho, ConstTensorView dy, const SavedMoe& saved,
                       LayerTensors<TensorView>& grad) {
  check_group(model);
  const ModelConfig& m = model.weights->config();
  RankGroup& ep = *model.ep;
  const int64_t D = m.hidden_size, I = m.expert_dim, capacity = ep.size() * model.exchange_rows;
  Arena& ws = *c.workspace;
  const ArenaScope scope(ws), host_scope(*c.host);

  Rounds rounds(c, ep, counts_of(c, saved), model.exchange_rows);
  const TensorView gradients = ws.tensor(DType::f32, {capacity, D}, "exchange.gradients"), drho_rows = ws.tensor(DType::f32, {capacity}, "exchange.drho");
  const TensorView a = ws.tensor(saved.x.dtype, {capacity, I}, "exchange.a");
  const TensorView dg = ws.tensor(DType::f32, {capacity, I}, "exchange.dg"), du = ws.tensor(DType::f32, {capacity, I}, "exchange.du");
  const Messages messages(ws, DType::f32, capacity, D + 1);

  int64_t begin = 0;
  for (int64_t i = 0; i < rounds.count(); ++i) {
    rounds.enter(i);
    const int64_t n = rounds.num_received;
    const TensorView out = message(messages.home, rounds.num_sent, D), in = message(messages.owner, n, D);
    rounds.for_each_piece([&](int64_t row, int64_t at, int64_t count) { moe_gather(c, out.slice(at, count), dy, saved.row_token.slice(row, count)); });
    ep.all_to_all(c, in, rounds.recv_rows, out, rounds.send_rows, "expert gradient dispatch");

    const TensorView dx = gradients.slice(0, n), dweight = drho_rows.slice(0, n);
    moe_gather(c, dx, in, rounds.order);
    experts_backward(c, model, layer, dx, dweight,
                     {saved.x.slice(begin, n), saved.rho.slice(begin, n), saved.g.slice(begin, n), saved.u.slice(begin, n), rounds.offsets},
                     {a.slice(0, n), dg.slice(0, n), du.slice(0, n)}, grad);

    const TensorView back = message(messages.owner, n, D + 1), home = message(messages.home, rounds.num_sent, D + 1);
    moe_gather(c, back.cols(0, D), dx, rounds.place);
    moe_gather(c, back.cols(D, 1), as_rows(dweight, DType::f32), rounds.place);
    ep.all_to_all(c, home, rounds.send_rows, back, rounds.recv_rows, "expert gradient combine");
    rounds.for_each_piece([&](int64_t row, int64_t at, int64_t count) {
      const TensorView piece = home.slice(at, count);
      cast(c, drows.slice(row, count), piece.cols(0, D));
      cast(c, as_rows(drho.slice(row, count), DType::f32), piece.cols(D, 1));
    });
    begin += n;
  }
}

size_t exchange_workspace(const ModelConfig& config, DType dtype, int ep, int64_t exchange_rows, ExchangePass pass) {
  const int64_t E = config.num_experts, D = config.hidden_size, I = config.expert_dim;
  const auto rows = [&](int64_t width, DType t) { return Arena::footprint(static_cast<size_t>(ep * exchange_rows * width) * dtype_bytes(t)); };
  const size_t plan = Rounds::workspace(ep, E, exchange_rows);
  if (pass == ExchangePass::backward)
    return plan + 2 * rows(D + 1, DType::f32) + rows(D, DType::f32) + rows(1, DType::f32) + rows(I, dtype) + 2 * rows(I, DType::f32);
  const int64_t behind = static_cast<int64_t>(sizeof(float) / dtype_bytes(dtype));
  return plan + Arena::footprint(static_cast<size_t>(ep * E) * sizeof(int64_t)) + 2 * rows(D + behind, dtype) + rows(D, dtype) + rows(1, DType::f32) +
         3 * rows(I, dtype);
}

ExchangeBytes expert_exchange_bytes(std::span<const int64_t> counts, int ep, int rank, int64_t hidden_size, DType dtype, ExchangePass pass) {
  const Counts all{counts, ep};
  CommBytes rows;  // sent and received by a dispatch; a combine is its mirror image
  for (int r = 0; r < ep; ++r) {
    if (r == rank) continue;
    rows.sent += all.between(rank, r);
    rows.received += all.between(r, rank);
  }
  const auto times = [](const CommBytes& n, int64_t bytes) { return CommBytes{n.sent * bytes, n.received * bytes}; };
  const CommBytes back{rows.received, rows.sent};
  constexpr int64_t kFloat = sizeof(float);
  if (pass == ExchangePass::backward) return {{}, times(rows, hidden_size * kFloat), times(back, (hidden_size + 1) * kFloat)};
  const int64_t row = hidden_size * static_cast<int64_t>(dtype_bytes(dtype));
  return {exchange_counts_bytes(all.experts(), ep), times(rows, row + kFloat), times(back, row)};
}

int64_t expert_exchange_rounds(std::span<const int64_t> counts, int ep, int64_t exchange_rows) {
  const Counts all{counts, ep};
  int64_t most = 0;
  for (int s = 0; s < ep; ++s)
    for (int d = 0; d < ep; ++d) most = std::max(most, all.between(s, d));
  return (most + exchange_rows - 1) / exchange_rows;
}

}  // namespace lockstep
