"""Tiny models of a few families on each device, and prompts of several lengths with their padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.families import make_tiny

Make = Callable[[str], Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models compute for microseconds between calls
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def tiny() -> Make:
    """A model by family and device, made once, with the attention that transformers uses by default."""
    models: dict[tuple[str, str], Any] = {}

    def make(family: str, device: str = "cpu") -> Any:
        if (family, device) not in models:
            model: Any = make_tiny(family, device)
            model.set_attn_implementation("sdpa")
            models[family, device] = model
        return models[family, device]

    return make


def prompts(device: str, rows: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    """Random ids and their mask. All rows but the second are padded on the left, each by another length."""
    ids = torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 0 if row == 1 else (3 * row + 4) % length] = 0
    return ids.to(device), mask.to(device)


def expected(model: Any, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
    """What transformers' own loop gives."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
