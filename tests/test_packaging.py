"""The files that say what is installed agree with each other, and the archives hold what they should."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements():
    """What a learner's environment needs, and what tests need on top."""
    lines = project()["dependencies"], project()["optional-dependencies"]["test"]
    return tuple([Requirement(line) for line in group] for group in lines)


def lines_of(name):
    """The lines of a file without comments and blanks."""
    lines = (line.partition("#")[0].rstrip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def test_conda_gets_the_same_packages_in_the_same_ranges():
    lines = [line.strip().removeprefix("- ") for line in lines_of("environment.yml")]
    start, pip = lines.index("dependencies:") + 1, lines.index("pip:")
    found = {r.name: r.specifier for r in map(Requirement, lines[start:pip])}
    wanted = {CONDA_NAMES.get(r.name, r.name): r.specifier for r in requirements()[0]}
    assert found == {"python": SpecifierSet(project()["requires-python"]), "pip": SpecifierSet(), **wanted}
    assert lines[pip + 1 :] == ["-e ."]


def test_every_package_is_pinned_to_a_version_in_its_range():
    pins = dict(line.split("==") for line in lines_of("constraints.txt"))
    for requirement in [*requirements()[0], *requirements()[1]]:
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_pins_fit_every_machine():
    """A local part such as +cpu exists for some machines only."""
    assert [line for line in lines_of("constraints.txt") if "+" in line or "@" in line] == []


def test_the_readme_says_why_each_package_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [requirement.name for group in requirements() for requirement in group]
    assert [name for name in names if f"| {name} |" not in readme] == []


def test_the_readme_maps_every_module():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [path.name + "/" * path.is_dir() for path in (ROOT / "mha_lessons").iterdir()]
    modules = [name for name in names if name.endswith((".py", "/")) and not name.startswith("__")]
    assert [name for name in modules if f"\n    {name} " not in readme] == []


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The wheel and the sdist, built with what is installed: no network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def files_under(*tops):
    """The files of the repo under these folders, without what Python and editors leave there."""
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return {name for name in names if "__pycache__" not in name and ".ipynb_checkpoints" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    (wheel,) = archives.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_under("mha_lessons")
    assert "mha_lessons/attention_view.js" in names


def test_the_sdist_holds_lessons_data_and_tests_too(archives):
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {"README.md", "constraints.txt", "environment.yml", "pyproject.toml", "run.py"}
    assert names >= files_under("mha_lessons", "notebooks", "data", "tests") | tops
