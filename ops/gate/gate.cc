#include "ops/gate/gate.h"
