// lockstep export CHECKPOINT DIR: the weights alone, in the form of a released checkpoint, for other programs.

#include <cstdio>
#include <filesystem>

#include "cli/console.h"
#include "model/checkpoint_io.h"
#include "rl/checkpoint.h"

namespace lockstep {

namespace {

constexpr size_t kArenaReserve = size_t{256} << 30;  // address space only

}  // namespace

int export_command(const ExportArgs& args) {
  Result<std::string> checkpoint = find_checkpoint(args.checkpoint);
  if (!checkpoint) return fail(kExitBadInput, checkpoint.status());
  if (const Status s = check_checkpoint(checkpoint.value()); !s) return fail(kExitBadInput, s);
  std::error_code error;
  if (std::filesystem::exists(args.directory + "/model.safetensors", error))
    return fail(kExitBadInput, errorf("{}/model.safetensors exists; name another directory", args.directory));
  PolicyOptions source;
  source.init = checkpoint.value();
  Result<ModelConfig> config = find_model_config(source);
  if (!config) return fail(kExitBadInput, config.status());
  Result<std::unique_ptr<Tokenizer>> tokenizer = find_tokenizer(source);
  if (!tokenizer) return fail(kExitBadInput, tokenizer.status());

  const std::vector<TensorSpec> table = tensor_table(config.value());
  Arena arena("masters", kArenaReserve);
  TensorSet masters = make_tensor_set(table, arena, [](const TensorSpec&) { return true; });
  if (const Status s = load_checkpoint(checkpoint.value(), config.value(), table, masters); !s) return fail(kExitBadInput, s);
  for (const Status& s : {save_checkpoint(args.directory, config.value(), table, masters), tokenizer.value()->save(args.directory)}) {
    if (!s) return fail(kExitFailure, s);
  }
  std::printf("%s: config.json, model.safetensors (f32) and the tokenizer of %s\n", args.directory.c_str(),
              checkpoint.value().c_str());
  return kExitOk;
}

}  // namespace lockstep
