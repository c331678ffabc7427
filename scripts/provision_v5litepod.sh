#!/usr/bin/env bash
# The life of a Cloud TPU v5e node, from the request in the queue to its deletion. `provision_v5litepod.sh --help`.
#
# All state is Google's: every step asks for the state first and does what is left to do, so a command that was
# interrupted is simply run again. Commands and states: cloud.google.com/tpu/docs/queued-resources.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly USAGE_ERROR=2 NODE_FAILED=3 TIME_IS_UP=4 PREEMPTED=75 # train.py's, too: run it again
readonly NO_CONNECTION=255 # ssh's

usage() {
  cat <<'TEXT'
The life of a Cloud TPU v5e node, safe to interrupt and to run again.

  scripts/provision_v5litepod.sh VERB [FLAGS] [-- train.py's settings]

  create    ask for a node (a queued resource with one node of the same name)
  status    print the state, and the reason of a failure
  wait      wait until the node is there; reports why it never will be
  ssh       open a shell on a worker (--worker N); after --: a command, run on --worker N or all
  setup     copy this checkout to every worker, install the locked packages, run the doctor on each
  train     train on every worker with the settings after --; started again, it joins the training that goes on
  fetch     copy the run's folder, which worker 0 writes, to runs/NAME here
  delete    delete the node and the request; asks first, unless --quiet
  run       all of it with the settings after --; the node is deleted at the end, whatever happened

Each setting is a flag, else an environment variable, else a line VARIABLE=value of the configuration file:

  --project ID             V5E_PROJECT          Google Cloud project (required)
  --zone ZONE              V5E_ZONE             such as us-central1-a (required)
  --lifetime DURATION      V5E_LIFETIME         such as 90m, 4h, 1d: required to create. When it is over, `run` stops
                                                and deletes, and so does the node by itself, wherever this script is
                                                (if its service account may delete TPUs: roles/tpu.admin)
  --valid-until DURATION   V5E_VALID_UNTIL      leave the queue after this long (default: the lifetime)
  --name NAME              V5E_NAME             of the node (default: vitkernels)
  --accelerator TYPE       V5E_ACCELERATOR      v5litepod-1, 4, 8, 16, 32, 64, 128 or 256 (default: v5litepod-1)
  --runtime-version NAME   V5E_RUNTIME_VERSION  (default: v2-alpha-tpuv5-lite)
  --service-account EMAIL  V5E_SERVICE_ACCOUNT  of the node (default: the project's)
  --capacity KIND          V5E_CAPACITY         on-demand, spot or reserved (default: on-demand)
  --tags TAG,...           V5E_TAGS             network tags
  --network NAME           V5E_NETWORK          (default: default)
  --subnetwork NAME        V5E_SUBNETWORK
  --price USD              V5E_PRICE            of one chip for one hour, to print what a lifetime costs
  --timeout DURATION       V5E_TIMEOUT          how long `wait` waits (default: the lifetime; 1d without one)
  --poll SECONDS           V5E_POLL             between two looks at the state (default: 15)
  --fetch-every DURATION   V5E_FETCH_EVERY      while it trains: a node that is preempted takes its disk along
                                                (default: 10m)
  --worker N               V5E_WORKER           for ssh (default: 0; all: every worker)
  --config FILE            V5E_CONFIG           (default: v5litepod.conf in the current folder, where there is one)

  --quiet      do not ask          --dry-run    print every command, run none          --help

Exit codes: 0 done; 1 a command failed; 2 a mistake in the call; 3 the node failed; 4 time is up; 75 the node was
preempted or the training interrupted, and the same command goes on; train and run else give train.py's own.
TEXT
}

say() { printf '%s\n' "$*" >&2; }

die() { # CODE WORDS...: the code, and what is wrong
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

read_flags() { # fills `given`, and the globals of flags without a value
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
        known "$name" || die $USAGE_ERROR "there is no flag $(flag "$name"); --help lists them"
        given[$name]=$value
        ;;
      *)
        [[ -z $verb ]] || die $USAGE_ERROR "'$1' after '$verb': settings of train.py come after --"
        verb=$1
        ;;
    esac
    shift
  done
}

read_file() { # FILE: lines VARIABLE=value; nothing in it is executed
  local line number=0 name
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
    [[ $line =~ ^[[:space:]]*(export[[:space:]]+)?V5E_([A-Z_]+)=(.*)$ ]] ||
      die $USAGE_ERROR "$1:$number: expected V5E_NAME=value, found: $line"
    name=${BASH_REMATCH[2],,} line=${BASH_REMATCH[3]}
    known "$name" || die $USAGE_ERROR "$1:$number: there is no setting V5E_${name^^}"
    [[ $line =~ ^\"(.*)\"[[:space:]]*$ || $line =~ ^\'(.*)\'[[:space:]]*$ ]] && line=${BASH_REMATCH[1]}
    setting[$name]=$line
  done <"$1"
}

read_settings() { # a flag wins over the environment, and that over the file
  declare -A given=()
  local name environment
  read_flags "$@"
  local file=${given[config]:-${V5E_CONFIG:-}}
  if [[ -n $file ]]; then
    [[ -r $file ]] || die $USAGE_ERROR "no configuration file $file"
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

need() { # SETTING WHY
  local ways
  ways="$(flag "$1"), the environment variable $(variable "$1"), or a line in v5litepod.conf"
  [[ -n ${setting[$1]:-} ]] || die $USAGE_ERROR "no $1: $2. Give $ways"
}

seconds() { # DURATION, checked already
  local -A unit=([s]=1 [m]=60 [h]=3600 [d]=86400)
  printf '%d' $((${1%?} * unit[${1: -1}]))
}

check_settings() {
  need project "which project pays"
  need zone "v5e is in some zones only, see cloud.google.com/tpu/docs/regions-zones"
  [[ ${setting[name]} =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] ||
    die $USAGE_ERROR "--name ${setting[name]}: lower-case letters, digits and dashes, starting with a letter"
  [[ ${setting[accelerator]} =~ ^v5litepod-(1|4|8|16|32|64|128|256)$ ]] ||
    die $USAGE_ERROR "--accelerator ${setting[accelerator]}: v5litepod-1, 4, 8, 16, 32, 64, 128 or 256"
  [[ ${setting[capacity]} =~ ^(on-demand|spot|reserved)$ ]] ||
    die $USAGE_ERROR "--capacity ${setting[capacity]}: on-demand, spot or reserved"
  [[ ${setting[poll]} =~ ^[0-9]+(\.[0-9]+)?$ ]] || die $USAGE_ERROR "--poll ${setting[poll]}: a number of seconds"
  [[ ${setting[worker]} =~ ^([0-9]+|all)$ ]] || die $USAGE_ERROR "--worker ${setting[worker]}: a number, or all"
  [[ -z ${setting[price]:-} || ${setting[price]} =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
    die $USAGE_ERROR "--price ${setting[price]}: US dollars, such as 1.20"
  local name
  for name in lifetime valid_until timeout fetch_every; do
    [[ ${setting[$name]:-1s} =~ ^[1-9][0-9]*[smhd]$ ]] ||
      die $USAGE_ERROR "$(flag "$name") ${setting[$name]}: a duration such as 90m, 4h or 1d"
  done
}

# ---------------------------------------------------------------------- gcloud
# Shown, interruptible, and asked again when it gives no clear answer. Every `return` names its value: in a trap, a bare
# one gives the value from before the trap.

shown() { printf '%q ' "$@"; }

# Runs a command in the background and waits for it: a trap is then served at once, and not when the command ends.
child='' asking=false # asking: a request may be on its way that Google does not show yet
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

on_worker() { # WORKER COMMAND: its exit code is the command's; 255 when there is no connection
  attended gcloud compute tpus tpu-vm ssh "${setting[name]}" "${place[@]}" "${SSH_FLAGS[@]}" \
    --worker="$1" --command="$2"
}

to_all_workers() { # FILE: into their home folders
  attended gcloud compute tpus tpu-vm scp "$1" "${setting[name]}:" "${place[@]}" --worker=all
}

describe() { # EXPRESSION -> its value. Else 1, with the error in the file $scratch/error
  gcloud compute tpus queued-resources describe "${setting[name]}" "${place[@]}" --format="value($1)" 2>"$scratch/error"
}

retried() { # TRIES COMMAND...: until it succeeds
  local tries=$1 attempt code
  shift
  for ((attempt = 1; ; attempt++)); do
    code=0
    "$@" || code=$?
    ((code == 0 || attempt == tries)) && return "$code"
    say "attempt $attempt of $tries failed (exit code $code); again in ${setting[poll]} s"
    nap
  done
}

# `state`, for the reader: ABSENT, or one of Google's. Anything but a clear "not found" is asked again, then an error:
# a node that cannot be seen must never count as deleted.
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
  say "error: gcloud does not say how ${setting[name]} is: $(cat "$scratch/error")"
  return 1
}

reason() { # why the node failed or went away
  local message
  message=$(describe state.failedData.error.message) || message=''
  [[ -n $message ]] || message=$(describe 'state.stateInitiator') || message=''
  case $message in
    '') say "reason: Google gives none; gcloud compute tpus queued-resources describe ${setting[name]} shows all" ;;
    SERVICE) say "reason: Cloud TPU took it back (preempted, or maintenance)" ;;
    USER) say "reason: a user stopped or deleted the node" ;;
    *) say "reason: $message" ;;
  esac
}

stop_child() { # a request on its way is let through: what is half made could not be deleted
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
    say "  price per chip hour: cloud.google.com/tpu/pricing (--price USD multiplies it out)"
  fi
}

# What the node runs when it starts: it deletes itself when its lifetime is over, even if nobody is left who would.
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
  need lifetime "a node that is forgotten is billed until somebody notices"
  print_bill
  look || return $?
  case $state in
    FAILED | SUSPENDED)
      say "${setting[name]} is $state and of no use any more:"
      reason
      remove || return $?
      ;;
    SUSPENDING | DELETING)
      say "${setting[name]} is $state; waiting until it is gone"
      remove || return $?
      ;;
    ABSENT | '') ;;
    *)
      local there
      there=$(describe 'tpu.nodeSpec[0].node.acceleratorType') || there=''
      [[ -z $there || $there == "${setting[accelerator]}" ]] ||
        die $USAGE_ERROR "${setting[name]} exists and is a $there, not a ${setting[accelerator]}: delete it, or give" \
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
      ABSENT) die $NODE_FAILED "there is no ${setting[name]} in ${setting[zone]}: create it first" ;;
      FAILED | DELETING | SUSPENDING | SUSPENDED)
        reason
        [[ $state == FAILED || $state == DELETING ]] || return $PREEMPTED
        return $NODE_FAILED
        ;;
    esac
    if ((SECONDS - begin >= limit)); then
      say "error: ${setting[name]} is $state after $limit s. It stays in the queue, and is billed once it is ACTIVE:" \
        "wait again, or delete it"
      return $TIME_IS_UP
    fi
    nap
  done
}

