"""tools/bootstrap.sh and the Makefile, with fake interpreters: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent

# Stands for a Python 3.12: answers the probe, "makes" an environment that holds itself, and "installs" as told by the
# files beside it: pip.log is printed, pip.rc is the exit code, pip.sleep the seconds an installation takes.
FAKE_PYTHON = """#!/bin/sh
here="{home}"
case "$1 $2" in
    "-c "*) case "$2" in *ensurepip*) echo "{home}/python3.12" ;; esac ;;
    "-m venv") mkdir -p "$3/bin" && cp "$here/python3.12" "$3/bin/python" ;;
    "-m pip")
        echo "$*" >>"$here/pip.calls"
        [ -d "$TMPDIR" ] || exit 9
        if [ -f "$here/pip.sleep" ]; then sleep "$(cat "$here/pip.sleep")"; fi
        if [ -f "$here/pip.log" ]; then cat "$here/pip.log"; fi
        if [ -f "$here/pip.rc" ]; then exit "$(cat "$here/pip.rc")"; fi
        ;;
esac
"""

TOOLS = (
    *("awk", "cat", "cp", "cut", "dirname", "flock", "grep", "ln", "mkdir", "mv", "readlink", "rm", "sha256sum"),
    *("sleep", "tail", "uname"),
)
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class Machine:
    """A machine with nothing on PATH but the few tools that the script needs, an empty home and two checkouts."""

    root: Path
    path: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tools = self.root / "tools"
        self.tools.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found, name
            (self.tools / name).symlink_to(found)
        self.set_free_disk(100_000)
        self.home = self.root / "home"
        self.home.mkdir()
        self.cache = self.root / "cache"
        self.checkout = self.new_checkout("checkout")

    def set_free_disk(self, mebibytes: int) -> None:
        write_script(self.tools / "df", f"#!/bin/sh\nprintf 'head\\ndisk 9 9 {mebibytes} 1%% /\\n'\n")

    def new_checkout(self, name: str) -> Path:
        checkout = self.root / name
        (checkout / "tools").mkdir(parents=True)
        for file in ("tools/bootstrap.sh", "requirements-cpu.txt", "requirements-cpu-nodeps.txt"):
            shutil.copy(REPOSITORY / file, checkout / file)
        return checkout

    def add_python(self, folder: Path, script: str | None = None, name: str = "python3.12") -> Path:
        home = folder if script is None else self.root
        python = write_script(folder / "python3.12", script or FAKE_PYTHON.format(home=home))
        if name != "python3.12":
            (folder / name).symlink_to(python)
        return python

    def environment_variables(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join(str(folder) for folder in (*self.path, self.tools)),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.cache),
        }

    def start(self, *arguments: str, checkout: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", str((checkout or self.checkout) / "tools/bootstrap.sh"), *arguments],
            env=self.environment_variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, checkout: Path | None = None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, checkout=checkout)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def refusal(self, *arguments: str) -> str:
        """The last line of a run that has to fail."""
        done = self.run(*arguments)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "/.venv" not in done.stdout
        lines = done.stderr.splitlines()
        assert lines[-1].startswith("megatron_vcpo set-up: ")
        assert lines[-1].endswith(".")
        return lines[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> tuple[Machine, Path]:
    """A machine with a working Python on PATH, and that Python's folder."""
    folder = machine.root / "bin"
    machine.add_python(folder)
    machine.path.append(folder)
    return machine, folder


