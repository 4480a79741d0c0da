"""Imports point down only: cbatch -> scheduler, cbatch -> kernels. Reads the source; imports nothing to learn it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "scheduler": {"numpy"},
    "kernels": {"torch", "triton"},
}
FOLDERS = ("cbatch", "scheduler", "kernels", "tests", "benchmarks", "examples")


def sources(folder: str) -> list[Path]:
    """Python files of a folder of the tree, not through the links in cbatch/: a file is read once."""
    links = (ROOT / "cbatch" / "scheduler", ROOT / "cbatch" / "kernels")
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if not any(link in p.parents for link in links)]


def imports(source: str) -> Iterator[str]:
    """Full dotted names that a source imports, wherever the statement stands. A relative import keeps its dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def points_down(layer: str, name: str) -> bool:
    """Whether a file of ``layer`` may import ``name``."""
    top = name.split(".")[0]
    if top == "cbatch":
        return name.startswith(f"cbatch.{layer}.") or name == f"cbatch.{layer}"
    return top in sys.stdlib_module_names or top in ALLOWED[layer]


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_lower_layers_import_nothing_from_above_or_beside(layer: str) -> None:
    files = sources(layer)
    assert files, f"{layer}/ holds no source: is the tree complete?"
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file.read_text(encoding="utf-8"))
        if not points_down(layer, name)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_scheduler_and_kernels_are_imported_by_their_full_name_only(folder: str) -> None:
    """With the repository root on ``sys.path``, ``import scheduler`` would make a second copy of every class, and
    ``kernels`` is another project that transformers looks for. Relative imports would hide which name is used."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources(folder)
        for name in imports(file.read_text(encoding="utf-8"))
        if name.split(".")[0] in ("", "scheduler", "kernels")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("layer", "statement", "right"),
    [
        ("scheduler", "import numpy as np", True),
        ("scheduler", "from cbatch.scheduler.plan import StepPlan", True),
        ("scheduler", "from cbatch.scheduler import plan", True),
        ("scheduler", "def f():\n    import torch", False),
        ("scheduler", "from cbatch import engine", False),
        ("scheduler", "from cbatch.errors import CBatchError", False),
        ("scheduler", "from cbatch.kernels import reference", False),
        ("scheduler", "from cbatch.scheduler_two import plan", False),
        ("scheduler", "from . import plan", False),
        ("kernels", "import triton.language as tl", True),
        ("kernels", "from cbatch.kernels.reference import paged_attention", True),
        ("kernels", "import cbatch.scheduler.plan", False),
        ("kernels", "import transformers", False),
        ("kernels", "import kernels", False),
    ],
)
def test_the_rule_itself(layer: str, statement: str, right: bool) -> None:
    assert all(points_down(layer, name) for name in imports(statement)) is right


def test_kernels_is_no_regular_package() -> None:
    """With an ``__init__.py``, transformers takes the folder for the project ``kernels`` if the root is on the path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_the_scheduler_imports_neither_torch_nor_transformers() -> None:
    modules = [f"cbatch.scheduler.{file.stem}" for file in sources("scheduler") if file.stem != "__init__"]
    program = (
        f"import sys, {', '.join(modules)}\n"
        "print([name for name in ('torch', 'triton', 'transformers', 'cbatch.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
