#include "ops/cast/cast.h"

#include <gtest/gtest.h>
