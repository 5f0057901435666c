#include "ops/logprob/logprob.h"

#include <gtest/gtest.h>
