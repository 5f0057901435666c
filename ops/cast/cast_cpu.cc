#include "ops/cast/cast.h"
