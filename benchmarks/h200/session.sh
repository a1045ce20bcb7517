#!/usr/bin/env bash
# How the runs of RESULTS.md were made on a borrowed GPU, to which only this folder travels, at most 64 MiB a call:
#
#   here    pack cifar100      a dataset of $FCIL_DATA, or several, in parts: carry/part.0, carry/part.1, ...
#   there   take N             keep part N, and with part 0 this folder
#   there   unpack             put the parts together; images are read once, and cached
#   there   runs LIST K S      the runs of LIST that are missing, K at a time, for S seconds at most; folders come back in $OUT
#   there   tests              tests/test_cuda.py, its log in $OUT
#
# A line of LIST is a folder, and what follows `fcil run`. A run that was cut off goes on where it was.
set -euo pipefail
home=$HOME/fcil
export FCIL_CACHE=$HOME/cache CUDA_MPS_PIPE_DIRECTORY=$HOME/mps CUDA_MPS_LOG_DIRECTORY=$HOME/mps
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1

pack() {
  cd "$(dirname "$0")/../.."
  rm -rf carry && mkdir carry
  tar --create --directory "$FCIL_DATA" "$@" | split --bytes 36MB --numeric-suffixes --suffix-length 1 - carry/part.
  ls -l carry
}

take() {
  mkdir -p "$HOME/mps" "$HOME/parts" "$home"
  mv "carry/part.$1" "$HOME/parts/"
  if [ "$1" = 0 ]; then
    tar --create --exclude ./carry . | tar --extract --directory "$home"
    nvidia-cuda-mps-control -d # several runs share the GPU
  fi
}

unpack() {
  mkdir -p "$HOME/data"
  cat "$HOME"/parts/part.* | tar --extract --directory "$HOME/data"
  cd "$home"
  for folder in "$HOME"/data/*; do
    name=$(basename "$folder" -50)
    FCIL_DATA=$HOME/data python3 -c "from fcil.scenario.datasets import load; print('$name', len(load('$name').train_labels))"
  done
}

one() { # when to stop, folder, words of `fcil run`
  local until=$1 name=$2
  shift 2
  local left=$((until - $(date +%s))) out=$HOME/runs/$name
  [ "$left" -gt 5 ] && [ ! -e "$out/result.json" ] || return 0
  timeout --signal INT "$left" python3 -m fcil run "$@" --device "${DEVICE:-cuda}" --out "$out" >>"$HOME/runs/$(tr / + <<<"$name").log" 2>&1 ||
    echo "$name ended with $?"
}

runs() {
  [ -d "$home/fcil" ] || { echo "a fresh machine: take the parts again" && exit 3; }
  cp "$1" "$home/list.txt" 2>/dev/null || true
  cd "$home" && mkdir -p "$HOME/runs"
  export FCIL_DATA=$HOME/data
  export -f one
  grep -v '^#' list.txt | xargs -d '\n' -P "$2" -I {} bash -c "one $(($(date +%s) + $3)) {}"
  find "$HOME/runs" -name result.json | wc -l
  tail -q -n 1 "$HOME"/runs/*.log
  tar --create --gzip --directory "$HOME/runs" --exclude 'checkpoint*' --exclude '*.safetensors' --exclude lock . >"$OUT/runs.tgz"
}

tests() {
  cd "$home" && python3 -m pytest -p no:benchmark -q -n 12 tests/test_cuda.py 2>&1 | tee "$OUT/gpu-tests.txt"
}

"$@"
