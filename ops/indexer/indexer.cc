#include "ops/indexer/indexer.h"

#include "ops/indexer/indexer_cpu.h"

namespace lockstep {

void index_select(Context& c, TensorView selected, ConstTensorView q, ConstTensorView weight, ConstTensorView keys,
                  const SequenceView& seq, const IndexerShape& shape) {
  if (!c.on_gpu()) check_sequences(seq);
  CHECK(q.shape.rank == 3 && q.rows() == seq.num_tokens && (q.dtype == DType::f32 || q.dtype == DType::bf16),
        "q {} {} for {} tokens", dtype_name(q.dtype), q.shape.str(), seq.num_tokens);
  CHECK(q.dim(1) > 0 && q.dim(2) > 0, "{} heads of {}", q.dim(1), q.dim(2));
  CHECK(weight.dtype == DType::f32 && weight.shape == (Shape{seq.num_tokens, q.dim(1)}), "weight {} {} for q {}",
        dtype_name(weight.dtype), weight.shape.str(), q.shape.str());
  CHECK(selected.dtype == DType::i32 && selected.shape.rank == 2 && selected.rows() == seq.num_tokens,
        "selected {} {} for {} tokens", dtype_name(selected.dtype), selected.shape.str(), seq.num_tokens);
  if (!c.on_gpu()) check_pages(seq, shape.ratio, shape.per_page, keys.rows());
  CHECK(keys.rows() == 0 || (keys.dtype == q.dtype && keys.shape.rank == 2 && keys.dim(1) == q.dim(2)), "keys {} {} for q {} {}",
        dtype_name(keys.dtype), keys.shape.str(), dtype_name(q.dtype), q.shape.str());
  if (seq.num_tokens == 0 || selected.dim(1) == 0) return;
  c.on_gpu() ? device::index_select(c, selected, q, weight, keys, seq, shape) : simd::index_select(c, selected, q, weight, keys, seq, shape);
}

}  // namespace lockstep
