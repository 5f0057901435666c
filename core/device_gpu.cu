// The accelerator through CUDA's or HIP's runtime. Arenas are virtual address ranges that grow by mapping physical memory behind what is in use, so that
// addresses stay (graphs and tensor maps hold them) and nothing is copied.

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#if defined(__HIP__)
#include <hip/hip_runtime.h>
#define GPU_API(name) hip##name
#else
#include <cuda.h>
#include <cuda_runtime.h>
#define GPU_API(name) cuda##name
#endif

#include "core/device.h"
#include "core/gpu_check.h"

namespace lockstep {

namespace {

using Error = GPU_API(Error_t);
constexpr Error kOk = GPU_API(Success);
#define RUN(call)                                                                       \
  do {                                                                                  \
    const Error run_error = (call);                                                     \
    GPU_CHECK(run_error == kOk, "%s", GPU_API(GetErrorString)(run_error));              \
  } while (0)

GPU_API(Stream_t) as_stream(void* stream) { return static_cast<GPU_API(Stream_t)>(stream); }

std::string version(int v) {
#if defined(__HIP__)
  return std::to_string(v / 10000000) + "." + std::to_string(v / 100000 % 100);
#else
  return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
#endif
}
#if defined(__HIP__)
constexpr const char* kRuntime = "HIP";
#else
constexpr const char* kRuntime = "CUDA";
#endif

constexpr size_t kGrowth = size_t{64} << 20;  // physical memory is mapped in multiples of this; a multiple of every device's granularity (2 MiB)

}  // namespace

Status device_available() {
  int n = 0;
  const Error e = GPU_API(GetDeviceCount)(&n);
  if (e == kOk && n > 0) return Status::ok();
  (void)GPU_API(GetLastError)();
  return Status::error(std::string("device = gpu: no GPU can be used (") + (e == kOk ? "none found" : GPU_API(GetErrorString)(e)) +
                       "); check the driver with nvidia-smi or rocm-smi, or use device = cpu");
}
DeviceInfo device_info() {
  int device = 0;
  RUN(GPU_API(GetDevice)(&device));
#if defined(__HIP__)
  hipDeviceProp_t p;
#else
  cudaDeviceProp p;
#endif
  RUN(GPU_API(GetDeviceProperties)(&p, device));
  DeviceInfo info;
  info.name = p.name;
  info.multiprocessors = p.multiProcessorCount;
#if defined(__HIP__)
  hipUUID id;
  RUN(hipDeviceGetUuid(&id, device));
  info.id.assign(id.bytes, sizeof id.bytes);
#else
  info.id.assign(p.uuid.bytes, sizeof p.uuid.bytes);
#endif
  RUN(GPU_API(MemGetInfo)(&info.free_bytes, &info.memory_bytes));
  int runtime = 0, driver = 0;
  RUN(GPU_API(RuntimeGetVersion)(&runtime));
  RUN(GPU_API(DriverGetVersion)(&driver));
  info.software = std::string(kRuntime) + " runtime " + version(runtime) + ", driver for " + kRuntime + " " + version(driver);
  return info;
}
void device_load_early() { setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0); }  // read by the driver when it starts; HIP needs none
void device_select(int ordinal) { RUN(GPU_API(SetDevice)(ordinal)); }
int device_count() {
  int n = 0;
  return GPU_API(GetDeviceCount)(&n) == kOk ? n : 0;
}

