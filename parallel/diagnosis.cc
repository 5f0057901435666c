#include "parallel/diagnosis.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include "io/file.h"

namespace lockstep {

namespace fs = std::filesystem;

namespace {

constexpr size_t kWaitsListed = 32;

std::string describe(const FlightOp& op) {
  std::string s = fmt::format("{} \"{}\"", op.kind, op.name);
  if (op.point_to_point()) return s + fmt::format(" {} rank {}", op.kind == "send" ? "to" : "from", op.peer);
  return s;
}

std::string place(const FlightOp& op) { return fmt::format("({}, sequence {}, {})", op.group, op.seq, op.caller); }

std::string list(const std::vector<int>& ranks) {
  std::string s;
  for (int r : ranks) s += (s.empty() ? "" : ", ") + std::to_string(r);
  return s;
}

// One rank in one operation that it waits for.
struct Wait {
  int rank;
  const FlightOp* op;
  double since;              // wall clock
  double seconds;            // until its record
  std::vector<int> missing;  // who has not arrived
};

class Case {
 public:
  Case(int world, std::span<const FlightRecord> records) : of_(world, nullptr), state_(world) {
    for (const FlightRecord& r : records)
      if (known(r.rank)) of_[r.rank] = &r;
    for (const FlightRecord& r : records)
      for (const FlightPeer& p : r.peers)
        // A rank that wrote its record and left is no casualty; one that was seen stopped is, even if it was woken to die.
        if (known(p.rank) && (p.state == "stopped" || of_[p.rank] == nullptr)) state_[p.rank] = &p;
    for (const FlightRecord& r : records)
      if (known(r.rank) && of_[r.rank] == &r)
        for (const FlightOp& op : r.ops)
          if (op.pending() && op.waited)
            waits_.push_back({r.rank, &op, r.wall_s - r.age_s + op.start_s, r.age_s - op.start_s, missing(r, op)});
    std::sort(waits_.begin(), waits_.end(), [](const Wait& a, const Wait& b) { return a.since < b.since; });
  }

  Diagnosis solve() const {
    if (const FlightRecord* r = first_failed())
      return about(r->rank, fmt::format("rank {} {}: {}", r->rank, failure_verb(*r), r->text), false);
    for (const char* state : {"gone", "stopped"}) {
      const std::vector<int> ranks = in_state(state);
      if (ranks.empty()) continue;
      const int rank = most_awaited(ranks);
      std::string why = fmt::format("its process {} is {}", state_[rank]->pid, state);
      if (ranks.size() > 1) why += fmt::format("; the processes of ranks {} are {}", list(ranks), state);
      return about(rank, why, true);
    }
    if (terminated()) return finish(-1, nullptr, "the job was terminated from outside (SIGTERM)");
    if (Diagnosis d; disagreement(&d)) return d;
    if (const std::vector<int> silent = without_record(); !silent.empty() && silent.size() < of_.size()) {
      std::string why = "it wrote no record: its host may be lost";
      if (silent.size() > 1) why += fmt::format("; no record came from ranks {}", list(silent));
      return about(most_awaited(silent), why, true);
    }
    return chain();
  }

 private:
  bool known(int rank) const { return rank >= 0 && rank < static_cast<int>(of_.size()); }

  std::vector<int> missing(const FlightRecord& record, const FlightOp& op) const {
    std::vector<int> ranks;
    if (op.point_to_point()) {
      if (known(op.peer) && !has_counterpart(record.rank, op)) ranks.push_back(op.peer);
      return ranks;
    }
    for (const FlightGroup& g : record.groups) {
      if (g.name != op.group) continue;
      for (int m : g.members)
        if (known(m) && m != record.rank && started(m, op.group) < op.seq) ranks.push_back(m);
    }
    return ranks;
  }

  // Whether the peer has entered the send that this recv waits for, or the other way round.
  bool has_counterpart(int rank, const FlightOp& op) const {
    if (of_[op.peer] == nullptr) return false;
    const char* kind = op.kind == "send" ? "recv" : "send";
    for (const FlightOp& o : of_[op.peer]->ops)
      if (o.kind == kind && o.peer == rank && o.tag == op.tag && o.group == op.group && o.seq >= op.seq) return true;
    return false;
  }

