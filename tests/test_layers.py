"""The package's layers: which module may import which, and what none may hold. Read from the syntax trees."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mha_lessons"

# Each module and those of ours that it may import, never upward. A new module needs a line here. All the maths may
# check shapes.
LAYERS = {
    "__init__": set(),
    "shapes": set(),
    "masks": {"shapes"},
    "positions": {"shapes"},
    "attention": {"shapes", "masks", "positions"},
    "flash": {"shapes", "masks"},
    "ring": {"shapes", "flash"},
    "variants": {"shapes", "attention", "masks"},
    "transformer": {"shapes", "attention", "masks", "positions"},
    "vit": {"shapes", "attention", "positions", "transformer"},
    "data": set(),
    "pretrained": {"attention", "data"},
    "plots": set(),
    "progress": set(),
    "attention_view": set(),
}
MATHS = {"shapes", "masks", "positions", "attention", "flash", "ring", "variants", "transformer", "vit"}
LAYERS["checks"] = MATHS
LAYERS["explore"] = set(LAYERS) - {"__init__", "checks"}

# What draws or talks to Jupyter; only these modules may know it.
SCREEN = {"matplotlib", "ipywidgets", "IPython", "anywidget"}
SEES_THE_SCREEN = {"plots", "progress", "attention_view", "explore"}


def files(package):
    """Each source file with its module; the files of a folder count as the folder's module."""
    for path in sorted(package.rglob("*.py")):
        yield path, path.relative_to(package).parts[0].removesuffix(".py")


def imported_names(path, package):
    """Every dotted name that a file imports, those inside functions too."""
    here = ".".join(path.parent.relative_to(package.parent).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), here)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def faults(package):
    """What breaks the rules, one sentence each."""
    for path, module in files(package):
        if module not in LAYERS:
            yield f"{module} is not in the table of layers"
            continue
        for name in imported_names(path, package):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == "mha_lessons" and target not in LAYERS[module] | {module}:
                yield f"{module} may not import {name}"
            if top in SCREEN and module not in SEES_THE_SCREEN:
                yield f"{module} may not import {name}"


def test_no_module_imports_upward():
    assert list(faults(PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("masks.py", "import mha_lessons.attention", "masks may not import mha_lessons.attention"),
        ("masks.py", "from mha_lessons import vit", "masks may not import mha_lessons.vit"),
        ("masks.py", "def f():\n    from .flash import g", "masks may not import mha_lessons.flash.g"),
        ("explore/masks.py", "from .. import checks", "explore may not import mha_lessons.checks"),
        ("checks/__init__.py", "from mha_lessons.plots import show", "checks may not import mha_lessons.plots.show"),
        ("shapes.py", "from matplotlib import pyplot", "shapes may not import matplotlib.pyplot"),
        ("helpers.py", "", "helpers is not in the table of layers"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, source, fault):
    path = tmp_path / "mha_lessons" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert list(faults(tmp_path / "mha_lessons")) == [fault]


def test_a_folder_may_import_its_own_files(tmp_path):
    path = tmp_path / "mha_lessons/checks/__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .masks import a\nfrom mha_lessons.checks.report import b\nimport torch\n")
    assert list(faults(tmp_path / "mha_lessons")) == []


def test_attention_comes_without_figures_and_widgets():
    code = f"import sys, mha_lessons.attention; print(sorted({SCREEN} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_assert_guards_the_package():
    found = [
        f"{path.name}:{node.lineno}"
        for path, _ in files(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == [], "python -O drops assert; raise ValueError or TypeError"


def test_no_module_is_a_drawer_for_everything():
    names = {path.stem for path, _ in files(PACKAGE)}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


def test_public_names_have_docstrings():
    missing = []
    for path, module in files(PACKAGE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        missing += [f"{module}.{node.name}" for node in public if not ast.get_docstring(node)]
        if not ast.get_docstring(tree):
            missing.append(f"{path.name} itself")
    assert missing == []
