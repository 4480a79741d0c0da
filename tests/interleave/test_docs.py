"""The snippets of docs/streams.md run as they stand; those that need a GPU run where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "docs" / "streams.md"


def snippets() -> list[object]:
    found, title = [], ""
    for match in re.finditer(
        r"^## (?P<title>[^\n]*)$|^```python\n(?P<code>.*?)^```$", FILE.read_text("utf-8"), re.M | re.S
    ):
        title = match["title"] or title
        if code := match["code"]:
            marks = [pytest.mark.gpu] if code.startswith("# On a GPU\n") else []
            found.append(pytest.param(code, id=title.replace(" ", "-"), marks=marks))
    return found


def test_the_page_has_a_snippet_for_each_part() -> None:
    assert len(snippets()) == 6


@pytest.mark.parametrize("code", snippets())
def test_the_snippet_runs(code: str) -> None:
    exec(compile(code, str(FILE), "exec"), {"__name__": "snippet"})
