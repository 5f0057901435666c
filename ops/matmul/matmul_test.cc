#include "ops/matmul/matmul.h"

#include <gtest/gtest.h>
