#include "ops/embed/embed.h"

#include <gtest/gtest.h>
