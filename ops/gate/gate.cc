#include "ops/gate/gate.h"

#include "ops/gate/gate_cpu.h"

namespace lockstep {

namespace {

void check_matrix(const char* op, const char* name, ConstTensorView v, DType dtype, int64_t rows, int64_t cols) {
  CHECK(v.dtype == dtype && v.shape == Shape({rows, cols}), "{}: {} is {} {}, wanted {} [{}, {}]", op, name, dtype_name(v.dtype),
        v.shape.str(), dtype_name(dtype), rows, cols);
}

// Checks z, ids and weight (or dweight) against one another.
void check_routes(const char* op, ConstTensorView ids, ConstTensorView weight, ConstTensorView z) {
  CHECK(z.dtype == DType::f32 && z.shape.rank == 2, "{}: z is {} {}, wanted f32 [T, E]", op, dtype_name(z.dtype), z.shape.str());
  CHECK(ids.shape.rank == 2, "{}: ids are {}, wanted [T, K]", op, ids.shape.str());
  const int64_t experts = z.dim(1), slots = ids.dim(1);
  CHECK(experts >= 1 && experts <= kMaxExperts, "{}: {} experts, at most {} are supported", op, experts, kMaxExperts);
  CHECK(slots >= 1 && slots <= kMaxExpertsPerToken, "{}: {} experts a token, at most {} are supported", op, slots,
        kMaxExpertsPerToken);
  check_matrix(op, "ids", ids, DType::i32, z.rows(), slots);
  check_matrix(op, "weight", weight, DType::f32, z.rows(), slots);
}

}  // namespace

void route_scored(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView bias, float factor) {
  check_routes("route_scored", ids, weight, z);
  CHECK(ids.dim(1) <= z.dim(1), "route_scored: {} experts a token of {} experts", ids.dim(1), z.dim(1));
  CHECK(bias.empty() || (bias.dtype == DType::f32 && bias.shape == Shape({z.dim(1)}) && bias.contiguous()),
        "route_scored: bias is {} {}, wanted f32 [{}] or empty", dtype_name(bias.dtype), bias.shape.str(), z.dim(1));
  c.on_gpu() ? device::route_scored(c, ids, weight, z, bias, factor) : reference::route_scored(c, ids, weight, z, bias, factor, simd::score_row);
}

void route_hashed(Context& c, TensorView ids, TensorView weight, ConstTensorView z, ConstTensorView tokens,
                  ConstTensorView table, float factor) {
  check_routes("route_hashed", ids, weight, z);
  CHECK(tokens.dtype == DType::i32 && tokens.shape == Shape({z.rows()}), "route_hashed: tokens are {} {}, wanted i32 [{}]",
        dtype_name(tokens.dtype), tokens.shape.str(), z.rows());
  CHECK(table.shape.rank == 2, "route_hashed: table is {}, wanted [V, K]", table.shape.str());
  check_matrix("route_hashed", "table", table, DType::i32, table.rows(), ids.dim(1));
  c.on_gpu() ? device::route_hashed(c, ids, weight, z, tokens, table, factor) : reference::route_hashed(c, ids, weight, z, tokens, table, factor);
}

void route_backward(Context& c, TensorView dz, ConstTensorView dweight, ConstTensorView ids, ConstTensorView z, float factor) {
  check_routes("route_backward", ids, dweight, z);
  check_matrix("route_backward", "dz", dz, DType::f32, z.rows(), z.dim(1));
  c.on_gpu() ? device::route_backward(c, dz, dweight, ids, z, factor) : reference::route_backward(c, dz, dweight, ids, z, factor);
}

}  // namespace lockstep
