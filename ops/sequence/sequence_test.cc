#include "ops/sequence/sequence.h"

#include <gtest/gtest.h>
