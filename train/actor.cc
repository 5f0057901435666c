#include "train/actor.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <deque>
#include <limits>
#include <map>

#include "core/device.h"
#include "core/log.h"
#include "io/file.h"
#include "train/loss.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/pack.h"
#include "train/partition.h"
#include "train/pipeline.h"
#include "train/results.h"
#include "train/stage_links.h"

namespace lockstep {

namespace {

// Address space only; pages are committed by first touch.
constexpr size_t kGradientReserve = size_t{256} << 30;
constexpr size_t kResultReserve = size_t{64} << 30;

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

std::map<std::string, std::string> to_metadata(const Counters& n) {
  return {{"steps", std::to_string(n.steps)}, {"skipped_in_a_row", std::to_string(n.skipped_in_a_row)}, {"version", std::to_string(n.version)}};
}

Result<Counters> read_counters(const BoxFiles& files) {
  const std::string path = files.paths().front();
  Counters n;
  for (const auto& [key, field] :
       {std::pair{"steps", &n.steps}, {"skipped_in_a_row", &n.skipped_in_a_row}, {"version", &n.version}}) {
    const auto it = files.metadata().find(key);
    if (it == files.metadata().end()) return errorf("{}: metadata has no '{}'; was this file written by a training run?", path, key);
    const std::string& text = it->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *field);
    if (error != std::errc() || end != text.data() + text.size() || *field < 0)
      return errorf("{}: metadata '{}' is '{}', a count is wanted", path, key, text);
  }
  return n;
}

}  // namespace

struct Actor::Impl {
  Context& c;
  Weights& weights;
  const OptimizerConfig optimizer_config;
  Groups* const groups;  // null: alone
  const ActorOptions options;
  Model model;

  Arena gradient_arena;
  Gradients gradients;
  Partition partition;
  Optimizer optimizer;

  StageLinks links;
  std::deque<MicroBatchPlace> places;  // micro-batch m has place m % size
  Arena result_arena;                  // what ranks tell each other

  double forward_seconds = 0, backward_seconds = 0, optimizer_seconds = 0;

  Impl(Context& c, Weights& w, const RopeTables& rope, const OptimizerConfig& o, const ActorOptions& a, Groups* groups)
      : c(c), weights(w), optimizer_config(o), groups(groups), options(a),
        gradient_arena("gradients", kGradientReserve, c.device),
        gradients(make_gradients(w.config(), w.shard(), gradient_arena, [&](const TensorSpec& s) { return is_trained(s, o); })),
        partition(gradients, groups), optimizer(w.table(), o, partition, groups == nullptr ? nullptr : groups->all, c.device),
        links(groups == nullptr ? nullptr : &groups->pp, w.config(), w.dtype(), c.device), result_arena("results of all ranks", kResultReserve) {
    CHECK(a.max_tokens_per_microbatch > 0, "a micro-batch of {} tokens", a.max_tokens_per_microbatch);
    model.weights = &weights;
    model.rope = rope;
    model.cache = options.cache;
    const Shard& shard = w.shard();
    CHECK(shard.embedding == (links.stage() == 0) && shard.head == last_stage() && shard.tp == layout().tp &&
              shard.experts == part_of(w.config().num_experts, layout().ep, groups == nullptr ? 0 : groups->ep.rank()),
          "the weights hold another shard than that of stage {} of {} in {}", links.stage(), links.stages(), layout().str());
    if (groups != nullptr && groups->tp.size() > 1) model.tp = &groups->tp;
    if (groups != nullptr && groups->ep.size() > 1) model.ep = &groups->ep;
    for (int i = 0; i < in_flight_max(links.stage(), links.stages()); ++i) places.emplace_back(c, weights, options);
  }

  Layout layout() const { return groups == nullptr ? Layout{.dp = 1} : groups->grid.layout(); }
  int dp_index() const { return groups == nullptr ? 0 : groups->dp.rank(); }
  bool last_stage() const { return links.stage() + 1 == links.stages(); }
  MicroBatchPlace& place(int64_t m) { return places[static_cast<size_t>(m) % places.size()]; }

  // The samples that `keep` accepts, in canonical order, cut for all dp ranks.
  template <typename Keep>
  Work plan(std::span<const TrainSample> samples, Keep keep) const {
    std::vector<int32_t> chosen = canonical_order(samples);
    std::erase_if(chosen, [&](int32_t i) { return !keep(samples[i]); });
    return plan_work(samples, chosen, layout().dp, dp_index(), options.max_tokens_per_microbatch);
  }

