#pragma once
// The one list of the model's tensors, and storage laid out by it.
//
// ModelTensors<T> has one T per tensor; visit() walks it in one fixed order and gives each tensor's released name, shape and role. Weights,
// master weights, gradients, optimizer moments, checkpoints, inspection and (later) synchronisation all iterate this list; none repeats a name.
// Experts are stacked: one tensor [E, ...] a projection; checkpoints spell them per expert (model/checkpoint_io.h).

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "model/config.h"
#include "model/shard.h"
#include "ops/hyperconn/hyperconn.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

enum class TensorRole : uint8_t {
  matrix,       // [N, K] linear weight: storage dtype, panels, weight decay
  expert,       // [E, N, K]: likewise, by expert
  embedding,    // [V, D]: storage dtype, read by row
  head,         // [V, D]: storage dtype, panels
  router,       // gate.weight [E, D]: storage dtype, panels; frozen by default in RL
  router_bias,  // [E]: f32 buffer, never trained by a loss
  hash_table,   // [V, K]: i32 buffer
  norm,         // gain: f32
  hyper,        // mHC parameters: f32 (fn with panels)
  sink,         // [H]: f32
  ape,          // compressor position bias: f32
};
const char* tensor_role_name(TensorRole role);

struct TensorSpec {
  std::string name;  // released name; for experts with "experts.*" in place of the id
  Shape shape;       // of the part that the shard holds; without elements if it holds none
  Shape whole;       // of the tensor
  Box box;           // where that part lies
  Cut cut = Cut::none;
  TensorRole role;
  int layer = -1;         // -1: not in a layer
  bool indexer = false;   // reached by no gradient; frozen by default
  int64_t groups = 0;     // > 0: rows of `shape` are `groups` equal blocks, each a matrix of its own (wo_a); weights are viewed as [groups, N / groups, K]
  bool linear = false;    // one of the large linear layers that fp8 and fp4 modes quantise
  int id = 0;             // place in the list
  bool held() const { return shape.elements() > 0; }
  bool is_buffer() const { return role == TensorRole::router_bias || role == TensorRole::hash_table; }
  bool has_panels() const;                 // used by matmul
  Shape weight_shape() const;              // shape, or [groups, N / groups, K]: in numbers
  DType master_dtype() const { return role == TensorRole::hash_table ? DType::i32 : DType::f32; }
  DType weight_dtype(Numerics n) const;    // dtype the forward reads: codes of quantised layers, storage dtype of other matrices, f32 or i32 otherwise
  Shape stored_shape(Numerics n) const;    // of that dtype: weight_shape, with half the columns where two numbers are a byte

  // How mode `n` quantises this tensor (rl spec 20.2); nothing for what it keeps. fp8: wq_a, wq_b, wkv, wo_b, the indexer's wq_b, shared and
  // routed experts in E4M3 128x128. fp4: routed experts in E2M1 1x32. Scales are UE8M0. Blocks begin anew at every expert and, in what tp
  // cuts, at every output group: a part then has the scales of the whole, whatever the widths. (Released widths are multiples of 128, where
  // this is the plain grid.)
  std::optional<QuantFormat> quant_format(Numerics n) const;
  BlockGrid row_grid(Numerics n) const, col_grid(Numerics n) const;  // REQUIRES: quant_format(n)
  Shape scale_shape(Numerics n) const;                               // [row blocks, column blocks], or by expert; rank 0: not quantised
  int64_t period = 0;  // rows (group_rows) or columns (group_columns) of an output group; rows of an expert
};

template <typename T>
struct CompressorTensors {
  T wkv, wgate, ape, norm;
};
template <typename T>
struct IndexerTensors {
  T wq_b, weights_proj;
  CompressorTensors<T> compressor;
};
template <typename T>
struct HyperTensors {
  T fn, base, scale;
};
template <typename T>
struct LayerTensors {
  HyperTensors<T> hc_attn, hc_ffn;
  T attn_norm, ffn_norm;
  T wq_a, q_norm, wq_b, wkv, kv_norm, wo_a, wo_b, sink;
  std::optional<CompressorTensors<T>> compressor;  // csa, hca
  std::optional<IndexerTensors<T>> indexer;        // csa
  T gate;
  T gate_bias;  // score-routed layers; unset otherwise
  T tid2eid;    // hash-routed layers; unset otherwise
  T w1, w3, w2;                       // experts [E, I, D], [E, I, D], [E, D, I]
  T shared_w1, shared_w3, shared_w2;  // [I, D], [I, D], [D, I]
};
template <typename T>
struct ModelTensors {
  T embed, head, norm;
  HyperTensors<T> hc_head;
  std::vector<LayerTensors<T>> layers;
};

// The list, in order: the same tensors with the same ids for every shard; those that it does not hold have no elements. `tensor` of the
// callback is the place in `tensors`, which is sized for `config` first.
template <typename T>
void visit(const ModelConfig& config, const Shard& shard, ModelTensors<T>& tensors, const std::function<void(const TensorSpec&, T&)>& f);
std::vector<TensorSpec> tensor_table(const ModelConfig& config);  // of the whole model
std::vector<TensorSpec> tensor_table(const ModelConfig& config, const Shard& shard);

