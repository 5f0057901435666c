#include "ops/moe_permute/moe_permute.h"

#include "ops/moe_permute/moe_permute_cpu.h"

namespace lockstep {

namespace {

void check_shape(const char* op, const char* name, ConstTensorView v, DType dtype, const Shape& shape) {
  CHECK(v.dtype == dtype && v.shape == shape, "{}: {} is {} {}, wanted {} {}", op, name, dtype_name(v.dtype), v.shape.str(),
        dtype_name(dtype), shape.str());
}

void check_rank2(const char* op, const char* name, ConstTensorView v) {
  CHECK(v.shape.rank == 2, "{}: {} is {}, wanted two dimensions", op, name, v.shape.str());
}

void check_storage(const char* op, ConstTensorView v) {
  CHECK(v.dtype == DType::f32 || v.dtype == DType::bf16, "{}: rows are {}, wanted f32 or bf16", op, dtype_name(v.dtype));
}

// The f32 values of [T, K] slots and of the R = T * K rows they own.
void check_values(const char* op, ConstTensorView value, ConstTensorView row_value, ConstTensorView slot_row) {
  check_rank2(op, "slot_row", slot_row);
  check_shape(op, "slot_row", slot_row, DType::i32, slot_row.shape);
  check_shape(op, "value", value, DType::f32, slot_row.shape);
  check_shape(op, "row_value", row_value, DType::f32, {slot_row.shape.elements()});
  CHECK(row_value.contiguous(), "{}: row_value has stride {}", op, row_value.row_stride);
}

}  // namespace

void moe_plan(Context& c, TensorView offsets, TensorView row_token, TensorView slot_row, ConstTensorView ids) {
  check_rank2("moe_plan", "ids", ids);
  check_shape("moe_plan", "ids", ids, DType::i32, ids.shape);
  CHECK(offsets.dtype == DType::i32 && offsets.shape.rank == 1 && offsets.rows() >= 2 && offsets.contiguous(),
        "moe_plan: offsets are {} {}, wanted i32 [E + 1]", dtype_name(offsets.dtype), offsets.shape.str());
  check_shape("moe_plan", "row_token", row_token, DType::i32, {ids.shape.elements()});
  check_shape("moe_plan", "slot_row", slot_row, DType::i32, ids.shape);
  CHECK(row_token.contiguous(), "moe_plan: row_token has stride {}", row_token.row_stride);
  CHECK(ids.shape.elements() <= INT32_MAX, "moe_plan: {} rows do not fit i32", ids.shape.elements());
  c.on_gpu() ? device::moe_plan(c, offsets, row_token, slot_row, ids) : reference::moe_plan(c, offsets, row_token, slot_row, ids);
}

void moe_gather(Context& c, TensorView rows, ConstTensorView x, ConstTensorView row_token) {
  check_storage("moe_gather", x);
  check_rank2("moe_gather", "x", x);
  check_shape("moe_gather", "rows", rows, x.dtype, {row_token.rows(), x.dim(1)});
  check_shape("moe_gather", "row_token", row_token, DType::i32, {row_token.rows()});
  c.on_gpu() ? device::moe_gather(c, rows, x, row_token) : reference::moe_gather(c, rows, x, row_token);
}

void moe_combine(Context& c, TensorView y, ConstTensorView rows, ConstTensorView slot_row, ConstTensorView shared) {
  check_storage("moe_combine", rows);
  check_rank2("moe_combine", "rows", rows);
  check_rank2("moe_combine", "slot_row", slot_row);
  check_shape("moe_combine", "slot_row", slot_row, DType::i32, slot_row.shape);
  check_shape("moe_combine", "rows", rows, rows.dtype, {slot_row.shape.elements(), rows.dim(1)});
  check_shape("moe_combine", "y", y, rows.dtype, {slot_row.rows(), rows.dim(1)});
  check_shape("moe_combine", "shared", shared, rows.dtype, {slot_row.rows(), rows.dim(1)});
  c.on_gpu() ? device::moe_combine(c, y, rows, slot_row, shared) : reference::moe_combine(c, y, rows, slot_row, shared);
}

void moe_gather_backward(Context& c, TensorView dx_accum, ConstTensorView drows, ConstTensorView slot_row) {
  check_rank2("moe_gather_backward", "drows", drows);
  check_rank2("moe_gather_backward", "slot_row", slot_row);
  check_shape("moe_gather_backward", "slot_row", slot_row, DType::i32, slot_row.shape);
  check_shape("moe_gather_backward", "drows", drows, DType::f32, {slot_row.shape.elements(), drows.dim(1)});
  check_shape("moe_gather_backward", "dx_accum", dx_accum, DType::f32, {slot_row.rows(), drows.dim(1)});
  c.on_gpu() ? device::moe_gather_backward(c, dx_accum, drows, slot_row) : reference::moe_gather_backward(c, dx_accum, drows, slot_row);
}

void moe_spread(Context& c, TensorView row_value, ConstTensorView value, ConstTensorView slot_row) {
  check_values("moe_spread", value, row_value, slot_row);
  c.on_gpu() ? device::moe_spread(c, row_value, value, slot_row) : reference::moe_spread(c, row_value, value, slot_row);
}

void moe_collect(Context& c, TensorView value, ConstTensorView row_value, ConstTensorView slot_row) {
  check_values("moe_collect", value, row_value, slot_row);
  c.on_gpu() ? device::moe_collect(c, value, row_value, slot_row) : reference::moe_collect(c, value, row_value, slot_row);
}

}  // namespace lockstep
