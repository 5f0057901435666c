#include "ops/compressor/compressor.h"

#include <gtest/gtest.h>
