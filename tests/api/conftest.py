"""What the API's tests share: a tiny model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
