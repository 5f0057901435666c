#include "rl/kernel_table.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "model/state.h"
#include "ops/adamw/adamw.h"
#include "ops/attention/attention.h"
#include "ops/cast/cast.h"
#include "ops/checksum/checksum.h"
#include "ops/compressor/compressor.h"
#include "ops/embed/embed.h"
#include "ops/finite/finite.h"
#include "ops/gate/gate.h"
#include "ops/hadamard/hadamard.h"
#include "ops/hyperconn/hyperconn.h"
#include "ops/indexer/indexer.h"
#include "ops/logprob/logprob.h"
#include "ops/matmul/matmul_gpu.h"
#include "ops/moe_permute/moe_permute.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/rows/rows.h"
#include "ops/sample/sample.h"
#include "ops/sum/sum.h"
#include "ops/swiglu/swiglu.h"

namespace lockstep {

namespace {

using Run = std::function<void()>;
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE2m1 = DType::e2m1x2;

template <typename... Factors>
double product(Factors... factors) {
  return (1.0 * ... * static_cast<double>(factors));
}
double element_bytes(DType t) { return t == kE2m1 ? 0.5 : static_cast<double>(dtype_bytes(t)); }

class Table {
 public:
  Table(const ModelConfig& m, const std::vector<Call>& calls, Device device) : m(m), device_(device) {
    for (const Call& call : calls) {
      call_ = call;
      T = call.tokens;
      streams();
      rows();
      products();
      for (const AttentionKind kind : {AttentionKind::swa, AttentionKind::csa, AttentionKind::hca}) attention_of(kind);
      experts();
      head();
      ++index_;
    }
    index_ = calls.empty() ? 0 : calls.size() - 1;
    weights();
  }
  std::vector<Kernel> take() { return std::move(kernels_); }

 private:
  void add(Kernel k) {
    k.call = index_;
    kernels_.push_back(std::move(k));
  }

