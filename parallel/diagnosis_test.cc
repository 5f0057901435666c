#include "parallel/diagnosis.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;

// A little world of records: every rank is 100 s old, knows the world and its own groups, and waits where the test says.
class Story {
 public:
  explicit Story(int world) : world_(world) {
    for (int r = 0; r < world; ++r) {
      FlightRecord record;
      record.rank = r;
      record.world = world;
      record.host = "host";
      record.pid = 1000 + r;
      record.cause = FlightCause::told;
      record.wall_s = 5000;
      record.age_s = 100;
      records_.push_back(record);
    }
    std::vector<int> all;
    for (int r = 0; r < world; ++r) all.push_back(r);
    group("world", all);
  }
  void group(const std::string& name, std::vector<int> members) {
    for (int m : members) records_[m].groups.push_back({name, members, 0});
  }
  void completed(int rank, const char* kind, const char* name, const std::string& group, double end_s) {
    const int64_t seq = ++group_of(rank, group).started;
    records_[rank].ops.push_back(
        {.kind = kind, .name = name, .group = group, .seq = seq, .caller = "a.cc:1", .start_s = end_s - 0.5, .end_s = end_s});
  }
  void waits(int rank, const char* kind, const char* name, const std::string& group, double start_s) {
    const int64_t seq = ++group_of(rank, group).started;
    records_[rank].ops.push_back(
        {.kind = kind, .name = name, .group = group, .seq = seq, .caller = "a.cc:2", .start_s = start_s});
  }
  void message(int rank, const char* kind, int peer, int64_t seq, double start_s, double end_s = -1) {
    records_[rank].ops.push_back({.kind = kind,
                                  .name = "stage",
                                  .group = "world",
                                  .seq = seq,
                                  .peer = peer,
                                  .tag = 1,
                                  .caller = "a.cc:3",
                                  .start_s = start_s,
                                  .end_s = end_s});
  }
  FlightRecord& operator[](int rank) { return records_[rank]; }
  void silence(int rank) { silent_.push_back(rank); }
  Diagnosis solve() const {
    std::vector<FlightRecord> said;
    for (const FlightRecord& r : records_)
      if (std::find(silent_.begin(), silent_.end(), r.rank) == silent_.end()) said.push_back(r);
    return diagnose(world_, said);
  }

 private:
  FlightGroup& group_of(int rank, const std::string& name) {
    for (FlightGroup& g : records_[rank].groups)
      if (g.name == name) return g;
    CHECK(false, "rank {} is not in {}", rank, name);
  }
  int world_;
  std::vector<FlightRecord> records_;
  std::vector<int> silent_;
};

void expect(const Diagnosis& d, int rank, const std::string& operation, std::vector<std::string> parts) {
  EXPECT_EQ(d.rank, rank) << d.text;
  EXPECT_EQ(d.operation, operation) << d.text;
  for (const std::string& part : parts)
    EXPECT_NE(d.text.find(part), std::string::npos) << "wanted: " << part << "\nin: " << d.text;
}

TEST(Diagnosis, BusyRank) {
  Story s(4);
  for (int r = 0; r < 4; ++r) s.completed(r, "barrier", "step", "world", 80);
  for (int r : {0, 1, 3}) s.waits(r, "all_to_all", "expert dispatch", "world", 90);
  s[0].cause = FlightCause::stall;
  expect(s.solve(), 2, "all_to_all \"expert dispatch\"",
         {"rank 2 did not arrive at all_to_all \"expert dispatch\" (world, sequence 2, a.cc:2): it waits for nobody",
          "rank 0 waited 10.0 s in all_to_all \"expert dispatch\" (world, sequence 2, a.cc:2) for rank 2",
          "rank 2 on host last completed barrier \"step\" (world, sequence 1, a.cc:1), 20.0 s before its record"});
}

TEST(Diagnosis, DeadAndStoppedRanks) {
  Story s(4);
  for (int r : {0, 1, 3}) s.waits(r, "barrier", "step", "world", 90);
  s[1].cause = FlightCause::peer_gone;
  s[1].peers = {{2, 4711, "gone"}};
  s.silence(2);
  expect(s.solve(), 2, "barrier \"step\"",
         {"rank 2 did not arrive at barrier \"step\" (world, sequence 1, a.cc:2): its process 4711 is gone",
          "rank 2 left no record"});
  s[1].peers = {{2, 4711, "stopped"}};
  expect(s.solve(), 2, "barrier \"step\"", {"its process 4711 is stopped"});
}

TEST(Diagnosis, StoppedRankThatWokeUpToDieIsStillTheOne) {
  Story s(3);
  for (int r : {0, 1}) s.waits(r, "barrier", "step", "world", 90);
  s.waits(2, "barrier", "step", "world", 99.9);  // entered it after it was woken
  s[0].cause = FlightCause::stall;
  s[0].peers = {{2, 4711, "stopped"}};
  expect(s.solve(), 2, "", {"rank 2: its process 4711 is stopped"});
}

TEST(Diagnosis, RankThatLeftAfterItsRecordIsNoCasualty) {
  Story s(3);
  for (int r : {0, 1}) s.waits(r, "barrier", "step", "world", 90);
  s[0].cause = FlightCause::stall;
  s[1].peers = {{0, 1000, "gone"}};
  expect(s.solve(), 2, "barrier \"step\"", {"it waits for nobody"});
}

