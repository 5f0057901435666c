#include "ops/attention/attention_cpu.h"

#include "ops/fixed_math.h"

namespace lockstep::reference {
namespace {

template <typename T>
void forward(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
             const SequenceView& seq, const AttentionShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2);
  const KeyReader<T> reader(keys, seq, shape, width);
  ArenaScope scope(*c.workspace);
  const int64_t longest = longest_window(seq, shape) + longest_entry_list(keys, seq, shape);
  const T** row = static_cast<const T**>(c.workspace->allocate(sizeof(T*) * static_cast<size_t>(longest), "attention rows"));
  float* e = static_cast<float*>(c.workspace->allocate(sizeof(float) * static_cast<size_t>(longest), "attention logits"));
  for (int64_t t = 0; t < seq.num_tokens; ++t) {
    const int64_t s = seq.token_seq.ptr<int32_t>()[t];
    const QueryList list = query_list(keys, shape, t, seq.token_pos.ptr<int32_t>()[t]);
    int64_t n = 0;
    for (int64_t p = list.first; p <= list.position; ++p) row[n++] = reader.window(s, p);
    for (int64_t i = 0; i < list.num_entries; ++i) row[n++] = reader.entry(s, list.entry(i));

    for (int64_t h = 0; h < heads; ++h) {
      const T* qh = q.row<T>(t) + h * width;
      const float z = sink.ptr<float>()[h];
      float m = z;
      for (int64_t j = 0; j < n; ++j) {
        float dot = 0.0f;
        for (int64_t i = 0; i < width; ++i) dot = std::fmaf(to_f32(qh[i]), to_f32(row[j][i]), dot);
        e[j] = dot * shape.scale;
        m = std::max(m, e[j]);
      }
      float denominator = 0.0f;
      for (int64_t j = 0; j < n; ++j) {
        e[j] = exp_f32(e[j] - m);
        denominator = denominator + e[j];
      }
      denominator = denominator + exp_f32(z - m);
      for (int64_t i = 0; i < width; ++i) {
        float sum = 0.0f;
        for (int64_t j = 0; j < n; ++j) sum = std::fmaf(e[j], to_f32(row[j][i]), sum);
        o.row<T>(t)[h * width + i] = from_f32<T>(sum / denominator);
      }
      if (!lse.empty()) lse.row<float>(t)[h] = m + log_f32(denominator);
    }
  }
}

template <typename T>
void backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum, ConstTensorView d_o,
              ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
              const SequenceView& seq, const AttentionShape& shape) {
  const int64_t heads = q.dim(1), width = q.dim(2);
  const KeyReader<T> reader(keys, seq, shape, width);
  ArenaScope scope(*c.workspace);
  const int64_t longest = longest_window(seq, shape) + longest_entry_list(keys, seq, shape);
  const T** row = static_cast<const T**>(c.workspace->allocate(sizeof(T*) * static_cast<size_t>(longest), "attention rows"));
  float** grad =
      static_cast<float**>(c.workspace->allocate(sizeof(float*) * static_cast<size_t>(longest), "attention row gradients"));
  float* sink_part =
      static_cast<float*>(c.workspace->allocate(sizeof(float) * static_cast<size_t>(heads), "attention sink gradients"));
  for (int64_t s = 0; s < seq.num_sequences; ++s) {
    const int64_t first_row = seq.seq_row.ptr<int32_t>()[s], end_row = seq.seq_row.ptr<int32_t>()[s + 1];
    for (int64_t t = first_row; t < end_row; ++t) std::fill_n(dkv.row<float>(t), width, 0.0f);
    std::fill_n(sink_part, heads, 0.0f);
    for (int64_t t = first_row; t < end_row; ++t) {
      const QueryList list = query_list(keys, shape, t, t - first_row);
      int64_t n = 0;
      for (int64_t p = list.first; p <= list.position; ++p) {
        row[n] = reader.window(s, p);
        grad[n++] = dkv.row<float>(first_row + p);
      }
      for (int64_t i = 0; i < list.num_entries; ++i) {
        row[n] = reader.entry(s, list.entry(i));
        grad[n++] = dentries_accum.row<float>(entry_row(seq, shape.per_page, s, list.entry(i)));
      }

      for (int64_t h = 0; h < heads; ++h) {
        const T* qh = q.row<T>(t) + h * width;
        const T* oh = o.row<T>(t) + h * width;
        const float* doh = d_o.row<float>(t) + h * width;
        float* dqh = dq.row<float>(t) + h * width;
        const float log_denominator = lse.row<float>(t)[h];
        const float delta = tree_dot(
            width, [&](int64_t i) { return to_f32(oh[i]); }, [&](int64_t i) { return doh[i]; });
        std::fill_n(dqh, width, 0.0f);
        for (int64_t j = 0; j < n; ++j) {
          float dot = 0.0f, dp = 0.0f;
          for (int64_t i = 0; i < width; ++i) {
            dot = std::fmaf(to_f32(qh[i]), to_f32(row[j][i]), dot);
            dp = std::fmaf(doh[i], to_f32(row[j][i]), dp);
          }
          const float p = exp_f32(dot * shape.scale - log_denominator);
          const float dl = p * (dp - delta) * shape.scale;
          for (int64_t i = 0; i < width; ++i) {
            dqh[i] = std::fmaf(dl, to_f32(row[j][i]), dqh[i]);
            grad[j][i] = std::fmaf(dl, to_f32(qh[i]), grad[j][i]);
            grad[j][i] = std::fmaf(p, doh[i], grad[j][i]);
          }
        }
        sink_part[h] = std::fmaf(-exp_f32(sink.ptr<float>()[h] - log_denominator), delta, sink_part[h]);
      }
    }
    for (int64_t h = 0; h < heads; ++h) dsink_accum.ptr<float>()[h] += sink_part[h];
  }
}

}  // namespace

void attention(Context& c, TensorView o, TensorView lse, ConstTensorView q, const AttentionKeys& keys, ConstTensorView sink,
               const SequenceView& seq, const AttentionShape& shape) {
  if (q.dtype == DType::f32) forward<float>(c, o, lse, q, keys, sink, seq, shape);
  else forward<bf16>(c, o, lse, q, keys, sink, seq, shape);
}

void attention_backward(Context& c, TensorView dq, TensorView dkv, TensorView dentries_accum, TensorView dsink_accum,
                        ConstTensorView d_o, ConstTensorView o, ConstTensorView lse, ConstTensorView q, const AttentionKeys& keys,
                        ConstTensorView sink, const SequenceView& seq, const AttentionShape& shape) {
  if (q.dtype == DType::f32) backward<float>(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
  else backward<bf16>(c, dq, dkv, dentries_accum, dsink_accum, d_o, o, lse, q, keys, sink, seq, shape);
}

}  // namespace lockstep::reference
