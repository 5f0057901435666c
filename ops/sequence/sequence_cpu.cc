#include "ops/sequence/sequence.h"
