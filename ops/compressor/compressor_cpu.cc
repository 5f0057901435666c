#include "ops/compressor/compressor.h"
