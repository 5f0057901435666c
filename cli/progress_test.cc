#include "cli/progress.h"

#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace {

TEST(Progress, Durations) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(760), "12:40");
  EXPECT_EQ(format_duration(10931), "3:02:11");
  EXPECT_EQ(format_duration(187300), "2d 4h");
  EXPECT_EQ(format_duration(-1), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "?");
}

TEST(Progress, Counts) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(9999), "9999");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(4560000), "4.56M");
  EXPECT_EQ(format_count(2e9), "2.00G");
}

}  // namespace
}  // namespace lockstep
