"""One command for everything, the same on every system: `python run.py lab | test | notebooks | bench`.

It makes the folder .venv beside this file when that is missing or out of date, and runs the job in there.
Standard library only, and in the syntax of Python 3.6: an old Python gives a sentence, not a traceback.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HELP = """\
python run.py lab          open the lessons in JupyterLab; hands on what follows: lab --no-browser --port 8899
python run.py test         lint, format, tests, notebooks; pytest gets what follows: test -k masks
python run.py notebooks    run every notebook and store its outputs, or only those named
python run.py bench        measure speed and memory

The first call makes the folder .venv here: some minutes, about 1.5 GB, from the network. Later calls start at
once and need no network. Nothing is installed outside this folder; to undo everything, delete the folder."""

OLDEST_PYTHON = (3, 11)
FREE_BYTES = 3 * 10**9  # .venv took half of that with the CPU build of PyTorch; pip keeps its downloads too

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "run.stamp"  # written last: says what .venv was made from
LOCK = VENV / "run.lock"  # its presence says that run.py made .venv; locked while a set-up runs

LEARNER, TESTER = ".", ".[test]"  # what pip installs: without and with the extra that only tests need

# What the caller set for other projects: it would lead a job to other packages, kernels, settings or colours.
FOREIGN = ("PYTHON", "JUPYTER", "IPYTHON", "MPL", "MATPLOTLIB", "VIRTUAL_ENV")
FOREIGN += ("PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET")

# JupyterLab's answer to its own first question: without it a pop-up asks whether it may fetch news.
NO_NEWS = '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}'


class Stop(Exception):  # noqa: N818 (it is not always an error of somebody)
    """Ends run.py; its text is a sentence for the reader that says what to do."""


def main(words):
    """Do the job that the first word names with the rest of the words; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name not in JOBS:
        print(f'run.py knows no job "{name}". Choose one of these:\n\n{HELP}', file=sys.stderr)
        return 2
    job, wanted = JOBS[name]
    try:
        check_python(sys.version_info)
        set_up(wanted)
        return job(rest)
    except Stop as reason:
        print(f"\n{reason}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nThe system refused: {error}. Mend that, then run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to start afresh.", file=sys.stderr)
        return 130


# The set-up: .venv is made once, and again when what it was made from has changed.


def check_python(version):
    """Stop if a Python of this version is too old."""
    if tuple(version[:2]) < OLDEST_PYTHON:
        have, need = ".".join(map(str, version[:3])), ".".join(map(str, OLDEST_PYTHON))
        raise Stop(
            f"This is Python {have}, and the lessons need {need} or later. Install one from python.org, "
            f"then start run.py with it, for example: python{need} run.py lab"
        )


def set_up(wanted):
    """Make .venv fit for `wanted` (LEARNER or TESTER); returns at once if it is."""
    if is_ready(wanted):
        return
    check_ours()
    VENV.mkdir(exist_ok=True)
    with only_one():
        before = read_stamp()
        if before.splitlines()[:1] == stamp(wanted).splitlines()[:1] and not is_broken():
            print("Bringing .venv up to date ...", flush=True)
        else:
            make_venv()
            before = ""
        install(wanted, before)


def is_ready(wanted):
    """Whether .venv was made from what lies here now. One made for tests serves a learner too."""
    return read_stamp() in (stamp(wanted), stamp(TESTER)) and not is_broken()


