// lockstep stall RUN_DIR: what the ranks of a run that could not go on left behind, read together.

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/console.h"
#include "io/utf8.h"
#include "parallel/diagnosis.h"

namespace lockstep {

int stall_command(const std::string& run_dir) {
  std::error_code error;
  std::string directory = run_dir;
  if (std::filesystem::exists(flight_root(run_dir), error)) {
    Result<std::string> newest = newest_flight(run_dir);
    if (!newest) return fail(kExitBadInput, newest.status());
    directory = newest.take();
  }
  Result<std::vector<FlightRecord>> records = load_flight(directory);
  if (!records) return fail(kExitBadInput, records.status());
  int world = 0;
  for (const FlightRecord& r : records.value()) world = std::max(world, r.world);
  std::printf("%s, records of %zu of %d ranks\n%s", directory.c_str(), records.value().size(), world,
              without_controls(diagnose(world, records.value()).text).c_str());
  return kExitOk;
}

}  // namespace lockstep
