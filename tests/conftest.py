"""Fixtures that several test files share."""

import os
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

import dscale.demo

# More threads than cores only wait for one another, and more than four gain nothing at 135M.
torch.set_num_threads(min(4, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)))
disable_progress_bar()


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    """The embedded target in float32 on the CPU, and its tokenizer; leave them as they are."""
    return dscale.demo.load(torch.float32, "cpu")
