# For the tests that compile kernel sources for a GPU that is not here; sourced by them as `source compile_once.sh SOURCE_DIR WORK_DIR`, after which the
# first is the working directory, the second is $work, and $compiler is there: else the test ends, skipped.
#
# compile_once OUT SOURCE COMMAND...   runs COMMAND, which makes OUT.s or OUT.o of SOURCE, unless nothing that it read has changed since: the source, headers, and the
#   test itself. COMMAND is a clang of -x cuda or -x hip, one side only. Its messages are in OUT.log; on failure the first are printed.
compile_once() {
  local out=$1 source=$2
  shift 2
  sha256sum --check --status "$out.sum" 2>/dev/null && return 0
  rm -f "$out.sum"
  "$@" -Xclang -dependency-file -Xclang "$out.d" -Xclang -MT -Xclang "$source" -Xclang -sys-header-deps "$source" >"$out.log" 2>&1 ||
    { echo "$source: does not compile"; head -n 30 "$out.log"; return 1; }
  [[ -s $out.d ]] || { echo "$source: no list of what it includes"; return 1; }
  # shellcheck disable=SC2086
  sed -e 's/^[^:]*://' -e 's/\\$//' "$out.d" | tr -s ' ' '\n' | sed '/^$/d' | sort -u | xargs sha256sum $watched >"$out.sum"
}
# for_each_source FUNCTION SOURCES...   on all cores; fails if one fails.
for_each_source() {
  local function=$1
  shift
  export -f "$function" compile_once
  printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" bash -euo pipefail -c "$function \"\$0\" || exit 1" || return 1
}

watched="$(readlink -f "$0") $(readlink -f "${BASH_SOURCE[0]}")"
cd "$1"
mkdir -p "$2"
work=$(readlink -f "$2")
compiler=clang++-22
command -v $compiler >/dev/null || { echo "$(basename "$0" .sh): skipped, no $compiler (scripts/packages.txt)"; exit 77; }
export compiler work watched
