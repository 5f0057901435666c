#pragma once
// The flight record: what one rank did last, and what it was waiting for when the job ended. The watchdog writes one file a rank;
// diagnosis.h reads them together. Text and values only; nothing here knows MPI, threads or time.
//
// A file is JSON lines: a head, one line for each group, one for each rank of the same host that is not running, then the
// operations, oldest first. "end_s" is missing while pending; "background":true marks what was begun and is not waited for yet.
//   {"rank":3,"world":16,"host":"node7","pid":4711,"cause":"stall","text":"...","wall_s":1760000000.25,"age_s":93.5}
//   {"group":"ep of stage 0","members":[0,1,2,3],"started":118}
//   {"peer":5,"pid":4713,"state":"stopped"}
//   {"op":"all_to_all","name":"expert dispatch","group":"ep of stage 0","seq":118,"peer":-1,"tag":-1,"bytes":8192,
//    "caller":"model/moe_layer.cc:210","start_s":12.5,"end_s":12.6}
// Times of operations count from the start of the watchdog on that rank.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace lockstep {

// Why a rank ended.
enum class FlightCause : uint8_t {
  stall,       // an operation missed its deadline here
  error,       // Watchdog::fail was called here
  crash,       // a CHECK, an uncaught exception or a bad access here
  peer_gone,   // the process of another rank of this host was gone
  terminated,  // SIGTERM: the launcher or a person ended the job
  told,        // another rank said so
};
const char* flight_cause_name(FlightCause cause);

struct FlightGroup {
  std::string name;
  std::vector<int> members;  // ranks of the world, ascending
  int64_t started = 0;       // collectives that this rank entered
};

struct FlightPeer {
  int rank = -1;
  int64_t pid = 0;
  std::string state;  // "stopped" | "gone"
};

struct FlightOp {
  std::string kind;  // barrier, broadcast, all_gather, all_to_all, reduce_scatter, all_reduce, send, recv, finalize
  std::string name;
  std::string group;
  int64_t seq = 0;  // from 1: collectives of a group on this rank; send and recv count for each peer and tag
  int peer = -1;    // rank of the world, of send and recv alone
  int tag = -1;
  int64_t bytes = 0;
  std::string caller;  // file:line
  double start_s = 0;
  double end_s = -1;   // below 0: pending
  bool waited = true;  // false: begun in the background, and the rank does not wait for it yet

  bool pending() const { return end_s < 0; }
  bool point_to_point() const { return peer >= 0; }
};

struct FlightRecord {
  int rank = 0;
  int world = 1;
  std::string host;
  int64_t pid = 0;
  FlightCause cause = FlightCause::stall;
  std::string text;   // of stall, error, crash and peer_gone: what happened
  double wall_s = 0;  // seconds since 1970 when the record was made
  double age_s = 0;   // the same on the clock of the operations
  std::vector<FlightGroup> groups;
  std::vector<FlightPeer> peers;
  std::vector<FlightOp> ops;  // oldest first
};

std::string format_flight_record(const FlightRecord& record);
// `origin` (a file name) opens every message.
Result<FlightRecord> parse_flight_record(std::string_view text, std::string_view origin);

}  // namespace lockstep
