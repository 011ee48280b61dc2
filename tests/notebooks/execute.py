"""Execute notebooks and write what they show: ``python run.py notebooks [names]``.

What is stored is the same on every run: no times, no widget state, no random ids.
"""

import copy
import hashlib
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def lessons() -> list[Path]:
    """Every notebook, in order."""
    return sorted(FOLDER.glob("[0-9]*.ipynb"))


def read(path: Path) -> NotebookNode:
    """The notebook in the current format; raises where its cells are not valid."""
    return nbformat.read(path, as_version=4)


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def executed(notebook: NotebookNode, timeout: int = 300) -> NotebookNode:
    """A copy, run from its first cell to its last in a fresh kernel."""
    notebook = copy.deepcopy(notebook)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that the loopback is not encrypted
        coalesce_streams=True,  # else prints some time apart are stored in pieces, differently at each run
    )
    return client.execute()


def stored_form(run: NotebookNode, before: NotebookNode) -> NotebookNode:
    """What is committed of an executed notebook.

    Args:
        run: the executed notebook.
        before: the notebook as it stands in its file, whose pictures of measured things are kept.

    Raises:
        ValueError: a cell wrote to stderr, which strict nbval would compare.
    """
    notebook = copy.deepcopy(run)
    notebook.metadata = nbformat.from_dict(METADATA)
    earlier = {cell.id: cell for cell in before.cells}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if any(output.get("name") == "stderr" for output in cell.outputs):
            raise ValueError(f"cell {cell.id} wrote to stderr: {cell.outputs}")
        for output in cell.outputs:
            # The picture beside it is then what a reader without a kernel sees.
            output.get("data", {}).pop(WIDGET_VIEW, None)
        if "measured" in tags(cell):
            _keep_measured(cell, earlier.get(cell.id))
    return notebook


def digest(cell: NotebookNode) -> str:
    """What tells whether a cell's source changed."""
    return hashlib.sha256(cell.source.encode()).hexdigest()


def _keep_measured(cell: NotebookNode, earlier: NotebookNode | None) -> None:
    """Keep a measured picture until the cell that makes it changes, so that a run alone changes no byte."""
    if earlier is not None and earlier.metadata.get("measured_source") == digest(cell):
        cell.outputs = earlier.outputs
    cell.metadata["measured_source"] = digest(cell)


def main(names: list[str]) -> int:
    chosen = [path for path in lessons() if not names or any(name in path.name for name in names)]
    if not chosen:
        print(f"no notebook in {FOLDER} is named like {' or '.join(names) or '*'}")
        return 1
    for path in chosen:
        before = read(path)
        print(f"executing {path.name} ...", flush=True)
        after = stored_form(executed(before), before)
        changed = after != before
        if changed:
            nbformat.write(after, path)
        print(f"{path.name}: {'written' if changed else 'nothing changed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
