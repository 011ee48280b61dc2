"""run.py: its decisions one by one, and its set-up for real in a folder that needs no network."""

import ast
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

RUN = Path(__file__).parents[1] / "run.py"

# A project whose set-up needs no network: it has no dependencies and builds itself, and its JupyterLab is a stub that
# tells what it was given and ends with 7.
PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
dependencies = []
[project.optional-dependencies]
test = []
"""
NOT_THERE = PYPROJECT.replace("requires = []", 'requires = ["no-such-package"]')
BACKEND = """\
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n")
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return "tiny-1-py3-none-any.whl"
"""
JUPYTERLAB = """\
import os, sys, tiny
print("arguments", *sys.argv[1:])
print("prefix", sys.prefix)
print("config", os.environ["JUPYTER_CONFIG_DIR"])
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path):
    """The tiny project, in a folder with a space in its path."""
    folder = tmp_path / "my lessons"
    (folder / "notebooks").mkdir(parents=True)
    shutil.copy(RUN, folder)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "constraints.txt").write_text("")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "jupyterlab.py").write_text(JUPYTERLAB)
    (folder / "notebooks/01_first.ipynb").write_text("{}")
    return folder


@pytest.fixture
def run(folder):
    """The module run.py of that folder."""
    spec = importlib.util.spec_from_file_location("run_of_tiny", folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(run):
    """The folder in .venv into which pip installs."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(run.VENV)}))


def make_ready(run, wanted):
    """What a finished set-up leaves, without the time that it takes."""
    python = run.venv_python()
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    packages(run).joinpath("pip").mkdir(parents=True)
    (run.VENV / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    run.LOCK.write_text("")
    run.STAMP.write_text(run.stamp(wanted))


def call(folder, *words, **variables):
    """Start run.py in its own process, without standard input and without an index of packages."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **variables}
    command = [sys.executable, str(folder / "run.py"), *words]
    return subprocess.run(
        command, cwd=folder.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


# Decisions


def test_an_old_python_can_read_it():
    ast.parse(RUN.read_text(encoding="utf-8"), feature_version=(3, 6))


def test_an_old_python_is_told_what_to_do(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    assert run.main(["lab"]) == 1
    assert "This is Python 3.9.18, and the lessons need 3.11 or later" in capsys.readouterr().err
    assert not run.VENV.exists()


def test_help_names_every_job(run, capsys):
    assert run.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"python run.py {job} " in text for job in run.JOBS)


@pytest.mark.parametrize("words", [[], ["lib"]])
def test_no_job_and_an_unknown_job_are_explained(run, capsys, words):
    assert run.main(words) == 2
    out, err = capsys.readouterr()
    assert "python run.py lab" in out + err
    assert all(f'no job "{word}"' in err for word in words)


def test_the_stamp_changes_with_all_that_it_stands_for(run, monkeypatch):
    stamps = [run.stamp(run.LEARNER), run.stamp(run.TESTER)]
    for name in ("pyproject.toml", "constraints.txt"):
        (run.ROOT / name).write_text("changed")
        stamps.append(run.stamp(run.LEARNER))
    monkeypatch.setattr(run, "ROOT", run.ROOT.parent / "moved")
    shutil.copytree(run.VENV.parent, run.ROOT)
    stamps.append(run.stamp(run.LEARNER))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    stamps.append(run.stamp(run.LEARNER))
    assert len(set(stamps)) == 6
    assert len({stamp.splitlines()[0] for stamp in stamps}) == 3  # only the folder and the Python ask for a new .venv


@pytest.mark.parametrize(
    ("made_for", "learner", "tester"), [("LEARNER", True, False), ("TESTER", True, True), ("neither", False, False)]
)
def test_a_venv_for_tests_serves_learners_too(run, made_for, learner, tester):
    make_ready(run, getattr(run, made_for, "another"))
    assert (run.is_ready(run.LEARNER), run.is_ready(run.TESTER)) == (learner, tester)


def test_an_unfinished_venv_is_not_ready(run):
    make_ready(run, run.LEARNER)
    run.STAMP.unlink()
    assert not run.is_ready(run.LEARNER)


@pytest.mark.parametrize("gone", ["interpreter", "base", "settings", "lib", "packages"])
def test_a_venv_without_what_a_job_needs_is_not_ready(run, gone):
    make_ready(run, run.LEARNER)
    if gone == "interpreter":
        run.venv_python().unlink()
    elif gone == "base":
        (run.VENV / "pyvenv.cfg").write_text("home = /no/such/python\n")
    elif gone == "settings":
        (run.VENV / "pyvenv.cfg").unlink()
    else:
        shutil.rmtree(packages(run).parents[1] if gone == "lib" else packages(run) / "pip")
    assert not run.is_ready(run.LEARNER)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permission")
def test_a_venv_whose_python_may_not_be_started_is_not_ready(run):
    make_ready(run, run.LEARNER)
    run.venv_python().chmod(0o644)
    assert not run.is_ready(run.LEARNER)


@pytest.mark.parametrize("name", ["run.stamp", "pyvenv.cfg"])
def test_a_garbled_file_means_not_ready(run, name):
    make_ready(run, run.LEARNER)
    (run.VENV / name).write_bytes(b"home\xff\xfe\x00\x80\n")
    assert not run.is_ready(run.LEARNER)


def test_little_disk_is_told_before_anything_is_made(run, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2.4e9))
    assert run.main(["lab"]) == 1
    assert "Only 2.4 GB are free" in capsys.readouterr().err
    assert not run.venv_python().exists()


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_told(run, monkeypatch, capsys, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert run.main(["lab"]) == 1
    assert "apt-get install python3." in capsys.readouterr().err


def test_the_caller_cannot_lead_a_job_astray(run, monkeypatch):
    make_ready(run, run.LEARNER)
    for name in ("PYTHONPATH", "PYTHONHOME", "JUPYTER_TOKEN", "JUPYTER_PATH", "MPLBACKEND", "PIP_TARGET"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("MHA_REQUIRE_BROWSER", "1")
    environment = run.environment()
    assert "theirs" not in environment.values()
    assert environment["PIP_USER"] == "0"
    assert environment["MHA_REQUIRE_BROWSER"] == "1"
    assert environment["PATH"].split(os.pathsep)[0] == str(run.venv_python().parent)


def test_a_read_only_venv_sends_jupyter_to_a_temporary_folder(run, monkeypatch, tmp_path):
    make_ready(run, run.LEARNER)
    assert Path(run.environment()["JUPYTER_RUNTIME_DIR"]).is_relative_to(run.VENV)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Path(run.environment()["JUPYTER_RUNTIME_DIR"]).parent
    assert own.is_dir()
    assert own.parent == tmp_path


def test_lab_writes_its_setting_only_where_it_differs(run, monkeypatch):
    monkeypatch.setattr(run, "run", lambda command: 0)
    setting = run.VENV / "share/jupyter/lab/settings/overrides.json"
    run.lab([])
    os.utime(setting, (0, 0))
    run.lab([])
    assert setting.stat().st_mtime == 0  # left as it was: in a read-only folder a write would fail
    setting.write_text("another")
    run.lab([])
    assert setting.read_text() == run.NO_NEWS


def test_all_steps_of_the_tests_run_and_the_end_says_which_failed(run, monkeypatch, capsys):
    commands = []

    def answer(command):
        commands.append([str(word) for word in command[2:]])
        return {"format": 3, "-k": 5}.get(commands[-1][1], 0)

    monkeypatch.setattr(run, "run", answer)
    assert run.test(["-k", "masks"]) == 3
    assert commands[:3] == [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["pytest", "-k", "masks"]]
    assert commands[3][:2] == ["pytest", "--nbval"]
    last = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-4:]]
    assert last == [
        "ruff check passed",
        "ruff format --check FAILED (exit code 3)",
        "pytest tests FAILED (exit code 5)",
        "pytest --nbval notebooks passed",
    ]


def test_no_notebook_yet_is_no_failure(run, monkeypatch, capsys):
    (run.ROOT / "notebooks/01_first.ipynb").unlink()
    monkeypatch.setattr(run, "run", lambda command: 0)
    assert run.test([]) == 0
    assert capsys.readouterr().out.endswith("There is no notebook in notebooks/ yet, so none was run.\n")


# The set-up for real


def test_a_failed_set_up_is_told_then_recovers_then_costs_nothing(folder, run):
    (folder / "pyproject.toml").write_text(NOT_THERE)
    failed = call(folder, "lab")
    assert failed.returncode == 1
    assert "pip could not finish" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not run.STAMP.exists()

    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / ".venv/left-over").write_text("")
    theirs = {"PYTHONPATH": "/nowhere", "PYTHONHOME": sys.base_prefix, "PIP_USER": "1"}
    recovered = call(folder, "lab", "--port", "8899", **theirs)
    assert recovered.returncode == 7, recovered.stderr
    assert not (folder / ".venv/left-over").exists()
    told = dict(line.split(maxsplit=1) for line in recovered.stdout.splitlines()[-3:])
    arguments = told["arguments"].split()
    assert arguments[-2:] == ["--port", "8899"]
    assert "--ip=127.0.0.1" in arguments
    assert "--LabApp.default_url=/lab/tree/notebooks/01_first.ipynb" in arguments
    assert Path(told["prefix"]) == folder / ".venv"
    assert folder / ".venv" in Path(told["config"]).parents

    seconds = []
    for _ in range(5):  # the best of them: other work on this machine must not decide
        start = time.perf_counter()
        again = call(folder, "lab")
        seconds.append(time.perf_counter() - start)
        assert again.stdout.startswith("arguments")  # neither venv nor pip ran
    assert min(seconds) < 1

    # A change that pip cannot install without a network leaves what worked; taken back, it costs nothing.
    stamp = run.STAMP.read_text()
    (folder / "pyproject.toml").write_text(NOT_THERE)
    failed = call(folder, "lab")
    assert (failed.returncode, run.STAMP.read_text()) == (1, stamp)
    assert "Bringing .venv up to date" in failed.stdout
    (folder / "pyproject.toml").write_text(PYPROJECT)
    assert call(folder, "lab").stdout.startswith("arguments")


