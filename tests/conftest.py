"""Fixtures that several test files share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract import attached
from soak import References
from tiny import tiny_drafter, tiny_model
from transformers.utils.logging import disable_progress_bar

import dscale.demo
from dscale import Attachment
from dscale.compiled.drafter import Drafter

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


@pytest.fixture(scope="module")
def references() -> References:
    """What plain generate says, worked out once."""
    return References()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Drafter]:
    """A model to attach to, and a random drafter for it."""
    model = tiny_model()
    return model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)


@pytest.fixture
def attach(pair: tuple[Any, Drafter]) -> Iterator[Callable[..., Attachment]]:
    """Attach the pair with a small pool; detach at the end."""
    specs: list[Attachment] = []

    def make(**settings: Any) -> Attachment:
        settings = {"pool_tokens": 12 * 128, "max_concurrency": 3, "prefill_chunk": 128} | settings
        specs.append(dscale.attach(*pair, **settings))
        return specs[-1]

    yield make
    for spec in specs:
        spec.detach()
