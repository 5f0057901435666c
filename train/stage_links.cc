#include "train/stage_links.h"

#include "core/device.h"
#include "train/pipeline.h"

namespace lockstep {

namespace {

constexpr size_t kReserve = size_t{64} << 30;  // address space only; pages are committed by first touch
constexpr int kStreamsTag = 0, kGradientsTag = 1;

}  // namespace

StageLinks::Buffer::Buffer(const char* name, Device device) : arena(name, kReserve, device) {}

StageLinks::StageLinks(RankGroup* pp, const ModelConfig& config, DType dtype, Device device)
    : pp_(pp), n_(config.hc_mult), d_(config.hidden_size), dtype_(dtype) {
  const auto fill = [device](Ring& ring, int count, const char* name) {
    for (int i = 0; i < count; ++i) ring.emplace_back(name, device);
  };
  if (has_previous()) {
    fill(inputs_, in_flight_max(stage(), stages()) + 1, "stage input");
    fill(input_gradients_, 2, "stage input gradient");
  }
  if (has_next()) {
    fill(outputs_, 2, "stage output");
    fill(output_gradients_, 2, "stage output gradient");
  }
}

void StageLinks::wait(Buffer& b) {
  if (b.request.slot >= 0) pp_->wait(b.request);
  b.request = {};
}

// The buffer of micro-batch m, free of the one that it held.
StageLinks::Buffer& StageLinks::take(Ring& ring, int64_t m, DType dtype) {
  Buffer& b = ring[static_cast<size_t>(m) % ring.size()];
  wait(b);
  b.arena.release(0);
  b.view = b.arena.tensor(dtype, {rows_[static_cast<size_t>(m)], n_, d_}, "streams");
  return b;
}

void StageLinks::start_input(Context& c, int64_t m) {
  if (m >= static_cast<int64_t>(rows_.size())) return;
  Buffer& b = take(inputs_, m, dtype_);
  if (!b.view.empty()) b.request = pp_->start_recv(c, b.view, stage() - 1, kStreamsTag, "streams");
}

void StageLinks::start_output_gradient(Context& c, int64_t m) {
  if (m >= static_cast<int64_t>(rows_.size())) return;
  Buffer& b = take(output_gradients_, m, DType::f32);
  if (!b.view.empty()) b.request = pp_->start_recv(c, b.view, stage() + 1, kGradientsTag, "stream gradients");
}

void StageLinks::begin(Context& c, std::vector<int64_t> rows, bool with_gradients) {
  rows_ = std::move(rows);
  if (has_previous()) start_input(c, 0);
  if (has_next() && with_gradients) start_output_gradient(c, 0);
}

ConstTensorView StageLinks::input(Context& c, int64_t m) {
  if (!has_previous()) return {};
  Buffer& b = inputs_[static_cast<size_t>(m) % inputs_.size()];
  wait(b);
  start_input(c, m + 1);  // into the place of a micro-batch that is no longer in flight: there is one place more than these
  return b.view;
}

void StageLinks::send_output(Context& c, int64_t m, ConstTensorView streams) {
  Buffer& b = take(outputs_, m, dtype_);
  if (b.view.empty()) return;
  copy(c, b.view, streams);
  b.request = pp_->start_send(c, b.view, stage() + 1, kStreamsTag, "streams");
}

ConstTensorView StageLinks::output_gradient(Context& c, int64_t m) {
  Buffer& b = output_gradients_[static_cast<size_t>(m) % 2];
  wait(b);
  start_output_gradient(c, m + 1);
  return b.view;
}

TensorView StageLinks::input_gradient(int64_t m) { return has_previous() ? take(input_gradients_, m, DType::f32).view : TensorView(); }

void StageLinks::send_input_gradient(Context& c, int64_t m) {
  if (!has_previous()) return;
  Buffer& b = input_gradients_[static_cast<size_t>(m) % 2];
  if (!b.view.empty()) b.request = pp_->start_send(c, b.view, stage() - 1, kGradientsTag, "stream gradients");
}

void StageLinks::end() {
  for (Ring* ring : {&outputs_, &input_gradients_})
    for (Buffer& b : *ring) wait(b);
}

size_t StageLinks::high_bytes() const {
  size_t bytes = 0;
  for (const Ring* ring : {&inputs_, &outputs_, &output_gradients_, &input_gradients_})
    for (const Buffer& b : *ring) bytes += b.arena.high_bytes();
  return bytes;
}

}  // namespace lockstep
