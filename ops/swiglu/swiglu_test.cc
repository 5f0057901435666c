#include "ops/swiglu/swiglu.h"

#include <gtest/gtest.h>