  void begin(const Work& work, bool with_gradients) {
    std::vector<int64_t> rows;
    for (const MicroBatch& m : work.micro_batches) rows.push_back(m.rows);
    links.begin(c, std::move(rows), with_gradients);
  }

  void run_forward(std::span<const TrainSample> samples, const Work& work, int64_t m, bool keep) {
    const ConstTensorView input = links.input(c, m);
    const Stopwatch watch(forward_seconds);
    const ArenaScope workspace_scope(*c.workspace);
    const ConstTensorView streams = place(m).forward(c, model, samples, work.micro_batches[static_cast<size_t>(m)], keep, input);
    if (!last_stage()) links.send_output(c, m, streams);
  }

  // f(sample, log-probs, entropies) for every sample of micro-batch m, whose forward has run on this last stage. The spans begin at row `first` of the head's.
  template <typename F>
  void for_each_sample(std::span<const TrainSample> samples, const Work& work, int64_t m, F f) {
    const ArenaScope host_scope(*c.host);
    const ConstTensorView logprobs = on_host(c, place(m).head().logprob), entropies = on_host(c, place(m).head().entropy);
    size_t first = 0;
    for (const int32_t i : work.micro_batches[static_cast<size_t>(m)].samples) {
      const auto n = static_cast<size_t>(samples[i].response_length());
      f(i, first, std::span<const float>(logprobs.ptr<float>() + first, n), std::span<const float>(entropies.ptr<float>() + first, n));
      first += n;
    }
  }

  // Losses of micro-batch m, and their gradient with respect to the hidden rows.
  ConstTensorView run_loss(std::span<const TrainSample> samples, const Work& work, int64_t m, const Denominators& d, const LossConfig& loss,
                           std::span<LossSums> sums, std::vector<TokenLogprobs>* seen) {
    Arena& arena = place(m).arena();
    const Shape rows = place(m).head().target.shape;
    const ArenaScope host_scope(*c.host);
    Arena& made = c.on_gpu() ? *c.host : arena;
    TensorView dlogprob = made.tensor(DType::f32, rows, "dlogprob"), dentropy = made.tensor(DType::f32, rows, "dentropy");
    for_each_sample(samples, work, m, [&](int32_t i, size_t first, std::span<const float> logprob, std::span<const float> entropy) {
      sums[i] = sample_loss(samples[i], logprob, entropy, d, loss, {dlogprob.ptr<float>() + first, logprob.size()},
                            {dentropy.ptr<float>() + first, logprob.size()});
      if (seen == nullptr) return;
      (*seen)[i].logprob.assign(logprob.begin(), logprob.end());
      (*seen)[i].entropy.assign(entropy.begin(), entropy.end());
    });
    dlogprob = on_device(c, dlogprob, arena);
    dentropy = on_device(c, dentropy, arena);
    return place(m).head_backward(c, model, dlogprob, loss.entropy_coef == 0 ? ConstTensorView() : ConstTensorView(dentropy), gradients);
  }

  Status agree(const Status& mine, Purpose p) const { return groups == nullptr ? mine : groups->all->agree(mine, p); }

  // Rounded masters to every rank that holds them.
  void publish() {
    optimizer.write_rows(c, weights);
    partition.share_rows(c, weights);
    for (const TensorSpec& spec : weights.table()) {  // each rank quantises all it holds: blocks span rows that ranks step apart
      if (weights.scales(spec.id).empty() || gradients.set.views[static_cast<size_t>(spec.id)].empty()) continue;
      const ArenaScope scope(*c.workspace);
      weights.store(c, spec.id, partition.gather_master(c, spec.id, optimizer.master(spec.id)));
    }
    weights.commit(c, weights.version() + 1);
  }

  Counters counters() const { return {optimizer.steps_applied(), optimizer.skipped_in_a_row(), weights.version()}; }
  const TensorSpec& spec(int id) const { return weights.table()[static_cast<size_t>(id)]; }
  Status write(const std::string& directory, const char* stem, const std::vector<BoxView>& boxes) const {
    const int rank = groups == nullptr ? 0 : groups->rank;
    return write_boxes(directory + "/" + box_file(stem, rank, layout().ranks()), boxes, to_metadata(counters()));
  }
};

Actor::Actor(Context& c, Weights& weights, const RopeTables& rope, const OptimizerConfig& optimizer, const ActorOptions& options, Groups* groups)
    : impl_(std::make_unique<Impl>(c, weights, rope, optimizer, options, groups)) {}

Actor::~Actor() = default;

