#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for a minute (or SECONDS_EACH), from the seeds in tests/fuzz/seeds and configs.
# What they learn stays in build-fuzz/corpus; an input that breaks a target is left in build-fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang++ >/dev/null && ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a >/dev/null 2>&1 || {
  echo "fuzz: clang++ and its runtime are needed: apt-get install clang libclang-rt-14-dev" >&2
  exit 1
}
scripts/setup.sh
cmake --preset fuzz >/dev/null
cmake --build build-fuzz --target fuzzers -j "$(nproc)"
for target in build-fuzz/tests/fuzz/fuzz_*; do
  [[ -x $target && -f $target ]] || continue
  name=${target##*/fuzz_}
  echo "== $name"
  mkdir -p "build-fuzz/corpus/$name"
  "$target" -max_total_time="${SECONDS_EACH:-60}" -timeout=10 -print_final_stats=1 -artifact_prefix=build-fuzz/ \
    "build-fuzz/corpus/$name" "tests/fuzz/seeds/$name" configs
done