  void streams() {
    const int64_t n = m.hc_mult, mix = m.mix_rows(), t = T, d = D;
    const HyperShape shape{.streams = n, .sinkhorn_iters = m.sinkhorn_iters, .norm_eps = m.norm_eps, .hc_eps = m.hc_eps};
    const double x_bytes = product(t, n, d) * 2;
    add({.op = "embed", .name = "embed", .shape = {t, n, d}, .bytes = product(t, d) * 2 + x_bytes, .set_up = [=, V = m.vocab_size](const CallOperands& o) -> Run {
           const auto table = o.operands.random(kBf16, {V, d}), x = o.operands.make(kBf16, {t, n, d});
           return [=, &c = o.c(), tokens = o.batch.tokens] { embed(c, x, table, tokens); };
         }});
    const auto hyper = [=](Operands& o, int64_t rows, int64_t scales) {
      return HyperWeights{o.weight(kF32, {rows, n * d}), o.random(kF32, {rows}), o.random(kF32, {scales})};
    };
    // A site's: pre, post and comb; the head's form has pre alone.
    const auto feed_of = [=](Operands& o, bool site) {
      const auto make = [&](int64_t k) { return o.random(kF32, {t, k}); };
      return HyperFeed{.pre = make(n), .post = site ? make(n) : TensorView(), .comb = site ? make(n * n) : TensorView(), .raw = make(site ? mix : n), .inv_rms = o.ones({t}),
                       .h = o.random(kBf16, {t, d}), .norm_inv = o.ones({t}), .u = o.make(kBf16, {t, d})};
    };
    const auto feed = [=](const char* name, bool site) {
      const int64_t rows = site ? mix : n;
      Kernel k{.op = "hyperconn", .name = name, .dtype = kF32, .shape = {t, rows, n * d}, .bytes = x_bytes + product(rows, n, d) * 4 + product(t, d) * 4,
               .operations = 2 * product(t, rows, n, d), .set_up = [=](const CallOperands& o) -> Run {
                 const auto w = hyper(o.operands, rows, site ? 3 : 1);
                 const auto x = o.operands.random(kBf16, {t, n, d});
                 return [=, &c = o.c(), to = feed_of(o.operands, site), norm = o.operands.ones({d})] { hyper_feed(c, to, x, w, shape, norm); };
               }};
      if (site) k.library = gpu::BlasProblem{.m = t, .n = mix, .k = n * d, .dtype = kF32, .y_dtype = kF32};
      return k;
    };
    add(feed("hyper_feed", true));
    add({.op = "hyperconn", .name = "hyper_post", .shape = {t, n, d}, .bytes = 2 * x_bytes + product(t, d) * 2, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {t, n, d}), out = o.operands.make(kBf16, {t, n, d}), y = o.operands.random(kBf16, {t, d});
           const auto post = o.operands.random(kF32, {t, n}), comb = o.operands.random(kF32, {t, n * n});
           return [=, &c = o.c()] { hyper_post(c, out, x, y, post, comb); };
         }});
    add(feed("hyper_feed head", false));
    if (!call_.train) return;
    add({.op = "embed", .name = "embed", .pass = "backward", .dtype = kF32, .shape = {t, n, d}, .bytes = 2 * x_bytes + product(t, d) * 8,
         .set_up = [=, V = m.vocab_size](const CallOperands& o) -> Run {
           const auto dtable = o.operands.zeros(kF32, {V, d}), dx = o.operands.random(kF32, {t, n, d});
           return [=, &c = o.c(), tokens = o.batch.tokens] { embed_backward(c, dtable, dx, tokens); };
         }});
    const auto feed_backward = [=](const char* name, bool site) {
      const int64_t rows = site ? mix : n;
      return Kernel{.op = "hyperconn", .name = name, .pass = "backward", .dtype = kF32, .shape = {t, rows, n * d},
                    .bytes = (site ? 5 : 3) * x_bytes + product(t, d) * 4 + 3 * product(rows, n, d) * 4, .operations = 4 * product(t, rows, n, d),
                    .set_up = [=](const CallOperands& o) -> Run {
                      const auto w = hyper(o.operands, rows, site ? 3 : 1);
                      const HyperGradients dw{o.operands.zeros(kF32, {rows, n * d}), o.operands.zeros(kF32, {rows}), o.operands.zeros(kF32, {site ? 3 : 1})};
                      const auto of_site = [&](const Shape& shape) { return site ? ConstTensorView(o.operands.random(kF32, shape)) : ConstTensorView(); };
                      const auto x = o.operands.random(kBf16, {t, n, d}), dx = o.operands.zeros(kF32, {t, n, d}), dh = o.operands.random(kF32, {t, d});
                      return [=, &c = o.c(), from = feed_of(o.operands, site), dpost = of_site({t, n}), dcomb = of_site({t, n * n}), dxout = of_site({t, n, d})] {
                        hyper_feed_backward(c, dx, dw, dh, dpost, dcomb, dxout, x, from, w, shape);
                      };
                    }};
    };
    add(feed_backward("hyper_feed", true));
    add({.op = "hyperconn", .name = "hyper_post", .pass = "backward", .dtype = kF32, .shape = {t, n, d}, .bytes = 3 * x_bytes + product(t, d) * 6,
         .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {t, n, d}), dout = o.operands.random(kF32, {t, n, d});
           const auto y = o.operands.random(kBf16, {t, d}), dy = o.operands.make(kF32, {t, d});
           const auto post = o.operands.random(kF32, {t, n}), dpost = o.operands.make(kF32, {t, n}), dcomb = o.operands.make(kF32, {t, n * n});
           return [=, &c = o.c()] { hyper_post_backward(c, dy, dpost, dcomb, dout, x, y, post); };
         }});
    add(feed_backward("hyper_feed head", false));
  }

  void rows() {
    const int64_t t = T, heads = m.num_heads, width = m.head_dim, rope_dim = m.rope_dim, expert_rows = t * m.experts_per_token, inner = m.expert_dim;
    const float eps = m.norm_eps, limit = m.swiglu_limit;
    const bool train = call_.train;
    const auto norm = [&](const char* name, int64_t count, int64_t columns, bool gain) {
      add({.op = "rmsnorm", .name = name, .shape = {count, columns}, .bytes = product(count, columns) * 4, .set_up = [=](const CallOperands& o) -> Run {
             const auto x = o.operands.random(kBf16, {count, columns}), y = o.operands.make(kBf16, {count, columns}), inv = o.operands.make(kF32, {count});
             const auto w = gain ? o.operands.random(kF32, {columns}) : TensorView();
             return [=, &c = o.c()] { rmsnorm(c, y, inv, x, w, eps); };
           }});
      if (!train) return;
      add({.op = "rmsnorm", .name = name, .pass = "backward", .dtype = kF32, .shape = {count, columns}, .bytes = product(count, columns) * 10, .set_up = [=](const CallOperands& o) -> Run {
             const auto x = o.operands.random(kBf16, {count, columns}), dy = o.operands.random(kF32, {count, columns}), dx = o.operands.make(kF32, {count, columns});
             const auto w = gain ? o.operands.random(kF32, {columns}) : TensorView(), dw = gain ? o.operands.zeros(kF32, {columns}) : TensorView(), inv = o.operands.ones({count});
             return [=, &c = o.c()] { rmsnorm_backward(c, dx, dw, dy, x, w, inv); };
           }});
    };
    norm("attn_norm", t, D, true);
    norm("head norm", t * heads, width, false);
    const auto rotate = [&](const char* name, int64_t count, DType dtype) {
      add({.op = "rope", .name = name, .dtype = dtype, .shape = {t, count, width}, .bytes = product(t, count, rope_dim) * 2 * element_bytes(dtype),
           .set_up = [=, length = call_.length](const CallOperands& o) -> Run {
             const auto x = o.operands.random(dtype, {t, count * width}), table = o.operands.random(kF32, {length, rope_dim});
             return [=, &c = o.c(), pos = o.batch.seq.token_pos] { rope(c, x, pos, table, count, false); };
           }});
    };
    rotate("queries", heads, kBf16);
    rotate("keys", 1, kBf16);
    if (train) rotate("gradients", heads, kF32);
    add({.op = "swiglu", .name = "experts", .shape = {expert_rows, inner}, .bytes = product(expert_rows, inner) * 6, .set_up = [=](const CallOperands& o) -> Run {
           const auto g = o.operands.random(kBf16, {expert_rows, inner}), u = o.operands.random(kBf16, {expert_rows, inner}), a = o.operands.make(kBf16, {expert_rows, inner});
           return [=, &c = o.c(), rho = o.operands.ones({expert_rows})] { swiglu(c, a, g, u, rho, limit); };
         }});
    if (device_ == Device::gpu)
      add({.op = "swiglu", .name = "experts", .dtype = kE4m3, .shape = {expert_rows, inner}, .bytes = product(expert_rows, inner) * 5, .set_up = [=](const CallOperands& o) -> Run {
             const auto g = o.operands.random(kBf16, {expert_rows, inner}), u = o.operands.random(kBf16, {expert_rows, inner});
             const MatmulInput a = {{}, o.operands.make(kE4m3, {expert_rows, inner}), o.operands.make(kF32, {expert_rows, num_blocks(inner, 128)})};
             return [=, &c = o.c(), rho = o.operands.ones({expert_rows})] { swiglu(c, a, g, u, rho, limit); };
           }});
    if (!train) return;
    add({.op = "swiglu", .name = "experts", .pass = "backward", .dtype = kF32, .shape = {expert_rows, inner}, .bytes = product(expert_rows, inner) * 16,
         .set_up = [=](const CallOperands& o) -> Run {
           const Shape s{expert_rows, inner};
           const auto g = o.operands.random(kBf16, s), u = o.operands.random(kBf16, s), da = o.operands.random(kF32, s), dg = o.operands.make(kF32, s), du = o.operands.make(kF32, s);
           return [=, &c = o.c(), rho = o.operands.ones({expert_rows}), drho = o.operands.make(kF32, {expert_rows})] { swiglu_backward(c, dg, du, drho, da, g, u, rho, limit); };
         }});
    const int64_t all = heads * width;
    add({.op = "cast", .name = "cast", .dtype = kF32, .shape = {t, all}, .bytes = product(t, all) * 6, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kF32, {t, all}), y = o.operands.make(kBf16, {t, all});
           return [=, &c = o.c()] { cast(c, y, x); };
         }});
    add({.op = "cast", .name = "add", .dtype = kF32, .shape = {t, D}, .bytes = product(t, D) * 12, .set_up = [=, d = D](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kF32, {t, d}), y = o.operands.zeros(kF32, {t, d});
           return [=, &c = o.c()] { add_to(c, y, x); };
         }});
  }
  static void add_to(Context& c, TensorView y, ConstTensorView x) { lockstep::add(c, y, x); }

  // One linear layer: the forward in bf16 and, where fp8 quantises it, E4M3; its gradients.
  void linear(const char* name, int64_t n, int64_t k, bool quantised, DType y_dtype = kBf16, int64_t k_segment = 0) {
    const int64_t t = T;
    const double operations = 2 * product(t, n, k);
    for (const DType dtype : {kBf16, kE4m3}) {
      if (dtype == kE4m3 && !quantised) continue;
      add({.op = "matmul", .name = name, .dtype = dtype, .shape = {t, n, k}, .bytes = product(t, k) * 2 + product(n, k) * element_bytes(dtype) + product(t, n) * element_bytes(y_dtype),
           .operations = operations, .unit = dtype, .set_up = [=](const CallOperands& o) -> Run {
             const auto x = o.operands.random(kBf16, {t, k}), y = o.operands.make(y_dtype, {t, n});
             return [=, &c = o.c(), w = o.operands.weight(dtype, {n, k}, k_segment)] { matmul(c, y, x, w, k_segment); };
           },
           .library = gpu::BlasProblem{.m = t, .n = n, .k = k, .dtype = dtype, .y_dtype = dtype == kE4m3 ? kBf16 : y_dtype}});
      if (!call_.train) continue;
      add({.op = "matmul", .name = name, .pass = "dx", .dtype = dtype, .shape = {t, n, k}, .bytes = product(t, n) * 4 + product(n, k) * element_bytes(dtype) + product(t, k) * 4,
           .operations = operations, .unit = kBf16, .set_up = [=](const CallOperands& o) -> Run {
             const auto dy = o.operands.random(kF32, {t, n}), dx = o.operands.make(kF32, {t, k});
             return [=, &c = o.c(), w = o.operands.weight(dtype, {n, k}, k_segment)] { matmul_backward_input(c, dx, dy, w); };
           },
           .library = gpu::BlasProblem{.m = t, .n = k, .k = n, .y_dtype = kF32, .b_by_k = true}});
    }
    if (!call_.train) return;
    add({.op = "matmul", .name = name, .pass = "dw", .shape = {t, n, k}, .bytes = product(t, n) * 4 + product(t, k) * 2 + product(n, k) * 8, .operations = operations, .unit = kBf16,
         .set_up = [=](const CallOperands& o) -> Run {
           const auto dy = o.operands.random(kF32, {t, n}), x = o.operands.random(kBf16, {t, k}), dw = o.operands.zeros(kF32, {n, k});
           return [=, &c = o.c()] { matmul_backward_weight(c, dw, dy, x); };
         },
         .library = gpu::BlasProblem{.m = n, .n = k, .k = t, .y_dtype = kF32, .a_by_k = true, .b_by_k = true}});
  }

  bool has(AttentionKind kind) const { return layer_of(kind) < m.layers.size(); }
  size_t layer_of(AttentionKind kind) const {
    return static_cast<size_t>(std::find_if(m.layers.begin(), m.layers.end(), [&](const LayerConfig& l) { return l.attention == kind; }) - m.layers.begin());
  }

  void products() {
    linear("wq_a", m.q_rank, D, true);
    linear("wq_b", m.num_heads * m.head_dim, m.q_rank, true);
    linear("wkv", m.head_dim, D, true);
    linear("wo_a", m.o_rank, m.num_heads / m.o_groups * m.head_dim, false);
    linear("wo_b", D, m.o_groups * m.o_rank, true, kBf16, m.o_rank);
    if (has(AttentionKind::csa)) {
      linear("csa compressor.wkv", 2 * m.head_dim, D, false, kF32);
      linear("indexer compressor.wkv", 2 * m.index_head_dim, D, false, kF32);
      linear("indexer wq_b", m.index_heads * m.index_head_dim, m.q_rank, true);
      linear("indexer weights_proj", m.index_heads, D, false, kF32);
    }
    if (has(AttentionKind::hca)) linear("hca compressor.wkv", m.head_dim, D, false, kF32);
    linear("gate", m.num_experts, D, false, kF32);
    linear("shared w1", m.expert_dim, D, true);
    linear("shared w2", D, m.expert_dim, true);
    if (!call_.train) linear("head", m.vocab_size, D, false, kF32);
    const int64_t t = T, d = D;
    // What a product makes of its operands first.
    add({.op = "quantize", .name = "activations 1x128", .shape = {t, d}, .bytes = product(t, d) * 3, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {t, d});
           const auto q = quantised(o.operands, kFp8Activation, t, d);
           return [=, &c = o.c()] { quantize(c, q, x, kFp8Activation.amax_floor); };
         }});
    if (device_ != Device::gpu) return;
    add({.op = "matmul", .name = "quantize_rows", .shape = {t, d}, .bytes = product(t, d) * 3, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {t, d}), codes = o.operands.make(kE4m3, {t, d}), scales = o.operands.make(kF32, {t, num_blocks(d, 128)});
           return [=, &c = o.c()] { gpu::quantize_rows(c, codes, scales, x); };
         }});
    if (!call_.train) return;
    add({.op = "matmul", .name = "round_rows", .dtype = kF32, .shape = {t, d}, .bytes = product(t, d) * 6, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kF32, {t, d}), y = o.operands.make(kBf16, {t, d});
           return [=, &c = o.c()] { gpu::round_rows(c, y, x); };
         }});
  }
  static QuantView quantised(Operands& o, const QuantFormat& f, int64_t rows, int64_t columns) {
    return {o.make(f.codes, code_shape(f, rows, columns)), o.make(f.scales, scale_shape(f, rows, columns)), f.block_rows, f.block_cols};
  }

  // Over the queries of the call: rows of their lists, and of csa the entries that the indexer scores.
  struct Pairs {
    double rows = 0, scores = 0;
  };
  Pairs pairs(int64_t ratio, int64_t chosen) const {
    Pairs p;
    for (int64_t s = 0; s < call_.sequences(); ++s)
      for (int64_t i = 0; i < call_.tokens_of(s); ++i) {
        const int64_t visible = (call_.train ? i : call_.length - 1) + 1, entries = ratio == 0 ? 0 : visible / ratio;
        p.rows += static_cast<double>(std::min(visible, m.window) + (chosen == 0 ? entries : std::min(chosen, entries)));
        if (chosen > 0 && entries > chosen) p.scores += static_cast<double>(entries);
      }
    return p;
  }
  // [T, k]: of the visible entries as many as fit, spread evenly.
  std::vector<int32_t> chosen_entries(int64_t ratio, int64_t k) const {
    std::vector<int32_t> ids;
    for (int64_t s = 0; s < call_.sequences(); ++s)
      for (int64_t i = 0; i < call_.tokens_of(s); ++i) {
        const int64_t visible = ((call_.train ? i : call_.length - 1) + 1) / ratio, n = std::min(k, visible);
        for (int64_t j = 0; j < k; ++j) ids.push_back(j < n ? static_cast<int32_t>(j * visible / n) : -1);
      }
    return ids;
  }

  void attention_of(AttentionKind kind) {
    const size_t layer = layer_of(kind);
    if (layer == m.layers.size()) return;
    const LayerConfig l = m.layers[layer];
    const std::string name = attention_kind_name(kind);
    const Call call = call_;
    const int64_t t = T, heads = m.num_heads, width = m.head_dim, S = call.sequences(), page_tokens = default_page_tokens(m), per_page = l.compressed() ? page_tokens / l.ratio : 0;
    const int64_t stored = S * ((call.length + page_tokens - 1) / page_tokens) * per_page, k = kind == AttentionKind::csa ? m.selected_columns(l.ratio) : 0;
    const Pairs p = pairs(l.ratio, k);
    // Rows that several queries read count once.
    const double keys = std::min(p.rows, call.train ? product(t) + product(stored) : p.rows) * static_cast<double>(width), queries = product(t, heads, width);
    const AttentionShape shape{.window = m.window, .ratio = l.ratio, .per_page = per_page, .scale = 1.0f / std::sqrt(static_cast<float>(width))};
    struct Made {
      TensorView q, o, lse, sink;
      AttentionKeys keys;
    };
    const std::vector<int32_t> ids = k > 0 ? chosen_entries(l.ratio, k) : std::vector<int32_t>();
    const auto make = [=, w = m.window](Operands& o) {
      return Made{.q = o.random(kBf16, {t, heads, width}), .o = o.make(kBf16, {t, heads, width}), .lse = o.make(kF32, {t, heads}), .sink = o.random(kF32, {heads}),
                  .keys = {.kv = o.random(kBf16, {t, width}), .ring = call.train ? TensorView() : o.random(kBf16, {S, w, width}),
                           .entries = stored > 0 ? o.random(kBf16, {stored, width}) : TensorView(), .selected = k > 0 ? o.ints(ids, {t, k}) : TensorView()}};
    };
    add({.op = "attention", .name = name, .shape = {t, heads, width}, .bytes = (keys + 2 * queries) * 2, .operations = 4 * p.rows * product(heads, width), .unit = kBf16,
         .set_up = [=](const CallOperands& o) -> Run {
           return [=, &c = o.c(), a = make(o.operands), seq = o.batch.seq] { attention(c, a.o, a.lse, a.q, a.keys, a.sink, seq, shape); };
         }});
    if (call.train)
      add({.op = "attention", .name = name, .pass = "backward", .shape = {t, heads, width}, .bytes = keys * 6 + queries * 12, .operations = 10 * p.rows * product(heads, width), .unit = kBf16,
           .set_up = [=](const CallOperands& o) -> Run {
             const Made a = make(o.operands);
             attention(o.c(), a.o, a.lse, a.q, a.keys, a.sink, o.batch.seq, shape);
             const auto d_o = o.operands.random(kF32, a.q.shape), dq = o.operands.make(kF32, a.q.shape), dkv = o.operands.make(kF32, {t, width}), dsink = o.operands.zeros(kF32, {heads});
             const auto dentries = stored > 0 ? o.operands.zeros(kF32, {stored, width}) : TensorView();
             return [=, &c = o.c(), seq = o.batch.seq] { attention_backward(c, dq, dkv, dentries, dsink, d_o, a.o, a.lse, a.q, a.keys, a.sink, seq, shape); };
           }});
    if (kind == AttentionKind::swa && !call.train)
      add({.op = "sequence", .name = "ring_update", .shape = {t, width}, .bytes = product(t, width) * 4, .set_up = [=, w = m.window](const CallOperands& o) -> Run {
             const auto x = o.operands.random(kBf16, {t, width}), ring = o.operands.make(kBf16, {S, w, width});
             return [=, &c = o.c(), seq = o.batch.seq] { ring_update(c, ring, x, seq); };
           }});
    if (!l.compressed()) return;
    compressor(name, layer, {.ratio = l.ratio, .overlap = l.overlap(), .width = width}, stored, per_page);
    if (kind != AttentionKind::csa) return;
    const int64_t index_heads = m.index_heads, di = m.index_head_dim;
    compressor("indexer", layer, {.ratio = l.ratio, .overlap = true, .width = di}, stored, per_page);
    add({.op = "indexer", .name = "index_select", .shape = {t, index_heads, di}, .bytes = (product(t, index_heads, di) + (call.train ? product(stored, di) : p.scores * static_cast<double>(di))) * 2 + product(t, k) * 4,
         .operations = 2 * p.scores * product(index_heads, di + 1), .unit = kBf16, .set_up = [=, ratio = l.ratio](const CallOperands& o) -> Run {
           const auto q = o.operands.random(kBf16, {t, index_heads, di}), keys = o.operands.random(kBf16, {stored, di});
           const auto weight = o.operands.random(kF32, {t, index_heads}), selected = o.operands.make(DType::i32, {t, k});
           return [=, &c = o.c(), seq = o.batch.seq] { index_select(c, selected, q, weight, keys, seq, {.ratio = ratio, .per_page = per_page}); };
         }});
    if (std::has_single_bit(static_cast<uint64_t>(di)))
      add({.op = "hadamard", .name = "hadamard", .shape = {t * index_heads, di}, .bytes = product(t, index_heads, di) * 4, .set_up = [=](const CallOperands& o) -> Run {
             return [=, &c = o.c(), x = o.operands.random(kBf16, {t * index_heads, di})] { hadamard(c, x); };
           }});
  }

  void compressor(const std::string& name, size_t layer, const CompressorShape& shape, int64_t stored, int64_t per_page) {
    const int64_t t = T, S = call_.sequences(), ratio = shape.ratio, wide = shape.proj_width(), dc = shape.width;
    const bool train = call_.train;
    int64_t E = 0;
    for (int64_t s = 0; s < S; ++s) E += train ? call_.tokens_of(s) / ratio : (call_.length % ratio == 0 ? 1 : 0);
    if (E == 0) return;
    const double read = train ? product(t, wide) * 4 : product(E, shape.ring_rows(), 2 * dc) * 4;
    struct Made {
      TensorView proj, ape, ring;
    };
    const auto make = [=](Operands& o) {
      return Made{o.random(kF32, {t, wide}), o.random(kF32, {ratio, shape.halves() * dc}), train ? TensorView() : o.random(kF32, {S, shape.ring_rows(), wide})};
    };
    add({.op = "compressor", .name = name, .dtype = kF32, .shape = {t, wide}, .bytes = read + product(E, dc) * 2, .set_up = [=](const CallOperands& o) -> Run {
           return [=, &c = o.c(), a = make(o.operands), pooled = o.operands.make(kBf16, {E, dc}), &entries = o.batch.entries[layer], seq = o.batch.seq] {
             compress(c, pooled, a.proj, a.ape, a.ring, entries, seq, shape);
           };
         }});
    if (train)
      add({.op = "compressor", .name = name, .pass = "backward", .dtype = kF32, .shape = {t, wide}, .bytes = 2 * read + product(E, dc) * 4, .set_up = [=](const CallOperands& o) -> Run {
             const Made a = make(o.operands);
             const auto dproj = o.operands.make(kF32, {t, wide}), dape = o.operands.zeros(kF32, a.ape.shape), dpooled = o.operands.random(kF32, {E, dc});
             return [=, &c = o.c(), &entries = o.batch.entries[layer], seq = o.batch.seq] { compress_backward(c, dproj, dape, dpooled, a.proj, a.ape, entries, seq, shape); };
           }});
    if (name != "csa") return;
    add({.op = "sequence", .name = "entries_scatter", .shape = {E, dc}, .bytes = product(E, dc) * 4, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {E, dc}), store = o.operands.make(kBf16, {stored, dc});
           return [=, &c = o.c(), &entries = o.batch.entries[layer], seq = o.batch.seq] { entries_scatter(c, store, x, entries, seq, per_page); };
         }});
    if (train)
      add({.op = "sequence", .name = "entries_gather", .dtype = kF32, .shape = {E, dc}, .bytes = product(E, dc) * 8, .set_up = [=](const CallOperands& o) -> Run {
             const auto x = o.operands.make(kF32, {E, dc}), store = o.operands.random(kF32, {stored, dc});
             return [=, &c = o.c(), &entries = o.batch.entries[layer], seq = o.batch.seq] { entries_gather(c, x, store, entries, seq, per_page); };
           }});
  }

  // [T, K], ascending and distinct in a row; all experts get about as many rows.
  std::vector<int32_t> expert_ids() const {
    const int64_t E = m.num_experts, K = m.experts_per_token;
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t j = 0; j < K; ++j) ids.push_back(static_cast<int32_t>((t * 97 + j * (E / K)) % E));
      std::sort(ids.end() - K, ids.end());
    }
    return ids;
  }
  void experts() {
    const int64_t t = T, d = D, E = m.num_experts, K = m.experts_per_token, R = t * K, I = m.expert_dim;
    const bool train = call_.train;
    const std::vector<int32_t> ids = expert_ids();
    const auto busy = static_cast<int64_t>(std::set<int32_t>(ids.begin(), ids.end()).size());
    struct Plan {
      TensorView ids, offsets, row_token, slot_row;
    };
    const auto plan = [=](Operands& o) {
      const Plan p{o.ints(ids, {t, K}), o.make(DType::i32, {E + 1}), o.make(DType::i32, {R}), o.make(DType::i32, {t, K})};
      moe_plan(o.context(), p.offsets, p.row_token, p.slot_row, p.ids);
      return p;
    };
    const float factor = m.routed_scale;
    add({.op = "gate", .name = "route_scored", .dtype = kF32, .shape = {t, E}, .bytes = product(t, E) * 4, .set_up = [=](const CallOperands& o) -> Run {
           const auto z = o.operands.random(kF32, {t, E}), bias = o.operands.random(kF32, {E}), weight = o.operands.make(kF32, {t, K}), to = o.operands.make(DType::i32, {t, K});
           return [=, &c = o.c()] { route_scored(c, to, weight, z, bias, factor); };
         }});
    add({.op = "gate", .name = "route_hashed", .dtype = kF32, .shape = {t, E}, .bytes = product(t, K) * 16, .set_up = [=, V = m.vocab_size](const CallOperands& o) -> Run {
           std::vector<int32_t> table;
           for (int64_t i = 0; i < V * K; ++i) table.push_back(static_cast<int32_t>(i % E));
           const auto z = o.operands.random(kF32, {t, E}), weight = o.operands.make(kF32, {t, K}), to = o.operands.make(DType::i32, {t, K}), hash = o.operands.ints(table, {V, K});
           return [=, &c = o.c(), tokens = o.batch.tokens] { route_hashed(c, to, weight, z, tokens, hash, factor); };
         }});
    add({.op = "moe_permute", .name = "moe_plan", .dtype = DType::i32, .shape = {t, K}, .bytes = product(R) * 12, .set_up = [=](const CallOperands& o) -> Run {
           return [=, &c = o.c(), p = plan(o.operands)] { moe_plan(c, p.offsets, p.row_token, p.slot_row, p.ids); };
         }});
    add({.op = "moe_permute", .name = "moe_spread", .dtype = kF32, .shape = {t, K}, .bytes = product(R) * 12, .set_up = [=](const CallOperands& o) -> Run {
           const auto value = o.operands.random(kF32, {t, K}), row = o.operands.make(kF32, {R});
           return [=, &c = o.c(), p = plan(o.operands)] { moe_spread(c, row, value, p.slot_row); };
         }});
    add({.op = "moe_permute", .name = "moe_gather", .shape = {R, d}, .bytes = product(t + R, d) * 2, .set_up = [=](const CallOperands& o) -> Run {
           const auto x = o.operands.random(kBf16, {t, d}), rows = o.operands.make(kBf16, {R, d});
           return [=, &c = o.c(), p = plan(o.operands)] { moe_gather(c, rows, x, p.row_token); };
         }});
    if (device_ == Device::gpu)
      add({.op = "matmul", .name = "quantize_rows of experts", .shape = {R, d}, .bytes = product(t, d) * 2 + product(R, d), .set_up = [=](const CallOperands& o) -> Run {
             const auto x = o.operands.random(kBf16, {t, d}), codes = o.operands.make(kE4m3, {R, d}), scales = o.operands.make(kF32, {R, num_blocks(d, 128)});
             return [=, &c = o.c(), p = plan(o.operands)] { gpu::quantize_rows(c, codes, scales, x, p.row_token); };
           }});
    const auto grouped = [&](const char* name, int64_t n, int64_t k) {
      const double operations = 2 * product(R, n, k);
      for (const DType dtype : {kBf16, kE4m3, kE2m1}) {
        const double w_bytes = product(busy, n, k) * element_bytes(dtype);
        add({.op = "matmul", .name = name, .dtype = dtype, .shape = {R, n, k}, .bytes = product(R, n + k) * 2 + w_bytes, .operations = operations, .unit = dtype == kE2m1 ? kE4m3 : dtype,
             .set_up = [=](const CallOperands& o) -> Run {
               const auto x = o.operands.random(kBf16, {R, k}), y = o.operands.make(kBf16, {R, n});
               return [=, &c = o.c(), w = o.operands.weight(dtype, {E, n, k}), p = plan(o.operands)] { grouped_matmul(c, y, x, w, p.offsets); };
             }});
        if (!train) continue;
        add({.op = "matmul", .name = name, .pass = "dx", .dtype = dtype, .shape = {R, n, k}, .bytes = product(R, n + k) * 4 + w_bytes, .operations = operations, .unit = kBf16,
             .set_up = [=](const CallOperands& o) -> Run {
               const auto dy = o.operands.random(kF32, {R, n}), dx = o.operands.make(kF32, {R, k});
               return [=, &c = o.c(), w = o.operands.weight(dtype, {E, n, k}), p = plan(o.operands)] { grouped_matmul_backward_input(c, dx, dy, w, p.offsets); };
             }});
      }
      if (!train) return;
      add({.op = "matmul", .name = name, .pass = "dw", .shape = {R, n, k}, .bytes = product(R, n) * 4 + product(R, k) * 2 + product(busy, n, k) * 8, .operations = operations, .unit = kBf16,
           .set_up = [=](const CallOperands& o) -> Run {
             const auto dy = o.operands.random(kF32, {R, n}), x = o.operands.random(kBf16, {R, k}), dw = o.operands.zeros(kF32, {E, n, k});
             return [=, &c = o.c(), p = plan(o.operands)] { grouped_matmul_backward_weight(c, dw, dy, x, p.offsets); };
           }});
    };
    grouped("experts w1", I, d);
    grouped("experts w2", d, I);
    add({.op = "moe_permute", .name = "moe_combine", .shape = {R, d}, .bytes = product(2 * t + R, d) * 2, .set_up = [=](const CallOperands& o) -> Run {
           const auto rows = o.operands.random(kBf16, {R, d}), shared = o.operands.random(kBf16, {t, d}), y = o.operands.make(kBf16, {t, d});
           return [=, &c = o.c(), p = plan(o.operands)] { moe_combine(c, y, rows, p.slot_row, shared); };
         }});
    if (!train) return;
    add({.op = "moe_permute", .name = "moe_gather", .pass = "backward", .dtype = kF32, .shape = {R, d}, .bytes = product(2 * t + R, d) * 4, .set_up = [=](const CallOperands& o) -> Run {
           const auto rows = o.operands.random(kF32, {R, d}), dx = o.operands.zeros(kF32, {t, d});
           return [=, &c = o.c(), p = plan(o.operands)] { moe_gather_backward(c, dx, rows, p.slot_row); };
         }});
    add({.op = "moe_permute", .name = "moe_collect", .dtype = kF32, .shape = {t, K}, .bytes = product(R) * 12, .set_up = [=](const CallOperands& o) -> Run {
           const auto value = o.operands.make(kF32, {t, K}), row = o.operands.random(kF32, {R});
           return [=, &c = o.c(), p = plan(o.operands)] { moe_collect(c, value, row, p.slot_row); };
         }});
    add({.op = "gate", .name = "route", .pass = "backward", .dtype = kF32, .shape = {t, E}, .bytes = product(t, E) * 4 + product(t, K) * 12, .set_up = [=](const CallOperands& o) -> Run {
           const auto z = o.operands.random(kF32, {t, E}), dz = o.operands.make(kF32, {t, E}), dweight = o.operands.random(kF32, {t, K});
           return [=, &c = o.c(), p = plan(o.operands)] { route_backward(c, dz, dweight, p.ids, z, factor); };
         }});
  }

  void head() {
    const int64_t t = T, d = D, V = m.vocab_size;
    if (!call_.train) {
      for (const bool filtered : {false, true})
        add({.op = "sample", .name = filtered ? "top_p" : "sample", .dtype = kF32, .shape = {t, V}, .bytes = product(t, V) * 4, .set_up = [=](const CallOperands& o) -> Run {
               std::vector<SampleParams> params(static_cast<size_t>(t));
               for (int64_t i = 0; i < t; ++i) params[static_cast<size_t>(i)] = {.top_p = filtered ? 0.95f : 1.0f, .prompt_id = static_cast<uint64_t>(i)};
               const auto logits = o.operands.random(kF32, {t, V}), token = o.operands.make(DType::i32, {t}), logprob = o.operands.make(kF32, {t});
               return [=, &c = o.c()] { sample(c, token, logprob, logits, params.data()); };
             }});
      return;
    }
    const double head_bytes = product(V, d) * 2, hidden_bytes = product(t, d) * 2;
    struct Made {
      TensorView hidden, target, temperature, logprob, lse, entropy;
      WeightView head;
    };
    const auto make = [=](const CallOperands& o) {
      const auto vector = [&] { return o.operands.make(kF32, {t}); };
      const Made a{o.operands.random(kBf16, {t, d}), o.operands.ints(std::vector<int32_t>(static_cast<size_t>(t), 1), {t}), o.operands.ones({t}), vector(), vector(), vector(),
                   o.operands.weight(kBf16, {V, d})};
      scale(o.c(), a.temperature, std::sqrt(static_cast<float>(d)));  // logits of random rows are large
      return a;
    };
    add({.op = "logprob", .name = "select_logprob", .shape = {t, V, d}, .bytes = head_bytes + hidden_bytes, .operations = 2 * product(t, V, d), .unit = kBf16,
         .set_up = [=](const CallOperands& o) -> Run {
           return [=, &c = o.c(), a = make(o)] { select_logprob(c, a.logprob, a.lse, a.entropy, a.hidden, a.head, a.target, a.temperature); };
         }});
    add({.op = "logprob", .name = "select_logprob", .pass = "backward", .shape = {t, V, d}, .bytes = 5 * head_bytes + 3 * hidden_bytes, .operations = 6 * product(t, V, d), .unit = kBf16,
         .set_up = [=](const CallOperands& o) -> Run {
           const Made a = make(o);
           select_logprob(o.c(), a.logprob, a.lse, a.entropy, a.hidden, a.head, a.target, a.temperature);
           const auto dhidden = o.operands.make(kF32, {t, d}), dhead = o.operands.zeros(kF32, {V, d}), dlogprob = o.operands.random(kF32, {t});
           return [=, &c = o.c()] { select_logprob_backward(c, dhidden, dhead, dlogprob, {}, a.hidden, a.head, a.target, a.temperature, a.lse, a.entropy); };
         }});
  }

  // Of one large weight, [H d, Rq]: optimizer and updates.
  void weights() {
    const int64_t rows = m.num_heads * m.head_dim, columns = m.q_rank, n = rows * columns;
    const double count = product(n);
    const auto elementwise = [&](const char* op, const char* name, double bytes, auto set_up) {
      add({.op = op, .name = name, .pass = "update", .dtype = kF32, .shape = {rows, columns}, .bytes = count * bytes, .set_up = set_up});
    };
    elementwise("adamw", "adamw", 28, [=](const CallOperands& o) -> Run {
      const auto w = o.operands.random(kF32, {n}), moment = o.operands.zeros(kF32, {n}), square = o.operands.zeros(kF32, {n}), grad = o.operands.random(kF32, {n});
      return [=, &c = o.c()] { adamw(c, w, moment, square, grad, {.lr = 1e-6f, .bias1 = 0.1f, .bias2 = 1e-3f}); };
    });
    elementwise("adamw", "sum_squares", 4, [=](const CallOperands& o) -> Run {
      return [=, &c = o.c(), out = o.operands.make(DType::f64, {1}), grad = ConstTensorView(o.operands.random(kF32, {n}))] { sum_squares(c, out, std::span(&grad, 1)); };
    });
    elementwise("adamw", "all_finite", 4, [=](const CallOperands& o) -> Run {
      return [=, &c = o.c(), out = o.operands.make(DType::i32, {1}), x = o.operands.random(kF32, {n})] { all_finite(c, out, x); };
    });
    elementwise("finite", "mark_nonfinite", 4, [=](const CallOperands& o) -> Run {
      return [=, &c = o.c(), mark = o.operands.zeros(DType::i32, {1}), x = o.operands.random(kF32, {rows, columns})] { mark_nonfinite(c, mark, x); };
    });
    elementwise("checksum", "checksum", 4, [=](const CallOperands& o) -> Run {
      return [=, &c = o.c(), out = o.operands.make(DType::i64, {1}), item = ChecksumItem{.rows = o.operands.random(kF32, {rows, columns})}] { checksum(c, out, std::span(&item, 1)); };
    });
    elementwise("sum", "sum_in_order", 12, [=](const CallOperands& o) -> Run {
      return [=, &c = o.c(), mine = o.operands.random(kF32, {n}), y = o.operands.make(kF32, {n}), parts = o.operands.random(kF32, {2, n})] { sum_in_order(c, y, mine, parts, 0); };
    });
    const auto converts = [&](const char* name, const QuantFormat& f) {
      const double bytes = 4 + element_bytes(f.codes) + 1.0 / static_cast<double>(f.block_rows * f.block_cols);
      elementwise("quantize", name, bytes, [=](const CallOperands& o) -> Run {
        const auto x = o.operands.random(kF32, {rows, columns});
        return [=, &c = o.c(), q = quantised(o.operands, f, rows, columns)] { quantize(c, q, x, f.amax_floor); };
      });
    };
    converts("to fp8 128x128", kFp8Weight);
    converts("to fp4 1x32", kFp4);
    elementwise("quantize", "fp8 to bf16", 3, [=](const CallOperands& o) -> Run {
      const auto w = o.operands.weight(kE4m3, {rows, columns});
      return [=, &c = o.c(), y = o.operands.make(kBf16, {rows, columns})] { dequantize(c, y, {w.rows, w.scales, 128, 128}); };
    });
    elementwise("quantize", "fp4 to fp8", 1.5 + 1.0 / 32, [=](const CallOperands& o) -> Run {
      const auto w = o.operands.weight(kE2m1, {rows, columns});
      return [=, &c = o.c(), to = quantised(o.operands, kFp8Weight, rows, columns)] { recode_fp4(c, to, {}, {w.rows, w.scales, 1, 32}); };
    });
    elementwise("rows", "scatter_rows", 8, [=](const CallOperands& o) -> Run {
      std::vector<int32_t> index;
      for (int64_t i = 0; i < rows; ++i) index.push_back(static_cast<int32_t>(rows - 1 - i));
      return [=, &c = o.c(), at = o.operands.ints(index, {rows}), x = o.operands.random(kF32, {rows, columns}), out = o.operands.make(kF32, {rows, columns})] {
        scatter_rows(c, out, x, at);
      };
    });
  }

  const ModelConfig& m;
  const Device device_;
  const int64_t D = m.hidden_size;
  Call call_;
  int64_t T = 0;
  size_t index_ = 0;
  std::vector<Kernel> kernels_;
};

}  // namespace

std::string Kernel::title() const { return fmt::format("{} {} {} {}", op, name, pass, dtype_name(dtype)); }

std::vector<Kernel> kernel_table(const ModelConfig& config, const std::vector<Call>& calls, Device device) { return Table(config, calls, device).take(); }

}  // namespace lockstep
