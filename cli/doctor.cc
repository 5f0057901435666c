// lockstep doctor: what this machine has, what the program can do with it, and a self-check of about a minute.

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "cli/console.h"
#include "core/device.h"
#include "parallel/collective.h"
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
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  line("cpu", fmt::format("{} cores, {:.1f} GiB of memory{}", std::thread::hardware_concurrency(), memory / kGiB,
#if defined(__x86_64__)
                          __builtin_cpu_supports("avx512f") ? ", AVX-512" : ", AVX2"
#else
                          ""
#endif
                          ));
  line("limits", fmt::format("{} of open files, {} of locked memory, /dev/shm {}", limit(RLIMIT_NOFILE, "", 1), limit(RLIMIT_MEMLOCK, "KiB", 1024), room("/dev/shm")));
  if (const Status s = device_available(); !s) return line("gpu", s.message());
  const DeviceInfo d = device_info();
  if (d.emulated) return line("gpu", "none: this program was built without a GPU's compiler; device = gpu runs kernels on the host, for tests");
  line("gpu", fmt::format("{} x {}, {} multiprocessors, {:.1f} of {:.1f} GiB free", device_count(), d.name, d.multiprocessors,
                          static_cast<double>(d.free_bytes) / kGiB, static_cast<double>(d.memory_bytes) / kGiB));
  const Result<std::string> between = device_library();
  line("between gpus", between ? between.value() : fmt::format("the host's memory: {}", between.message()));
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
  for (const Device d : devices) {
    const Result<int64_t> found = check(d);
    if (!found) return fail(kExitFailure, found.status());
    failed += found.value();
  }
  std::printf(failed == 0 ? "doctor: all is well\n" : "doctor: %lld checks FAILED; `lockstep gates` says more\n", static_cast<long long>(failed));
  return failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace lockstep
