#include "ops/attention/attention.h"

#include <gtest/gtest.h>
