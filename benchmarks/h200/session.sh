#!/usr/bin/env bash
# How runs are made on a borrowed GPU, to which only this folder travels, at most 64 MiB a call:
#
#   here    pack DATASET...    datasets of $FCIL_DATA, and runs that were kept, in parts: carry/part.0, .1, ...
#   here    aside              results/ stays here from now on, for with each part this whole folder travels
#   there   take N             keep part N, and with part 0 this folder
#   there   unpack             put the parts together; images are read once, and cached
#   here    home FOLDER        after each call of `runs`: what came back lies in results/arrived, in a commit of its own
#   here    back               after the last call: git knows of results/ again
#   there   runs LISTS K S     the runs of "LIST ...", K at a time, for S seconds at most; their folders come back in $OUT
#   there   rates LIST K S     likewise, and where a method's best rate is the last one tried, a run beyond it
#   there   tests              tests/test_cuda.py, its log in $OUT
#   there   save N NAME        unfinished runs, those whose folder has NAME in it, with their checkpoints: the N-th 64 MB
#   here    keep FOLDER...     put together what came back of them, for the next `pack`: they go on another day
#
# A line of LIST is what follows `fcil run`. A run that was cut off goes on when it is asked for again. In place of
# `lr=chosen` it gets the rate that has done best, when its turn comes, on held-out images.
set -euo pipefail
home=$HOME/fcil
export FCIL_CACHE=$HOME/cache CUDA_MPS_PIPE_DIRECTORY=$HOME/mps CUDA_MPS_LOG_DIRECTORY=$HOME/mps
export OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1

pack() {
  cd "$(dirname "$0")/../.."
  (cd "${FCIL_DATA:?}" && ls -d "$@")
  rm -rf carry/kept/results carry/part.* carry/dense && mkdir -p carry/kept/results
  for name in "$@"; do
    "${PYTHON:-python3}" benchmarks/h200/dense.py pack "$FCIL_DATA/$name" "carry/dense/$name"
  done
  [ ! -d results/cifar100-held-out ] || cp -r results/cifar100-held-out carry/kept/results # for lr=chosen
  tar --create --directory carry/dense "$@" --directory "$PWD/carry" kept |
    split --bytes 60MB --numeric-suffixes --suffix-length 1 - carry/part.
  ls -l carry
}

aside() {
  cd "$(dirname "$0")/../.."
  git rm -r --cached --quiet results
  mkdir -p .git/info && echo /results/ >>.git/info/exclude
  echo "what you commit now has no results/; first: session.sh back"
}

home() { # a session may be cut off, and what it did not commit is lost
  cd "$(dirname "$0")/../.."
  mkdir -p results/arrived
  tar --extract --gzip --file "$1/runs.tgz" --strip-components 1 --directory results/arrived
  local index
  index=$(mktemp -d)
  GIT_INDEX_FILE=$index/index git read-tree HEAD # with results/, wherever git's own index has it
  GIT_INDEX_FILE=$index/index git add --force results/arrived
  GIT_INDEX_FILE=$index/index git commit --quiet --message "Runs as they came back from the GPU"
  rm -r "$index"
  find results/arrived -name result.json
}

back() {
  cd "$(dirname "$0")/../.."
  touch .git/info/exclude && sed -i '/^\/results\/$/d' .git/info/exclude
  git reset --quiet -- results
}

keep() {
  local carry
  carry=$(dirname "$0")/../../carry
  rm -rf "$carry/new" && mkdir -p "$carry/new"
  for folder in "$@"; do cat "$folder"/kept.*; done | tar --extract --directory "$carry/new"
  rm -rf "$carry/kept" && mv "$carry/new" "$carry/kept" # not before all of it is there
  find "$carry/kept" -name config.toml
}

take() {
  mkdir -p "$HOME/mps" "$HOME/parts" "$home"
  if [ "$1" = 0 ]; then
    rm -f "$HOME"/parts/*
    tar --create --exclude ./carry . | tar --extract --directory "$home"
    nvidia-cuda-mps-control -d || true # several runs share the GPU; it may be there already
  fi
  mv "carry/part.$1" "$HOME/parts/"
}

unpack() {
  rm -rf "$HOME/packed" && mkdir -p "$HOME/packed"
  cat "$HOME"/parts/part.* | tar --extract --directory "$HOME/packed"
  cp -r "$HOME/packed/kept/." "$home"
  cd "$home"
  for folder in "$HOME"/packed/*; do
    [ "${folder##*/}" != kept ] || continue
    python3 benchmarks/h200/dense.py unpack "$folder" "$HOME/data/$(basename "$folder")"
    name=$(basename "$folder" -50)
    FCIL_DATA=$HOME/data python3 -c "from fcil.scenario.datasets import load; print('$name', len(load('$name').train_labels))"
  done
}

one() { # when to stop, words of `fcil run`
  local left=$(($1 - $(date +%s))) line
  line=$(python3 benchmarks/h200/chosen.py <(echo "${*:2}") results/cifar100-held-out runs) || return 0
  set -- $line
  local name=$HOME/logs/${*//[^a-z0-9=.-]/_}
  if [ "$left" -le 5 ] || [ -e "$name.done" ]; then return 0; fi
  # these start many short kernels in a row and would queue behind the other runs at each: they go first
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
  list=$(cat $1 | { grep -v -e '^#' -e '^$' || true; })
  cd "$home"
  export FCIL_DATA=$HOME/data
  export -f one
  printf %s "$list" |
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

unfinished() { # the files of a run that has a checkpoint, of its states the newest that is whole
  local newest
  newest=$(find "$1/checkpoint" -name '*.json' -printf '%f\n' | sort --version-sort | tail --lines 1)
  if [ -e "$1/result.json" ] || [ -z "$newest" ]; then return 0; fi
  find "$1" -type f ! -name lock ! -name 'state-*'
  echo "$1/checkpoint/state-${newest%.json}.safetensors"
}

save() {
  cd "$home"
  if [ "$1" = 0 ]; then
    find runs -name checkpoint -printf '%h\n' | { grep -e "$2" || echo "no run has $2 in its name" >&2; } |
      while read -r run; do unfinished "$run"; done | tar --create --files-from - >"$HOME/kept.tar"
    echo "$(($(stat --format %s "$HOME/kept.tar") / 64000000 + 1)) times, from save 0"
  fi
  dd if="$HOME/kept.tar" bs=1MB skip=$(($1 * 64)) count=64 status=none |
    split --bytes 16MB --numeric-suffixes --suffix-length 1 - "$OUT/kept.$1."
}

tests() {
  cd "$home" && python3 -m pytest -p no:benchmark -q -n 12 tests/test_cuda.py 2>&1 | tee "$OUT/gpu-tests.txt"
}

[ $# -gt 0 ] || { sed -n '2,17s/^# \?//p' "$0" && exit 2; }
"$@"
