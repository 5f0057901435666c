// Any bytes as a run file: refused with a reason, or settings whose TOML reads back the same.

#include <cstdint>

#include "cli/options.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  ResolvedConfig config = default_config();
  const Status status = read_config(config, {reinterpret_cast<const char*>(data), size}, "fuzz");
  if (!status) {
    CHECK(status.message().starts_with("fuzz:") && status.message().size() < 2 * size + 2000, "{}", status.message());
    return 0;
  }
  for (const Status& s : {check_config(config), check_train_config(config), check_sft_config(config), check_eval_config(config)})
    CHECK(s.is_ok() || !s.message().empty());
  const std::string text = config_toml(config.values);
  ResolvedConfig again = default_config();
  const Status reread = read_config(again, text, "again");
  CHECK(reread.is_ok(), "{}\n{}", reread.message(), text);
  CHECK_EQ(config_toml(again.values), text);
  return 0;
}
