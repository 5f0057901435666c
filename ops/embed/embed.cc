#include "ops/embed/embed.h"

#include "ops/embed/embed_cpu.h"

namespace lockstep {

namespace {

void check_shapes(const char* op, ConstTensorView table, ConstTensorView x, ConstTensorView tokens) {
  CHECK(table.shape.rank == 2 && x.shape.rank == 3 && tokens.shape.rank == 1, "{}: table {}, streams {}, tokens {}", op,
        table.shape.str(), x.shape.str(), tokens.shape.str());
  CHECK(x.dim(0) == tokens.dim(0) && x.dim(1) >= 1 && x.dim(2) == table.dim(1), "{}: table {}, streams {}, tokens {}", op,
        table.shape.str(), x.shape.str(), tokens.shape.str());
  CHECK(tokens.dtype == DType::i32 && tokens.contiguous(), "{}: tokens are {} with stride {}", op, dtype_name(tokens.dtype),
        tokens.row_stride);
}

void check_arguments(const Context& c, const char* op, ConstTensorView table, ConstTensorView x, ConstTensorView tokens) {
  check_shapes(op, table, x, tokens);
  if (tokens.rows() == 0 || c.on_gpu()) return;
  const int32_t* id = tokens.ptr<int32_t>();
  for (int64_t t = 0; t < tokens.rows(); ++t)
    CHECK(id[t] >= 0 && id[t] < table.dim(0), "{}: token {} at {} of a vocabulary of {}", op, id[t], t, table.dim(0));
}

void check_gradients(const char* op, ConstTensorView dtable_accum, ConstTensorView dx) {
  CHECK(dx.dtype == DType::f32 && dtable_accum.dtype == DType::f32, "{}: dx {}, dtable {}", op, dtype_name(dx.dtype),
        dtype_name(dtable_accum.dtype));
}

void add_gradients(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens) {
  c.on_gpu() ? device::embed_backward(c, dtable_accum, first, dx, tokens) : reference::embed_backward(c, dtable_accum, first, dx, tokens);
}

}  // namespace

void embed(Context& c, TensorView x, ConstTensorView table, ConstTensorView tokens) {
  check_arguments(c, "embed", table, x, tokens);
  CHECK((table.dtype == DType::f32 || table.dtype == DType::bf16) && x.dtype == table.dtype, "embed: table {}, streams {}",
        dtype_name(table.dtype), dtype_name(x.dtype));
  c.on_gpu() ? device::embed(c, x, table, tokens) : reference::embed(c, x, table, tokens);
}

void embed_backward(Context& c, TensorView dtable_accum, ConstTensorView dx, ConstTensorView tokens) {
  check_arguments(c, "embed_backward", dtable_accum, dx, tokens);
  check_gradients("embed_backward", dtable_accum, dx);
  add_gradients(c, dtable_accum, 0, dx, tokens);
}

void embed_backward_part(Context& c, TensorView dtable_accum, int64_t first, ConstTensorView dx, ConstTensorView tokens) {
  check_shapes("embed_backward_part", dtable_accum, dx, tokens);
  check_gradients("embed_backward_part", dtable_accum, dx);
  CHECK(first >= 0, "embed_backward_part: first id {}", first);
  add_gradients(c, dtable_accum, first, dx, tokens);
}

}  // namespace lockstep
