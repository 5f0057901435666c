#pragma once
// Published models by short name.

#include <string>

#include "model/config.h"

namespace lockstep {

// "flash" and "pro": the released DeepSeek-V4 configs, as in configs/; anything else is a config.json or a directory that holds one.
Result<ModelConfig> known_model(const std::string& name);

}  // namespace lockstep
