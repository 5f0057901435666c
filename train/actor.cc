#include "train/actor.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>

#include "core/log.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "model/head.h"
#include "train/loss.h"
#include "train/optimizer.h"
#include "train/pack.h"

namespace lockstep {

namespace {

// Address space only; pages are committed by first touch.
constexpr size_t kStepReserve = size_t{256} << 30;
constexpr const char* kMastersFile = "masters.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

void check_samples(std::span<const TrainSample> samples) {
  for (const TrainSample& s : samples) {
    CHECK(s.prompt_length >= 1 && s.response_length() >= 1, "sample {}: a prompt of {} and {} tokens in all", s.index,
          s.prompt_length, s.tokens.size());
    CHECK(static_cast<int64_t>(s.mask.size()) == s.response_length(), "sample {}: {} mask entries for {} response tokens",
          s.index, s.mask.size(), s.response_length());
  }
}

// What survives a restart besides tensors.
struct Counters {
  int64_t steps = 0, skipped_in_a_row = 0, version = 0;
  bool operator==(const Counters&) const = default;
};

void add_counters(SafetensorsWriter& w, const Counters& n) {
  w.add_metadata("steps", std::to_string(n.steps));
  w.add_metadata("skipped_in_a_row", std::to_string(n.skipped_in_a_row));
  w.add_metadata("version", std::to_string(n.version));
}

Result<Counters> read_counters(const SafetensorsFile& file) {
  Counters n;
  for (const auto& [key, field] :
       {std::pair{"steps", &n.steps}, {"skipped_in_a_row", &n.skipped_in_a_row}, {"version", &n.version}}) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end())
      return errorf("{}: metadata has no '{}'; was this file written by a training run?", file.path(), key);
    const std::string& text = it->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *field);
    if (error != std::errc() || end != text.data() + text.size() || *field < 0)
      return errorf("{}: metadata '{}' is '{}', a count is wanted", file.path(), key, text);
  }
  return n;
}

// One tensor that a checkpoint holds.
struct NamedView {
  std::string name;
  TensorView view;
};

void append(std::vector<NamedView>& list, const std::string& prefix, const std::vector<TensorSpec>& table, const TensorSet& set) {
  for (size_t i = 0; i < table.size(); ++i)
    if (!set.views[i].empty()) list.push_back({prefix + table[i].name, set.views[i]});
}

// The file must hold exactly `wanted`, with dtypes and shapes.
Status check_tensors(const SafetensorsFile& file, const std::vector<NamedView>& wanted) {
  for (const NamedView& w : wanted) {
    const SafetensorsEntry* entry = file.find(w.name);
    if (entry == nullptr)
      return errorf("{}: tensor {} {} is missing; does the checkpoint belong to this config?", file.path(), w.name,
                    w.view.shape.str());
    const std::string_view dtype = w.view.dtype == DType::i32 ? "I32" : "F32";
    const std::span<const int64_t> shape(w.view.shape.dims.data(), static_cast<size_t>(w.view.shape.rank));
    if (entry->dtype != dtype || !std::equal(shape.begin(), shape.end(), entry->shape.begin(), entry->shape.end()))
      return errorf("{}: tensor {} is {} {}, this config wants {} {}", file.path(), w.name, entry->dtype, entry->shape_str(),
                    dtype, w.view.shape.str());
  }
  if (file.tensors().size() == wanted.size()) return Status::ok();
  for (const SafetensorsEntry& entry : file.tensors())
    if (std::none_of(wanted.begin(), wanted.end(), [&](const NamedView& w) { return w.name == entry.name; }))
      return errorf("{}: tensor {} is not one of this config and these frozen tensors", file.path(), entry.name);
  return Status::ok();
}

Status write_tensors(const std::string& path, const std::vector<NamedView>& tensors, const Counters& counters) {
  SafetensorsWriter writer;
  for (const NamedView& t : tensors) writer.add(t.name, t.view);
  add_counters(writer, counters);
  return writer.write(path);
}

}  // namespace

struct Actor::Impl {
  Context& c;
  Weights& weights;
  const OptimizerConfig optimizer_config;
  const ActorOptions options;
  Model model;

  Arena master_arena, gradient_arena, state_arena, step_arena;
  TensorSet masters;
  Gradients gradients;
  Optimizer optimizer;

