#include "ops/indexer/indexer.h"
