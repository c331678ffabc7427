"""A fake `gcloud` for tests: a queued resource whose states follow a plan, with a folder per worker.

The folder $GCLOUD_STAND_IN holds plan.json, calls.jsonl (every call), node.json (the queued resource) and worker<N>/, a
home folder in which `tpu-vm ssh` runs commands. The plan:

    states: the states that successive calls of describe report; the last one is kept
    error: the message of a FAILED request
    faults: [{step, code, message, times, hang, after}]: the first `times` calls of a step wait `hang` seconds and then
            fail with `code`, unless it is 0; with `after`, the step is still carried out

Steps: create, describe, delete, scp, ssh install, ssh train, ssh stop, ssh fetch, ssh other. Flags are checked against
the reference of gcloud 528: cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and .../tpu-vm.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.environ["GCLOUD_STAND_IN"])
WIDE = {"project", "zone", "quiet", "format"}
CREATE = {
    "node-id",
    "accelerator-type",
    "runtime-version",
    "valid-until-duration",
    "service-account",
    "spot",
    "reserved",
}
CREATE |= {"tags", "network", "subnetwork", "scopes", "metadata-from-file", "async"}
FLAGS = {"create": CREATE, "describe": set(), "delete": {"force", "async"}}
FLAGS |= {"ssh": {"worker", "command", "ssh-flag"}, "scp": {"worker", "recurse", "scp-flag"}}
REQUIRED = {"create": {"node-id", "accelerator-type", "runtime-version"}}


def main(words: list[str]) -> int:
    flags, names = {}, []
    for word in words:
        flag = re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word, re.DOTALL)
        if flag:
            flags[flag[1]] = True if flag[2] is None else flag[2]
        else:
            names.append(word)
    if names[:2] != ["compute", "tpus"] or names[2] not in ("queued-resources", "tpu-vm"):
        return fail(2, f"Invalid choice: {names}")
    verb, operands = names[3], names[4:]
    unknown = flags.keys() - WIDE - FLAGS[verb]
    missing = ({"project", "zone"} | REQUIRED.get(verb, set())) - flags.keys()
    if unknown or missing:
        return fail(2, f"unrecognized {sorted(unknown)}, missing {sorted(missing)}")
    step = verb if verb != "ssh" else f"ssh {purpose(flags.get('command', ''))}"
    with open(HERE / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"step": step, "flags": flags, "operands": operands}) + "\n")
    fault = next_fault(step)
    if fault:
        done = globals()[verb](operands, flags) if fault.get("after") else 0
        time.sleep(fault.get("hang", 0))
        if fault.get("code"):
            return fail(fault["code"], fault.get("message", "the call failed"))
        if fault.get("after"):
            return done
    return globals()[verb](operands, flags)


def fail(code: int, message: str) -> int:
    print(f"ERROR: (gcloud.compute.tpus) {message}", file=sys.stderr)
    return code


def purpose(command: str) -> str:
    words = re.search(r"v5litepod_worker\.sh (\w+)", command)
    return words[1] if words else "fetch" if "-czf -" in command else "other"


def next_fault(step: str) -> dict | None:
    plan = read("plan.json")
    for fault in plan.get("faults", ()):
        if fault["step"] == step and fault.setdefault("times", 1) > 0:
            fault["times"] -= 1
            write("plan.json", plan)
            return fault
    return None


def read(name: str) -> dict | None:
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else None


def write(name: str, content: dict) -> None:
    path = HERE / f"{name}.{os.getpid()}"
    path.write_text(json.dumps(content))
    path.rename(HERE / name)


def create(operands, flags) -> int:
    if read("node.json"):
        return fail(1, "ALREADY_EXISTS: Resource already exists")
    states = read("plan.json").get("states", ["ACTIVE"])
    write("node.json", {"name": operands[0], "states": states, "accelerator": flags["accelerator-type"]})
    return 0


def describe(operands, flags) -> int:
    node = read("node.json")
    if node is None:
        return fail(1, f"NOT_FOUND: Resource '{operands[0]}' was not found")
    state, *later = node["states"]
    if "state.state)" in flags["format"]:
        write("node.json", {**node, "states": later or [state]})
        print(state)
        if state in ("SUSPENDING", "SUSPENDED"):
            lose_workers()
    elif "failedData" in flags["format"]:
        print(read("plan.json").get("error", "") if state == "FAILED" else "")
    elif "stateInitiator" in flags["format"]:
        print("SERVICE" if state.startswith("SUSPEND") else "")
    elif "acceleratorType" in flags["format"]:
        print(node["accelerator"])
    return 0


def delete(operands, flags) -> int:
    node = read("node.json")
    if node is None:
        return fail(1, f"NOT_FOUND: Resource '{operands[0]}' was not found")
    if not flags.get("force") and node["states"][0] not in ("ACCEPTED", "FAILED", "SUSPENDED"):
        return fail(1, "FAILED_PRECONDITION: the queued resource has nodes")
    (HERE / "node.json").unlink()
    lose_workers()
    return 0


def lose_workers() -> None:
    for worker in HERE.glob("worker*"):
        for pid in worker.glob("vitkernels/runs/*/pid"):
            subprocess.run(["kill", "-KILL", pid.read_text().strip()], capture_output=True)
        shutil.rmtree(worker, ignore_errors=True)


def workers(flags) -> list[Path]:
    chips = int(read("node.json")["accelerator"].split("-")[1])
    count = max(1, chips // 8)
    numbers = range(count) if flags.get("worker") == "all" else [int(flags.get("worker", 0))]
    homes = [HERE / f"worker{n}" for n in numbers]
    for home in homes:
        home.mkdir(exist_ok=True)
    return homes


def is_up() -> bool:
    return (read("node.json") or {"states": ["ABSENT"]})["states"][0] == "ACTIVE"


def scp(operands, flags) -> int:
    if not is_up():
        return fail(1, "the TPU is not in state READY")
    for home in workers(flags):
        shutil.copy(operands[0], home)
    return 0


def ssh(operands, flags) -> int:
    if not is_up():
        return fail(1, "the TPU is not in state READY")
    started = [
        subprocess.Popen(["bash", "-c", flags["command"]], cwd=home, env={**os.environ, "HOME": str(home)})
        for home in workers(flags)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
