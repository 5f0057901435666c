#include "ops/moe_permute/moe_permute.h"

#include <gtest/gtest.h>
