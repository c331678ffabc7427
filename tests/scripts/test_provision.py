"""scripts/provision_v5litepod.sh against a fake gcloud (gcloud_stand_in.py): every verb, failure and interruption.

scripts/v5litepod_worker.sh runs too, in the fake's folders. Only installation and training are replaced: `uv` and
`make` do nothing, and train.py is a few lines of shell that handle SIGTERM.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("gcloud_stand_in.py")
PLACE = ["--project", "p", "--zone", "us-central1-a"]
LIFE = [*PLACE, "--lifetime", "1h"]

DOCTOR = 'echo "${DOCTOR:-TPU: attached}"'
# Counts tenths of a second in a checkpoint, written atomically like the real ones, and resumes from it: up to $STEPS,
# or until the file $MAY_END exists.
TRAINER = r"""#!/bin/bash
case "$*" in *vitkernels.doctor*) DOCTOR; exit ;; esac
for word in "$@"; do case $word in hydra.run.dir=*) run=${word#*=} ;; esac; done
mkdir -p "$run/checkpoints"; newest=$run/checkpoints/step; step=$(cat "$newest" 2>/dev/null || echo 0)
save() { echo $step >"$newest.tmp"; mv "$newest.tmp" "$newest"; }
echo "from step $step with $*"
trap 'save; echo stopped at $step; exit 75' TERM
while [[ $step -lt ${STEPS:-3} && ! -e $MAY_END ]]; do step=$((step + 1)); save; sleep 0.1; done
save; echo "{\"status\": \"done\"}" >"$run/summary.json"; echo done; exit ${TRAIN_EXIT:-0}
"""
MAKE = "#!/bin/bash\nmkdir -p .venv/bin && cp train.py .venv/bin/python && chmod +x .venv/bin/python\n"


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


class Cloud:
    """A checkout in which to call the script, and the state of the fake gcloud."""

    def __init__(self, path: Path):
        self.state, self.checkout, bin_dir = path / "state", path / "checkout", path / "bin"
        self.output, self.training_may_end = path / "output", path / "training_may_end"
        for folder in (self.state, self.checkout / "scripts", bin_dir):
            folder.mkdir(parents=True)
        for script in ("provision_v5litepod.sh", "v5litepod_worker.sh"):
            shutil.copy(ROOT / "scripts" / script, self.checkout / "scripts")
        (self.checkout / "train.py").write_text(TRAINER.replace("DOCTOR;", f"{DOCTOR};"))
        subprocess.run(["git", "init", "-q"], cwd=self.checkout, check=True)
        (self.checkout / ".git/info/exclude").write_text("runs\nv5litepod.conf\n")
        commands = {"gcloud": f'#!/bin/sh\nexec "{sys.executable}" -S "{STAND_IN}" "$@"\n', "make": MAKE}
        commands["uv"] = "#!/bin/sh\necho python3\n"
        for name, text in commands.items():
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("V5E_")}
        self.environment |= {"PATH": f"{bin_dir}:{os.environ['PATH']}", "GCLOUD_STAND_IN": str(self.state)}
        self.environment |= {"V5E_POLL": "0.05", "MAY_END": str(self.training_may_end)}
        self.plan()

    def plan(self, *faults, **plan):
        (self.state / "plan.json").write_text(json.dumps({"faults": faults, **plan}))

    def start(self, *words, **environment):
        # A shell without job control makes its background jobs, and their children, ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.output.unlink(missing_ok=True)  # processes left by a killed script still write to the earlier file
        with open(self.output, "w") as output:  # not a pipe: processes left by a killed script would hold it open
            return subprocess.Popen(
                [str(self.checkout / "scripts/provision_v5litepod.sh"), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.checkout,
                env={**self.environment, **environment},
            )

    def finish(self, process, code=0):
        found = process.wait(timeout=300)
        output = self.output.read_text()
        assert found == code, output
        return output

    def __call__(self, *words, code=0, **environment):
        return self.finish(self.start(*words, **environment), code)

    @property
    def calls(self):
        path = self.state / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self):
        return [call["step"] for call in self.calls]

    @property
    def exists(self):
        return (self.state / "node.json").exists()

    @property
    def fetched(self):
        return self.checkout / "runs/vitkernels"

    @property
    def trains(self):
        log = self.state / "worker0/vitkernels/runs/vitkernels/output.log"
        return log.exists() and "from step" in log.read_text()

    def until(self, seen, process):
        """Wait until a step was called, given its name, or until a function returns true."""
        end = time.monotonic() + 300
        while not (seen() if callable(seen) else seen in self.steps):
            assert time.monotonic() < end and process.poll() is None, self.output.read_text()
            time.sleep(0.01)


# ---------------------------------------------------------------------- verbs


def test_verbs__entire_life_of_a_node(cloud):
    cloud.plan(states=["ACCEPTED", *["WAITING_FOR_RESOURCES"] * 4, "PROVISIONING", "ACTIVE"])
    bill = cloud(
        "create", *LIFE, "--accelerator", "v5litepod-16", "--price", "1.2", "--capacity", "spot", "--tags", "a,b"
    )
    assert "16 v5e chip(s), spot" in bill and "16 chip hours" in bill and "at most 19.20 USD" in bill
    flags = cloud.calls[-1]["flags"]
    expected = {"node-id": "vitkernels", "accelerator-type": "v5litepod-16", "runtime-version": "v2-alpha-tpuv5-lite"}
    expected |= {"valid-until-duration": "3600s", "spot": True, "tags": "a,b", "project": "p", "zone": "us-central1-a"}
    assert expected.items() <= flags.items() and "reserved" not in flags and "service-account" not in flags
    assert "exists already: ACCEPTED" in cloud("create", *LIFE, "--accelerator", "v5litepod-16")
    assert "is a v5litepod-16" in cloud("create", *LIFE, code=2)
    assert cloud("status", *PLACE) == "WAITING_FOR_RESOURCES\n"
    waited = cloud("wait", *PLACE)
    seen = [line.split()[-1] for line in waited.splitlines()]
    assert seen == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    cloud("setup", *PLACE)
    for worker in ("worker0", "worker1"):
        assert (cloud.state / worker / "vitkernels/doctor.txt").read_text() == "TPU: attached\n"
    output = cloud("train", *PLACE, "--", "model=x", "data.root=/with space")
    assert output.count("resume=auto hydra.run.dir=runs/vitkernels model=x data.root=/with space") == 2  # workers
    assert not cloud.fetched.exists()
    cloud("fetch", *PLACE)
    assert (cloud.fetched / "summary.json").exists() and not (cloud.fetched / "pid").exists()
    assert "worker1" in cloud("ssh", *PLACE, "--worker", "1", "--", "pwd")
    assert "not deleted" in cloud("delete", *PLACE, code=1) and cloud.exists
    assert "is deleted" in cloud("delete", *PLACE, "--quiet") and not cloud.exists
    assert "nothing to delete" in cloud("delete", *PLACE, "--quiet")
    assert cloud("status", *PLACE) == "ABSENT\n"


def test_run__all_steps_and_deletion(cloud):
    cloud.plan(states=["WAITING_FOR_RESOURCES", "ACTIVE"])
    output = cloud("run", *LIFE, "--", "seed=1")
    assert "done" in output and not cloud.exists and (cloud.fetched / "summary.json").exists()
    assert "vitkernels tpu-estimate --against runs/vitkernels" in output
    steps = [step for step in cloud.steps if step != "describe"]
    assert steps == ["create", "scp", "ssh install", "ssh train", "ssh fetch", "delete"]


def test_dry_run__prints_commands_without_running_them(cloud):
    output = cloud("run", *LIFE, "--dry-run", "--capacity", "reserved", "--", "seed=1")
    assert cloud.steps == [] and not (cloud.checkout / "runs").exists()
    for command in (
        "create vitkernels",
        "describe vitkernels",
        "tpu-vm scp",
        "worker.sh\\ install",
        "-czf",
        "delete vitkernels",
    ):
        assert command in output
    assert "--reserved" in output and "seed=1" in output and "--on-active=3600s" in output


def test_settings__precedence_of_flag_environment_file(cloud):
    (cloud.checkout / "v5litepod.conf").write_text('# ours\nV5E_PROJECT=file\nexport V5E_ZONE="file"\nV5E_NAME=file\n')
    output = cloud("create", "--lifetime=30m", "--dry-run", "--name", "flag", V5E_ZONE="environment", V5E_NAME="no")
    assert "create flag --project=file --zone=environment" in output
    other = cloud.checkout / "other"
    other.write_text("V5E_PROJECT=$(touch hacked)\n")
    assert "touch hacked" in cloud("status", "--dry-run", "--zone=z", "--config", str(other))
    assert not (cloud.checkout / "hacked").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "VERB"),
        (["fly", *PLACE], "unknown verb 'fly'"),
        (["create", *PLACE], "lifetime is not set"),
        (["run", *PLACE], "lifetime is not set"),
        (
            ["create", "--zone", "z"],
            "project is not set (the project that is billed); set it with --project, the environment variable V5E_PRO",
        ),
        (["status", "--project", "p"], "zone is not set"),
        (["create", *PLACE, "--lifetime", "4"], "--lifetime 4: must be a duration"),
        (["create", *LIFE, "--accelerator", "v5litepod-3"], "v5litepod-3: must be v5litepod-1, 4, 8"),
        (["create", *LIFE, "--capacity", "free"], "on-demand, spot or reserved"),
        (["create", *LIFE, "--name", "Big"], "lower-case"),
        (["create", *LIFE, "--zoen", "z"], "unknown flag --zoen"),
        (["create", *LIFE, "--zone"], "--zone needs a value"),
        (["status", *PLACE, "--", "x"], "status takes no arguments after --"),
        (["train", *PLACE, "model=x"], "settings of train.py come after --"),
        (["status", *PLACE, "--config", "nosuch"], "cannot read configuration file nosuch"),
    ],
)
def test_usage_errors_message(cloud, words, message):
    assert message in cloud(*words, code=2)
    assert cloud.steps == []


def test_configuration_file__error_has_line_number(cloud):
    (cloud.checkout / "v5litepod.conf").write_text("V5E_ZONE=z\nV5E_ZOEN=z\n")
    assert "v5litepod.conf:2: unknown setting V5E_ZOEN" in cloud("status", *PLACE, code=2)


def test_help__lists_verbs_and_settings(cloud):
    text = cloud("--help")
    for word in (
        "create",
        "status",
        "wait",
        "ssh",
        "setup",
        "train",
        "fetch",
        "delete",
        "run",
        "V5E_LIFETIME",
        "--dry-run",
    ):
        assert word in text


# ---------------------------------------------------------------------- failures


def test_wait__reports_reason_of_failure(cloud):
    cloud.plan(states=["PROVISIONING", "FAILED"], error="RESOURCE_EXHAUSTED: no v5e left")
    cloud("create", *LIFE)
    assert "reason: RESOURCE_EXHAUSTED: no v5e left" in cloud("wait", *PLACE, code=3)
    assert "no v5e left" in cloud("status", *PLACE)
    cloud.plan(states=["ACTIVE"], error="RESOURCE_EXHAUSTED: no v5e left")
    assert "cannot be used" in cloud("create", *LIFE)  # and is created again
    assert cloud.steps.count("create") == 2 and cloud("status", *PLACE) == "ACTIVE\n"


@pytest.mark.parametrize("state", ["SUSPENDING", "SUSPENDED"])
def test_wait__reports_preemption(cloud, state):
    cloud.plan(states=["PROVISIONING", state])
    cloud("create", *LIFE)
    assert "preempted" in cloud("wait", *PLACE, code=75)


def test_wait__time_limit(cloud):
    cloud.plan(states=["WAITING_FOR_RESOURCES"])
    cloud("create", *LIFE)
    assert "WAITING_FOR_RESOURCES after 1 s" in cloud("wait", *PLACE, "--timeout", "1s", code=4)
    assert cloud.exists


def test_verbs__absent_node(cloud):
    assert "create it first" in cloud("wait", *PLACE, code=3)
    for verb in ("setup", "train", "fetch", "ssh"):
        assert "ABSENT, not ACTIVE" in cloud(verb, *PLACE, code=3)


@pytest.mark.parametrize(
    ("step", "code"),
    [("create", 1), ("describe", 1), ("scp", 1), ("ssh install", 7), ("ssh train", 7), ("ssh fetch", 1)],
)
def test_run__deletes_node_if_any_step_fails(cloud, step, code):
    """The step fails permanently, or once if the script does not retry it."""
    cloud.plan({"step": step, "code": code, "times": 30 if step == "describe" else 9, "message": "broken"})
    output = cloud("run", *LIFE, "--", code=0 if step == "ssh fetch" else code)
    assert not cloud.exists and "broken" in output
    if step == "ssh fetch":
        assert "cannot fetch the run" in output


def test_run__retries_transient_failures(cloud):
    cloud.plan(
        {"step": "describe", "code": 1, "message": "UNAVAILABLE"},
        {"step": "scp", "code": 255},
        {"step": "ssh install", "code": 1},
        {"step": "ssh train", "code": 255},
        {"step": "delete", "code": 1, "times": 2, "message": "FAILED_PRECONDITION"},
    )
    cloud("run", *LIFE, "--")
    assert not cloud.exists and (cloud.fetched / "summary.json").exists()
    assert cloud.steps.count("delete") == 3 and cloud.steps.count("ssh train") == 2


def test_delete__failure_warns_about_billing_message(cloud):
    cloud("create", *LIFE)
    cloud.plan({"step": "delete", "code": 1, "times": 99, "message": "PERMISSION_DENIED"})
    output = cloud("delete", *PLACE, "--quiet", code=1, V5E_POLL="0")
    assert "STILL EXISTS (ACTIVE) AND MAY BE BILLED" in output
    assert (
        "gcloud compute tpus queued-resources delete vitkernels --project=p --zone=us-central1-a --quiet --force"
        in output
    )


def test_run__worker_without_tpu(cloud):
    output = cloud("run", *LIFE, "--", code=1, DOCTOR="CPU: only")
    assert "no TPU attached on" in output and not cloud.exists


def test_run__returns_exit_code_of_training(cloud):
    output = cloud("run", *LIFE, "--", code=9, TRAIN_EXIT="9")
    assert "training ended with exit code 9" in output and not cloud.exists
    assert (cloud.fetched / "output.log").exists()


def test_train__preempted_run_resumes_from_fetched_checkpoint(cloud):
    cloud("create", *LIFE)
    cloud("setup", *PLACE)
    process = cloud.start("train", *PLACE, "--fetch-every", "1s", "--", STEPS="9999")
    cloud.until((cloud.fetched / "checkpoints/step").exists, process)
    node = json.loads((cloud.state / "node.json").read_text())
    (cloud.state / "node.json").write_text(json.dumps({**node, "states": ["SUSPENDED"]}))
    pid = (cloud.state / "worker0/vitkernels/runs/vitkernels/pid").read_text().strip()
    subprocess.run(["kill", "-KILL", pid], check=True)
    assert "preempted" in cloud.finish(process, code=75)
    step = int((cloud.fetched / "checkpoints/step").read_text())
    output = cloud("run", *LIFE, "--", STEPS=str(step + 2))
    assert f"from step {step}" in output and not cloud.exists
    assert int((cloud.fetched / "checkpoints/step").read_text()) == step + 2


def test_run__ends_at_its_lifetime(cloud):
    cloud.plan(states=["WAITING_FOR_RESOURCES"])
    output = cloud("run", *PLACE, "--lifetime", "1s", "--timeout", "1h", "--", code=4)
    assert "the lifetime of 1s has ended" in output and not cloud.exists


# ---------------------------------------------------------------------- interruptions

STEPS = ["describe", "create", "scp", "ssh install", "ssh train"]


@pytest.mark.parametrize(
    ("step", "number"),
    [*((step, signal.SIGTERM) for step in STEPS), ("create", signal.SIGINT), ("ssh train", signal.SIGINT)],
)
def test_run__interruption_deletes_node(cloud, step, number):
    # The script completes a request in flight and a query of the state.
    cloud.plan({"step": step, "hang": 0.3 if step in ("create", "describe") else 20, "after": step == "create"})
    process = cloud.start("run", *LIFE, "--")
    cloud.until(step, process)
    process.send_signal(number)
    output = cloud.finish(process, code=128 + number)
    assert not cloud.exists and "is deleted" in output


def test_run__interruption_fetches_a_checkpoint(cloud):
    process = cloud.start("run", *LIFE, "--", STEPS="9999")
    cloud.until(lambda: cloud.trains, process)
    process.send_signal(signal.SIGTERM)
    assert "stopped at" in cloud.finish(process, code=128 + signal.SIGTERM)
    assert not cloud.exists and int((cloud.fetched / "checkpoints/step").read_text()) > 0


def test_train__interruption_waits_for_unpacking(cloud, tmp_path):
    unpacking = tmp_path / "unpacking"
    slow_tar = tmp_path / "bin/tar"
    slow_tar.write_text(f"""#!/bin/bash
        [[ "$*" == "-C {cloud.checkout}/runs -xzf "* ]] || exec {shutil.which("tar")} "$@"
        touch {unpacking}; sleep 2; {shutil.which("tar")} "$@" && rm {unpacking}""")
    slow_tar.chmod(0o755)
    cloud("create", *LIFE)
    cloud("setup", *PLACE)
    process = cloud.start("train", *PLACE, "--fetch-every", "1s", "--", STEPS="9999")
    cloud.until(unpacking.exists, process)
    process.send_signal(signal.SIGTERM)
    cloud.finish(process, code=128 + signal.SIGTERM)
    assert not unpacking.exists() and (cloud.fetched / "checkpoints/step").exists()
    cloud("delete", *PLACE, "--quiet")


@pytest.mark.parametrize("step", STEPS)
def test_run__after_a_kill(cloud, step):
    cloud.plan({"step": step, "hang": 0.5, "after": step == "create"})
    process = cloud.start("run", *LIFE, "--")
    cloud.until(step, process)
    process.kill()
    process.wait()
    output = cloud("run", *LIFE, "--")
    assert "done" in output and not cloud.exists and (cloud.fetched / "summary.json").exists()


def test_train__attaches_after_a_kill(cloud):
    cloud("create", *LIFE)
    cloud("setup", *PLACE)
    process = cloud.start("train", *PLACE, "--", STEPS="9999")
    cloud.until(lambda: cloud.trains, process)
    process.kill()
    process.wait()
    process = cloud.start("train", *PLACE, "--")
    cloud.until(lambda: "attaching to the running training" in cloud.output.read_text(), process)
    cloud.training_may_end.touch()
    output = cloud.finish(process)
    assert output.count("from step 0") == 1 and "done" in output
    cloud("delete", *PLACE, "--quiet")


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = [str(path) for path in (ROOT / "scripts").glob("*.sh")]
    assert len(scripts) >= 2
    run = subprocess.run([str(shellcheck), *scripts], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
