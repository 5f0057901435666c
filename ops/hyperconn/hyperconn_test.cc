#include "ops/hyperconn/hyperconn.h"

#include <gtest/gtest.h>
