#!/usr/bin/env bash
# Draws and trains every step of a run again, each from the checkpoint before it, in one process, and compares what does not depend on the
# layout that made the run: rollouts byte for byte, and metrics but for the gradient's last bits and the packing. The run must have kept a
# checkpoint of every step (run.checkpoint_every = 1, run.keep_checkpoints large).
#
#   scripts/replay.sh build/lockstep RUN_DIR [--set key=value ...]      settings are taken from the run
set -euo pipefail
program=$(realpath "$1") run=$(realpath "$2")
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What the layout may change, and nothing else.
settings() { sed -e 's/^\(tp\|pp\|ep\|rollout_tp\|rollout_ep\) = .*/\1 = 1/' -e 's/^dp = .*/dp = 0/' -e 's/^stages = .*/stages = ""/' "$run/config.resolved.toml"; }
comparable() { sed -e 's/"train\/grad_norm":[^,}]*,\{0,1\}//' -e 's/"train\/microbatches":[^,}]*,\{0,1\}//'; }

settings > "$work/run.toml"
same=0 different=0
for checkpoint in "$run"/checkpoints/step_*; do
  step=$((10#${checkpoint##*_} + 1))
  name=$(printf 'step_%06d' "$step")
  [[ -f $checkpoint/COMPLETE && -f $run/rollouts/$name.jsonl ]] || continue
  again=$work/again
  rm -rf "$again"
  mkdir -p "$again/checkpoints"
  cp -r "$checkpoint" "$again/checkpoints/"
  cp "$run/config.resolved.toml" "$run/run.lock" "$again/"
  "$program" train "$work/run.toml" --resume --set run.dir="$again" --set run.steps="$step" --set run.checkpoint_every=0 "$@" > "$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
  }
  line() { grep "\"rollout/step\":$step," "$1/metrics.jsonl" | comparable; }
  if cmp -s "$run/rollouts/$name.jsonl" "$again/rollouts/$name.jsonl" && [[ "$(line "$run")" == "$(line "$again")" ]]; then
    same=$((same + 1))
  else
    different=$((different + 1))
    echo "step $step differs"
  fi
done
echo "$same steps are the same, $different differ"
[[ $same -gt 0 && $different -eq 0 ]]
