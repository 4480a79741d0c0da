"""What all tests share: the demo model's folder, and the rule that tests marked ``gpu`` are skipped without CUDA."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cbatch.models.demo import ensure_demo_model


def pytest_configure() -> None:
    """In the background of a shell, Ctrl-C is ignored, and our children would inherit that: its tests then hang."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # and torch need not be imported to learn it
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct. Without it and without a network the test fails, and says so: a suite that
    skips its real model in silence proves less than it seems to."""
    return ensure_demo_model()
