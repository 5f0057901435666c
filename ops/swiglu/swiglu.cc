#include "ops/swiglu/swiglu.h"