def stamp(wanted):
    """Two lines: what only a new .venv can change, and a hash of what pip can bring up to date."""
    digest = hashlib.sha256(wanted.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    python = "Python {}.{} {}".format(*sys.version_info[:2], sysconfig.get_platform())
    return f"{python} in {ROOT}\n{digest.hexdigest()}\n"


def read_stamp():
    """The stamp of .venv; empty if there is none, so that an interrupted set-up is done again."""
    return STAMP.read_text(encoding="utf-8", errors="replace") if STAMP.exists() else ""


def venv_python():
    """The Python in .venv."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_broken():
    """Whether .venv has lost what a job needs: its Python, the one that it was made from, or its packages."""
    settings = VENV / "pyvenv.cfg"
    pip = Path(sysconfig.get_path("purelib", "venv", {"base": str(VENV)})) / "pip"  # stands for all beside it
    if not (settings.exists() and os.access(str(venv_python()), os.X_OK) and pip.exists()):
        return True
    pairs = (line.partition("=") for line in settings.read_text(encoding="utf-8", errors="replace").splitlines())
    return not any(name.strip() == "home" and Path(home.strip()).exists() for name, _, home in pairs)


def check_ours():
    """Stop rather than overwrite a .venv that somebody made by other means, be it a file or a link to nothing."""
    free = not any(VENV.iterdir()) if VENV.is_dir() else not os.path.lexists(str(VENV))
    if not (free or LOCK.exists()):
        raise Stop(f"run.py did not make {VENV}, so it leaves it alone. Rename or delete it, then run again.")


@contextlib.contextmanager
def only_one():
    """Let one set-up run at a time. The system frees the lock however this process ends."""
    with open(LOCK, "a") as file:
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Stop("Another run.py is setting up .venv just now. Wait for it, then run again.") from None
        yield


def make_venv():
    """Make an empty .venv, in place of whatever an earlier one or a broken set-up left."""
    check_venv_module()
    check_disk(shutil.disk_usage(ROOT).free)
    print(f"Setting up {VENV}: once, some minutes ...", flush=True)
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != LOCK:
            path.unlink()
    # The base Python: the one that runs now may itself be the one in .venv.
    base = getattr(sys, "_base_executable", sys.executable)
    if run([base, "-m", "venv", str(VENV)]):
        raise Stop("Python could not make .venv; the lines above say why. Mend that, then run again.")


def check_venv_module():
    """Stop if this Python came without the modules that make a .venv, as Debian's does."""
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        raise Stop(
            "This Python has no venv module. Install it (on Debian and Ubuntu: "
            f"sudo apt-get install {package}) or take the Python from python.org. Then run again."
        )


def check_disk(free):
    """Stop if so few bytes are free that the set-up may not fit."""
    if free < FREE_BYTES:
        raise Stop(
            f"Only {free / 1e9:.1f} GB are free on the disk of {ROOT}, and the set-up may need "
            f"{FREE_BYTES / 1e9:.0f} GB. Free some, then run again."
        )


def install(wanted, before):
    """Let pip install the package and what it needs in the versions that were tested, then stamp .venv."""
    if before:
        STAMP.unlink()
    command = ["pip", "install", "--constraint", "constraints.txt", "--editable", wanted]
    if run([venv_python(), "-m", *command]):
        if before:  # pip has put back what it could not replace: the next run need not start from nothing
            STAMP.write_text(before, encoding="utf-8")
        raise Stop(
            "pip could not finish; its last lines above say why. If the network broke off, run the same "
            "command again: what was downloaded whole is kept. If the disk is full, free some first. "
            "If no version of torch fits, this Python may be too new: take 3.11."
        )
    STAMP.write_text(stamp(wanted), encoding="utf-8")


def environment():
    """The caller's environment, without what belongs to other projects, and with .venv first.

    Settings, history and kernels of Jupyter, IPython and matplotlib live in .venv too: those in the user's
    home would change what a notebook shows, and a lesson should leave no trace there. Where .venv may only be
    read, they live in a temporary folder: Jupyter cannot start without one to write to.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(FOREIGN)}
    own = VENV / "user" if os.access(str(VENV), os.W_OK) else Path(tempfile.mkdtemp(prefix="mha_lessons-"))
    kept.update(
        PATH=os.pathsep.join([str(venv_python().parent), os.environ.get("PATH", os.defpath)]),
        VIRTUAL_ENV=str(VENV),
        PYTHONUTF8="1",
        PIP_USER="0",
        PIP_NO_INPUT="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        JUPYTER_PREFER_ENV_PATH="1",
        JUPYTER_CONFIG_DIR=str(own / "jupyter"),
        JUPYTER_DATA_DIR=str(own / "data"),
        JUPYTER_RUNTIME_DIR=str(own / "runtime"),
        IPYTHONDIR=str(own / "ipython"),
        MPLCONFIGDIR=str(own / "matplotlib"),
    )
    return kept


def run(command):
    """Run a command here and return its exit code. Ctrl-C reaches it as well: it says how it wants to end."""
    process = subprocess.Popen([str(word) for word in command], cwd=str(ROOT), env=environment())
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # else JupyterLab would stay, and hold its port
    stopped = False
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            stopped = True
        else:
            break
    if stopped and code:
        raise KeyboardInterrupt
    return code


# The jobs: each gets the words that follow its name and returns an exit code.


def lab(words):
    """JupyterLab at the first lesson, for this machine alone: its token stays on."""
    settings = VENV / "share/jupyter/lab/settings/overrides.json"
    if not settings.exists() or settings.read_bytes() != NO_NEWS.encode():  # else leave it: it may be read-only
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_bytes(NO_NEWS.encode())
    lessons = sorted(ROOT.glob("notebooks/*.ipynb"))
    start = "/lab/tree/notebooks/" + lessons[0].name if lessons else "/lab"
    options = [
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={ROOT}",
        f"--LabApp.default_url={start}",
        "--LanguageServerManager.autodetect=False",  # its search would run npm, which writes to the user's home
    ]
    return run([venv_python(), "-m", "jupyterlab", *options, *words])


def test(words):
    """Lint, format, tests and notebooks: all of them, even if one fails."""
    steps = [
        ("ruff check", ["ruff", "check", "."]),
        ("ruff format --check", ["ruff", "format", "--check", "."]),
        ("pytest tests", ["pytest", *words]),  # a path among the words takes the place of tests
    ]
    if any(ROOT.glob("notebooks/*.ipynb")):
        nbval = ["pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "notebooks"]
        steps.append(("pytest --nbval notebooks", nbval))
    codes = {}
    for name, command in steps:
        print(f"\n== {name}", flush=True)
        codes[name] = run([venv_python(), "-m", *command])
    print()
    for name, code in codes.items():
        print(f"{name:<26}{'passed' if code == 0 else f'FAILED (exit code {code})'}")
    if len(steps) == 3:
        print("There is no notebook in notebooks/ yet, so none was run.")
    return next((code for code in codes.values() if code), 0)


def notebooks(words):
    """Run the notebooks and store their outputs."""
    return run([venv_python(), "-m", "tests.notebooks.execute", *words])


def bench(words):
    """Measure speed and memory."""
    return run([venv_python(), "-m", "tests.bench", *words])


JOBS = {
    "lab": (lab, LEARNER),
    "test": (test, TESTER),
    "notebooks": (notebooks, TESTER),
    "bench": (bench, TESTER),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
