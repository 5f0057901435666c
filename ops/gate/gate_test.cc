#include "ops/gate/gate.h"

#include <gtest/gtest.h>
