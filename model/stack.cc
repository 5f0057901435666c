#include "model/stack.h"

#include "core/device.h"
#include "model/attention_layer.h"
#include "model/embedding.h"
#include "model/moe_layer.h"
#include "model/saved.h"
#include "ops/cast/cast.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows/rows.h"

namespace lockstep {

Saved::Saved() = default;
Saved::~Saved() = default;

RopeTables make_rope_tables(const ModelConfig& config, int64_t positions, Arena& arena) {
  RopeTables t;
  t.window = arena.tensor(DType::f32, {positions, config.rope_dim}, "rope.window");
  t.compressed = arena.tensor(DType::f32, {positions, config.rope_dim}, "rope.compressed");
  rope_table(t.window, config.rope_theta, RopeScaling());
  rope_table(t.compressed, config.compress_rope_theta, config.compress_rope_scaling);
  return t;
}
RopeTables make_rope_tables(Context& c, const ModelConfig& config, int64_t positions, Arena& arena) {
  if (!c.on_gpu()) return make_rope_tables(config, positions, arena);
  const ArenaScope scope(*c.host);
  const RopeTables made = make_rope_tables(config, positions, *c.host);
  return {on_device(c, made.window, arena), on_device(c, made.compressed, arena)};
}

namespace {

HyperShape hyper_shape(const ModelConfig& m) { return {m.hc_mult, m.sinkhorn_iters, m.norm_eps, m.hc_eps}; }
HyperWeights hyper_weights(const HyperTensors<WeightView>& t) { return {t.fn, t.base.rows, t.scale.rows}; }
HyperGradients hyper_gradients(const HyperTensors<TensorView>& t) { return {t.fn, t.base, t.scale}; }

// How one sublayer is fed.
void site_forward(Context& c, const ModelConfig& m, const HyperTensors<WeightView>& hyper, const WeightView& norm, ConstTensorView x, SavedSite& s,
                  Arena& keep) {
  const int64_t T = x.dim(0), n = m.hc_mult, D = m.hidden_size;
  s.pre = keep.tensor(DType::f32, {T, n}, "site.pre");
  s.post = keep.tensor(DType::f32, {T, n}, "site.post");
  s.comb = keep.tensor(DType::f32, {T, n * n}, "site.comb");
  s.raw = keep.tensor(DType::f32, {T, m.mix_rows()}, "site.raw");
  s.inv_rms = keep.tensor(DType::f32, {T}, "site.inv_rms");
  s.h = keep.tensor(x.dtype, {T, D}, "site.h");
  s.norm_inv = keep.tensor(DType::f32, {T}, "site.norm_inv");
  s.u = keep.tensor(x.dtype, {T, D}, "site.u");
  s.y = keep.tensor(x.dtype, {T, D}, "site.y");
  hyper_feed(c, s, x, hyper_weights(hyper), hyper_shape(m), norm.rows);
}

// The gradient of one site around its branch: dxout -> dx, with branch(du, dy) turning the branch's output gradient into its input's.
template <typename Branch>
void site_backward(Context& c, const ModelConfig& m, const HyperTensors<WeightView>& hyper, const WeightView& norm, HyperTensors<TensorView>& dhyper,
                   TensorView dnorm, ConstTensorView x, const SavedSite& s, TensorView dx, ConstTensorView dxout, Branch branch) {
  const int64_t T = x.dim(0), n = m.hc_mult, D = m.hidden_size;
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;
  TensorView dy = ws.tensor(DType::f32, {T, D}, "site.dy"), du = ws.tensor(DType::f32, {T, D}, "site.du");
  TensorView dpost = ws.tensor(DType::f32, {T, n}, "site.dpost"), dcomb = ws.tensor(DType::f32, {T, n * n}, "site.dcomb");
  hyper_post_backward(c, dy, dpost, dcomb, dxout, x, s.y, s.post);
  branch(du, dy);
  rmsnorm_backward(c, du, dnorm, du, s.h, norm.rows, s.norm_inv);
  hyper_feed_backward(c, dx, hyper_gradients(dhyper), du, dpost, dcomb, dxout, x, s, hyper_weights(hyper), hyper_shape(m));
}

void layer_forward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, TensorView xout, ConstTensorView x,
                   SavedLayer& s, Arena& keep) {
  const ModelConfig& m = model.weights->config();
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  const auto probe = [&](std::string_view point, ConstTensorView rows) {
    if (model.probe) (*model.probe)(layer, point, rows);
  };
  s.x_mid = keep.tensor(x.dtype, x.shape, "layer.x_mid");
  site_forward(c, m, w.hc_attn, w.attn_norm, x, s.attn_site, keep);
  probe("attn.u", s.attn_site.u);
  attention_layer_forward(c, model, layer, batch, state, s.attn_site.y, s.attn_site.u, s.attention, keep);
  hyper_post(c, s.x_mid, x, s.attn_site.y, s.attn_site.post, s.attn_site.comb);
  probe("attn.x", s.x_mid);
  site_forward(c, m, w.hc_ffn, w.ffn_norm, s.x_mid, s.ffn_site, keep);
  probe("ffn.u", s.ffn_site.u);
  moe_layer_forward(c, model, layer, batch, s.ffn_site.y, s.ffn_site.u, s.moe, keep);
  hyper_post(c, xout, s.x_mid, s.ffn_site.y, s.ffn_site.post, s.ffn_site.comb);
  probe("ffn.x", xout);
}

// dx [T, n, D] f32: gradient of the layer's output on entry, of its input on return. dx_other is scratch of the same shape.
void layer_backward(Context& c, const Model& model, int layer, const SequenceBatch& batch, const StatePool& state, ConstTensorView x,
                    const SavedLayer& s, TensorView dx, TensorView dx_other, LayerTensors<TensorView>& grad) {
  const ModelConfig& m = model.weights->config();
  const LayerTensors<WeightView>& w = model.weights->tensors().layers[static_cast<size_t>(layer)];
  site_backward(c, m, w.hc_ffn, w.ffn_norm, grad.hc_ffn, grad.ffn_norm, s.x_mid, s.ffn_site, dx_other, dx,
                [&](TensorView du, ConstTensorView dy) { moe_layer_backward(c, model, layer, batch, du, dy, s.ffn_site.u, s.moe, grad); });
  site_backward(c, m, w.hc_attn, w.attn_norm, grad.hc_attn, grad.attn_norm, x, s.attn_site, dx, dx_other, [&](TensorView du, ConstTensorView dy) {
    attention_layer_backward(c, model, layer, batch, state, du, dy, s.attn_site.u, s.attention, grad);
  });
}

// From the streams [T, n, D] to the hidden rows [R, D] of the wanted rows.
void final_site_forward(Context& c, const Model& model, const SequenceBatch& batch, TensorView hidden, ConstTensorView x, Saved* saved) {
  const Weights& weights = *model.weights;
  const ModelConfig& m = weights.config();
  const int64_t T = x.rows(), R = hidden.rows(), n = m.hc_mult, D = m.hidden_size;
  Arena& keep = saved != nullptr ? *saved->arena : *c.workspace;
  ConstTensorView xw = x;
  if (!batch.wanted.empty()) {
    const TensorView taken = keep.tensor(x.dtype, {R, n, D}, "final.x");
    moe_gather(c, taken.reshape({R, n * D}), x.reshape({T, n * D}), batch.wanted);
    xw = taken;
  }
  HyperFeed feed = {.pre = keep.tensor(DType::f32, {R, n}, "final.pre"), .post = {}, .comb = {}, .raw = keep.tensor(DType::f32, {R, n}, "final.raw"),
                    .inv_rms = keep.tensor(DType::f32, {R}, "final.inv_rms"), .h = keep.tensor(x.dtype, {R, D}, "final.h"),
                    .norm_inv = keep.tensor(DType::f32, {R}, "final.norm_inv"), .u = hidden};
  hyper_feed(c, feed, xw, hyper_weights(weights.tensors().hc_head), hyper_shape(m), weights.tensors().norm.rows);
  if (saved == nullptr) return;
  saved->final_x = xw;
  saved->final_feed = feed;
}

// dx [T, n, D] f32 written.
void final_site_backward(Context& c, const Model& model, const SequenceBatch& batch, const Saved& saved, TensorView dx, ConstTensorView dhidden,
                         Gradients& gradients) {
  const Weights& weights = *model.weights;
  const ModelConfig& m = weights.config();
  const int64_t R = dhidden.rows(), n = m.hc_mult, D = m.hidden_size;
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;
  const HyperFeed& feed = saved.final_feed;
  TensorView dh = ws.tensor(DType::f32, {R, D}, "final.dh");
  TensorView dxw = batch.wanted.empty() ? dx : ws.tensor(DType::f32, {R, n, D}, "final.dx");
  rmsnorm_backward(c, dh, gradients.tensors.norm, dhidden, feed.h, weights.tensors().norm.rows, feed.norm_inv);
  hyper_feed_backward(c, dxw, hyper_gradients(gradients.tensors.hc_head), dh, {}, {}, {}, saved.final_x, feed, hyper_weights(weights.tensors().hc_head),
                      hyper_shape(m));
  if (batch.wanted.empty()) return;
  set_zero(c, dx);
  scatter_rows(c, dx.reshape({dx.rows(), n * D}), dxw.reshape({R, n * D}), batch.wanted);
}

}  // namespace

