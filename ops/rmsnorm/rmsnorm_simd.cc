#include "ops/rmsnorm/rmsnorm.h"