def test_a_venv_made_by_other_means_is_left_alone(folder):
    (folder / ".venv").mkdir()
    (folder / ".venv/mine").write_text("")
    done = call(folder, "lab")
    assert done.returncode == 1
    assert "did not make" in done.stderr
    assert [path.name for path in (folder / ".venv").iterdir()] == ["mine"]


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_venv_that_is_no_folder_is_left_alone(run, capsys, kind):
    if kind == "file":
        run.VENV.write_text("mine")
    else:
        run.VENV.symlink_to("nowhere")
    assert run.main(["lab"]) == 1
    assert "Rename or delete it" in capsys.readouterr().err
    assert not run.VENV.is_dir()


def test_two_set_ups_at_once_do_not_mix(folder, run):
    run.VENV.mkdir()
    with run.only_one():
        done = call(folder, "lab")
    assert done.returncode == 1
    assert "Another run.py is setting up" in done.stderr
    assert not run.venv_python().exists()


@contextlib.contextmanager
def started(folder, *words):
    """run.py in a process group of its own, as a terminal would start it, so that Ctrl-C can be sent to all of it."""
    command = [sys.executable, str(folder / "run.py"), *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


posix = pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C in another way")


@posix
def test_ctrl_c_in_the_set_up_is_quiet_and_leaves_no_stamp(folder, run):
    with started(folder, "lab") as process:
        assert "Setting up" in process.stdout.readline()
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.rstrip().endswith("Stopped. Run the same command again to start afresh.")
    assert not run.STAMP.exists()


@posix
def test_ctrl_c_in_a_job_leaves_its_end_to_the_job(folder, run):
    make_ready(run, run.LEARNER)
    run.venv_python().unlink()
    run.venv_python().symlink_to(sys.executable)
    job = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    pass\n"
    (folder / "jupyterlab.py").write_text(job)
    with started(folder, "lab") as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


@posix
def test_ending_run_py_ends_its_job(folder, run):
    make_ready(run, run.LEARNER)
    run.venv_python().unlink()
    run.venv_python().symlink_to(sys.executable)
    (folder / "jupyterlab.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(30)\n")
    with started(folder, "lab") as process:
        job = int(process.stdout.readline())
        process.terminate()
        process.wait(timeout=10)
        with pytest.raises(ProcessLookupError):
            os.kill(job, 0)