Status Actor::load_masters(const ReadBox& read) {
  LOCKSTEP_RETURN_IF_ERROR(impl_->optimizer.read_masters(impl_->c, read));
  impl_->optimizer.reset(impl_->c);
  return impl_->weights.load(impl_->c, read, 0);
}

ConstTensorView Actor::master(int id) const {
  const Impl& a = *impl_;
  for (const Optimizer::Frozen& m : a.optimizer.frozen())
    if (m.id == id) return m.master;
  return a.partition.gather_master(a.c, id, a.optimizer.master(id));
}

void Actor::initialize(uint64_t seed) {
  const Status drawn = load_masters(random_boxes(impl_->weights.config(), seed));
  CHECK(drawn.is_ok(), "{}", drawn.message());
}

void Actor::visit_owned(Owned what, const std::function<void(const BoxView&)>& f) const {
  const Impl& a = *impl_;
  const auto view_of = [&](const Optimizer::Owned& o) {
    switch (what) {
      case Owned::masters: return o.master;
      case Owned::gradients: return o.gradient;
      case Owned::first_moments: return o.m;
      case Owned::second_moments: return o.v;
    }
    return TensorView();
  };
  for (const Optimizer::Owned& o : a.optimizer.owned())
    if (const TensorSpec& spec = a.spec(o.piece.id); a.partition.counts(spec)) f({spec.name, spec.whole, o.piece.box, view_of(o)});
  if (what != Owned::masters) return;
  for (const Optimizer::Frozen& m : a.optimizer.frozen())
    if (const TensorSpec& spec = a.spec(m.id); a.partition.saves(spec)) f({spec.name, spec.whole, spec.box, matrix_view(m.master)});
}

std::vector<TokenLogprobs> Actor::logprobs(std::span<const TrainSample> samples) {
  Impl& a = *impl_;
  check_samples(samples);
  std::vector<TokenLogprobs> result(samples.size());
  const Work work = a.plan(samples, [](const TrainSample&) { return true; });
  a.begin(work, /*with_gradients=*/false);
  for (int64_t m = 0; m < static_cast<int64_t>(work.micro_batches.size()); ++m) {
    a.run_forward(samples, work, m, /*keep=*/false);
    if (!a.last_stage()) continue;
    a.for_each_sample(samples, work, m, [&](int32_t i, size_t, std::span<const float> logprob, std::span<const float> entropy) {
      result[i].logprob.assign(logprob.begin(), logprob.end());
      result[i].entropy.assign(entropy.begin(), entropy.end());
    });
  }
  a.links.end();
  if (a.groups != nullptr) gather_logprobs(a.c, *a.groups, a.result_arena, samples, work, result);
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
  const Work work = a.plan(samples, has_trained_token);

  StepMetrics metrics;
  const auto put = [&](const char* name, double value) { metrics.values.emplace_back(name, value); };
  put("tokens", static_cast<double>(d.num_tokens));
  put("microbatches", static_cast<double>(work.total));
  if (work.total == 0) {
    log_warn("actor: none of {} samples has a trained token; step skipped", samples.size());
    metrics.skipped = true;
    put("skipped", 1);
    return metrics;
  }

  std::vector<LossSums> sums(samples.size());
  zero_gradients(a.c, a.gradients);
  a.begin(work, /*with_gradients=*/true);
  for (const PipelineStep& s : pipeline_schedule(a.links.stage(), a.links.stages(), static_cast<int64_t>(work.micro_batches.size()))) {
    const int64_t m = s.micro_batch;
    if (s.forward) {
      a.run_forward(samples, work, m, /*keep=*/true);
      continue;
    }
    const ConstTensorView arrived = a.last_stage() ? ConstTensorView() : a.links.output_gradient(a.c, m);
    const TensorView dinput = a.links.input_gradient(m);
    const Stopwatch watch(a.backward_seconds);
    const ConstTensorView doutput = a.last_stage() ? a.run_loss(samples, work, m, d, loss, sums, seen) : arrived;
    a.place(m).backward(a.c, a.model, doutput, a.gradients, dinput);
    a.links.send_input_gradient(a.c, m);
  }
  a.links.end();
  if (a.groups != nullptr) {
    gather_sums(a.c, *a.groups, a.result_arena, work, sums);
    if (seen != nullptr) gather_logprobs(a.c, *a.groups, a.result_arena, samples, work, *seen);
  }
  if (accept) LOCKSTEP_RETURN_IF_ERROR(a.agree(accept(), "accept"));
  a.partition.sum_gradients(a.c);
  LossSums total;  // in canonical order, whatever the packing was
  for (const int32_t i : canonical_order(samples)) total.add(sums[i]);

  const Stopwatch watch(a.optimizer_seconds);
  const OptimizerStep step = a.optimizer.step(a.c);
  if (!step.skipped) a.publish();
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
    if (loss.tis != TisKind::none) {
      put("tis", total.tis / total.tokens);
      put("tis_abs", total.tis_abs / total.tokens);
      put("tis_clipfrac", total.tis_clipped / total.tokens);
      if (loss.tis_mask_high > 0) put("tis_maskfrac", total.tis_masked / total.tokens);
    }
    if (loss.tis_veto > 0) put("tis_vetofrac", total.vetoed / total.tokens);
    if (loss.opsm > 0) put("opsm_maskfrac", total.opsm / total.tokens);
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
  std::vector<BoxView> masters, moments;
  Context& c = impl_->c;
  const ArenaScope host_scope(*c.host);  // copies of what lies on a GPU
  visit_owned(Owned::masters, [&](BoxView b) {
    b.values = on_host(c, b.values);
    masters.push_back(std::move(b));
  });
  for (const auto& [what, prefix] : {std::pair{Owned::first_moments, "m."}, {Owned::second_moments, "v."}}) {
    visit_owned(what, [&](BoxView b) {
      b.name = prefix + b.name;
      b.values = on_host(c, b.values);
      moments.push_back(std::move(b));
    });
  }
  LOCKSTEP_RETURN_IF_ERROR(impl_->write(directory, kOptimizerStem, moments));
  return impl_->write(directory, kMastersStem, masters);
}

