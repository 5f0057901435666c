#include "ops/rope/rope.h"
