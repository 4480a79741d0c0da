"""Tiny models compute for microseconds between calls: threads would only wait for each other (12 times slower on two
busy cores)."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