// f32 (or i32) copies of a shard's tensors. views[id] follows tensor_table's order.
struct TensorSet {
  std::vector<TensorView> views;  // empty view: absent
};
// One f32 tensor for every held spec (i32 for hash tables) that `wanted` accepts; zeroed.
TensorSet make_tensor_set(const std::vector<TensorSpec>& table, Arena& arena, const std::function<bool(const TensorSpec&)>& wanted);

// What forward and backward read: every tensor of a shard in its weight dtype, matrices also as panels. Owned storage with stable addresses.
// `version` counts policy updates; an update writes all tensors before it changes.
class Weights {
 public:
  Weights(const ModelConfig& config, Numerics numerics, const Shard& shard, Arena& arena);
  Weights(const ModelConfig& config, Numerics numerics, Arena& arena) : Weights(config, numerics, whole_shard(config), arena) {}
  Weights(const Weights&) = delete;  // tensors_ is pointed into
  Weights& operator=(const Weights&) = delete;
  const ModelConfig& config() const { return config_; }
  const Shard& shard() const { return shard_; }
  Numerics numerics() const { return numerics_; }
  DType dtype() const { return storage_dtype(numerics_); }
  const ModelTensors<WeightView>& tensors() const { return tensors_; }
  const std::vector<TensorSpec>& table() const { return table_; }
  const WeightView& view(int id) const { return *by_id_[static_cast<size_t>(id)]; }
  int64_t version() const { return version_; }

  // Rounds every master tensor of the shard to its weight dtype, once: codes come from the f32 masters, not from bf16 copies. Then commits.
  // Masters: f32 (i32 hash tables).
  void load(Context& c, const TensorSet& masters, int64_t version);
  // The same from wherever boxes come from; an error leaves the version as it was, and the weights unfit for use.
  Status load(Context& c, const ReadBox& read, int64_t version);

  // Rounds one master of the shard's shape; commit follows.
  void store(Context& c, int id, ConstTensorView master);

  // An update by others: write rows(id), in the weight dtype and stored shape, and scales(id) of every tensor that changes, then commit, which
  // repacks all panels.
  TensorView rows(int id) { return rows_[static_cast<size_t>(id)]; }
  TensorView scales(int id) { return scales_[static_cast<size_t>(id)]; }  // ue8m0; empty: not quantised
  // What the last load() lost of a tensor: overflowed, underflowed, not finite. Zeros for what is not quantised.
  const QuantStats& quant_stats(int id) const { return quant_stats_[static_cast<size_t>(id)]; }
  void commit(Context& c, int64_t version);
  // What `other` holds, the same shard in the same numerics in the other memory (one of the two on the GPU, whose context c is); then commits its version.
  void copy_across(Context& c, const Weights& other);
  // An update that is given up: rows(id) of a tensor with panels as the last commit read them, from the panels.
  void restore_rows(Context& c, int id);

 private:
  ModelConfig config_;
  Numerics numerics_;
  Shard shard_;
  Device device_;
  std::vector<TensorSpec> table_;
  ModelTensors<WeightView> tensors_;
  std::vector<WeightView*> by_id_;
  std::vector<TensorView> rows_, panels_, scales_, panel_scales_;
  std::vector<QuantStats> quant_stats_;
  int64_t version_ = -1;
};

// Gradients of one step, f32, laid out as the shard's tensors; an empty view means that this tensor is frozen, or not held, and gets none.
// They lie one behind the other in table order in two runs, dense and experts, because these are summed over different ranks; between
// tensors there may be padding, which is zero.
struct Gradients {
  std::vector<TensorSpec> table;
  TensorSet set;
  ModelTensors<TensorView> tensors;
  TensorView dense, experts;  // [n] each; empty where nothing is trained
};
// Where they lie in the two runs.
struct GradientPlaces {
  std::vector<int64_t> begin;         // by id: in its run, in floats; -1: gets none
  int64_t dense = 0, experts = 0;     // lengths of the runs
};
GradientPlaces gradient_places(const std::vector<TensorSpec>& table, const std::function<bool(const TensorSpec&)>& trained);
Gradients make_gradients(const ModelConfig& config, const Shard& shard, Arena& arena, const std::function<bool(const TensorSpec&)>& trained);
inline Gradients make_gradients(const ModelConfig& config, Arena& arena, const std::function<bool(const TensorSpec&)>& trained) {
  return make_gradients(config, whole_shard(config), arena, trained);
}
void zero_gradients(Context& c, Gradients& g);

// Random masters as transformers initialises them, but with tid2eid rows of distinct experts, keyed by (seed, tensor id): the same numbers
// for every shard.
ReadBox random_boxes(const ModelConfig& config, uint64_t seed);
void initialize_masters(const ModelConfig& config, const std::vector<TensorSpec>& table, TensorSet& masters, uint64_t seed);
// masters.views[id] of every held spec, from `read`.
Status read_masters(const std::vector<TensorSpec>& table, const ReadBox& read, TensorSet& masters);

}  // namespace lockstep