Status Actor::load(const std::string& directory) {
  Impl& a = *impl_;
  const Result<BoxFiles> masters = BoxFiles::open(directory, kMastersStem), moments = BoxFiles::open(directory, kOptimizerStem);
  if (!masters) return masters.status();
  if (!moments) return moments.status();

  // Everything is checked before anything changes.
  std::vector<WholeTensor> wanted_masters, wanted_moments;
  for (const TensorSpec& spec : a.weights.table()) {
    wanted_masters.push_back({spec.name, spec.whole, spec.master_dtype()});
    if (!is_trained(spec, a.optimizer_config)) continue;
    for (const char* prefix : {"m.", "v."}) wanted_moments.push_back({prefix + spec.name, spec.whole, DType::f32});
  }
  LOCKSTEP_RETURN_IF_ERROR(masters.value().check(wanted_masters));
  LOCKSTEP_RETURN_IF_ERROR(moments.value().check(wanted_moments));
  const Result<Counters> counters = read_counters(masters.value()), optimizer_counters = read_counters(moments.value());
  if (!counters) return counters.status();
  if (!optimizer_counters) return optimizer_counters.status();
  const Counters& n = counters.value();
  if (n != optimizer_counters.value())
    return errorf("{}: {} is of step {}, {} of step {}; the save was cut short, use an older checkpoint", directory, kMastersStem, n.steps,
                  kOptimizerStem, optimizer_counters.value().steps);

  const ReadBox read = [&](const TensorSpec& spec, const Box& box, TensorView out) { return masters.value().read(spec.name, box, out); };
  LOCKSTEP_RETURN_IF_ERROR(a.optimizer.read_masters(a.c, read));
  for (const Optimizer::Owned& o : a.optimizer.owned()) {
    const std::string& name = a.spec(o.piece.id).name;
    LOCKSTEP_RETURN_IF_ERROR(fill_on_host(a.c, o.m, [&](TensorView v) { return moments.value().read("m." + name, o.piece.box, v); }));
    LOCKSTEP_RETURN_IF_ERROR(fill_on_host(a.c, o.v, [&](TensorView v) { return moments.value().read("v." + name, o.piece.box, v); }));
  }
  a.optimizer.set_counters(n.steps, n.skipped_in_a_row);
  return a.weights.load(a.c, read, n.version);
}

double Actor::forward_seconds() const { return impl_->forward_seconds; }
double Actor::backward_seconds() const { return impl_->backward_seconds; }
double Actor::optimizer_seconds() const { return impl_->optimizer_seconds; }
size_t Actor::high_bytes() const {
  size_t bytes = impl_->gradient_arena.high_bytes() + impl_->optimizer.high_bytes() + impl_->links.high_bytes() + impl_->result_arena.high_bytes();
  for (const MicroBatchPlace& p : impl_->places) bytes += p.high_bytes();
  return bytes;
}
size_t Actor::owned_bytes() const { return impl_->optimizer.owned_bytes(); }

}  // namespace lockstep