  int64_t started(int rank, const std::string& group) const {
    if (of_[rank] == nullptr) return 0;
    for (const FlightGroup& g : of_[rank]->groups)
      if (g.name == group) return g.started;
    return 0;
  }

  const FlightRecord* first_failed() const {
    const FlightRecord* first = nullptr;
    for (const FlightRecord* r : of_) {
      if (r == nullptr || (r->cause != FlightCause::error && r->cause != FlightCause::crash)) continue;
      if (first == nullptr || r->wall_s < first->wall_s) first = r;
    }
    return first;
  }

  static const char* failure_verb(const FlightRecord& r) { return r.cause == FlightCause::error ? "failed" : "crashed"; }

  std::vector<int> in_state(const std::string& state) const {
    std::vector<int> ranks;
    for (size_t r = 0; r < state_.size(); ++r)
      if (state_[r] != nullptr && state_[r]->state == state) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  std::vector<int> without_record() const {
    std::vector<int> ranks;
    for (size_t r = 0; r < of_.size(); ++r)
      if (of_[r] == nullptr) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  // The longest wait that `rank` is missing in; nullptr if nobody waits for it.
  const Wait* wait_for(int rank) const {
    for (const Wait& w : waits_)
      if (std::find(w.missing.begin(), w.missing.end(), rank) != w.missing.end()) return &w;
    return nullptr;
  }

  const Wait* wait_of(int rank) const {
    for (const Wait& w : waits_)
      if (w.rank == rank) return &w;
    return nullptr;
  }

  // Of `ranks`, the one that was waited for first; the lowest if none was.
  int most_awaited(const std::vector<int>& ranks) const {
    for (const Wait& w : waits_)
      for (int m : w.missing)
        if (std::find(ranks.begin(), ranks.end(), m) != ranks.end()) return m;
    return ranks.front();
  }

  // The headline: "rank R did not arrive at OPERATION: WHY", or `why` alone where that is a whole sentence.
  Diagnosis about(int rank, const std::string& why, bool reason_only) const {
    const Wait* w = wait_for(rank);
    std::string head = why;
    if (reason_only && w != nullptr)
      head = fmt::format("rank {} did not arrive at {} {}: {}", rank, describe(*w->op), place(*w->op), why);
    if (reason_only && w == nullptr) head = fmt::format("rank {}: {}", rank, why);
    return finish(rank, w, head);
  }

  Diagnosis finish(int rank, const Wait* wait, std::string head) const {
    Diagnosis d;
    d.rank = rank;
    if (wait != nullptr) d.operation = describe(*wait->op);
    d.text = std::move(head) + "\n";
    for (size_t i = 0; i < waits_.size() && i < kWaitsListed; ++i) {
      const Wait& w = waits_[i];
      d.text += fmt::format("  rank {} waited {:.1f} s in {} {}", w.rank, w.seconds, describe(*w.op), place(*w.op));
      d.text += w.missing.empty() ? ", where everyone had arrived\n"
                                  : fmt::format(" for rank{} {}\n", w.missing.size() > 1 ? "s" : "", list(w.missing));
    }
    if (waits_.size() > kWaitsListed) d.text += fmt::format("  and {} more waits\n", waits_.size() - kWaitsListed);
    if (known(rank)) d.text += last_seen(rank);
    return d;
  }

  std::string last_seen(int rank) const {
    const FlightRecord* r = of_[rank];
    if (r == nullptr) return fmt::format("  rank {} left no record\n", rank);
    const FlightOp* last = nullptr;
    for (const FlightOp& op : r->ops)
      if (!op.pending() && (last == nullptr || op.end_s > last->end_s)) last = &op;
    if (last == nullptr) return fmt::format("  rank {} on {} had completed nothing\n", rank, r->host);
    return fmt::format("  rank {} on {} last completed {} {}, {:.1f} s before its record\n", rank, r->host, describe(*last),
                       place(*last), r->age_s - last->end_s);
  }

  // Two ranks at the same sequence number of a group in different operations.
  bool disagreement(Diagnosis* out) const {
    for (const Wait& w : waits_) {
      if (w.op->point_to_point()) continue;
      std::map<std::string, std::vector<int>> by_name;
      for (const Wait& other : waits_)
        if (!other.op->point_to_point() && other.op->group == w.op->group && other.op->seq == w.op->seq)
          by_name[describe(*other.op)].push_back(other.rank);
      if (by_name.size() < 2) continue;
      const auto fewest = std::min_element(by_name.begin(), by_name.end(),
                                           [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
      std::string head = fmt::format("the ranks of {} disagree about operation {}:", w.op->group, w.op->seq);
      for (const auto& [name, ranks] : by_name)
        head += fmt::format(" {} on rank{} {};", name, ranks.size() > 1 ? "s" : "", list(ranks));
      head.pop_back();
      *out = finish(fewest->second.front(), &w, head);
      return true;
    }
    return false;
  }

  // Follows who waits for whom from the longest wait on. Ends at a rank that waits for nobody, or in a circle.
  Diagnosis chain() const {
    const Wait* start = nullptr;
    for (const Wait& w : waits_) {
      if (start == nullptr) start = &w;
      if (of_[w.rank]->cause == FlightCause::stall) {
        start = &w;
        break;
      }
    }
    if (start == nullptr) return finish(-1, nullptr, "no rank was waiting for another");
    if (start->missing.empty())
      return finish(-1, start,
                    fmt::format("every rank arrived at {} {}, but it does not complete: look at the network",
                                describe(*start->op), place(*start->op)));
    std::vector<bool> seen(of_.size(), false);
    seen[start->rank] = true;
    if (const int rank = idle_end(start->missing, &seen); rank >= 0) {
      const Wait* w = wait_for(rank);
      return finish(rank, w,
                    fmt::format("rank {} did not arrive at {} {}: it waits for nobody, so it is busy or stuck elsewhere", rank,
                                describe(*w->op), place(*w->op)));
    }
    const int rank = start->missing.front();
    const Wait* theirs = wait_of(rank);
    return finish(rank, start,
                  fmt::format("ranks wait for each other: rank {} in {} for rank {}, which is in {} {}", start->rank,
                              describe(*start->op), rank, describe(*theirs->op), place(*theirs->op)));
  }

  int idle_end(const std::vector<int>& ranks, std::vector<bool>* seen) const {
    for (int r : ranks) {
      if ((*seen)[r]) continue;
      (*seen)[r] = true;
      const Wait* w = wait_of(r);
      if (w == nullptr) return r;
      if (const int end = idle_end(w->missing, seen); end >= 0) return end;
    }
    return -1;
  }

  // Whether a SIGTERM is all that happened.
  bool terminated() const {
    bool any = false;
    for (const FlightRecord* r : of_) {
      if (r == nullptr) continue;
      if (r->cause != FlightCause::terminated && r->cause != FlightCause::told) return false;
      any = any || r->cause == FlightCause::terminated;
    }
    return any;
  }

  std::vector<const FlightRecord*> of_;   // by rank; nullptr: silent
  std::vector<const FlightPeer*> state_;  // by rank; nullptr: nobody saw it gone or stopped
  std::vector<Wait> waits_;               // the longest first
};

}  // namespace

Diagnosis diagnose(int world, std::span<const FlightRecord> records) { return Case(world, records).solve(); }

std::string flight_root(const std::string& run_dir) { return run_dir + "/flight"; }

std::string flight_record_name(int rank) { return fmt::format("rank_{}.jsonl", rank); }

Result<std::vector<FlightRecord>> load_flight(const std::string& directory) {
  std::vector<FlightRecord> records;
  std::error_code error;
  for (fs::directory_iterator it(directory, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("rank_") || !name.ends_with(".jsonl")) continue;
    const std::string path = it->path().string();
    Result<std::string> text = read_file(path);
    if (!text) return text.status();
    Result<FlightRecord> record = parse_flight_record(text.value(), path);
    if (!record) return record.status();
    records.push_back(record.take());
  }
  if (error) return errorf("cannot list {}: {}", directory, error.message());
  if (records.empty()) return errorf("{} holds no flight records", directory);
  std::sort(records.begin(), records.end(), [](const FlightRecord& a, const FlightRecord& b) { return a.rank < b.rank; });
  return records;
}

Result<std::string> newest_flight(const std::string& run_dir) {
  const std::string root = flight_root(run_dir);
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    std::error_code inner;
    if (fs::is_directory(it->path(), inner) && !fs::is_empty(it->path(), inner)) found.push_back(it->path().string());
  }
  if (found.empty()) return errorf("{} holds no flight records: the run has not stalled since its directory was made", root);
  return *std::max_element(found.begin(), found.end());
}

}  // namespace lockstep
