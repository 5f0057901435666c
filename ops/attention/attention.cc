#include "ops/attention/attention.h"

#include "ops/attention/attention_cpu.h"

namespace lockstep {
namespace {

void check(const char* what, ConstTensorView v, DType dtype, const Shape& shape) {
  CHECK(v.dtype == dtype && v.shape == shape, "{} is {} {}, wanted {} {}", what, dtype_name(v.dtype), v.shape.str(),
        dtype_name(dtype), shape.str());
}

void check_keys(const Context& c, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink, const SequenceView& seq,
                const AttentionShape& shape) {
  if (!c.on_gpu()) check_sequences(seq);
  CHECK(q.shape.rank == 3 && q.rows() == seq.num_tokens && (q.dtype == DType::f32 || q.dtype == DType::bf16),
        "q {} {} for {} tokens", dtype_name(q.dtype), q.shape.str(), seq.num_tokens);
  const int64_t heads = q.dim(1), width = q.dim(2);
  CHECK(heads > 0 && width > 0 && shape.window > 0 && shape.ratio >= 0, "{} heads of {}, window {}, ratio {}", heads, width,
        shape.window, shape.ratio);
  check("kv", keys.kv, q.dtype, {seq.num_tokens, width});
  check("sink", sink, DType::f32, {heads});
  if (keys.ring.data != nullptr) check("ring", keys.ring, q.dtype, {keys.ring.rows(), shape.window, width});
  if (!c.on_gpu()) check_slots(seq, keys.ring.rows(), /*needs_past=*/true);
  if (shape.ratio == 0) {
    CHECK(keys.selected.empty(), "selected {} without compressed entries", keys.selected.shape.str());
    return;
  }
  if (seq.longest >= shape.ratio) check("entries", keys.entries, q.dtype, {keys.entries.rows(), width});
  if (!c.on_gpu()) check_pages(seq, shape.ratio, shape.per_page, keys.entries.rows());
  if (keys.selected.data != nullptr) check("selected", keys.selected, DType::i32, {seq.num_tokens, keys.selected.dim(1)});
}

}  // namespace

void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
               const SequenceView& seq, const AttentionShape& shape) {
  check_keys(c, q, keys, sink, seq, shape);
  check("o", o, q.dtype, q.shape);
  if (lse.data != nullptr) check("lse", lse, DType::f32, {seq.num_tokens, q.dim(1)});
  if (seq.num_tokens == 0) return;
  c.on_gpu() ? device::attention(c, o, lse, q, keys, sink, seq, shape) : simd::attention(c, o, lse, q, keys, sink, seq, shape);
}

void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                        ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  check_keys(c, q, keys, sink, seq, shape);
  for (int64_t s = 0; !c.on_gpu() && s < seq.num_sequences; ++s)
    CHECK(seq.seq_pos.ptr<int32_t>()[s] == 0, "sequence {} starts at position {}; gradients need whole sequences", s,
          seq.seq_pos.ptr<int32_t>()[s]);
  check("dq", dq, DType::f32, q.shape);
  check("dkv", dkv, DType::f32, keys.kv.shape);
  check("dsink_accum", dsink_accum, DType::f32, {q.dim(1)});
  check("d_o", d_o, DType::f32, q.shape);
  check("o", o, q.dtype, q.shape);
  check("lse", lse, DType::f32, {seq.num_tokens, q.dim(1)});
  if (keys.entries.data != nullptr) check("dentries_accum", dentries_accum, DType::f32, keys.entries.shape);
  if (seq.num_tokens == 0) return;
  c.on_gpu() ? device::attention_backward(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape)
             : simd::attention_backward(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
}

}  // namespace lockstep
