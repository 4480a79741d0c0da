"""What a user installs: real copies of the linked folders, the data, and nothing at the top level but cbatch."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {".py", ".json", ".html", ".typed"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and a wheel that is built from it. No network: setuptools is the installed one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("cbatch", "scheduler", "kernels"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return tree / "dist"


def expected() -> set[str]:
    """Every file under cbatch/ that a program may need, through the links."""
    return {
        os.path.relpath(os.path.join(folder, name), ROOT)
        for folder, _, names in os.walk(ROOT / "cbatch", followlinks=True)
        for name in names
        if Path(name).suffix in SHIPPED
    }


def test_the_links_are_links_to_the_folders_at_the_top() -> None:
    """A checkout that turned them into text files or copies would let two versions of one module drift apart."""
    for name in ("scheduler", "kernels"):
        assert os.readlink(ROOT / "cbatch" / name) == f"../{name}"
        assert (ROOT / "cbatch" / name).is_dir()


def test_the_wheel_holds_the_package_whole_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    package = {name for name in names if name.startswith("cbatch/")}
    assert package == expected()
    assert {"cbatch/scheduler/kv_spec.py", "cbatch/data/demo_prompts.json", "cbatch/data/timeline.html"} <= package
    assert "cbatch/py.typed" in package
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"cbatch"}  # and its dist-info
    assert "cbatch = cbatch.__main__:main" in entry_points


def test_the_source_distribution_holds_copies_for_the_links(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert expected() <= members.keys()
    assert {"LICENSE", "README.md"} <= members.keys()


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    """Two lists of versions that nobody compares part company at the first upgrade."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(r.name): r for line in lines if (bare := line.partition("#")[0]) for r in [Requirement(bare)]
    }
    versions = {name: str(requirement.specifier).removeprefix("==") for name, requirement in pins.items()}
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    for requirement in map(Requirement, wanted):
        if requirement.name != "cbatch":
            version = versions.get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name} has no line in constraints.txt"
            assert requirement.specifier.contains(version), f"{requirement} excludes the tested {version}"


def test_the_readmes_tree_names_every_module() -> None:
    """The tree is where a reader begins; a file that is missing there was usually added in a hurry. And none is named
    that is gone."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"[\w-]+\.(?:py|json)", tree))
    files = {path.name for path in (ROOT / "cbatch").rglob("*.py")}
    files |= {path.name for folder in ("scheduler", "kernels") for path in (ROOT / folder).iterdir() if path.is_file()}
    modules = {name for name in files if name.endswith(".py") and not name.startswith("__")}
    assert modules - named == set() == named - files