  // Storage of one micro-batch, kept so that the next one allocates nothing.
  BatchBuilder builder;
  std::optional<StatePool> pool;  // pages of compressed entries; training has no slots
  Saved saved;
  SequenceBatch batch;
  std::vector<SequenceRows> rows;
  std::vector<int32_t> page_ids;  // 0, 1, 2, ...: sequences take consecutive pieces

  RankGroup* const ranks;  // null: alone

  double forward_seconds = 0, backward_seconds = 0, optimizer_seconds = 0;

  // The head's side of a micro-batch: response rows of all its samples, in order.
  struct HeadRows {
    TensorView hidden;                 // [R, D]
    TensorView target, temperature;    // [R]
    TensorView logprob, lse, entropy;  // [R]
  };

  Impl(Context& c, Weights& w, const RopeTables& rope, const OptimizerConfig& o, const ActorOptions& a, RankGroup* ranks)
      : c(c), weights(w), optimizer_config(o), options(a),
        master_arena("masters", tensor_set_bytes(w.table(), [](const TensorSpec&) { return true; })),
        gradient_arena("gradients", tensor_set_bytes(w.table(), [&](const TensorSpec& s) { return is_trained(s, o); })),
        state_arena("training state", kStepReserve), step_arena("training step", kStepReserve), optimizer(w.table(), o),
        builder(w.config(), default_page_tokens(w.config())), ranks(ranks) {
    CHECK(a.max_tokens_per_microbatch > 0, "a micro-batch of {} tokens", a.max_tokens_per_microbatch);
    model.weights = &weights;
    model.rope = rope;
    masters = make_tensor_set(w.table(), master_arena, [](const TensorSpec&) { return true; });
    gradients = make_gradients(w.config(), gradient_arena, [&](const TensorSpec& s) { return is_trained(s, optimizer_config); });
    saved.arena = &step_arena;
    saved.recompute = a.recompute ? Recompute::layer : Recompute::none;
    constexpr int64_t kExpectedTokens = 1 << 16;  // a budget beyond is a way to say "all at once", however many these will be
    reserve_pages(pages_for(std::min(a.max_tokens_per_microbatch, kExpectedTokens)));
  }

  int64_t pages_for(int64_t positions) const { return (positions + builder.page_tokens() - 1) / builder.page_tokens(); }

  // Grows to the largest micro-batch seen: short sequences and those over the budget need more pages than the budget's tokens
  // alone.
  void reserve_pages(int64_t pages) {
    if (pool && pool->num_pages() >= pages) return;
    pool.reset();
    state_arena.release(0);
    pool.emplace(weights.config(), weights.numerics(), 0, pages, builder.page_tokens(), state_arena);
    page_ids.resize(static_cast<size_t>(pages));
    std::iota(page_ids.begin(), page_ids.end(), 0);
  }

  // Packs the samples of `micro` and runs the model and the head over them. Results lie in the step arena and the workspace,
  // whose scopes the caller holds.
  HeadRows run_forward(std::span<const TrainSample> samples, const MicroBatch& micro, Saved* keep) {
    const Stopwatch watch(forward_seconds);
    int64_t num_pages = 0, num_wanted = 0;
    for (const int32_t i : micro.samples) {
      num_pages += pages_for(trained_rows(samples[i]));
      num_wanted += samples[i].response_length();
    }
    reserve_pages(num_pages);

    rows.clear();
    int64_t page = 0;
    for (const int32_t i : micro.samples) {
      const int64_t n = trained_rows(samples[i]), pages = pages_for(n);
      rows.push_back({.tokens = std::span(samples[i].tokens).first(static_cast<size_t>(n)),
                      .first_position = 0,
                      .slot = -1,
                      .pages = std::span(page_ids).subspan(static_cast<size_t>(page), static_cast<size_t>(pages))});
      page += pages;
    }
    batch = builder.build(step_arena, rows, WantedRows::all);

    HeadRows h;
    const TensorView wanted = step_arena.tensor(DType::i32, {num_wanted}, "wanted rows");
    h.target = step_arena.tensor(DType::i32, {num_wanted}, "targets");
    h.temperature = step_arena.tensor(DType::f32, {num_wanted}, "temperatures");
    int64_t r = 0, first_row = 0;
    for (const int32_t i : micro.samples) {
      const TrainSample& s = samples[i];
      for (int64_t t = 0; t < s.response_length(); ++t, ++r) {
        wanted.ptr<int32_t>()[r] = static_cast<int32_t>(first_row + s.prompt_length + t - 1);
        h.target.ptr<int32_t>()[r] = s.tokens[static_cast<size_t>(s.prompt_length + t)];
        h.temperature.ptr<float>()[r] = s.temperature;
      }
      first_row += trained_rows(s);
    }
    batch.wanted = wanted;

    h.hidden = forward(c, model, batch, *pool, keep);
    h.logprob = step_arena.tensor(DType::f32, {num_wanted}, "log-probs");
    h.lse = step_arena.tensor(DType::f32, {num_wanted}, "lse");
    h.entropy = step_arena.tensor(DType::f32, {num_wanted}, "entropies");
    head_logprob(c, model, h.logprob, h.lse, h.entropy, h.hidden, h.target, h.temperature);
    return h;
  }

