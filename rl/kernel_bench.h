#pragma once
// Every operator of a model alone (rl/kernel_table.h), at the model's own shapes: how long it takes, beside what the machine allows and the best that the GPU
// maker's library does with the same product.

#include <functional>
#include <string>
#include <vector>

#include "model/config.h"

namespace lockstep {

struct KernelBenchOptions {
  Device device = Device::cpu;
  int threads = 1;
  std::vector<int64_t> decode = {64, 256};              // tokens of calls with one for each sequence
  int64_t context = 0;                                  // positions of these sequences, whole pages; 0: 4096 or what the model has
  int64_t train_tokens = 8192, row_tokens = 4096;       // of a call that trains, and of its sequences
  std::string only;                                     // regular expression: the rows whose "op name pass dtype" it finds; empty: all
  bool warm = false;                                    // leave the caches as the run before left them
  int repeat = 10;
};

// One JSON line for each measurement, as it is made. The first holds the ceilings:
//   copy_gb_s, {f32, bf16, e4m3}_tflops and _by (own product, library, or the CPU's multiply-adds), library (its name and version, or why there is none)
// then one an operator:
//   op, name, pass, dtype, tokens, shape; us (median), us_min, us_max, caches; bytes and operations of the mathematics, gb_s, tflops
//   floor_us   max(bytes / copy rate, operations / rate of the unit); bound: bytes | operations;  share: floor_us / us, above 1 where caches help
//   library_us, ratio (library_us / us)   where there is one
Status bench_kernels(const ModelConfig& config, const KernelBenchOptions& options, const std::function<void(const std::string& line)>& tell);

}  // namespace lockstep
