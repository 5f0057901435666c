// lockstep doctor: what this machine has, what the program can do with it, and a short self-check.

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "cli/console.h"
#include "cli/goldens.h"
#include "core/device.h"
#include "model/golden.h"
#include "ops/matmul/blas_library.h"
#include "parallel/collective.h"
#include "parallel/groups.h"
#include "rl/gates.h"

namespace lockstep {

namespace {

constexpr double kGiB = 1 << 30;

void line(const char* what, const std::string& found) { std::printf("%-14s %s\n", what, found.c_str()); }

std::string limit(int resource, const char* unit, double scale) {
  rlimit r{};
  if (getrlimit(resource, &r) != 0) return "unknown";
  return r.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{:.0f} {}", static_cast<double>(r.rlim_cur) / scale, unit);
}

std::string room(const char* path) {
  struct statvfs s{};
  return statvfs(path, &s) != 0 ? "missing" : fmt::format("{:.1f} GiB free", static_cast<double>(s.f_bavail) * static_cast<double>(s.f_frsize) / kGiB);
}

void tell_machine() {
  line("cpu", fmt::format("{} cores, {:.1f} GiB of memory{}", std::thread::hardware_concurrency(), memory_bytes(Device::cpu) / kGiB,
#if defined(__x86_64__)
                          __builtin_cpu_supports("avx512f") ? ", AVX-512" : ", AVX2"
#else
                          ""
#endif
                          ));
  line("limits", fmt::format("{} of open files, {} of locked memory, /dev/shm {}", limit(RLIMIT_NOFILE, "", 1), limit(RLIMIT_MEMLOCK, "KiB", 1024), room("/dev/shm")));
  line("mpi", mpi_library());
  if (const Status s = device_available(); !s) return line("gpu", s.message());
  const DeviceInfo d = device_info();
  if (d.emulated) return line("gpu", "none: this program was built without a GPU's compiler; device = gpu runs kernels on the host, for tests");
  line("gpu", fmt::format("{} x {}, {} multiprocessors, {:.1f} of {:.1f} GiB free", device_count(), d.name, d.multiprocessors,
                          static_cast<double>(d.free_bytes) / kGiB, static_cast<double>(d.memory_bytes) / kGiB));
  line("gpu software", d.software);
  const Result<std::string> between = device_library();
  line("between gpus", between ? between.value() : fmt::format("the host's memory: {}", between.message()));
  const Result<std::string> blas = gpu::blas_library();
  line("gpu products", fmt::format("the program's own; for `lockstep bench` {}", blas ? blas.value() : blas.message()));
}

// The model against reference numbers, in f32 within their limits, in bf16 decoding as the packed forward does.
Result<int64_t> check_goldens(Device device) {
  DeviceContext context(device, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  int64_t failed = 0;
  for (const BuiltInGolden& g : built_in_goldens()) {
    // verify_golden wants a file; this one lies in memory.
    const int fd = memfd_create(g.name, MFD_CLOEXEC);
    if (fd < 0 || write(fd, g.bytes.data(), g.bytes.size()) != static_cast<ssize_t>(g.bytes.size())) {
      if (fd >= 0) close(fd);
      return errorf("doctor: no memory for {} bytes of reference numbers", g.bytes.size());
    }
    for (const Numerics n : {Numerics::f32, Numerics::bf16}) {
      const Result<GoldenReport> report = verify_golden(context, fmt::format("/proc/self/fd/{}", fd), n);
      const std::string wrong = report ? golden_failures(report.value(), n, GoldenLimits()) : report.message();
      failed += !wrong.empty();
      line(device_name(device), fmt::format("golden {:<9} {:<5} {}", g.name, numerics_name(n),
                                            !wrong.empty() ? "FAILED " + wrong
                                                           : fmt::format("logits within {:.2g}, gradients within {:.2g} of the reference; decoding is bit-equal",
                                                                         report.value().logits_max_abs, report.value().grad_rel_l2_max)));
    }
    close(fd);
  }
  return failed;
}

// Few tokens through the gates: sampler against trainer, and that damage is found.
Result<int64_t> check(Device device) {
  GatesOptions o;
  o.model.device = device;
  o.numerics = {Numerics::bf16, Numerics::fp8};
  o.tokens = 500;
  o.only = {"G1", "G2", "G10"};
  if (device == Device::gpu) o.only.push_back("G6");  // graphs against kernel by kernel
  o.optimizer.lr = 1e-3f;
  o.optimizer.freeze_router = false;
  const Console console(false);
  const Result<std::vector<GateResult>> results =
      run_gates(o, console.hooks(), nullptr, [&](const GateResult& r) { line(device_name(device), r.str()); });
  if (!results) return results.status();
  return std::count_if(results.value().begin(), results.value().end(), [](const GateResult& r) { return r.verdict == Verdict::fail; });
}

}  // namespace

int doctor_command(bool machine_only) {
  tell_machine();
  if (machine_only) return kExitOk;
  std::vector<Device> devices = {Device::cpu};
  if (device_available() && !device_info().emulated) devices.push_back(Device::gpu);
  int64_t failed = 0;
  for (const Device d : devices)
    for (const auto part : {check_goldens, check}) {
      const Result<int64_t> found = part(d);
      if (!found) return fail(kExitFailure, found.status());
      failed += found.value();
    }
  std::printf(failed == 0 ? "doctor: all is well\n" : "doctor: %lld checks FAILED; `lockstep gates` and `lockstep verify` say more\n", static_cast<long long>(failed));
  return failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace lockstep
