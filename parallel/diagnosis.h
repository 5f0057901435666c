#pragma once
// Reads the flight records of all ranks together and says which rank the others waited for, in which operation, and why.
// The watchdog calls it when a job ends; `lockstep stall RUN_DIR` calls it afterwards.

#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "parallel/flight.h"

namespace lockstep {

struct Diagnosis {
  int rank = -1;          // to look at first; -1 if none stands out
  std::string operation;  // that the others wait in: `all_to_all "expert dispatch"`; empty if nobody waits
  std::string text;       // a headline, then who waits where and what that rank did last
};

// `records` in any order; ranks of `world` without one count as silent. In order of trust: a rank that failed or crashed, a
// process that is gone or stopped, ranks that disagree about the operation, a silent rank, and else the end of the chain of
// waits: the rank that is waited for and waits for nobody.
Diagnosis diagnose(int world, std::span<const FlightRecord> records);

// The records rank_K.jsonl of a directory, by rank. Unreadable ones are errors; none at all is one too.
Result<std::vector<FlightRecord>> load_flight(const std::string& directory);

// Where the watchdog of a run keeps its records: RUN_DIR/flight/000001 and on, one directory a start. They go away with a clean
// end.
std::string flight_root(const std::string& run_dir);
std::string flight_record_name(int rank);  // "rank_3.jsonl"
// The newest directory that holds records.
Result<std::string> newest_flight(const std::string& run_dir);

}  // namespace lockstep
