#include "ops/matmul/matmul.h"
