#!/usr/bin/env bash
# Installs the packages of packages.txt that are missing (root or sudo). Does nothing, and needs no rights, when all are there. Those with a question mark
# are left out where they cannot be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
missing=() wanted=()
while read -r mark package; do
  [[ -z $mark || $mark == \#* ]] && continue
  [[ $mark == "?" ]] || package=$mark
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' && continue
  [[ $mark == "?" ]] && wanted+=("$package") || missing+=("$package")
done < "$here/packages.txt"
[[ ${#missing[@]} -eq 0 && ${#wanted[@]} -eq 0 ]] && exit 0
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if command -v sudo >/dev/null; then
    as_root=(sudo)
  elif [[ ${#missing[@]} -eq 0 ]]; then
    echo "setup: without ${wanted[*]} (neither root nor sudo)" && exit 0
  else
    echo "setup: these packages are missing and neither root nor sudo is available: ${missing[*]}" >&2 && exit 1
  fi
fi
export DEBIAN_FRONTEND=noninteractive
[[ ${#missing[@]} -gt 0 ]] && "${as_root[@]}" apt-get update -qq
optional=()
for package in "${wanted[@]}"; do
  if apt-cache show "$package" >/dev/null 2>&1; then
    optional+=("$package")
  else
    echo "setup: no package $package here; what needs it is skipped"
  fi
done
install() {
  [[ $# -eq 0 ]] && return 0
  echo "installing: $*"
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@"
}
install "${missing[@]}"
install "${optional[@]}" || echo "setup: without ${optional[*]}; what needs them is skipped"
