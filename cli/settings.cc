// lockstep settings: every setting of RUN.toml, from the same rows that read it.

#include <cstdio>

#include "cli/commands.h"
#include "cli/options.h"

namespace lockstep {

int settings_command() {
  std::fputs(settings_help().c_str(), stdout);
  return kExitOk;
}

}  // namespace lockstep
