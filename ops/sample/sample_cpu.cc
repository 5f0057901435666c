#include "ops/sample/sample.h"
