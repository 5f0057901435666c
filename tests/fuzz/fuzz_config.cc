// Any bytes as a config.json: refused with a reason, or a config whose JSON reads back the same and whose tensors can be counted.

#include <cstdint>
#include <limits>

#include "model/config.h"
#include "model/weights.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const Result<ModelConfig> r = parse_model_config({reinterpret_cast<const char*>(data), size}, "fuzz");
  if (!r) {
    CHECK(r.message().starts_with("fuzz: ") && r.message().size() < size + 2000, "{}", r.message());
    return 0;
  }
  const ModelConfig& m = r.value();
  CHECK(check_model_config(m, "fuzz").is_ok());
  const Result<ModelConfig> again = parse_model_config(model_config_json(m), "again");
  CHECK(again.is_ok(), "{}", again.message());
  CHECK(again.value() == m, "{}\nreads back as\n{}", model_config_json(m), model_config_json(again.value()));
  CHECK_GE(m.page_unit(), 1);
  if (m.num_layers() > 64) return 0;  // the same again, slower

  int64_t room = std::numeric_limits<int64_t>::max();
  for (const TensorSpec& spec : tensor_table(m)) {
    for (int i = 0; i < spec.shape.rank; ++i) CHECK(spec.shape[i] > 0, "{} {}", spec.name, spec.shape.str());
    CHECK_EQ(spec.weight_shape().elements(), spec.shape.elements());
    const int64_t bytes = spec.shape.elements() * static_cast<int64_t>(sizeof(float));
    CHECK_LE(bytes, room);
    room -= bytes;
  }
  return 0;
}
