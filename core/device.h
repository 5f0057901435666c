#pragma once
// The accelerator: its memory, its queues of work, and copies to and from it. One implementation is linked: device_gpu.cu speaks to CUDA or HIP,
// device_simt.cc is the host executor (core/simt.h), whose device memory may be touched by kernels and by the copies below and by nothing else: the host that
// reads it by mistake stops with SIGSEGV, in every test.
//
// Errors of the runtime (no device, no memory, a kernel that failed) are CHECKs with the runtime's own text: the caller asked device_available() first.

#include <cstddef>
#include <string>

#include "core/context.h"

namespace lockstep {

struct DeviceInfo {
  std::string name;
  size_t memory_bytes = 0, free_bytes = 0;
  int multiprocessors = 0;
  bool emulated = false;  // the host executor
};
Status device_available();  // an error says why there is none and what to do
DeviceInfo device_info();
void device_select(int ordinal);  // of the calling thread; ranks of one host take one each, in turn
int device_count();

// What arenas are made of. Reserved address space never moves; bytes [begin, end) of it are usable once committed, and stay so until all is released.
namespace device_memory {
void* reserve(size_t bytes);
void commit(void* base, size_t begin, size_t end);
void release(void* base, size_t bytes);
void clear(void* p, size_t bytes);  // zeros; waits
}  // namespace device_memory

// A context on the GPU with its own stream, workspace, host scratch and pool: what programs and tests start from.
class GpuContext {
 public:
  explicit GpuContext(int num_threads = 1, size_t workspace_reserve_bytes = size_t{64} << 30);
  ~GpuContext();
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;
  Context& get() { return context_; }
  operator Context&() { return context_; }

 private:
  ThreadPool pool_;
  Arena workspace_, host_;
  Context context_;
};

// The host waits until all work of the context's stream is done. Nothing on the CPU.
void synchronize(Context& c);

// Contiguous views of one shape and dtype. All work on the CPU too, where they are plain copies.
void copy(Context& c, TensorView to, ConstTensorView from);           // both in the context's memory
void set_zero(Context& c, TensorView v);                              // in the context's memory
void upload(Context& c, TensorView to, ConstTensorView from_host);    // the host's memory may be used again at once
void download(Context& c, TensorView to_host, ConstTensorView from);  // waits
// The same for bytes.
void copy_bytes(Context& c, void* to, const void* from, size_t bytes);
void upload_bytes(Context& c, void* to, const void* from_host, size_t bytes);
void download_bytes(Context& c, void* to_host, const void* from, size_t bytes);

// What a tensor of the context's memory holds, for the host to read: the tensor itself on the CPU, otherwise a copy in c.host, which the caller's scope
// there releases.
ConstTensorView on_host(Context& c, ConstTensorView v);
// What the host made in c.host, in the context's memory: itself on the CPU, otherwise a copy in `arena`.
TensorView on_device(Context& c, TensorView v, Arena& arena);

}  // namespace lockstep