TensorView forward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved* saved, ConstTensorView input) {
  const Weights& weights = *model.weights;
  const Shard& shard = weights.shard();
  const ModelConfig& m = weights.config();
  const int64_t T = batch.seq.num_tokens, n = m.hc_mult, D = m.hidden_size;
  const DType dtype = weights.dtype();
  Arena& ws = *c.workspace;
  const auto probe = [&](std::string_view point, ConstTensorView rows) {
    if (model.probe) (*model.probe)(-1, point, rows);
  };
  CHECK(shard.embedding || (input.shape == Shape{T, n, D} && input.dtype == dtype), "a stage's input is {} {}", dtype_name(input.dtype),
        input.shape.str());

  // The result; everything after it is released.
  TensorView result = shard.head ? ws.tensor(dtype, {batch.num_wanted(), D}, "stack.hidden") : ws.tensor(dtype, {T, n, D}, "stack.streams");
  ArenaScope scope(ws);

  // Without saving, two stream buffers take turns; with it every layer's input is kept.
  if (saved != nullptr) {
    saved->layer_inputs.clear();
    saved->layers.resize(saved->recompute == Recompute::none ? static_cast<size_t>(shard.layers.size()) : 0);
  }
  TensorView buffers[2];
  if (saved == nullptr)
    for (TensorView& b : buffers) b = ws.tensor(dtype, {T, n, D}, "stack.x");
  const auto stream = [&](int64_t i) { return saved == nullptr ? buffers[i % 2] : saved->arena->tensor(dtype, {T, n, D}, "saved.x"); };

  TensorView made;  // by the layer before, or by the embedding
  ConstTensorView x = input;
  if (shard.embedding) {
    made = stream(1);
    embedding_forward(c, model, made, batch.tokens);
    x = made;
    probe("embed", x);
  }
  for (int64_t i = 0; i < shard.layers.size(); ++i) {
    if (saved != nullptr) saved->layer_inputs.push_back(x);
    made = stream(i);
    ArenaScope layer_scope(ws);
    const int layer = static_cast<int>(shard.layers.begin + i);
    if (saved != nullptr && saved->recompute == Recompute::none) {
      layer_forward(c, model, layer, batch, state, made, x, saved->layers[static_cast<size_t>(i)], *saved->arena);
    } else {
      SavedLayer passing;
      layer_forward(c, model, layer, batch, state, made, x, passing, ws);
    }
    x = made;
  }
  if (saved != nullptr) saved->layer_inputs.push_back(x);

  if (shard.head) {
    final_site_forward(c, model, batch, result, x, saved);
    probe("final", result);
  } else {
    copy(c, result, x);
  }
  return result;
}

