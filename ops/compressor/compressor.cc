#include "ops/compressor/compressor.h"

#include "ops/compressor/compressor_cpu.h"

namespace lockstep {
namespace {

void check(const char* what, ConstTensorView v, DType dtype, const Shape& shape) {
  CHECK(v.dtype == dtype && v.shape == shape, "{} is {} {}, wanted {} {}", what, dtype_name(v.dtype), v.shape.str(),
        dtype_name(dtype), shape.str());
}

void check_inputs(const Context& c, ConstTensorView proj, ConstTensorView ape, const EntryView& entries, const SequenceView& seq,
                  const CompressorShape& shape) {
  CHECK(shape.ratio > 0 && shape.width > 0, "ratio {}, width {}", shape.ratio, shape.width);
  if (!c.on_gpu()) {
    check_sequences(seq);
    check_entries(entries, seq, shape.ratio);
  }
  check("proj", proj, DType::f32, {seq.num_tokens, shape.proj_width()});
  check("ape", ape, DType::f32, {shape.ratio, shape.halves() * shape.width});
  CHECK(ape.contiguous(), "ape has rows of {} at a stride of {}", ape.dim(1), ape.row_stride);
}

}  // namespace

void compress(Context& c, TensorView pooled, ConstTensorView proj, ConstTensorView ape, ConstTensorView ring,
              const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  check_inputs(c, proj, ape, entries, seq, shape);
  CHECK(pooled.dtype == DType::f32 || pooled.dtype == DType::bf16, "pooled is {}", dtype_name(pooled.dtype));
  check("pooled", pooled, pooled.dtype, {entries.num_entries, shape.width});
  if (ring.data != nullptr) check("ring", ring, DType::f32, {ring.rows(), shape.ring_rows(), shape.proj_width()});
  if (!c.on_gpu()) check_slots(seq, ring.rows(), /*needs_past=*/true);
  if (entries.num_entries == 0) return;
  c.on_gpu() ? device::compress(c, pooled, proj, ape, ring, entries, seq, shape) : simd::compress(c, pooled, proj, ape, ring, entries, seq, shape);
}

void compress_backward(Context& c, TensorView dproj, TensorView dape_accum, ConstTensorView dpooled, ConstTensorView proj,
                       ConstTensorView ape, const EntryView& entries, const SequenceView& seq, const CompressorShape& shape) {
  check_inputs(c, proj, ape, entries, seq, shape);
  for (int64_t s = 0; !c.on_gpu() && s < seq.num_sequences; ++s)
    CHECK(seq.seq_pos.ptr<int32_t>()[s] == 0, "sequence {} starts at position {}; gradients need whole sequences", s,
          seq.seq_pos.ptr<int32_t>()[s]);
  check("dproj", dproj, DType::f32, proj.shape);
  check("dape_accum", dape_accum, DType::f32, ape.shape);
  check("dpooled", dpooled, DType::f32, {entries.num_entries, shape.width});
  if (seq.num_tokens == 0) return;
  c.on_gpu() ? device::compress_backward(c, dproj, dape_accum, dpooled, proj, ape, entries, seq, shape)
             : simd::compress_backward(c, dproj, dape_accum, dpooled, proj, ape, entries, seq, shape);
}

}  // namespace lockstep
