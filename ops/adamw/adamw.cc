#include "ops/adamw/adamw.h"