  // Adds the gradients of one micro-batch and fills the sums and log-probs of its samples.
  void run_micro_batch(std::span<const TrainSample> samples, const MicroBatch& micro, const Denominators& d,
                       const LossConfig& loss, std::span<LossSums> sums, std::vector<TokenLogprobs>* seen) {
    const ArenaScope step_scope(step_arena), workspace_scope(*c.workspace);
    const HeadRows h = run_forward(samples, micro, &saved);

    const Stopwatch watch(backward_seconds);
    const int64_t num_wanted = h.target.rows();
    const TensorView dlogprob = step_arena.tensor(DType::f32, {num_wanted}, "dlogprob");
    const TensorView dentropy = step_arena.tensor(DType::f32, {num_wanted}, "dentropy");
    size_t r = 0;
    for (const int32_t i : micro.samples) {
      const size_t n = static_cast<size_t>(samples[i].response_length());
      const std::span<const float> logprob(h.logprob.ptr<float>() + r, n), entropy(h.entropy.ptr<float>() + r, n);
      sums[i] =
          sample_loss(samples[i], logprob, entropy, d, loss, {dlogprob.ptr<float>() + r, n}, {dentropy.ptr<float>() + r, n});
      if (seen != nullptr) {
        std::copy(logprob.begin(), logprob.end(), (*seen)[i].logprob.begin());
        std::copy(entropy.begin(), entropy.end(), (*seen)[i].entropy.begin());
      }
      r += n;
    }
    const TensorView dhidden = step_arena.tensor(DType::f32, h.hidden.shape, "dhidden");
    head_logprob_backward(c, model, dhidden, gradients.tensors.head, dlogprob,
                          loss.entropy_coef == 0 ? ConstTensorView() : ConstTensorView(dentropy), h.hidden, h.target, h.temperature,
                          h.lse, h.entropy);
    backward(c, model, batch, *pool, saved, dhidden, gradients);
  }

  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
  int num_ranks() const { return ranks == nullptr ? 1 : ranks->size(); }

  // The samples that `keep` accepts, by the rank that works on them: places in `samples`, in canonical order.
  using Shares = std::vector<std::vector<int32_t>>;
  template <typename Keep>
  Shares share_samples(std::span<const TrainSample> samples, Keep keep) const {
    std::vector<int32_t> order = canonical_order(samples);
    std::erase_if(order, [&](int32_t i) { return !keep(samples[i]); });
    std::vector<int64_t> lengths;
    for (const int32_t i : order) lengths.push_back(trained_rows(samples[i]));
    Shares shares = share_out(lengths, num_ranks());
    for (std::vector<int32_t>& share : shares)
      for (int32_t& i : share) i = order[i];
    return shares;
  }

  // This rank's share by micro-batch.
  std::vector<MicroBatch> pack_own(std::span<const TrainSample> samples, const Shares& shares) const {
    const std::vector<int32_t>& own = shares[static_cast<size_t>(rank())];
    std::vector<int64_t> lengths;
    for (const int32_t i : own) lengths.push_back(trained_rows(samples[i]));
    std::vector<MicroBatch> micro_batches = pack(lengths, options.max_tokens_per_microbatch);
    for (MicroBatch& m : micro_batches)
      for (int32_t& i : m.samples) i = own[i];
    return micro_batches;
  }

