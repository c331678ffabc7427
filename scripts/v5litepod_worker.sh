#!/usr/bin/env bash
# What scripts/provision_v5litepod.sh has each worker of a TPU node do. It comes to the worker with the checkout.
#
#   v5litepod_worker.sh install           the locked packages, and what the doctor says of this worker
#   v5litepod_worker.sh train RUN [...]   train in runs/RUN with train.py's settings, or join the training there
#   v5litepod_worker.sh stop RUN          ask the training for a checkpoint and an end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PJRT_DEVICE=TPU

install() {
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv >/dev/null || python3 -m pip install --quiet --user uv
  uv python install --quiet 3.11 # the image's own is older than the locked packages allow
  make setup PYTHON="$(uv python find 3.11)"
  .venv/bin/python -m vitkernels.doctor | tee doctor.txt
  grep -q '^TPU: attached' doctor.txt || { echo "the doctor sees no TPU on $(hostname)"; exit 1; }
}

# The training outlives the connection that started it: its process, its log and its exit code are in the run's folder.
train() {
  local run="runs/$1"
  shift
  mkdir -p "$run"
  if goes_on "$run"; then
    echo "joining the training that goes on"
  else
    rm -f "$run"/{pid,exit_code}
    # shellcheck disable=SC2016 # expanded by the inner shell
    setsid nohup bash -c '
      run=$1; shift
      "$@" & echo $! >"$run/pid"
      code=0; wait $! || code=$?
      echo "$code" >"$run/exit_code"
    ' training "$run" .venv/bin/python train.py runtime=xla resume=auto hydra.run.dir="$run" "$@" \
      </dev/null >"$run/output.log" 2>&1 &
    until [[ -s $run/pid ]]; do sleep 0.1; done
  fi
  tail -n +1 -F --pid="$(cat "$run/pid")" "$run/output.log" 2>/dev/null
  ended "$run" || { echo "the training was killed"; exit 1; }
  exit "$(cat "$run/exit_code")"
}

goes_on() { [[ -s $1/pid && ! -e $1/exit_code ]] && kill -0 "$(cat "$1/pid")" 2>/dev/null; }

ended() { # the exit code is written a moment after the process has gone
  local tries=50
  until [[ -s $1/exit_code ]]; do
    ((tries-- > 0)) || return 1
    sleep 0.1
  done
}

stop() {
  local run="runs/$1"
  goes_on "$run" || return 0
  kill -TERM "$(cat "$run/pid")"
  timeout 120 tail --pid="$(cat "$run/pid")" -f /dev/null
}

"$@"
