#!/usr/bin/env bash
# Compiles every kernel source for sm_90a (Hopper) to PTX with Debian's clang, where neither CUDA nor a GPU is at hand: against declarations of our own
# (tests/cuda_stand_in). Registers, spills and what is inlined are nvcc's, and only a CUDA build tells them. Asserted: it compiles; nothing is called that is not
# there; files *_sm90*.cu hold warpgroup matrix instructions.
#
#   tests/sm90_test.sh SOURCE_DIR WORK_DIR
# Exit codes: 0, 1 (what is wrong is printed), 77 without the compiler.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/compile_once.sh" "$1" "$2"

check() {
  local source=$1 out=$work/${1//\//.} wrong=0
  compile_once "$out" "$source" $compiler -x cuda --cuda-gpu-arch=sm_90a --cuda-device-only --cuda-path=/nowhere --cuda-feature=+ptx86 -nocudainc -nocudalib \
    -D__CUDACC__ -std=c++20 -O3 -ffp-contract=off -I. -Itests/cuda_stand_in -include cuda_runtime.h -S -o "$out.s" || return 1
  grep -q '^\.target sm_90a' "$out.s" || { echo "$source: $(grep -m 1 '^\.target' "$out.s")"; wrong=1; }
  if grep -q '^\.extern \.func' "$out.s"; then echo "$source: calls $(grep -A 1 '^\.extern \.func' "$out.s" | tr '\n' ' ')" && wrong=1; fi
  if [[ $source == *_sm90*.cu ]]; then
    grep -q 'wgmma\.mma_async' "$out.s" || { echo "$source: no matrix instructions"; wrong=1; }
  fi
  return $wrong
}

mapfile -t sources < <(find [a-z]* -path '*build*' -prune -o -name '*_gpu*.cu' -print | grep -v -e _cdna4 -e _bench -e core/device_gpu | sort)
[[ ${#sources[@]} -ge 3 ]] || { echo "sm90_test: found ${#sources[@]} sources"; exit 1; }
for_each_source check "${sources[@]}" || exit 1
echo "sm90_test: ${#sources[@]} sources"
