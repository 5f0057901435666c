#pragma once
// Whether the weights that the forward reads are those that the trainer exports, number by number (rl spec 20.3): "bytes arrived" is not success. What
// serves is read where the forward reads it, on the CPU from panels, and de-quantised as the kernels do; what was exported is the f32 master, rounded, or quantised
// and de-quantised in plain loops. Compared are numbers at their places in the model, so neither layout nor packing can give a false alarm.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/context.h"
#include "model/weights.h"

namespace lockstep {

// Of one tensor of the shard, f32 [rows, columns] of its box, in the host's memory; the ids of hash tables as numbers. c: of the weights' device.
void served_numbers(Context& c, const Weights& served, int id, TensorView out);
// The same as a trainer in numerics `n` with these masters exports it.
Status exported_numbers(CpuContext& cpu, const TensorSpec& spec, Numerics n, const ReadBox& masters, TensorView out);

struct WeightDifference {
  std::string tensor;              // of an expert, with its id
  int64_t row = 0, column = 0;     // in the whole tensor, or the expert
  float served = 0, exported = 0;
  std::string str() const;
};
// Of two rows of f32 numbers, `first_column` of `row` of a tensor's whole matrix being their first: where their bits first differ.
std::optional<WeightDifference> first_difference(const TensorSpec& spec, int64_t row, int64_t first_column, std::span<const float> served,
                                                 std::span<const float> exported);

struct WeightsComparison {
  int64_t tensors = 0, numbers = 0;  // compared
  int64_t different = 0;             // tensors of which a bit differs
  std::optional<WeightDifference> first;
};
// Every tensor of the shard, in table order. c: of the weights' device. Scratch on the host: two tensors in f32. An error: the masters cannot be read.
Result<WeightsComparison> compare_weights(Context& c, const Weights& served, const ReadBox& masters);

}  // namespace lockstep