  // Every rank's rows to all: [sum of `rows`, width], rank by rank, of which `fill` writes the own ones. Taken from the step
  // arena.
  template <typename T, typename Fill>
  const T* gather(DType dtype, const std::vector<int64_t>& rows, int64_t width, Purpose p, Fill fill) {
    const TensorView all =
        step_arena.tensor(dtype, {std::accumulate(rows.begin(), rows.end(), int64_t{0}), width}, "what all ranks computed");
    const int64_t first = std::accumulate(rows.begin(), rows.begin() + rank(), int64_t{0});
    T* own = all.ptr<T>() + first * width;
    fill(own);
    ranks->all_gather(c, all, TensorView(own, dtype, {rows[static_cast<size_t>(rank())], width}), rows, p);
    return all.ptr<T>();
  }

  // After every rank has filled in its share: the log-probs and entropies of all shares.
  void gather_logprobs(std::span<const TrainSample> samples, const Shares& shares, std::vector<TokenLogprobs>& result) {
    if (ranks == nullptr) return;
    const ArenaScope scope(step_arena);
    std::vector<int64_t> rows;
    for (const std::vector<int32_t>& share : shares) {
      rows.push_back(0);
      for (const int32_t i : share) rows.back() += samples[i].response_length();
    }
    const float* from = gather<float>(DType::f32, rows, 2, "log-probs", [&](float* own) {
      for (const int32_t i : shares[static_cast<size_t>(rank())]) {
        for (size_t t = 0; t < result[i].logprob.size(); ++t) {
          *own++ = result[i].logprob[t];
          *own++ = result[i].entropy[t];
        }
      }
    });
    for (const std::vector<int32_t>& share : shares) {
      for (const int32_t i : share) {
        const auto n = static_cast<size_t>(samples[i].response_length());
        result[i].logprob.resize(n);
        result[i].entropy.resize(n);
        for (size_t t = 0; t < n; ++t) {
          result[i].logprob[t] = *from++;
          result[i].entropy[t] = *from++;
        }
      }
    }
  }

  void gather_sums(const Shares& shares, std::span<LossSums> sums) {
    if (ranks == nullptr) return;
    constexpr int64_t kWidth = sizeof(LossSums) / sizeof(double);
    static_assert(sizeof(LossSums) == kWidth * sizeof(double) && std::is_trivially_copyable_v<LossSums>);
    const ArenaScope scope(step_arena);
    std::vector<int64_t> rows;
    for (const std::vector<int32_t>& share : shares) rows.push_back(static_cast<int64_t>(share.size()));
    const double* from = gather<double>(DType::f64, rows, kWidth, "loss sums", [&](double* own) {
      for (const int32_t i : shares[static_cast<size_t>(rank())]) {
        std::memcpy(own, &sums[i], sizeof(LossSums));
        own += kWidth;
      }
    });
    for (const std::vector<int32_t>& share : shares) {
      for (const int32_t i : share) {
        std::memcpy(static_cast<void*>(&sums[i]), from, sizeof(LossSums));
        from += kWidth;
      }
    }
  }

  // Gradients of all ranks added up in rank order, on every rank. Small tensors travel together: what a tiny one costs is the
  // wait.
  void sum_gradients() {
    if (ranks == nullptr) return;
    constexpr int64_t kTogether = int64_t{1} << 18;  // elements
    const ArenaScope scope(step_arena);
    const TensorView bucket = step_arena.tensor(DType::f32, {kTogether}, "gradients on their way");
    std::vector<TensorView> inside;
    int64_t filled = 0;
    const auto empty_bucket = [&] {
      if (inside.empty()) return;
      float* at = bucket.ptr<float>();
      for (const TensorView& g : inside) {
        std::memcpy(at, g.data, g.bytes());
        at += g.shape.elements();
      }
      ranks->all_reduce(c, TensorView(bucket.data, DType::f32, {filled}), "gradients");
      at = bucket.ptr<float>();
      for (const TensorView& g : inside) {
        std::memcpy(g.data, at, g.bytes());
        at += g.shape.elements();
      }
      inside.clear();
      filled = 0;
    };
    for (const TensorView& g : gradients.set.views) {
      if (g.empty()) continue;
      const int64_t n = g.shape.elements();
      if (n > kTogether) {
        ranks->all_reduce(c, g, "gradients");
        continue;
      }
      if (filled + n > kTogether) empty_bucket();
      inside.push_back(g);
      filled += n;
    }
    empty_bucket();
  }

