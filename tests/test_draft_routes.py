"""Every attention route and the captured stages draft the same candidates from the same cache.

Output tokens cannot show a broken draft, only a slow one, so the stages are compared themselves.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, left_padded, prompt, tiny_drafter, tiny_model
from torch import Tensor

import dscale
from dscale.compiled.kv import PAGE
from dscale.core import Core
from dscale.decode import Decoding, Launch
from dscale.request import Request
from dscale.workspace import bucket_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_threads = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch built for CUDA (2.11), without a device, crashes when a second thread traces",
)
ROUTES = [
    pytest.param("cpu", False, id="cpu-flex", marks=two_threads),
    pytest.param("cuda", False, id="cuda-eager", marks=[pytest.mark.gpu, needs_gpu]),
    pytest.param("cuda", True, id="cuda-captured", marks=[pytest.mark.gpu, needs_gpu]),
]
Steps = list[tuple[Tensor, list[Tensor]]]


def drafts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    *,
    mode: Any,
    flex: bool,
    capture: bool,
) -> tuple[Tensor, Steps]:
    """Output ids, and after every step the candidates and the draft cache but for its scratch."""
    model = tiny_model(num_hidden_layers=3, head_dim=16).to(device)
    drafter = tiny_drafter(folder, model)
    inputs = left_padded([prompt(n) for n in (3, 130, 17, 127)], pad=VOCAB - 1)
    steps: Steps = []
    launch = Decoding.launch

    def watched(self: Decoding, live: list[Request], *, timed: bool = True) -> Launch:
        launched = launch(self, live, timed=timed)
        lanes = bucket_of(len(live)) if self.padded else len(live)
        candidates = self.workspace.step(lanes).candidate_NC[: len(live)].cpu().clone()
        assert self.workspace.draft_pool is not None
        pools = [pool[PAGE:].cpu().clone() for pool in self.workspace.draft_pool.buffers()]
        steps.append((candidates, pools))
        return launched

    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "launch", watched)
        patch.setattr(Core, "flex", property(lambda self: flex))
        with dscale.attach(
            model, drafter, mode=mode, budget=5, capture=capture, pool_tokens=12 * PAGE
        ):
            moved = {name: tensor.to(device) for name, tensor in inputs.items()}
            out = model.generate(**moved, max_new_tokens=6)
    return out.cpu(), steps


@pytest.mark.parametrize("mode", ["dflash", "+tiles", "dscale"])
@pytest.mark.parametrize(("device", "capture"), ROUTES)
def test_routes_draft_alike(
    device: str, capture: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    want_out, want = drafts(tmp_path, monkeypatch, "cpu", mode=mode, flex=False, capture=False)
    out, got = drafts(tmp_path, monkeypatch, device, mode=mode, flex=True, capture=capture)
    assert torch.equal(out, want_out)
    # Captured steps are read late: one more follows, in which nobody lives.
    assert len(got) - capture == len(want) > 1
    for index, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        for pool, reference in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(pool, reference, atol=1e-4, rtol=1e-4, msg=f"step {index}")
        assert torch.equal(ours[0], theirs[0]), f"candidates of step {index}"
