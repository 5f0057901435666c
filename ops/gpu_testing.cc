#include "ops/gpu_testing.h"

namespace lockstep::testing {

TensorView Gpu::put(ConstTensorView host) {
  if (host.data == nullptr) return {};
  const TensorView v = make(host.dtype, host.shape);
  upload(context_, v, host);
  return v;
}

Tensor Gpu::get(ConstTensorView device) {
  Tensor t(device.dtype, device.shape);
  download(context_, t, device);
  return t;
}

}  // namespace lockstep::testing