TEST(Diagnosis, ChainOfWaitsEndsAtTheCulprit) {
  // Rank 0 waits for 1 in a group, 1 for a message of 2, 2 for a message of 3, which computes.
  Story s(5);
  s.group("ep", {0, 1});
  s.waits(0, "all_to_all", "expert dispatch", "ep", 50);
  s.message(1, "recv", 2, 7, 40);
  s.message(2, "recv", 3, 7, 45);
  s.message(3, "send", 2, 6, 30, 31);
  s[0].cause = FlightCause::stall;
  expect(s.solve(), 3, "recv \"stage\" from rank 3",
         {"rank 3 did not arrive at recv \"stage\" from rank 3", "rank 1 waited 60.0 s"});
}

TEST(Diagnosis, MessageThatWasSentIsNotMissing) {
  Story s(3);
  s.message(1, "recv", 2, 7, 40);
  s.message(2, "send", 1, 7, 39, 39.5);
  s[1].cause = FlightCause::stall;
  expect(s.solve(), -1, "recv \"stage\" from rank 2", {"every rank arrived", "look at the network"});
}

TEST(Diagnosis, SendInTheBackgroundIsNoWait) {
  Story s(2);
  s.waits(0, "barrier", "step", "world", 50);
  s.message(1, "send", 0, 1, 20);
  s[1].ops.back().waited = false;
  s[0].cause = FlightCause::stall;
  expect(s.solve(), 1, "barrier \"step\"", {"it waits for nobody"});
}

TEST(Diagnosis, Circle) {
  Story s(2);
  s.message(0, "recv", 1, 1, 50);
  s.message(1, "recv", 0, 1, 51);
  s[0].cause = FlightCause::stall;
  expect(s.solve(), 1, "recv \"stage\" from rank 1",
         {"ranks wait for each other: rank 0 in recv \"stage\" from rank 1 for rank 1"});
}

TEST(Diagnosis, RanksInDifferentOperations) {
  Story s(4);
  for (int r : {0, 2, 3}) s.waits(r, "all_to_all", "expert dispatch", "world", 50);
  s.waits(1, "barrier", "save", "world", 60);
  s[0].cause = FlightCause::stall;
  expect(s.solve(), 1, "all_to_all \"expert dispatch\"",
         {"the ranks of world disagree about operation 1: all_to_all \"expert dispatch\" on ranks 0, 2, 3; barrier \"save\" on "
          "rank 1"});
}

TEST(Diagnosis, FailuresComeFirst) {
  Story s(3);
  for (int r : {0, 1}) s.waits(r, "barrier", "step", "world", 90);
  s[2].cause = FlightCause::error;
  s[2].text = "model.safetensors: cannot read";
  s[2].wall_s = 4990;
  s[1].cause = FlightCause::crash;  // a consequence, later
  s[1].text = "Aborted";
  expect(s.solve(), 2, "barrier \"step\"", {"rank 2 failed: model.safetensors: cannot read", "rank 0 waited 10.0 s"});
  s[1].wall_s = 4980;
  s[2].cause = FlightCause::told;
  expect(s.solve(), 1, "", {"rank 1 crashed: Aborted"});
}

TEST(Diagnosis, SilentHost) {
  Story s(4);
  for (int r : {0, 1}) s.waits(r, "barrier", "step", "world", 90);
  s[0].cause = FlightCause::stall;
  s.silence(2);
  s.silence(3);
  expect(s.solve(), 2, "barrier \"step\"", {"it wrote no record", "no record came from ranks 2, 3"});
}

TEST(Diagnosis, Terminated) {
  Story s(2);
  s.waits(0, "barrier", "step", "world", 99);
  s[0].cause = FlightCause::terminated;
  expect(s.solve(), -1, "", {"terminated from outside"});
}

TEST(Diagnosis, ManyWaitsAreCut) {
  Story s(100);
  for (int r = 1; r < 100; ++r) s.waits(r, "barrier", "step", "world", 90);
  s[1].cause = FlightCause::stall;
  expect(s.solve(), 0, "barrier \"step\"", {"and 67 more waits"});
}

TEST(Diagnosis, RecordsOfAnotherShapeDoNoHarm) {
  Story s(2);
  s.waits(0, "barrier", "step", "world", 90);
  s[0].groups[0].members = {-1, 0, 7};
  s[0].peers = {{99, 1, "gone"}};
  s.message(0, "recv", 12, 1, 3);
  EXPECT_FALSE(s.solve().text.empty());
  EXPECT_EQ(diagnose(3, {}).rank, -1);
}

TEST(Flight, NewestDirectoryWithRecords) {
  testing::TemporaryDirectory run;
  EXPECT_TRUE(fails_with(newest_flight(run.path()), "holds no flight records"));
  for (const char* n : {"000001", "000002", "000010"}) std::filesystem::create_directories(flight_root(run.path()) + "/" + n);
  Story s(2);
  const std::string two = flight_root(run.path()) + "/000002";
  testing::put(two + "/" + flight_record_name(1), format_flight_record(s[1]));
  const Result<std::string> newest = newest_flight(run.path());
  ASSERT_TRUE(newest.is_ok()) << newest.message();
  EXPECT_EQ(newest.value(), two);
  const Result<std::vector<FlightRecord>> records = load_flight(two);
  ASSERT_TRUE(records.is_ok()) << records.message();
  ASSERT_EQ(records.value().size(), 1u);
  EXPECT_EQ(records.value()[0].rank, 1);
  testing::put(two + "/" + flight_record_name(0), "{");
  EXPECT_TRUE(fails_with(load_flight(two), "rank_0.jsonl:1:"));
  EXPECT_TRUE(fails_with(load_flight(flight_root(run.path()) + "/000001"), "holds no flight records"));
}

}  // namespace
}  // namespace lockstep
