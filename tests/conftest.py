"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract import attached
from tiny import tiny_model
from transformers.utils.logging import disable_progress_bar

import dscale.demo
from dscale import Attachment

# More threads than cores only wait for one another, and more than four gain nothing at 135M.
torch.set_num_threads(min(4, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)))
disable_progress_bar()


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    """The embedded target in float32 on the CPU, and its tokenizer; leave them as they are."""
    return dscale.demo.load(torch.float32, "cpu")


@pytest.fixture(scope="module")
def reference() -> Any:
    """A model that nobody attaches."""
    return tiny_model()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attachment]:
    """A model attached with a random drafter."""
    yield from attached(tmp_path_factory.mktemp("drafter"))
