#pragma once
// The accelerator: its memory, its queues of work, and copies to and from it. One implementation is linked: device_gpu.cu speaks to CUDA or HIP,
// device_simt.cc is the host executor (core/simt.h), whose device memory may be touched by kernels and by the copies below and by nothing else: the host that
// reads it by mistake stops with SIGSEGV, in every test.
//
// Errors of the runtime (no device, no memory, a kernel that failed) are CHECKs with the runtime's own text: the caller asked device_available() first.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/context.h"

namespace lockstep {

struct DeviceInfo {
  std::string name;
  size_t memory_bytes = 0, free_bytes = 0;
  int multiprocessors = 0;
  std::string software;   // runtime and driver with their versions
  bool emulated = false;  // the host executor
  std::string id;         // the UUID, 16 bytes, unlike that of any other GPU; the executor has none
};
Status device_available();  // an error says why there is none and what to do
DeviceInfo device_info();
// Before anything else here, in a process whose GPU will wait for other ranks: all kernels are loaded at once. Loading one later may wait for all that runs, which
// may be what waits for a rank that this one must answer.
void device_load_early();
void device_select(int ordinal);  // of the calling thread, which then makes and uses contexts
int device_count();

// Bytes that there are, of all processes together: of a GPU's own memory, else of the machine's.
double memory_bytes(Device device);

// What differs from one accelerator to the other, for the functions below and for arenas.
namespace device_memory {
// Reserved address space never moves; its first `end` bytes are usable once committed, and stay so until all is released.
void* reserve(size_t bytes);
void commit(void* base, size_t end);
void release(void* base, size_t bytes);
void clear(void* p, size_t bytes);  // zeros; waits
// In the order of a stream.
void copy(void* stream, void* to, const void* from, size_t bytes);
void upload(void* stream, void* to, const void* from_host, size_t bytes);
void download(void* stream, void* to_host, const void* from, size_t bytes);  // waits
void clear(void* stream, void* p, size_t bytes);
void synchronize(void* stream);
// Between the two, what is enqueued is kept in the graph that the second returns, and not run.
void begin_capture(void* stream);
void* end_capture(void* stream);
void run_graph(void* stream, void* graph);
void destroy_graph(void* graph);
// Zeros in the host's memory that the GPU can write; never released.
uint64_t* host_words(size_t count);
// *word = value once all before it in the stream is done: the host sees what has been done without asking the driver, which may be stuck. Values grow.
void write_word(void* stream, uint64_t* word, uint64_t value);
}  // namespace device_memory

// A place in a stream: for other streams and the host to wait for, and to measure the time between two. StreamMark is made of them.
namespace device_event {
void* make(bool timed = false);
void destroy(void* event);
void record(void* event, void* stream);
void wait(void* stream, void* event);   // what comes next in the stream waits for where the event was recorded last
bool done(void* event);                 // does not wait
double seconds(void* from, void* to);   // of timed events; waits for `to`
}  // namespace device_event

// A context on either device with its own pool, workspace, host scratch and stream: what programs start from (CpuContext serves where the CPU is meant).
class DeviceContext {
 public:
  explicit DeviceContext(Device device, int num_threads = 1, size_t workspace_reserve_bytes = size_t{64} << 30);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;
  Context& get() { return context_; }
  operator Context&() { return context_; }
  Arena& workspace() { return workspace_; }
  size_t high_bytes() const { return workspace_.high_bytes(); }

 private:
  ThreadPool pool_;
  Arena workspace_, host_;
  Context context_;
};
void* make_stream();
void destroy_stream(void* stream);  // waits for its work

// The host waits until all work of the context's stream is done. Nothing on the CPU.
void synchronize(Context& c);

// A place in the work of a context's stream, for measurements: reached when all that was enqueued before it is done. On the CPU, where work has ended when its
// call returns, the time.
class StreamMark {
 public:
  StreamMark() = default;
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  void set(Context& c);
  double seconds_since(const StreamMark& earlier) const;  // both set, in one context; waits until this one is reached

 private:
  void* event_ = nullptr;  // of the GPU
  std::chrono::steady_clock::time_point time_;
};

// Contiguous views of one shape and dtype. All work on the CPU too, where they are plain copies.
void copy(Context& c, TensorView to, ConstTensorView from);           // both in the context's memory
void set_zero(Context& c, TensorView v);                              // in the context's memory
TensorView zeros(Context& c, DType dtype, Shape shape, std::string_view name);  // from c's workspace
void upload(Context& c, TensorView to, ConstTensorView from_host);    // the host's memory may be used again at once
void download(Context& c, TensorView to_host, ConstTensorView from);  // waits
// The same for bytes.
void copy_bytes(Context& c, void* to, const void* from, size_t bytes);
void upload_bytes(Context& c, void* to, const void* from_host, size_t bytes);
void download_bytes(Context& c, void* to_host, const void* from, size_t bytes);

// Work of a stream that is enqueued again as a whole, by one call instead of one for every kernel: launches, copies and zeros with the addresses and values that they were
// captured with. What changes between runs must therefore be read from memory that stays where it is.
class DeviceGraph {
 public:
  // What `work()` enqueues on the stream of c, a context on the GPU; nothing of it is run. It may not wait, upload, download, raise the high mark of an arena
  // or capture: CHECKs name what it did. Work that was run once before raises no mark. Of other threads it stops only those that map or clear an arena's memory.
  template <typename Work>
  static DeviceGraph capture(Context& c, const Work& work) {
    begin(c);
    work();
    return end(c);
  }
  DeviceGraph() = default;
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  DeviceGraph& operator=(DeviceGraph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  bool empty() const { return graph_ == nullptr; }
  void run(Context& c) const;  // on any stream of the device; does not wait

 private:
  static void begin(Context& c);
  static DeviceGraph end(Context& c);
  void* graph_ = nullptr;
};
bool capturing();  // by this thread

// What a tensor of the context's memory holds, for the host to read: the tensor itself on the CPU, otherwise a copy in c.host, which the caller's scope
// there releases.
ConstTensorView on_host(Context& c, ConstTensorView v);
TensorView host_copy(Context& c, ConstTensorView v);  // a copy in c.host on either device
// What the host made in c.host, in the context's memory: itself on the CPU, otherwise a copy in `arena`.
TensorView on_device(Context& c, TensorView v, Arena& arena);
// Fills a contiguous tensor of the context's memory by what `fill(TensorView)` writes on the host: in place on the CPU, otherwise by way of c.host.
// Returns what `fill` returns; after an error of its own, v's contents are undefined.
template <typename Fill>
auto fill_on_host(Context& c, TensorView v, Fill fill) {
  if (!c.on_gpu()) return fill(v);
  const ArenaScope scope(*c.host);
  const TensorView copy = c.host->tensor(v.dtype, v.shape, "host copy");
  auto result = fill(copy);
  upload(c, v, copy);
  return result;
}

}  // namespace lockstep