  Counters counters() const { return {optimizer.steps_applied(), optimizer.skipped_in_a_row(), weights.version()}; }
  std::vector<NamedView> master_views() const {
    std::vector<NamedView> list;
    append(list, "", weights.table(), masters);
    return list;
  }
  std::vector<NamedView> moment_views() const {
    std::vector<NamedView> list;
    append(list, "m.", weights.table(), optimizer.first_moments());
    append(list, "v.", weights.table(), optimizer.second_moments());
    return list;
  }
};

Actor::Actor(Context& c, Weights& weights, const RopeTables& rope, const OptimizerConfig& optimizer, const ActorOptions& options,
             RankGroup* ranks)
    : impl_(std::make_unique<Impl>(c, weights, rope, optimizer, options, ranks)) {}

Actor::~Actor() = default;

void Actor::initialize(uint64_t seed) {
  for (const TensorView& v : impl_->masters.views) std::memset(v.data, 0, v.bytes());
  initialize_masters(impl_->weights.config(), impl_->weights.table(), impl_->masters, seed);
  impl_->optimizer.reset();
  impl_->weights.load(impl_->c, impl_->masters, 0);
}

TensorSet& Actor::masters() { return impl_->masters; }

void Actor::publish() { impl_->weights.load(impl_->c, impl_->masters, std::max<int64_t>(impl_->weights.version(), 0)); }

std::vector<TokenLogprobs> Actor::logprobs(std::span<const TrainSample> samples) {
  check_samples(samples);
  std::vector<TokenLogprobs> result(samples.size());
  const Impl::Shares shares = impl_->share_samples(samples, [](const TrainSample&) { return true; });
  for (const MicroBatch& micro : impl_->pack_own(samples, shares)) {
    const ArenaScope step_scope(impl_->step_arena), workspace_scope(*impl_->c.workspace);
    const Impl::HeadRows h = impl_->run_forward(samples, micro, nullptr);
    const float *logprob = h.logprob.ptr<float>(), *entropy = h.entropy.ptr<float>();
    for (const int32_t i : micro.samples) {
      const int64_t n = samples[i].response_length();
      result[i].logprob.assign(logprob, logprob + n);
      result[i].entropy.assign(entropy, entropy + n);
      logprob += n;
      entropy += n;
    }
  }
  impl_->gather_logprobs(samples, shares, result);
  return result;
}

Result<StepMetrics> Actor::step(std::span<const TrainSample> samples, const LossConfig& loss, std::vector<TokenLogprobs>* seen,
                                const std::function<Status()>& accept) {
  Impl& a = *impl_;
  check_samples(samples);
  if (seen != nullptr) {
    seen->resize(samples.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      const size_t n = static_cast<size_t>(samples[i].response_length());
      (*seen)[i].logprob.assign(n, std::numeric_limits<float>::quiet_NaN());
      (*seen)[i].entropy.assign(n, std::numeric_limits<float>::quiet_NaN());
    }
  }
  const Denominators d = count_denominators(samples, loss);
  const auto has_trained_token = [](const TrainSample& s) {
    return std::any_of(s.mask.begin(), s.mask.end(), [](uint8_t m) { return m != 0; });
  };
  const Impl::Shares shares = a.share_samples(samples, has_trained_token);
  const std::vector<MicroBatch> micro_batches = a.pack_own(samples, shares);
  int64_t num_micro_batches = static_cast<int64_t>(micro_batches.size());
  if (a.ranks != nullptr) a.ranks->all_reduce(std::span(&num_micro_batches, 1), Reduction::sum, "micro-batches");

  StepMetrics metrics;
  const auto put = [&](const char* name, double value) { metrics.values.emplace_back(name, value); };
  put("tokens", static_cast<double>(d.num_tokens));
  put("microbatches", static_cast<double>(num_micro_batches));
  if (num_micro_batches == 0) {
    log_warn("actor: none of {} samples has a trained token; step skipped", samples.size());
    metrics.skipped = true;
    put("skipped", 1);
    return metrics;
  }

  std::vector<LossSums> sums(samples.size());
  zero_gradients(a.c, a.gradients);
  for (const MicroBatch& micro : micro_batches) a.run_micro_batch(samples, micro, d, loss, sums, seen);
  a.gather_sums(shares, sums);
  if (seen != nullptr) a.gather_logprobs(samples, shares, *seen);
  if (accept) {
    const Status accepted = accept();
    LOCKSTEP_RETURN_IF_ERROR(a.ranks == nullptr ? accepted : a.ranks->agree(accepted, "accept"));
  }
  a.sum_gradients();
  LossSums total;  // in canonical order, whatever the packing was
  for (const int32_t i : canonical_order(samples)) total.add(sums[i]);

  const Stopwatch watch(a.optimizer_seconds);
  const OptimizerStep step = a.optimizer.step(a.c, a.masters, a.gradients.set);
  if (!step.skipped) a.weights.load(a.c, a.masters, a.weights.version() + 1);
  if (step.skipped && a.optimizer.skipped_in_a_row() >= a.optimizer_config.max_skipped)
    return errorf(
        "training: gradients were not finite {} times in a row (the limit is max_skipped = {}), after {} good steps; the loss of "
        "the last was {}",
        a.optimizer.skipped_in_a_row(), a.optimizer_config.max_skipped, a.optimizer.steps_applied(), total.loss);

  put("loss", total.loss);
  put("pg_loss", total.pg_loss);
  if (loss.kl != KlKind::none) put("kl_loss", total.kl_loss);
  put("entropy", total.entropy);
  if (loss.kind == LossKind::policy) {
    put("pg_clipfrac", total.clipped / total.tokens);
    if (loss.dual_clip > 0) put("pg_clipfrac_lower", total.clipped_lower / total.tokens);
    put("ppo_kl", total.ppo_kl / total.tokens);
  }
  put("grad_norm", step.grad_norm);
  put("lr", step.lr);
  put("skipped", step.skipped ? 1 : 0);
  metrics.skipped = step.skipped;
  return metrics;
}

