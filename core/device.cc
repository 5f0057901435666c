#include "core/device.h"

#include <unistd.h>

#include <cstring>

namespace lockstep {

namespace {

void check_like(ConstTensorView a, ConstTensorView b) {
  CHECK(a.dtype == b.dtype && a.shape == b.shape && a.contiguous() && b.contiguous(), "a copy from {} {} to {} {}", dtype_name(b.dtype), b.shape.str(),
        dtype_name(a.dtype), a.shape.str());
}

thread_local bool in_capture = false;

void check_may(const char* what) { CHECK(!in_capture, "{} while a graph is captured, which can only hold launches, copies and zeros in the device's memory", what); }

}  // namespace

double memory_bytes(Device device) {
  if (device == Device::gpu && !device_info().emulated) return static_cast<double>(device_info().memory_bytes);
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
}

DeviceContext::DeviceContext(Device device, int num_threads, size_t workspace_reserve_bytes)
    : pool_(num_threads), workspace_(device == Device::gpu ? "device workspace" : "workspace", workspace_reserve_bytes, device),
      host_("host scratch", device == Device::gpu ? workspace_reserve_bytes : 0) {
  context_.device = device;
  context_.pool = &pool_;
  context_.workspace = &workspace_;
  context_.host = device == Device::gpu ? &host_ : &workspace_;
  context_.stream = device == Device::gpu ? make_stream() : nullptr;
}
DeviceContext::~DeviceContext() {
  if (context_.on_gpu()) destroy_stream(context_.stream);
}

StreamMark::~StreamMark() {
  if (event_ != nullptr) device_event::destroy(event_);
}
void StreamMark::set(Context& c) {
  if (!c.on_gpu()) {
    time_ = std::chrono::steady_clock::now();
    return;
  }
  if (event_ == nullptr) event_ = device_event::make(/*timed=*/true);
  device_event::record(event_, c.stream);
}
double StreamMark::seconds_since(const StreamMark& earlier) const {
  return event_ == nullptr ? std::chrono::duration<double>(time_ - earlier.time_).count() : device_event::seconds(earlier.event_, event_);
}

void synchronize(Context& c) {
  if (!c.on_gpu()) return;
  check_may("the host waits for the stream");
  device_memory::synchronize(c.stream);
}

bool capturing() { return in_capture; }
void DeviceGraph::begin(Context& c) {
  CHECK(c.on_gpu() && c.stream != nullptr, "a graph is captured on a context of the {} {} a stream", device_name(c.device), c.stream == nullptr ? "without" : "with");
  check_may("another graph is captured");
  device_memory::begin_capture(c.stream);
  in_capture = true;
}
DeviceGraph DeviceGraph::end(Context& c) {
  in_capture = false;
  DeviceGraph made;
  made.graph_ = device_memory::end_capture(c.stream);
  return made;
}
DeviceGraph::~DeviceGraph() {
  if (graph_ != nullptr) device_memory::destroy_graph(graph_);
}
void DeviceGraph::run(Context& c) const {
  CHECK(graph_ != nullptr, "a graph that was not captured is run");
  check_may("a graph is run");
  device_memory::run_graph(c.stream, graph_);
}

void copy_bytes(Context& c, void* to, const void* from, size_t bytes) {
  c.on_gpu() ? device_memory::copy(c.stream, to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
}
void upload_bytes(Context& c, void* to, const void* from_host, size_t bytes) {
  check_may("the host's memory is uploaded");
  c.on_gpu() ? device_memory::upload(c.stream, to, from_host, bytes) : static_cast<void>(std::memcpy(to, from_host, bytes));
}
void download_bytes(Context& c, void* to_host, const void* from, size_t bytes) {
  check_may("the device's memory is downloaded");
  c.on_gpu() ? device_memory::download(c.stream, to_host, from, bytes) : static_cast<void>(std::memcpy(to_host, from, bytes));
}
void set_zero(Context& c, TensorView v) {
  CHECK(v.contiguous(), "zeros to a strided view {}", v.shape.str());
  if (v.bytes() == 0) return;
  c.on_gpu() ? device_memory::clear(c.stream, v.data, v.bytes()) : static_cast<void>(std::memset(v.data, 0, v.bytes()));
}

void copy(Context& c, TensorView to, ConstTensorView from) {
  check_like(to, from);
  if (to.bytes() > 0) copy_bytes(c, to.data, from.data, to.bytes());
}
void upload(Context& c, TensorView to, ConstTensorView from_host) {
  check_like(to, from_host);
  if (to.bytes() > 0) upload_bytes(c, to.data, from_host.data, to.bytes());
}
void download(Context& c, TensorView to_host, ConstTensorView from) {
  check_like(to_host, from);
  if (from.bytes() > 0) download_bytes(c, to_host.data, from.data, from.bytes());
}

TensorView zeros(Context& c, DType dtype, Shape shape, std::string_view name) {
  const TensorView v = c.workspace->tensor(dtype, shape, name);
  set_zero(c, v);
  return v;
}

TensorView host_copy(Context& c, ConstTensorView v) {
  const TensorView copy = c.host->tensor(v.dtype, v.shape, "host copy");
  download(c, copy, v);
  return copy;
}
ConstTensorView on_host(Context& c, ConstTensorView v) { return c.on_gpu() && !v.empty() ? host_copy(c, v) : v; }
TensorView on_device(Context& c, TensorView v, Arena& arena) {
  if (!c.on_gpu() || v.shape.elements() == 0) return v;
  const TensorView copy = arena.tensor(v.dtype, v.shape, "device copy");
  upload(c, copy, v);
  return copy;
}

}  // namespace lockstep
