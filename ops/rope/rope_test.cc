#include "ops/rope/rope.h"

#include <gtest/gtest.h>
