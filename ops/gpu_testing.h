#pragma once
// What tests of kernels share: tensors on the GPU (or in the executor's device memory) and back. Not linked into the program.

#include "core/device.h"
#include "ops/testing.h"

namespace lockstep::testing {

class Gpu {
 public:
  Gpu() : context_(Device::gpu), arena_("test tensors", size_t{4} << 30, Device::gpu) {}
  Context& context() { return context_; }
  operator Context&() { return context_; }
  // The tensor's copy in device memory; an empty view stays empty. Valid while this lives.
  TensorView put(ConstTensorView host);
  TensorView make(DType dtype, Shape shape) { return arena_.tensor(dtype, shape, "test"); }  // undefined contents
  Tensor get(ConstTensorView device);  // of a contiguous view

 private:
  DeviceContext context_;
  Arena arena_;
};

}  // namespace lockstep::testing
