#include "ops/hyperconn/hyperconn.h"
