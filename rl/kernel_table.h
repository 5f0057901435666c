#pragma once
// Every operator of a model as a row of one table: how the model calls it, forward and backward, on which shapes, what it reads and writes and multiplies. What
// rl/kernel_bench.h measures. Counts are of the mathematics: each operand once, whatever a kernel does with it.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/batch.h"
#include "ops/measure.h"

namespace lockstep {

// One call of the model that operators are measured in.
struct Call {
  bool train = false;       // sequences of `length` from position 0, the last perhaps shorter; otherwise each token is the last of a sequence of `length`
  int64_t tokens = 0;       // T
  int64_t length = 0;
  int64_t sequences() const { return train ? (tokens + length - 1) / length : tokens; }
  int64_t tokens_of(int64_t sequence) const { return train ? std::min(length, tokens - sequence * length) : 1; }
};
// What a row's operands are made with.
struct CallOperands {
  Operands& operands;
  const SequenceBatch& batch;  // of the row's call, in the context's memory
  Context& c() const { return operands.context(); }
};

struct Kernel {
  std::string op;    // its folder in ops/
  std::string name;  // the function, or the weight that a product is with
  std::string pass = "forward";
  DType dtype = DType::bf16;   // of what it reads most
  size_t call = 0;
  std::vector<int64_t> shape;  // of products M, N, K
  double bytes = 0, operations = 0;
  DType unit = DType::f32;  // whose rate bounds the operations
  std::function<std::function<void()>(const CallOperands&)> set_up;
  std::optional<gpu::BlasProblem> library = {};  // the same product, or the nearest that the library has
  std::string title() const;                     // "matmul wq_a dx bf16": what --only is matched with
};

// In the order of a forward, call by call; what no call changes comes last. REQUIRES: sequences as long as config.max_positions allows.
std::vector<Kernel> kernel_table(const ModelConfig& config, const std::vector<Call>& calls, Device device);

}  // namespace lockstep
