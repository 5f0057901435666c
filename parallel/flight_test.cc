#include "parallel/flight.h"

#include <gtest/gtest.h>

#include "io/testing.h"

namespace lockstep {
namespace {

using testing::fails_with;

FlightRecord example() {
  FlightRecord r;
  r.rank = 3;
  r.world = 16;
  r.host = "node7";
  r.pid = 4711;
  r.cause = FlightCause::crash;
  r.text = "a \"quoted\"\nmessage";
  r.wall_s = 1760000000.25;
  r.age_s = 93.5;
  r.groups = {{"world", {0, 1, 2, 3}, 7}, {"ep of stage 0", {3}, 0}};
  r.peers = {{5, 4713, "stopped"}};
  r.ops.push_back({.kind = "all_to_all",
                   .name = "expert dispatch",
                   .group = "world",
                   .seq = 7,
                   .bytes = 8192,
                   .caller = "model/moe_layer.cc:210",
                   .start_s = 12.5,
                   .end_s = 12.625});
  r.ops.push_back({.kind = "recv",
                   .name = "stage input",
                   .group = "world",
                   .seq = 2,
                   .peer = 1,
                   .tag = 4,
                   .bytes = 1,
                   .caller = "a.cc:1",
                   .start_s = 13.0});
  r.ops.push_back({.kind = "send",
                   .name = "stage output",
                   .group = "world",
                   .seq = 2,
                   .peer = 1,
                   .tag = 4,
                   .caller = "a.cc:2",
                   .start_s = 13.0,
                   .waited = false});
  return r;
}

TEST(FlightRecord, ReadsBackWhatWasWritten) {
  const std::string text = format_flight_record(example());
  const Result<FlightRecord> back = parse_flight_record(text, "rank_3.jsonl");
  ASSERT_TRUE(back.is_ok()) << back.message();
  EXPECT_EQ(format_flight_record(back.value()), text);
  const FlightRecord& r = back.value();
  EXPECT_EQ(r.cause, FlightCause::crash);
  EXPECT_EQ(r.text, example().text);
  ASSERT_EQ(r.ops.size(), 3u);
  EXPECT_EQ(r.ops[0].end_s, 12.625);
  EXPECT_FALSE(r.ops[0].pending());
  EXPECT_TRUE(r.ops[1].pending() && r.ops[1].waited && r.ops[1].point_to_point());
  EXPECT_FALSE(r.ops[2].waited);
  EXPECT_EQ(r.groups[0].members, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(r.peers[0].pid, 4713);
}

TEST(FlightRecord, ErrorsNameFileAndLine) {
  const std::string text = format_flight_record(example());
  const size_t second = text.find('\n') + 1;
  EXPECT_TRUE(fails_with(parse_flight_record("", "f"), "f: the record is empty"));
  EXPECT_TRUE(fails_with(parse_flight_record(text.substr(0, second) + "{\"op\":", "f"), "f:2: line 1"));
  EXPECT_TRUE(
      fails_with(parse_flight_record(text.substr(0, second) + "{\"op\":\"send\"}\n", "f"), "f:2: \"name\" must be a string"));
  EXPECT_TRUE(fails_with(parse_flight_record("[]\n", "f"), "f:1: an object is wanted"));
  EXPECT_TRUE(fails_with(parse_flight_record("{\"rank\":1}\n", "f"), "f:1: \"world\" must be an integer"));
  std::string odd = text;
  odd.replace(odd.find("crash"), 5, "crush");
  EXPECT_TRUE(fails_with(parse_flight_record(odd, "f"), "\"cause\" is \"crush\""));
  odd = text;
  odd.replace(odd.find("\"rank\":3"), 8, "\"rank\":99");
  EXPECT_TRUE(fails_with(parse_flight_record(odd, "f"), "rank 99 of 16"));
}

// Any byte may be damaged by a crash: an error or some record, never a crash of the reader.
TEST(FlightRecord, SurvivesDamage) {
  const std::string text = format_flight_record(example());
  for (size_t i = 0; i < text.size(); ++i) {
    for (char c : {'\0', '"', '9', '\n', '}'}) {
      std::string bad = text;
      bad[i] = c;
      const Result<FlightRecord> r = parse_flight_record(bad, "f");
      EXPECT_TRUE(!r || r.value().ops.size() <= 4);
    }
  }
}

}  // namespace
}  // namespace lockstep
