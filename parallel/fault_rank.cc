// One rank of the jobs that fault_test starts: works in a loop until a fault hits one of the ranks, or for a while if none is
// wanted.
//
//   fault_rank DIR OPERATION FAULT VICTIM DEADLINE_S SEED
//
// OPERATION gpu_X is X of what lies on GPUs.
//
// The process that mpirun starts only watches: its child is the rank. It writes how and when the child ended to DIR/exit_RANK,
// which mpirun does not tell.

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "core/device.h"
#include "io/file.h"
#include "parallel/collective.h"

namespace {

using namespace lockstep;

double wall_s() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void note(const std::string& path, const std::string& text) {
  if (const Status s = atomic_write(path, text, Durability::later); !s) std::fprintf(stderr, "%s\n", s.message().c_str());
}

struct Job {
  std::string directory, operation, fault;
  int victim;
  double deadline_s;
  unsigned seed;
  pid_t launcher;
};

[[gnu::noinline]] void write_nowhere(volatile int* where) { *where = 1; }

// Faults of the rank's own thread, between two operations. Those from outside come from a thread and hit anywhere.
void misbehave(const Job& job, RankWorld& world) {
  note(job.directory + "/fault_time", fmt::format("{:.3f}", wall_s()));
  if (job.fault == "error") world.fail("model.safetensors: cannot read, as the test wants");
  if (job.fault == "check") CHECK(job.victim < 0, "victim {}", job.victim);
  if (job.fault == "throw") throw std::runtime_error("as the test wants");
  if (job.fault == "segv") write_nowhere(nullptr);
  if (job.fault == "exit") _exit(3);
  if (job.fault == "busy") sleep(1000);
  if (job.fault == "other") world.all().barrier("another operation");
}

bool from_outside(const std::string& fault) { return fault == "kill" || fault == "stop" || fault == "terminate"; }

int work(const Job& job) {
  Result<std::unique_ptr<RankWorld>> started = RankWorld::start({.deadline_s = job.deadline_s});
  if (!started) {
    std::fprintf(stderr, "%s\n", started.message().c_str());
    return 1;
  }
  RankWorld& world = *started.value();
  if (const Status s = world.record_in(job.directory); !s) {
    std::fprintf(stderr, "%s\n", s.message().c_str());
    return 1;
  }
  RankGroup& all = world.all();
  const bool on_gpu = job.operation.starts_with("gpu_");
  const std::string o = on_gpu ? job.operation.substr(4) : job.operation;
  if (on_gpu) {
    if (const Status s = world.use_devices(Transport::automatic); !s) {
      std::fprintf(stderr, "%s\n", s.message().c_str());
      return 1;
    }
  }
  DeviceContext context(on_gpu ? Device::gpu : Device::cpu, 1, size_t{256} << 20);
  const int n = world.size(), me = world.rank();
  std::mt19937 random(job.seed);  // the same on every rank
  const bool victim = me == job.victim;
  std::thread hand;
  if (victim && from_outside(job.fault)) {
    const int after_ms = 50 + static_cast<int>(random() % 200);
    hand = std::thread([&job, after_ms] {
      usleep(static_cast<useconds_t>(after_ms) * 1000);
      note(job.directory + "/fault_time", fmt::format("{:.3f}", wall_s()));
      if (job.fault == "terminate")
        kill(job.launcher, SIGTERM);
      else
        kill(getpid(), job.fault == "kill" ? SIGKILL : SIGSTOP);
    });
    hand.detach();
  }
  constexpr int64_t kElements = 1 << 20;
  const TensorView x = zeros(context, DType::f32, {kElements}, "x"), y = zeros(context, DType::f32, {kElements}, "y");
  const std::vector<int64_t> rows(n, 200);
  for (int step = 0; job.fault != "none" || step < 60; ++step) {
    if (victim && !from_outside(job.fault) && job.fault != "none" && step == 20) {
      if (job.fault == "leave") {
        note(job.directory + "/fault_time", fmt::format("{:.3f}", wall_s()));
        return 0;
      }
      misbehave(job, world);
    }
    if (job.fault == "none") usleep(20000);
    if (o == "barrier") all.barrier("step");
    if (o == "compute") {
      usleep(20000);
      all.barrier("step");
    }
    if (o == "broadcast") all.broadcast(context, TensorView(x.data, DType::f32, {1 << 18}), step % n, "weights");
    if (o == "all_reduce") all.all_reduce(context, TensorView(x.data, DType::f32, {1 << 18}), "gradients");
    if (o == "all_to_all") {
      const TensorView from(x.data, DType::f32, {200 * n, 64}), to(y.data, DType::f32, {200 * n, 64});
      all.all_to_all(context, to, rows, from, rows, "expert dispatch");
    }
    if (o == "pipeline") {
      const TensorView out(x.data, DType::f32, {1 << 16}), in(y.data, DType::f32, {1 << 16});
      const RankGroup::Request sent = all.start_send(context, out, (me + 1) % n, 1, "stage output");
      all.recv(context, in, (me + n - 1) % n, 1, "stage input");
      all.wait(sent);
    }
  }
  world.finish();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK_EQ(argc, 7);
  const Job job{argv[1],  argv[2], argv[3], std::atoi(argv[4]), std::atof(argv[5]), static_cast<unsigned>(std::atoi(argv[6])),
                getppid()};
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  CHECK(rank != nullptr, "start this with mpirun");
  const pid_t child = fork();
  if (child == 0) return work(job);
  signal(SIGTERM, SIG_IGN);  // meant for the rank, which has its own way to end
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
  }
  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  note(fmt::format("{}/exit_{}", job.directory, rank), fmt::format("{} {:.3f}", code, wall_s()));
  // mpirun kills the rest once it has seen a few end; this is about how they end by themselves.
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  for (int tries = 0; tries < 100; ++tries) {
    int missing = 0;
    for (int r = 0; r < std::atoi(size); ++r) missing += access(fmt::format("{}/exit_{}", job.directory, r).c_str(), F_OK) != 0;
    if (missing == 0) break;
    usleep(50000);
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) kill(getpid(), SIGKILL);
  return code;
}