void backward(Context& c, const Model& model, const SequenceBatch& batch, const StatePool& state, Saved& saved, ConstTensorView doutput,
              Gradients& gradients, TensorView dinput) {
  const Weights& weights = *model.weights;
  const Shard& shard = weights.shard();
  const ModelConfig& m = weights.config();
  const int64_t T = batch.seq.num_tokens, n = m.hc_mult, D = m.hidden_size;
  const DType dtype = weights.dtype();
  ArenaScope scope(*c.workspace);
  Arena& ws = *c.workspace;
  CHECK_EQ(static_cast<int64_t>(saved.layer_inputs.size()), shard.layers.size() + 1);

  TensorView dx = ws.tensor(DType::f32, {T, n, D}, "backward.dx"), dx_other = ws.tensor(DType::f32, {T, n, D}, "backward.dx_other");
  if (shard.head) {
    final_site_backward(c, model, batch, saved, dx, doutput, gradients);
  } else {
    copy(c, dx, doutput);
  }
  for (int64_t i = shard.layers.size() - 1; i >= 0; --i) {
    const int layer = static_cast<int>(shard.layers.begin + i);
    const ConstTensorView x = saved.layer_inputs[static_cast<size_t>(i)];
    LayerTensors<TensorView>& grad = gradients.tensors.layers[static_cast<size_t>(layer)];
    if (saved.recompute == Recompute::none) {
      layer_backward(c, model, layer, batch, state, x, saved.layers[static_cast<size_t>(i)], dx, dx_other, grad);
    } else {
      ArenaScope layer_scope(*saved.arena);
      SavedLayer again;
      TensorView xout = saved.arena->tensor(dtype, {T, n, D}, "recompute.x");
      Model silent = model;
      silent.probe = nullptr;
      layer_forward(c, silent, layer, batch, state, xout, x, again, *saved.arena);
      layer_backward(c, silent, layer, batch, state, x, again, dx, dx_other, grad);
    }
  }
  if (!shard.embedding) {
    copy(c, dinput, dx);
  } else if (!gradients.tensors.embed.empty()) {
    embedding_backward(c, model, gradients.tensors.embed, dx, batch.tokens);
  }
}

}  // namespace lockstep
