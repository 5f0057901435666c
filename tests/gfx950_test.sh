#!/usr/bin/env bash
# Compiles every kernel source for gfx950 (CDNA4) and asserts on the assembly, since no such GPU need be at hand:
#   no register spills to memory (scalar registers parked in lanes of a vector register are not); static shared memory within a workgroup's 160 KB; registers that let a workgroup of the kernel's launch bounds be resident;
#   no calls of device functions, which nothing would link; matrix instructions in files *_cdna4*.cu, the scaled one of E2M1 in *_cdna4_fp4.cu.
# The runtime's own file, core/device_gpu.cu, is checked for the host.
#
#   tests/gfx950_test.sh SOURCE_DIR WORK_DIR
# A source is compiled again when it, a header that it includes or this script has changed. Exit codes: 0, 1 (what is wrong is printed), 77 without the compiler.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/compile_once.sh" "$1" "$2"

# One source: its assembly, or for device_gpu.cu nothing; stdout tells what is wrong.
check() {
  local source=$1 out=$work/${1//\//.}
  # Debian's headers are older than the compiler: they want the width told, and its device libraries know no gfx950 (no kernel needs them).
  local options=(-x hip --offload-arch=gfx950 -nogpulib --rocm-path=/usr -D__AMDGCN_WAVEFRONT_SIZE=64 -std=c++20 -O3 -ffp-contract=off -I.)
  if [[ $source == core/device_gpu.cu ]]; then
    compile_once "$out" "$source" $compiler "${options[@]}" --offload-host-only -c -o "$out.o"
    return
  fi
  compile_once "$out" "$source" $compiler "${options[@]}" --offload-device-only -S -o "$out.s" || return 1
  local wrong=0
  if grep -q s_swappc "$out.s"; then
    echo "$source: calls $(grep -o '[^ ,]*@rel32@lo' "$out.s" | sort -u | head -n 5 | tr '\n' ' ')" && wrong=1
  fi
  if [[ $source == *_cdna4*.cu ]] && ! grep -q v_mfma_ "$out.s"; then echo "$source: no matrix instructions" && wrong=1; fi
  if [[ $source == *_cdna4_fp4.cu ]] && ! grep -q 'v_mfma_scale_f32_32x32x64_f8f6f4 .*blgp:4' "$out.s"; then echo "$source: no scaled matrix instruction of E2M1" && wrong=1; fi
  grep -q -e GPU_KERNEL -e __global__ "$source" || return $wrong  # it only launches others' kernels
  # The metadata has one entry a kernel.
  awk -v source="$source" '
    /^amdhsa.kernels:/ { metadata = 1 }
    !metadata { next }
    /^  - / || /^amdhsa.target:/ { judge(); delete is; sub(/^  - /, "    ") }
    /^    \.[a-z_]+: +[^ ]+$/ { key = $1; sub(/:$/, "", key); is[key] = $2 }
    function judge(    waves) {
      if (!(".name" in is)) return
      kernels++
      waves = int((is[".max_flat_workgroup_size"] + 255) / 256)  # on each of four SIMDs, whose 512 registers they share
      if (is[".vgpr_spill_count"] > 0 || (is[".sgpr_spill_count"] > 0 && is[".private_segment_fixed_size"] > 0)) say("spills " is[".vgpr_spill_count"] " vector and " is[".sgpr_spill_count"] " scalar registers")
      if (is[".group_segment_fixed_size"] > 163840) say(is[".group_segment_fixed_size"] " bytes of shared memory")
      if (is[".vgpr_count"] * waves > 512) say(is[".vgpr_count"] " vector registers, " is[".max_flat_workgroup_size"] " threads")
      if (is[".wavefront_size"] != 64) say("waves of " is[".wavefront_size"])
    }
    function say(what) { print source ": " is[".name"] ": " what; wrong = 1 }
    END {
      if (kernels == 0) { print source ": no kernels"; wrong = 1 }
      exit wrong
    }' "$out.s" || wrong=1
  return $wrong
}
mapfile -t sources < <(find [a-z]* -path '*build*' -prune -o -name '*_gpu*.cu' -print | grep -v -e _sm90 -e _bench | sort)
[[ ${#sources[@]} -ge 3 ]] || { echo "gfx950_test: found ${#sources[@]} sources"; exit 1; }
for_each_source check "${sources[@]}" || exit 1
echo "gfx950_test: ${#sources[@]} sources"
