#include "ops/embed/embed.h"