namespace device_memory {

#if defined(__HIP__)
using Handle = hipMemGenericAllocationHandle_t;
#else
using Handle = CUmemGenericAllocationHandle;
// The driver's functions by name, so that a program without a driver still starts and can say so.
template <typename F>
F driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  GPU_CHECK(e == cudaSuccess && found != nullptr, "the driver has no %s; CUDA 12 or newer is needed", name);
  return reinterpret_cast<F>(found);
}
#define DRIVER(name, ...)                                                        \
  do {                                                                           \
    static const auto function = driver<decltype(&cu##name)>("cu" #name);        \
    const CUresult driver_error = function(__VA_ARGS__);                         \
    GPU_CHECK(driver_error == CUDA_SUCCESS, "cu" #name " says %d", static_cast<int>(driver_error)); \
  } while (0)
#endif

namespace {

struct Mapped {
  size_t reserved = 0, committed = 0;
  std::vector<std::pair<Handle, size_t>> pieces;
};
std::mutex mutex;  // also held during a capture: what maps or clears memory, or waits for the whole device, would break it
std::map<char*, Mapped>& arenas() {
  static auto* all = new std::map<char*, Mapped>;
  return *all;
}
size_t whole(size_t bytes) { return (bytes + kGrowth - 1) / kGrowth * kGrowth; }

}  // namespace

void* reserve(size_t bytes) {
  const std::lock_guard lock(mutex);
  RUN(GPU_API(Free)(nullptr));  // makes the context
#if defined(__HIP__)
  void* p = nullptr;
  RUN(hipMemAddressReserve(&p, whole(bytes), 0, nullptr, 0));
#else
  CUdeviceptr address = 0;
  DRIVER(MemAddressReserve, &address, whole(bytes), 0, 0, 0);
  void* p = reinterpret_cast<void*>(address);
#endif
  arenas()[static_cast<char*>(p)].reserved = whole(bytes);
  return p;
}

void commit(void* base, size_t end) {
  const std::lock_guard lock(mutex);
  Mapped& m = arenas().at(static_cast<char*>(base));
  if (end <= m.committed) return;
  const size_t bytes = whole(end - m.committed);
  int device = 0;
  RUN(GPU_API(GetDevice)(&device));
  char* const at = static_cast<char*>(base) + m.committed;
  Handle handle;
#if defined(__HIP__)
  hipMemAllocationProp p = {};
  p.type = hipMemAllocationTypePinned;
  p.location = {hipMemLocationTypeDevice, device};
  RUN(hipMemCreate(&handle, bytes, &p, 0));
  RUN(hipMemMap(at, bytes, 0, handle, 0));
  hipMemAccessDesc access = {p.location, hipMemAccessFlagsProtReadWrite};
  RUN(hipMemSetAccess(at, bytes, &access, 1));
#else
  CUmemAllocationProp p = {};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  DRIVER(MemCreate, &handle, bytes, &p, 0);
  DRIVER(MemMap, reinterpret_cast<CUdeviceptr>(at), bytes, 0, handle, 0);
  const CUmemAccessDesc access = {p.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  DRIVER(MemSetAccess, reinterpret_cast<CUdeviceptr>(at), bytes, &access, 1);
#endif
  m.pieces.push_back({handle, bytes});
  m.committed += bytes;
}

void release(void* base, size_t) {
  const std::lock_guard lock(mutex);
  RUN(GPU_API(DeviceSynchronize)());
  const auto found = arenas().find(static_cast<char*>(base));
  Mapped& m = found->second;
#if defined(__HIP__)
  if (m.committed > 0) RUN(hipMemUnmap(base, m.committed));
  for (const auto& [handle, bytes] : m.pieces) RUN(hipMemRelease(handle));
  RUN(hipMemAddressFree(base, m.reserved));
#else
  if (m.committed > 0) DRIVER(MemUnmap, reinterpret_cast<CUdeviceptr>(base), m.committed);
  for (const auto& [handle, bytes] : m.pieces) DRIVER(MemRelease, handle);
  DRIVER(MemAddressFree, reinterpret_cast<CUdeviceptr>(base), m.reserved);
#endif
  arenas().erase(found);
}

void copy(void* stream, void* to, const void* from, size_t bytes) {
  RUN(GPU_API(MemcpyAsync)(to, from, bytes, GPU_API(MemcpyDeviceToDevice), as_stream(stream)));
}
void upload(void* stream, void* to, const void* from_host, size_t bytes) {
  RUN(GPU_API(MemcpyAsync)(to, from_host, bytes, GPU_API(MemcpyHostToDevice), as_stream(stream)));  // from pageable memory: staged before it returns
}
void download(void* stream, void* to_host, const void* from, size_t bytes) {
  RUN(GPU_API(MemcpyAsync)(to_host, from, bytes, GPU_API(MemcpyDeviceToHost), as_stream(stream)));
  synchronize(stream);
}
void clear(void* stream, void* p, size_t bytes) { RUN(GPU_API(MemsetAsync)(p, 0, bytes, as_stream(stream))); }
void clear(void* p, size_t bytes) {
  const std::lock_guard lock(mutex);
  RUN(GPU_API(Memset)(p, 0, bytes));
  RUN(GPU_API(DeviceSynchronize)());
}
void synchronize(void* stream) { RUN(GPU_API(StreamSynchronize)(as_stream(stream))); }

void begin_capture(void* stream) {
  mutex.lock();
  RUN(GPU_API(StreamBeginCapture)(as_stream(stream), GPU_API(StreamCaptureModeThreadLocal)));
}
void* end_capture(void* stream) {
  GPU_API(Graph_t) graph;
  RUN(GPU_API(StreamEndCapture)(as_stream(stream), &graph));
  GPU_API(GraphExec_t) made;
  RUN(GPU_API(GraphInstantiateWithFlags)(&made, graph, 0));
  RUN(GPU_API(GraphDestroy)(graph));
  mutex.unlock();
  return made;
}
void run_graph(void* stream, void* graph) { RUN(GPU_API(GraphLaunch)(static_cast<GPU_API(GraphExec_t)>(graph), as_stream(stream))); }
void destroy_graph(void* graph) { RUN(GPU_API(GraphExecDestroy)(static_cast<GPU_API(GraphExec_t)>(graph))); }
uint64_t* host_words(size_t count) {
  void* p = nullptr;
#if defined(__HIP__)
  RUN(hipHostMalloc(&p, count * sizeof(uint64_t), hipHostMallocPortable | hipHostMallocMapped));
#else
  RUN(cudaHostAlloc(&p, count * sizeof(uint64_t), cudaHostAllocPortable | cudaHostAllocMapped));
#endif
  std::memset(p, 0, count * sizeof(uint64_t));
  return static_cast<uint64_t*>(p);
}
void write_word(void* stream, uint64_t* word, uint64_t value) {
#if defined(__HIP__)
  RUN(hipStreamWriteValue64(as_stream(stream), word, value, 0));
#else
  DRIVER(StreamWriteValue64, as_stream(stream), reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
#endif
}

}  // namespace device_memory

namespace device_event {

GPU_API(Event_t) as_event(void* event) { return static_cast<GPU_API(Event_t)>(event); }

void* make(bool timed) {
  GPU_API(Event_t) event;
  RUN(GPU_API(EventCreateWithFlags)(&event, timed ? GPU_API(EventDefault) : GPU_API(EventDisableTiming)));
  return event;
}
void destroy(void* event) { RUN(GPU_API(EventDestroy)(as_event(event))); }
void record(void* event, void* stream) { RUN(GPU_API(EventRecord)(as_event(event), as_stream(stream))); }
void wait(void* stream, void* event) { RUN(GPU_API(StreamWaitEvent)(as_stream(stream), as_event(event), 0)); }
bool done(void* event) {
  const Error e = GPU_API(EventQuery)(as_event(event));
  if (e == GPU_API(ErrorNotReady)) return false;
  RUN(e);
  return true;
}
double seconds(void* from, void* to) {
  RUN(GPU_API(EventSynchronize)(as_event(to)));
  float ms = 0;
  RUN(GPU_API(EventElapsedTime)(&ms, as_event(from), as_event(to)));
  return ms * 1e-3;
}

}  // namespace device_event

void* make_stream() {
  GPU_API(Stream_t) stream;
  RUN(GPU_API(StreamCreate)(&stream));
  return stream;
}
void destroy_stream(void* stream) {
  device_memory::synchronize(stream);
  RUN(GPU_API(StreamDestroy)(as_stream(stream)));
}

}  // namespace lockstep