def test_first_run_builds_installs_both_pin_files_and_links(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    done = machine.run()
    assert done.returncode == 0, done.stderr
    environment = (machine.checkout / ".venv").resolve()
    assert environment.parent == machine.cache / "megatron_vcpo"
    assert (environment / ".complete").is_file()
    assert not (environment / "tmp").exists()
    calls = (folder / "pip.calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].endswith("/requirements-cpu.txt")
    assert "--no-deps" not in calls[0]
    assert "--no-deps" in calls[1]
    assert calls[1].endswith("/requirements-cpu-nodeps.txt")


def test_second_run_and_second_checkout_install_nothing_and_say_nothing(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    assert machine.run().returncode == 0
    other = machine.new_checkout("other")
    for checkout in (machine.checkout, other):
        done = machine.run(checkout=checkout)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len((folder / "pip.calls").read_text().splitlines()) == 2
    assert (other / ".venv").resolve() == (machine.checkout / ".venv").resolve()


def test_a_ready_environment_needs_no_interpreter_search(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    assert machine.run().returncode == 0
    machine.path.clear()
    assert machine.run().returncode == 0


def test_changed_pins_make_another_environment(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    assert machine.run().returncode == 0
    before = (machine.checkout / ".venv").resolve()
    with (machine.checkout / "requirements-cpu.txt").open("a") as pins:
        pins.write("einops==0.0.1\n")
    assert machine.run().returncode == 0
    assert (machine.checkout / ".venv").resolve() != before
    assert before.is_dir()


def test_killed_set_up_is_done_again_from_nothing(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    (folder / "pip.sleep").write_text("30")
    process = machine.start()
    while not (folder / "pip.calls").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (half_built,) = (entry for entry in (machine.cache / "megatron_vcpo").iterdir() if entry.is_dir())
    (half_built / "leftover").touch()
    (folder / "pip.sleep").unlink()
    assert machine.run().returncode == 0
    assert (machine.checkout / ".venv").resolve() == half_built
    assert not (half_built / "leftover").exists()
    assert (half_built / ".complete").is_file()


def test_two_set_ups_at_once_build_one_environment(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    (folder / "pip.sleep").write_text("2")
    other = machine.new_checkout("other")
    both = [machine.start(), machine.start(checkout=other)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len((folder / "pip.calls").read_text().splitlines()) == 2
    assert sum("waiting for another set-up" in out for out, _ in outputs) == 1


def test_environment_whose_interpreter_vanished_is_built_again(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    assert machine.run().returncode == 0
    (machine.checkout / ".venv/bin/python").unlink()
    assert machine.run().returncode == 0
    assert len((folder / "pip.calls").read_text().splitlines()) == 4


def test_shim_that_fails_is_passed_over_for_a_later_python_on_path(machine: Machine) -> None:
    machine.add_python(machine.root / "shims", BROKEN_SHIM)
    python = machine.add_python(machine.root / "later")
    machine.path += [machine.root / "shims", machine.root / "later"]
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert str(python) in done.stdout


@pytest.mark.parametrize(
    "folder",
    [
        ".pyenv/versions/3.12.1/bin",
        ".local/share/uv/python/cpython-3.12.4-linux-x86_64-gnu/bin",
        "miniconda3/envs/rl/bin",
        "miniforge3/bin",
    ],
)
def test_python_of_a_version_manager_is_found_without_path(machine: Machine, folder: str) -> None:
    machine.add_python(machine.home / folder, name="python")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert folder in done.stdout


@pytest.mark.parametrize(("command", "answer"), [("uv", "{python}"), ("conda", "{base}")])
def test_python_that_uv_or_conda_names_is_found(machine: Machine, command: str, answer: str) -> None:
    python = machine.add_python(machine.root / "elsewhere/bin")
    told = answer.format(python=python, base=python.parent.parent)
    write_script(machine.root / "commands" / command, f"#!/bin/sh\necho '{told}'\n")
    machine.path.append(machine.root / "commands")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert str(python) in done.stdout


def test_named_python_wins_over_the_search(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    named = machine.add_python(machine.root / "with space")
    done = machine.run("--python", str(named))
    assert done.returncode == 0, done.stderr
    assert str(named) in done.stdout


def test_named_python_that_does_not_work_is_refused_even_if_another_would(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    shim = machine.add_python(machine.root / "shims", BROKEN_SHIM)
    assert f"{shim} is not a working Python 3.12" in machine.refusal("--python", str(shim))


def test_no_python_is_one_sentence_with_the_places_and_the_remedies(machine: Machine) -> None:
    machine.add_python(machine.root / "shims", BROKEN_SHIM)
    machine.path.append(machine.root / "shims")
    done = machine.run()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    for word in ("no working Python 3.12", "PATH", "pyenv", "uv", "conda", "apt install", "make PYTHON="):
        assert word in done.stderr


def test_python_of_another_minor_version_is_not_taken(machine: Machine) -> None:
    """With this very interpreter under a wrong name, the probe's own version check has to decide."""
    folder = machine.root / "bin"
    write_script(folder / "python3.12", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script = machine.checkout / "tools/bootstrap.sh"
    script.write_text(script.read_text().replace("!= (3, 12)", "!= (3, 99)"))
    machine.path.append(folder)
    assert "no working Python 3.12" in machine.refusal()


def test_too_little_disk_is_refused_before_anything_is_installed(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    machine.set_free_disk(812)
    assert "812 MiB free" in machine.refusal()
    assert not (folder / "pip.calls").exists()


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        ("WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution found for x", "package index"),
        ("ReadTimeoutError: HTTPSConnectionPool: ReadTimeout", "could not reach the package index"),
        ("OSError: [Errno 28] No space left on device", "the disk filled up"),
        ("ERROR: No matching distribution found for torch==2.13.0", "lacks a pinned package"),
        ("error: command 'gcc' failed: No such file or directory", "install a C compiler"),
        ("something new", "pip failed"),
    ],
)
def test_failing_pip_is_named_and_its_log_shown(ready: tuple[Machine, Path], printed: str, sentence: str) -> None:
    machine, folder = ready
    (folder / "pip.log").write_text(printed + "\n")
    (folder / "pip.rc").write_text("1")
    done = machine.run()
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert sentence in last
    assert printed.splitlines()[-1] in shown
    log = last[last.index(str(machine.cache)) :].split(")")[0].split(",")[0]
    assert printed in Path(log).read_text()
    assert not (machine.checkout / ".venv").is_symlink()


def test_failed_set_up_is_not_taken_for_a_finished_one(ready: tuple[Machine, Path]) -> None:
    machine, folder = ready
    (folder / "pip.rc").write_text("1")
    machine.refusal()
    (folder / "pip.rc").unlink()
    assert machine.run().returncode == 0
    assert len((folder / "pip.calls").read_text().splitlines()) == 3


def test_cache_folder_that_cannot_be_written_is_named(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    machine.cache.write_text("a file where the folder should be")
    assert f"{machine.cache}/megatron_vcpo cannot be written" in machine.refusal()


@pytest.mark.parametrize(("system", "processor"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_machine_without_vllm_package_is_refused(ready: tuple[Machine, Path], system: str, processor: str) -> None:
    machine, _ = ready
    (machine.tools / "uname").unlink()
    text = f"#!/bin/sh\ncase $1 in -s) echo {system} ;; *) echo {processor} ;; esac\n"
    write_script(machine.tools / "uname", text)
    assert f"{system} on {processor}" in machine.refusal()


def test_own_folder_named_dot_venv_is_left_alone(ready: tuple[Machine, Path]) -> None:
    machine, _ = ready
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv/mine").touch()
    assert "move it away" in machine.refusal()
    assert (machine.checkout / ".venv/mine").exists()


def test_unknown_argument_is_refused(machine: Machine) -> None:
    assert "unknown argument --pyhton" in machine.refusal("--pyhton")


def test_make_hands_the_named_interpreter_on() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "demo", "PYTHON=/opt/py312/bin/python"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "tools/bootstrap.sh --python '/opt/py312/bin/python'"
    assert "examples/llama/demo.sh" in done.stdout


def test_every_pin_is_exact() -> None:
    for name in ("requirements-cpu.txt", "requirements-cpu-nodeps.txt"):
        for line in (REPOSITORY / name).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                (specifier,) = Requirement(line).specifier
                assert specifier.operator == "==", line
