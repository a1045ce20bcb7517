#!/usr/bin/env bash
# How runs are made on a borrowed GPU, to which only this folder travels, at most 64 MiB a call:
#
#   here    pack DATASET...    datasets of $FCIL_DATA, and runs that were kept, in parts: carry/part.00, .01, ...
#   there   take N             keep part N (two digits), and with part 00 this folder
#   there   unpack             put the parts together; images are read once, and cached
#   there   runs LIST K S      the runs of LIST, K at a time, for S seconds at most; their folders come back in $OUT
#   there   rates LIST K S     likewise, and where a method's best rate is the last one tried, a run beyond it
#   there   tests              tests/test_cuda.py, its log in $OUT
#   there   save N NAME        unfinished runs, those whose folder has NAME in it, with their checkpoints: the N-th 64 MB
#   here    keep FOLDER...     put together what came back of them, for the next `pack`: they go on another day
#
# A line of LIST is what follows `fcil run`. A run that was cut off goes on when it is asked for again. In place of
# `lr=chosen` it gets the rate that did best in the runs of `rates`.
set -euo pipefail
home=$HOME/fcil
export FCIL_CACHE=$HOME/cache CUDA_MPS_PIPE_DIRECTORY=$HOME/mps CUDA_MPS_LOG_DIRECTORY=$HOME/mps
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1

pack() {
  cd "$(dirname "$0")/../.."
  (cd "${FCIL_DATA:?}" && ls -d "$@")
  mkdir -p carry/kept && rm -f carry/part.*
  tar --create --directory "$FCIL_DATA" "$@" --directory "$PWD/carry" kept |
    split --bytes 36MB --numeric-suffixes --suffix-length 2 - carry/part.
  ls -l carry
}

keep() {
  cd "$(dirname "$0")/../.."
  rm -rf carry/kept && mkdir -p carry/kept
  cat $(printf '%s/kept.* ' "$@") | tar --extract --directory carry/kept
  find carry/kept -name config.toml
}

take() {
  mkdir -p "$HOME/mps" "$HOME/parts" "$home"
  if [ "$1" = 00 ]; then
    rm -f "$HOME"/parts/*
    tar --create --exclude ./carry . | tar --extract --directory "$home"
    nvidia-cuda-mps-control -d || true # several runs share the GPU; it may be there already
  fi
  mv "carry/part.$1" "$HOME/parts/"
}

unpack() {
  mkdir -p "$HOME/data"
  cat "$HOME"/parts/part.* | tar --extract --directory "$HOME/data"
  cp -r "$HOME/data/kept/." "$home" && rm -r "$HOME/data/kept"
  cd "$home"
  for folder in "$HOME"/data/*; do
    name=$(basename "$folder" -50)
    FCIL_DATA=$HOME/data python3 -c "from fcil.scenario.datasets import load; print('$name', len(load('$name').train_labels))"
  done
}

one() { # when to stop, words of `fcil run`
  local left=$(($1 - $(date +%s)))
  shift
  local name=$HOME/logs/${*//[^a-z0-9=.-]/_}
  if [ "$left" -le 5 ] || [ -e "$name.done" ]; then return 0; fi
  # those of many short kernels, one after the other, go first: the others wait for the GPU, not for its answers
  case $1 in geodl | glfc) export CUDA_MPS_CLIENT_PRIORITY=0 ;; *) export CUDA_MPS_CLIENT_PRIORITY=1 ;; esac
  if timeout --signal INT "$left" python3 -m fcil run "$@" --device "${DEVICE:-cuda}" >>"$name.log" 2>&1; then
    touch "$name.done"
  else
    echo "ended with $?: $*"
  fi
}

runs() {
  [ -d "$home/fcil" ] || { echo "a fresh machine: take the parts again" && exit 3; }
  mkdir -p "$HOME/logs" "$home/runs"
  local list
  list=$(python3 benchmarks/h200/chosen.py "$1" "$home/results/cifar100-held-out" "$home/runs")
  cd "$home"
  export FCIL_DATA=$HOME/data
  export -f one
  { grep -v '^$' <<<"$list" || true; } |
    xargs --delimiter '\n' --no-run-if-empty --max-procs "$2" -I {} bash -c "one $(($(date +%s) + $3)) {}"
  tar --create --gzip --exclude 'checkpoint*' --exclude '*.safetensors' --exclude lock runs >"$OUT/runs.tgz" ||
    [ $? = 1 ] # another run wrote meanwhile
  tail -n 1 "$HOME"/logs/*.log || true
}

rates() {
  local list=$1 end=$(($(date +%s) + $3))
  (runs "$list" "$2" "$3")
  python3 benchmarks/h200/chosen.py --further "$list" "$home/results/cifar100-held-out" "$home/runs" >"$HOME/further.txt"
  cat "$HOME/further.txt"
  (runs "$HOME/further.txt" "$2" $((end - $(date +%s))))
}

unfinished() { # the files of a run, of its checkpoints the newest state
  [ ! -e "$1/result.json" ] || return 0
  find "$1" -type f ! -name lock ! -name 'state-*'
  ls --sort version "$1"/checkpoint/state-* | tail --lines 1
}

save() {
  cd "$home"
  if [ "$1" = 0 ]; then
    find runs -name checkpoint -printf '%h\n' | grep -e "$2" | while read -r run; do unfinished "$run"; done |
      tar --create --files-from - >"$HOME/kept.tar"
    echo "$(($(stat --format %s "$HOME/kept.tar") / 64000000 + 1)) times, from save 0"
  fi
  tail --bytes "+$(($1 * 64000000 + 1))" "$HOME/kept.tar" | head --bytes 64000000 |
    split --bytes 16MB --numeric-suffixes --suffix-length 1 - "$OUT/kept.$1."
}

tests() {
  cd "$home" && python3 -m pytest -p no:benchmark -q -n 12 tests/test_cuda.py 2>&1 | tee "$OUT/gpu-tests.txt"
}

[ $# -gt 0 ] || { sed -n '2,14s/^# \?//p' "$0" && exit 2; }
"$@"