need_node() {
  look || return $?
  [[ -z $state || $state == ACTIVE ]] && return 0
  say "error: ${setting[name]} is $state and not ACTIVE"
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
  rm -r "$scratch" # exec runs no trap
  exec gcloud compute tpus tpu-vm ssh "${setting[name]}" "${place[@]}" --worker="${setting[worker]}"
}

# Files that git knows or would: the checkout with what is changed in it, without results and environments.
pack_checkout() { # ARCHIVE
  local files=()
  mapfile -d '' -t files < <(git -C "$ROOT" ls-files -z --cached --others --exclude-standard)
  ((${#files[@]})) || die 1 "$ROOT is no git checkout: what should be copied to the node?"
  local file present=()
  for file in "${files[@]}"; do
    [[ -e $ROOT/$file ]] && present+=("$file")
  done
  printf '%s\0' "${present[@]}" | tar -C "$ROOT" --null -T - -czf "$1"
}

setup() {
  need_node || return $?
  say "+ pack $ROOT (what git knows or would) into vitkernels.tar.gz"
  $dry_run || pack_checkout "$scratch/vitkernels.tar.gz"
  # A node that has just become ACTIVE may not take connections yet.
  retried 8 to_all_workers "$scratch/vitkernels.tar.gz" || return $?
  retried 3 on_worker all "mkdir -p vitkernels && tar -xzf vitkernels.tar.gz -C vitkernels && $WORKER install"
}

fetcher=''

outlived() { # SECONDS: waits so long, or fails when this script is gone, which what it started in the background is not
  local left=$1
  for (( ; left > 0; left -= 5)); do
    sleep $((left < 5 ? left : 5)) &
    child=$!
    wait "$child"
    kill -0 $$ || return $?
  done
}

fetch_regularly() { # the node's disk goes with the node
  local pause
  child=''
  trap 'stop_child; exit' TERM # what is being unpacked is finished first: half a checkpoint helps nobody
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
    say "taking runs/${setting[name]} along, to go on from its newest checkpoint"
    say "+ tar -C runs -czf run.tar.gz ${setting[name]}"
    $dry_run || tar -C "$ROOT/runs" -czf "$scratch/run.tar.gz" "${setting[name]}"
    retried 3 to_all_workers "$scratch/run.tar.gz" || return $?
    # What is on the worker already is newer than what was fetched from it.
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
    # The state tells whether the training ended, or the node did.
    need_node || return $?
    ((code == NO_CONNECTION)) || break
    say "the connection broke (attempt $attempt); the training goes on, joining it again"
    nap
  done
  say "error: the training ended with exit code $code"
  return "$code"
}

fetch() {
  need_node || return $?
  local archive="$scratch/fetched$BASHPID.tar.gz" run=${setting[name]}
  say "to runs/$run:"
  # A checkpoint may be replaced by a newer one meanwhile: tar then ends with 1.
  on_worker 0 "tar -C vitkernels/runs --ignore-failed-read --exclude=pid --exclude=exit_code -czf - $run ||
    test \$? = 1" >"$archive" || return $?
  $dry_run && return 0
  mkdir -p "$ROOT/runs" && tar -C "$ROOT/runs" -xzf "$archive"
}

# Deletes until Google says that it is gone. A request that is just being granted refuses to be deleted, for a while;
# one whose creation was cut off may show only later.
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
  say "error: ${setting[name]} IS STILL THERE (${state:-state unknown}) AND MAY BE BILLED. By hand:"
  say "  gcloud compute tpus queued-resources delete ${setting[name]} ${place[*]} --force"
  return 1
}

delete() {
  look || return $?
  [[ $state != ABSENT ]] || { say "there is no ${setting[name]}: nothing to delete"; return 0; }
  if ! $quiet && ! $dry_run; then
    local answer
    read -r -p "Delete ${setting[name]} (${state}) and everything on its disk? [y/N] " answer || answer=''
    [[ $answer == [yY]* ]] || { say "not deleted; --quiet deletes without asking"; return 1; }
  fi
  remove
}

# ---------------------------------------------------------------------- run: all of it

alarm='' trained=false

ring_after() { # SECONDS: SIGALRM to this script, if it is still there
  outlived "$1" && kill -ALRM $$
}

end_of_run() {
  local code=$?
  trap '' INT TERM HUP ALRM # nothing stops the deletion
  set +e
  [[ -z $alarm ]] || kill "$alarm" 2>/dev/null
  stop_fetching
  stop_child
  if $trained; then
    # Interrupted while it trained: a last checkpoint. The node is gone when it was preempted; fetch then fails.
    ((code == 0)) || on_worker all "$WORKER stop ${setting[name]}"
    fetch || say "error: nothing could be fetched"
  fi
  say "deleting the node:"
  remove || code=1
  rm -rf "$scratch"
  exit "$code"
}

run() {
  need lifetime "a node that is forgotten is billed until somebody notices"
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

interrupted() { # CODE WORDS
  say "$2"
  exit "$1" # through the EXIT trap
}

main() {
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die $USAGE_ERROR "bash 4.4 is needed, not $BASH_VERSION"
  read_settings "$@"
  local step
  case $verb in
    create | status | setup | train | fetch | delete | run) step=$verb ;;
    wait) step=wait_for_node ;;
    ssh) step=open_shell ;;
    '') usage >&2; exit $USAGE_ERROR ;;
    *) die $USAGE_ERROR "there is no '$verb'; --help lists the verbs" ;;
  esac
  [[ $verb =~ ^(train|run|ssh)$ || ${#arguments[@]} -eq 0 ]] || die $USAGE_ERROR "$verb takes nothing after --"
  check_settings
  place=(--project="${setting[project]}" --zone="${setting[zone]}" --quiet)
  $dry_run || command -v gcloud >/dev/null || die 1 "gcloud is not on the PATH: cloud.google.com/sdk/docs/install"
  scratch=$(mktemp -d)
  trap 'code=$?; stop_fetching; stop_child; rm -rf "$scratch"; exit $code' EXIT
  trap 'interrupted 130 "interrupted"' INT
  trap 'interrupted 143 "terminated"' TERM
  trap 'interrupted 129 "hung up"' HUP
  trap 'interrupted $TIME_IS_UP "error: the lifetime of ${setting[lifetime]} is over"' ALRM
  "$step"
}

main "$@"
