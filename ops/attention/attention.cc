#include "ops/attention/attention.h"
