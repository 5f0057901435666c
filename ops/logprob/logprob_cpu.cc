#include "ops/logprob/logprob.h"
