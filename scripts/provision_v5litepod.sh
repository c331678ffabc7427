#!/usr/bin/env bash
# Provision a Cloud TPU v5e node, train on it and delete it. See `provision_v5litepod.sh --help`.
#
# This script keeps no state. Every step queries Google for the state of the node and does what remains to be done, so
# an interrupted command can be run again. Commands and states: cloud.google.com/tpu/docs/queued-resources.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly USAGE_ERROR=2 NODE_FAILED=3 TIME_IS_UP=4 PREEMPTED=75 # as train.py's exit code for a resumable run
readonly NO_CONNECTION=255 # of ssh

usage() {
  cat <<'TEXT'
Provision a Cloud TPU v5e node, train on it and delete it. Any command can be interrupted and run again.

  scripts/provision_v5litepod.sh VERB [FLAGS] [-- train.py's settings]

  create    request a node (a queued resource with one node of the same name)
  status    print the state, and the reason of a failure
  wait      wait until the node is active, or report why it cannot become active
  ssh       open a shell on a worker (--worker N), or run the command after -- on --worker N or all
  setup     copy this checkout to every worker, install the locked packages, run the doctor on each
  train     train on every worker with the settings after --; if a training is running, attach to it
  fetch     copy the run's folder, which worker 0 writes, to the local runs/NAME
  delete    delete the node and the request, after a confirmation unless --quiet
  run       create, wait, setup and train with the settings after --, fetch the run; always delete the node at the end

Each setting is taken from its flag, then from its environment variable, then from a line VARIABLE=value of the
configuration file:

  --project ID             V5E_PROJECT          Google Cloud project (required)
  --zone ZONE              V5E_ZONE             such as us-central1-a (required)
  --lifetime DURATION      V5E_LIFETIME         such as 90m, 4h, 1d (required to create). When it expires, `run` stops
                                                the training and deletes the node. The node also deletes itself, in case
                                                this script was killed (its service account needs roles/tpu.admin)
  --valid-until DURATION   V5E_VALID_UNTIL      leave the queue after this time (default: the lifetime)
  --name NAME              V5E_NAME             name of the node (default: vitkernels)
  --accelerator TYPE       V5E_ACCELERATOR      v5litepod-1, 4, 8, 16, 32, 64, 128 or 256 (default: v5litepod-1)
  --runtime-version NAME   V5E_RUNTIME_VERSION  (default: v2-alpha-tpuv5-lite)
  --service-account EMAIL  V5E_SERVICE_ACCOUNT  service account of the node (default: the project's)
  --capacity KIND          V5E_CAPACITY         on-demand, spot or reserved (default: on-demand)
  --tags TAG,...           V5E_TAGS             network tags
  --network NAME           V5E_NETWORK          (default: default)
  --subnetwork NAME        V5E_SUBNETWORK
  --price USD              V5E_PRICE            price of a chip hour, to print the cost of a lifetime
  --timeout DURATION       V5E_TIMEOUT          time limit of `wait` (default: the lifetime, or 1d)
  --poll SECONDS           V5E_POLL             interval between queries of the state (default: 15)
  --fetch-every DURATION   V5E_FETCH_EVERY      interval between copies of the run's folder during training, because
                                                a preempted node loses its disk (default: 10m)
  --worker N               V5E_WORKER           worker for ssh, or all (default: 0)
  --config FILE            V5E_CONFIG           (default: v5litepod.conf in the current folder, if present)

  --quiet      do not ask          --dry-run    print the commands without running them          --help

Exit codes: 0 success; 1 a command failed; 2 invalid usage; 3 the node failed; 4 time limit reached; 75 the node was
preempted or the training interrupted; run the same command again to resume. Otherwise, train and run return train.py's
exit code.
TEXT
}

say() { printf '%s\n' "$*" >&2; }

die() { # CODE MESSAGE...
  local code=$1
  shift
  say "error: $*"
  exit "$code"
}

# ---------------------------------------------------------------------- settings

readonly SETTINGS="project zone lifetime valid_until name accelerator runtime_version service_account capacity tags \
network subnetwork price timeout poll fetch_every worker config"

declare -A setting=([name]=vitkernels [accelerator]=v5litepod-1 [runtime_version]=v2-alpha-tpuv5-lite
  [capacity]=on-demand [network]=default [poll]=15 [fetch_every]=10m [worker]=0)
quiet=false dry_run=false verb='' arguments=()

variable() { local upper=${1^^}; printf 'V5E_%s' "$upper"; }
flag() { printf -- '--%s' "${1//_/-}"; }
known() { [[ " $SETTINGS " == *" $1 "* ]]; }

read_flags() { # sets `given`, and the globals for flags without a value
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      -q | --quiet) quiet=true ;;
      --dry-run) dry_run=true ;;
      --) shift; arguments=("$@"); return 0 ;;
      --*)
        local name=${1#--} value
        if [[ $name == *=* ]]; then
          value=${name#*=} name=${name%%=*}
        else
          (($# > 1)) || die $USAGE_ERROR "$1 needs a value"
          value=$2
          shift
        fi
        name=${name//-/_}
        known "$name" || die $USAGE_ERROR "unknown flag $(flag "$name"); see --help"
        given[$name]=$value
        ;;
      *)
        [[ -z $verb ]] || die $USAGE_ERROR "unexpected '$1' after '$verb'; settings of train.py come after --"
        verb=$1
        ;;
    esac
    shift
  done
}

read_file() { # FILE with lines VARIABLE=value; nothing in it is executed
  local line number=0 name
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
    [[ $line =~ ^[[:space:]]*(export[[:space:]]+)?V5E_([A-Z_]+)=(.*)$ ]] ||
      die $USAGE_ERROR "$1:$number: expected V5E_NAME=value, got: $line"
    name=${BASH_REMATCH[2],,} line=${BASH_REMATCH[3]}
    known "$name" || die $USAGE_ERROR "$1:$number: unknown setting V5E_${name^^}"
    [[ $line =~ ^\"(.*)\"[[:space:]]*$ || $line =~ ^\'(.*)\'[[:space:]]*$ ]] && line=${BASH_REMATCH[1]}
    setting[$name]=$line
  done <"$1"
}

read_settings() { # precedence: flag, environment variable, file
  declare -A given=()
  local name environment
  read_flags "$@"
  local file=${given[config]:-${V5E_CONFIG:-}}
  if [[ -n $file ]]; then
    [[ -r $file ]] || die $USAGE_ERROR "cannot read configuration file $file"
    read_file "$file"
  elif [[ -r v5litepod.conf ]]; then
    read_file v5litepod.conf
  fi
  for name in $SETTINGS; do
    environment=$(variable "$name")
    [[ -n ${!environment:-} ]] && setting[$name]=${!environment}
    [[ -n ${given[$name]:-} ]] && setting[$name]=${given[$name]}
  done
  return 0
}

need() { # SETTING REASON
  local ways
  ways="$(flag "$1"), the environment variable $(variable "$1"), or v5litepod.conf"
  [[ -n ${setting[$1]:-} ]] || die $USAGE_ERROR "$1 is not set ($2); set it with $ways"
}

seconds() { # DURATION, already validated
  local -A unit=([s]=1 [m]=60 [h]=3600 [d]=86400)
  printf '%d' $((${1%?} * unit[${1: -1}]))
}

check_settings() {
  need project "the project that is billed"
  need zone "zones with v5e: cloud.google.com/tpu/docs/regions-zones"
  [[ ${setting[name]} =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] ||
    die $USAGE_ERROR "--name ${setting[name]}: must be lower-case letters, digits and dashes, starting with a letter"
  [[ ${setting[accelerator]} =~ ^v5litepod-(1|4|8|16|32|64|128|256)$ ]] ||
    die $USAGE_ERROR "--accelerator ${setting[accelerator]}: must be v5litepod-1, 4, 8, 16, 32, 64, 128 or 256"
  [[ ${setting[capacity]} =~ ^(on-demand|spot|reserved)$ ]] ||
    die $USAGE_ERROR "--capacity ${setting[capacity]}: must be on-demand, spot or reserved"
  [[ ${setting[poll]} =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
    die $USAGE_ERROR "--poll ${setting[poll]}: must be a number of seconds"
  [[ ${setting[worker]} =~ ^([0-9]+|all)$ ]] || die $USAGE_ERROR "--worker ${setting[worker]}: must be a number or all"
  [[ -z ${setting[price]:-} || ${setting[price]} =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
    die $USAGE_ERROR "--price ${setting[price]}: must be US dollars, such as 1.20"
  local name
  for name in lifetime valid_until timeout fetch_every; do
    [[ ${setting[$name]:-1s} =~ ^[1-9][0-9]*[smhd]$ ]] ||
      die $USAGE_ERROR "$(flag "$name") ${setting[$name]}: must be a duration such as 90m, 4h or 1d"
  done
}

# ---------------------------------------------------------------------- gcloud
# Commands are printed, can be interrupted, and are retried if their result is ambiguous. Every `return` has an explicit
# value, because in a trap a bare `return` yields the status from before the trap.

shown() { printf '%q ' "$@"; }

# Run a command in the background and wait for it, so that traps run at once instead of after the command.
child='' asking=false # asking: a request may be in flight that Google does not report yet
attended() {
  say "+ $(shown "$@")"
  $dry_run && return 0
  local code=0
  "$@" </dev/null &
  child=$!
  wait "$child" || code=$?
  child=''
  return "$code"
}

nap() {
  sleep "${setting[poll]}" &
  child=$!
  wait "$child" || true
  child=''
}

queue() { # VERB ARGUMENTS...
  attended gcloud compute tpus queued-resources "$1" "${setting[name]}" "${place[@]}" "${@:2}"
}

readonly SSH_FLAGS=(--ssh-flag=-oConnectTimeout=20 --ssh-flag=-oServerAliveInterval=20
  --ssh-flag=-oServerAliveCountMax=6)

on_worker() { # WORKER COMMAND; returns the command's exit code, or 255 without a connection
  attended gcloud compute tpus tpu-vm ssh "${setting[name]}" "${place[@]}" "${SSH_FLAGS[@]}" \
    --worker="$1" --command="$2"
}

to_all_workers() { # FILE, copied to the home folders
  attended gcloud compute tpus tpu-vm scp "$1" "${setting[name]}:" "${place[@]}" --worker=all
}

describe() { # EXPRESSION; prints its value, or returns 1 with the error in $scratch/error
  gcloud compute tpus queued-resources describe "${setting[name]}" "${place[@]}" --format="value($1)" 2>"$scratch/error"
}

retried() { # TRIES COMMAND...; repeats the command until it succeeds
  local tries=$1 attempt code
  shift
  for ((attempt = 1; ; attempt++)); do
    code=0
    "$@" || code=$?
    ((code == 0 || attempt == tries)) && return "$code"
    say "attempt $attempt of $tries failed (exit code $code); retrying in ${setting[poll]} s"
    nap
  done
}

# Set `state` to ABSENT or to one of Google's states. Any failure other than a clear "not found" is retried, and then an
# error: a node that cannot be queried must never count as deleted.
state=''
look() {
  local attempt
  if $dry_run; then
    say "+ gcloud compute tpus queued-resources describe ${setting[name]} ${place[*]} --format='value(state.state)'"
    return 0
  fi
  for ((attempt = 1; attempt <= 5; attempt++)); do
    state=$(describe state.state) && return 0
    if grep -q NOT_FOUND "$scratch/error"; then
      state=ABSENT
      return 0
    fi
    state=''
    nap
  done
  say "error: cannot query the state of ${setting[name]}: $(cat "$scratch/error")"
  return 1
}

reason() { # why the node failed or disappeared
  local message
  message=$(describe state.failedData.error.message) || message=''
  [[ -n $message ]] || message=$(describe 'state.stateInitiator') || message=''
  case $message in
    '') say "reason: not given; gcloud compute tpus queued-resources describe ${setting[name]} shows the details" ;;
    SERVICE) say "reason: preempted by Cloud TPU, or maintenance" ;;
    USER) say "reason: a user stopped or deleted the node" ;;
    *) say "reason: $message" ;;
  esac
}

stop_child() { # a request in flight is completed first: a half-created node could not be deleted
  [[ -n $child ]] || return 0
  $asking || kill "$child" 2>/dev/null || true
  wait "$child" || true
  child=''
}

# ---------------------------------------------------------------------- verbs

readonly WORKER="bash vitkernels/scripts/v5litepod_worker.sh"

print_bill() {
  local chips=${setting[accelerator]#v5litepod-} hours
  hours=$(awk "BEGIN { printf \"%.4g\", $chips * $(seconds "${setting[lifetime]}") / 3600 }")
  say "billed from ACTIVE until deleted: $chips v5e chip(s), ${setting[capacity]}, ${setting[zone]}, project" \
    "${setting[project]}; at most ${setting[lifetime]} = $hours chip hours"
  if [[ -n ${setting[price]:-} ]]; then
    say "  at ${setting[price]} USD per chip hour: at most" \
      "$(awk "BEGIN { printf \"%.2f\", $hours * ${setting[price]} }") USD"
  else
    say "  price per chip hour: cloud.google.com/tpu/pricing (pass it as --price USD to print the cost)"
  fi
}

# The startup script of the node: it deletes the node at the end of its lifetime, even if this script was killed.
lifetime_guard() {
  printf '%s\n' '#!/bin/bash' "systemd-run --unit=lifetime --on-active=$(seconds "${setting[lifetime]}")s \\" \
    "  gcloud compute tpus queued-resources delete ${setting[name]} --project=${setting[project]} \\" \
    "  --zone=${setting[zone]} --force --quiet --async"
}

make_request() {
  local guard="$scratch/lifetime_guard.sh"
  local options=(
    --node-id="${setting[name]}"
    --accelerator-type="${setting[accelerator]}"
    --runtime-version="${setting[runtime_version]}"
    --valid-until-duration="$(seconds "${setting[valid_until]:-${setting[lifetime]}}")s"
    --network="${setting[network]}"
    --scopes=https://www.googleapis.com/auth/cloud-platform
    --metadata-from-file=startup-script="$guard"
  )
  [[ -z ${setting[subnetwork]:-} ]] || options+=(--subnetwork="${setting[subnetwork]}")
  [[ -z ${setting[service_account]:-} ]] || options+=(--service-account="${setting[service_account]}")
  [[ -z ${setting[tags]:-} ]] || options+=(--tags="${setting[tags]}")
  [[ ${setting[capacity]} == on-demand ]] || options+=("--${setting[capacity]}")
  lifetime_guard >"$guard"
  $dry_run && sed 's/^/#   /' "$guard" >&2
  asking=true
  queue create "${options[@]}" || return $?
  asking=false
}

create() {
  need lifetime "without it, a forgotten node is billed indefinitely"
  print_bill
  look || return $?
  case $state in
    FAILED | SUSPENDED)
      say "${setting[name]} is $state and cannot be used:"
      reason
      remove || return $?
      ;;
    SUSPENDING | DELETING)
      say "${setting[name]} is $state; waiting for its deletion"
      remove || return $?
      ;;
    ABSENT | '') ;;
    *)
      local there
      there=$(describe 'tpu.nodeSpec[0].node.acceleratorType') || there=''
      [[ -z $there || $there == "${setting[accelerator]}" ]] ||
        die $USAGE_ERROR "${setting[name]} exists and is a $there, not a ${setting[accelerator]}; delete it or choose" \
          "another --name"
      say "${setting[name]} exists already: $state"
      return 0
      ;;
  esac
  make_request
}

status() {
  look || return $?
  printf '%s\n' "${state:-UNKNOWN}"
  case $state in
    FAILED | SUSPENDING | SUSPENDED) reason ;;
  esac
}

wait_for_node() {
  local limit before='' begin=$SECONDS
  limit=$(seconds "${setting[timeout]:-${setting[lifetime]:-1d}}")
  while true; do
    look || return $?
    $dry_run && return 0
    [[ $state == "$before" ]] || say "$(date +%T) ${setting[name]}: $state"
    before=$state
    case $state in
      ACTIVE) return 0 ;;
      ABSENT) die $NODE_FAILED "${setting[name]} does not exist in ${setting[zone]}; create it first" ;;
      FAILED | DELETING | SUSPENDING | SUSPENDED)
        reason
        [[ $state == FAILED || $state == DELETING ]] || return $PREEMPTED
        return $NODE_FAILED
        ;;
    esac
    if ((SECONDS - begin >= limit)); then
      say "error: ${setting[name]} is $state after $limit s. It stays in the queue and is billed once it is ACTIVE;" \
        "wait again or delete it"
      return $TIME_IS_UP
    fi
    nap
  done
}

