#include "ops/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>