int64_t Actor::steps_done() const { return impl_->optimizer.steps_applied(); }
const Gradients& Actor::gradients() const { return impl_->gradients; }

Status Actor::save(const std::string& directory) const {
  LOCKSTEP_RETURN_IF_ERROR(make_directories(directory));
  LOCKSTEP_RETURN_IF_ERROR(write_tensors(directory + "/" + kOptimizerFile, impl_->moment_views(), impl_->counters()));
  return write_tensors(directory + "/" + kMastersFile, impl_->master_views(), impl_->counters());
}

Status Actor::load(const std::string& directory) {
  const std::vector<NamedView> masters = impl_->master_views(), moments = impl_->moment_views();
  Result<SafetensorsFile> master_file = SafetensorsFile::open(directory + "/" + kMastersFile);
  if (!master_file) return master_file.status();
  Result<SafetensorsFile> optimizer_file = SafetensorsFile::open(directory + "/" + kOptimizerFile);
  if (!optimizer_file) return optimizer_file.status();

  // Everything is checked before anything changes.
  LOCKSTEP_RETURN_IF_ERROR(check_tensors(master_file.value(), masters));
  LOCKSTEP_RETURN_IF_ERROR(check_tensors(optimizer_file.value(), moments));
  const Result<Counters> counters = read_counters(master_file.value()),
                         optimizer_counters = read_counters(optimizer_file.value());
  if (!counters) return counters.status();
  if (!optimizer_counters) return optimizer_counters.status();
  const Counters& n = counters.value();
  if (n != optimizer_counters.value())
    return errorf("{}: {} is of step {}, {} of step {}; the save was cut short, use an older checkpoint", directory, kMastersFile,
                  n.steps, kOptimizerFile, optimizer_counters.value().steps);

  for (const NamedView& m : masters) LOCKSTEP_RETURN_IF_ERROR(master_file.value().copy_to(m.name, m.view));
  for (const NamedView& m : moments) LOCKSTEP_RETURN_IF_ERROR(optimizer_file.value().copy_to(m.name, m.view));
  impl_->optimizer.set_counters(n.steps, n.skipped_in_a_row);
  impl_->weights.load(impl_->c, impl_->masters, n.version);
  return Status::ok();
}

double Actor::forward_seconds() const { return impl_->forward_seconds; }
double Actor::backward_seconds() const { return impl_->backward_seconds; }
double Actor::optimizer_seconds() const { return impl_->optimizer_seconds; }
size_t Actor::high_bytes() const {
  return impl_->master_arena.high_bytes() + impl_->gradient_arena.high_bytes() + impl_->optimizer.high_bytes() +
         impl_->state_arena.high_bytes() + impl_->step_arena.high_bytes();
}

}  // namespace lockstep