need_node() {
  look || return $?
  [[ -z $state || $state == ACTIVE ]] && return 0
  say "error: ${setting[name]} is $state, not ACTIVE"
  case $state in
    SUSPENDING | SUSPENDED) reason; return $PREEMPTED ;;
  esac
  return $NODE_FAILED
}

open_shell() {
  need_node || return $?
  if ((${#arguments[@]})); then
    on_worker "${setting[worker]}" "${arguments[*]}"
    return 0
  fi
  say "+ gcloud compute tpus tpu-vm ssh ${setting[name]} ${place[*]} --worker=${setting[worker]}"
  $dry_run && return 0
  rm -r "$scratch" # exec skips the EXIT trap
  exec gcloud compute tpus tpu-vm ssh "${setting[name]}" "${place[@]}" --worker="${setting[worker]}"
}

# Pack the files that git tracks or would track: the checkout with local changes, without results and environments.
pack_checkout() { # ARCHIVE
  local files=()
  mapfile -d '' -t files < <(git -C "$ROOT" ls-files -z --cached --others --exclude-standard)
  ((${#files[@]})) || die 1 "$ROOT is not a git checkout, so the files to copy are unknown"
  local file present=()
  for file in "${files[@]}"; do
    [[ -e $ROOT/$file ]] && present+=("$file")
  done
  printf '%s\0' "${present[@]}" | tar -C "$ROOT" --null -T - -czf "$1"
}

setup() {
  need_node || return $?
  say "+ pack $ROOT (files that git tracks or would track) into vitkernels.tar.gz"
  $dry_run || pack_checkout "$scratch/vitkernels.tar.gz"
  # A node that has just become ACTIVE may not accept connections yet.
  retried 8 to_all_workers "$scratch/vitkernels.tar.gz" || return $?
  retried 3 on_worker all "mkdir -p vitkernels && tar -xzf vitkernels.tar.gz -C vitkernels && $WORKER install"
}

fetcher=''

outlived() { # SECONDS; waits that long, or fails if this script was killed while its background job still runs
  local left=$1
  for (( ; left > 0; left -= 5)); do
    sleep $((left < 5 ? left : 5)) &
    child=$!
    wait "$child"
    kill -0 $$ || return $?
  done
}

fetch_regularly() { # because a preempted node loses its disk
  local pause
  child=''
  trap 'stop_child; exit' TERM # finish unpacking first, so that no checkpoint is torn
  pause=$(seconds "${setting[fetch_every]}")
  while outlived "$pause"; do
    fetch || true
  done
}

stop_fetching() {
  [[ -n $fetcher ]] || return 0
  kill "$fetcher" 2>/dev/null || true
  wait "$fetcher" || true
  fetcher=''
}

train() {
  need_node || return $?
  if [[ -d $ROOT/runs/${setting[name]}/checkpoints ]]; then
    say "copying runs/${setting[name]} to the node, to resume from its newest checkpoint"
    say "+ tar -C runs -czf run.tar.gz ${setting[name]}"
    $dry_run || tar -C "$ROOT/runs" -czf "$scratch/run.tar.gz" "${setting[name]}"
    retried 3 to_all_workers "$scratch/run.tar.gz" || return $?
    # Files on the worker are newer than those fetched from it.
    on_worker all "mkdir -p vitkernels/runs && tar -C vitkernels/runs --skip-old-files -xzf run.tar.gz" || return $?
  fi
  if ! $dry_run; then
    fetch_regularly >/dev/null 2>&1 &
    fetcher=$!
  fi
  local code attempt
  for attempt in {1..20}; do
    code=0
    on_worker all "$WORKER train ${setting[name]} ${arguments[*]@Q}" || code=$?
    ((code == 0)) && return 0
    # The state shows whether the training ended or the node is gone.
    need_node || return $?
    ((code == NO_CONNECTION)) || break
    say "connection lost (attempt $attempt); training continues, reattaching"
    nap
  done
  say "error: training ended with exit code $code"
  return "$code"
}

fetch() {
  need_node || return $?
  local archive="$scratch/fetched$BASHPID.tar.gz" run=${setting[name]}
  say "copying to runs/$run:"
  # A checkpoint may be replaced during the copy; tar then exits with 1.
  on_worker 0 "tar -C vitkernels/runs --ignore-failed-read --exclude=pid --exclude=exit_code -czf - $run ||
    test \$? = 1" >"$archive" || return $?
  $dry_run && return 0
  mkdir -p "$ROOT/runs" && tar -C "$ROOT/runs" -xzf "$archive"
}

# Delete until Google reports the node as gone. A request that is being granted rejects deletion for a while; a request
# whose creation was interrupted may appear only later.
remove() {
  local attempt absent=0
  if $dry_run; then
    queue delete --force
    return 0
  fi
  for ((attempt = 1; attempt <= 20; attempt++)); do
    look || continue
    case $state in
      ABSENT)
        if ! $asking || ((absent++ == 2)); then
          say "${setting[name]} is deleted"
          return 0
        fi
        nap
        ;;
      DELETING) nap ;;
      *)
        asking=false
        queue delete --force || nap
        ;;
    esac
  done
  say "error: ${setting[name]} STILL EXISTS (${state:-state unknown}) AND MAY BE BILLED. Delete it manually:"
  say "  gcloud compute tpus queued-resources delete ${setting[name]} ${place[*]} --force"
  return 1
}

delete() {
  look || return $?
  [[ $state != ABSENT ]] || { say "${setting[name]} does not exist: nothing to delete"; return 0; }
  if ! $quiet && ! $dry_run; then
    local answer
    read -r -p "Delete ${setting[name]} (${state}) and everything on its disk? [y/N] " answer || answer=''
    [[ $answer == [yY]* ]] || { say "not deleted; --quiet deletes without asking"; return 1; }
  fi
  remove
}

# ---------------------------------------------------------------------- run: all steps

alarm='' trained=false

ring_after() { # SECONDS; then sends SIGALRM to this script if it still runs
  outlived "$1" && kill -ALRM $$
}

end_of_run() {
  local code=$?
  trap '' INT TERM HUP ALRM # the deletion must not be interrupted
  set +e
  [[ -z $alarm ]] || kill "$alarm" 2>/dev/null
  stop_fetching
  stop_child
  if $trained; then
    # If training was interrupted, save a last checkpoint. After a preemption the node is gone, and fetch fails.
    ((code == 0)) || on_worker all "$WORKER stop ${setting[name]}"
    if ! fetch; then
      say "error: cannot fetch the run"
    elif [[ -e $ROOT/runs/${setting[name]}/summary.json ]]; then
      say "to compare its step times with the estimate: vitkernels tpu-estimate --against runs/${setting[name]}"
    fi
  fi
  say "deleting the node:"
  remove || code=1
  rm -rf "$scratch"
  exit "$code"
}

run() {
  need lifetime "without it, a forgotten node is billed indefinitely"
  local life
  life=$(seconds "${setting[lifetime]}")
  trap end_of_run EXIT
  if ! $dry_run; then
    ring_after "$life" >/dev/null 2>&1 &
    alarm=$!
  fi
  create
  wait_for_node
  setup
  trained=true
  train
}

# ---------------------------------------------------------------------- main

interrupted() { # CODE MESSAGE
  say "$2"
  exit "$1" # through the EXIT trap
}

main() {
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
    die $USAGE_ERROR "needs bash 4.4 or newer; this is $BASH_VERSION"
  read_settings "$@"
  local step
  case $verb in
    create | status | setup | train | fetch | delete | run) step=$verb ;;
    wait) step=wait_for_node ;;
    ssh) step=open_shell ;;
    '') usage >&2; exit $USAGE_ERROR ;;
    *) die $USAGE_ERROR "unknown verb '$verb'; see --help" ;;
  esac
  [[ $verb =~ ^(train|run|ssh)$ || ${#arguments[@]} -eq 0 ]] || die $USAGE_ERROR "$verb takes no arguments after --"
  check_settings
  place=(--project="${setting[project]}" --zone="${setting[zone]}" --quiet)
  $dry_run || command -v gcloud >/dev/null ||
    die 1 "gcloud is not on the PATH; install it from cloud.google.com/sdk/docs/install"
  scratch=$(mktemp -d)
  trap 'code=$?; stop_fetching; stop_child; rm -rf "$scratch"; exit $code' EXIT
  trap 'interrupted 130 "interrupted"' INT
  trap 'interrupted 143 "terminated"' TERM
  trap 'interrupted 129 "hung up"' HUP
  trap 'interrupted $TIME_IS_UP "error: the lifetime of ${setting[lifetime]} has ended"' ALRM
  "$step"
}

main "$@"
