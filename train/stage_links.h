#pragma once
// What a pipeline stage exchanges with its neighbours: streams [T, n, D] in storage dtype forward, their f32 gradients back.
//
// Messages travel while the stage computes: a receive is started one micro-batch before it is needed, a send ends in the background. Open at any time
// are two receives and four sends. A micro-batch without rows sends nothing. Without neighbours nothing happens here.
//
// Buffers: for each micro-batch in flight its input, and one more that is arriving; two of everything else.

#include <deque>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "model/config.h"
#include "parallel/collective.h"

namespace lockstep {

class StageLinks {
 public:
  // `pp` (null: one stage) outlives the links; its ranks are the stages.
  StageLinks(RankGroup* pp, const ModelConfig& config, DType dtype, Device device = Device::cpu);

  int stage() const { return pp_ == nullptr ? 0 : pp_->rank(); }
  int stages() const { return pp_ == nullptr ? 1 : pp_->size(); }

  // Micro-batch m will have rows[m] rows, on every stage. Micro-batches come in ascending order in each direction, as pipeline.h has them.
  void begin(Context& c, std::vector<int64_t> rows, bool with_gradients);
  // From the stage before; stays until the backward of `m` has ended, or without gradients until the next input. The first stage has none.
  ConstTensorView input(Context& c, int64_t m);
  // To the stage behind. Copied, so `streams` is free again.
  void send_output(Context& c, int64_t m, ConstTensorView streams);
  // From the stage behind; stays until the next one.
  ConstTensorView output_gradient(Context& c, int64_t m);
  // To the stage before: where it is to be written, then that it has been. The first stage has none.
  TensorView input_gradient(int64_t m);
  void send_input_gradient(Context& c, int64_t m);
  // Waits until all that was sent has left.
  void end();

  size_t high_bytes() const;

 private:
  struct Buffer {
    Buffer(const char* name, Device device);
    Arena arena;
    TensorView view;
    RankGroup::Request request;  // slot -1: nothing on its way
  };
  using Ring = std::deque<Buffer>;  // micro-batch m has place m % size

  bool has_previous() const { return stage() > 0; }
  bool has_next() const { return stage() + 1 < stages(); }
  Buffer& take(Ring& ring, int64_t m, DType dtype);
  void start_input(Context& c, int64_t m);
  void start_output_gradient(Context& c, int64_t m);
  void wait(Buffer& b);

  RankGroup* pp_;
  const int64_t n_, d_;
  const DType dtype_;
  std::vector<int64_t> rows_;
  Ring inputs_, outputs_, output_gradients_, input_gradients_;
};

}  // namespace lockstep
