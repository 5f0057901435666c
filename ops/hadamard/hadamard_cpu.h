#pragma once
// Internal to ops/hadamard: the implementations, without argument checks. Same bits. device: on the GPU, hadamard_gpu.cu.

#include "ops/hadamard/hadamard.h"

namespace lockstep {

namespace reference {
void hadamard(Context& c, TensorView x);
}  // namespace reference

namespace device {
void hadamard(Context& c, TensorView x);
}  // namespace device

}  // namespace lockstep
