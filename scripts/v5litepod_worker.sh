#!/usr/bin/env bash
# The part of scripts/provision_v5litepod.sh that runs on each worker of a TPU node, copied there with the checkout.
#
#   v5litepod_worker.sh install           install the locked packages and run the doctor
#   v5litepod_worker.sh train RUN [...]   train in runs/RUN with these settings of train.py, or attach to its training
#   v5litepod_worker.sh stop RUN          let the training save a checkpoint and stop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PJRT_DEVICE=TPU

install() {
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv >/dev/null || python3 -m pip install --quiet --user uv
  uv python install --quiet 3.11 # the image's Python is too old for the locked packages
  make setup PYTHON="$(uv python find 3.11)"
  .venv/bin/python -m vitkernels.doctor | tee doctor.txt
  grep -q '^TPU: attached' doctor.txt || { echo "doctor: no TPU attached on $(hostname)"; exit 1; }
}

# Training survives the connection that started it. Its pid, its log and its exit code are files in the run's folder.
train() {
  local run="runs/$1"
  shift
  mkdir -p "$run"
  if is_running "$run"; then
    echo "attaching to the running training"
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
  ended "$run" || { echo "training was killed"; exit 1; }
  exit "$(cat "$run/exit_code")"
}

is_running() { [[ -s $1/pid && ! -e $1/exit_code ]] && kill -0 "$(cat "$1/pid")" 2>/dev/null; }

ended() { # waits for the exit code, which is written shortly after the process exits
  local tries=50
  until [[ -s $1/exit_code ]]; do
    ((tries-- > 0)) || return 1
    sleep 0.1
  done
}

stop() {
  local run="runs/$1"
  is_running "$run" || return 0
  kill -TERM "$(cat "$run/pid")"
  timeout 120 tail --pid="$(cat "$run/pid")" -f /dev/null
}

"$@"
