#include "ops/indexer/indexer.h"

#include <gtest/gtest.h>
