#include "ops/moe_permute/moe_permute.h"
