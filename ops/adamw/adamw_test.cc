#include "ops/adamw/adamw.h"

#include <gtest/gtest.h>
