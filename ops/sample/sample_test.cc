#include "ops/sample/sample.h"

#include <gtest/gtest.h>
