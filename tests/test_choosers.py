"""Which way of choosing tokens serves which requests, and what a captured engine takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_drafter, tiny_model

import dscale
from dscale.choosers import ALL_CANDIDATES, chooser_of, narrowest
from dscale.compiled.sampling import Chooser
from dscale.core import Core
from dscale.request import Request

GREEDY, UNFILTERED = Chooser(), Chooser(sample=True)
TOP, WIDER = Chooser(sample=True, max_candidates=64), Chooser(sample=True, max_candidates=128)
SORTED = Chooser(sample=True, max_candidates=ALL_CANDIDATES)
PENALTY = Chooser(sample=True, max_candidates=64, penalty=True)
EVERY = (GREEDY, UNFILTERED, TOP, WIDER, SORTED, PENALTY)


@pytest.mark.parametrize(
    ("needed", "serving"),
    [
        (GREEDY, set(EVERY)),
        (UNFILTERED, {UNFILTERED, SORTED}),
        (TOP, {TOP, WIDER, SORTED, PENALTY}),
        (WIDER, {WIDER, SORTED}),
        (PENALTY, {PENALTY}),
        (Chooser(penalty=True), {PENALTY}),
    ],
)
def test_who_serves_whom(needed: Chooser, serving: set[Chooser]) -> None:
    assert {c for c in EVERY if narrowest(needed, [c]) is not None} == serving
    if needed in EVERY:
        assert narrowest(needed, EVERY) == needed
    assert narrowest(needed, []) is None


def request(**how: Any) -> Request:
    return Request(prompt=prompt(9), max_new_tokens=4, **how)


def test_captured_steps_are_not_compiled_anew_after_a_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a narrower way taken up while other requests run; uncaptured steps take their own."""
    model = tiny_model()
    greedy, sampled = request(), request(temperature=1.0, top_k=5)
    penalty = request(temperature=1.0, top_k=5, repetition_penalty=1.2)
    with (
        dscale.attach(model, tiny_drafter(tmp_path, model), budget="half") as spec,
        torch.no_grad(),
    ):
        core = spec.engine.batcher.core
        core.make_room([penalty])
        assert core.decoding([greedy]).stages is core.stages(GREEDY)
        monkeypatch.setattr(Core, "captured", property(lambda self: True))
        monkeypatch.setattr(Core, "_capture", lambda *args, **kwargs: None)
        monkeypatch.setattr("dscale.stages.capture", lambda stage: stage)
        core.prepare([sampled])
        assert core.decoding([greedy]).stages is core.stages(TOP)
        core.prepare([greedy])  # alone, so that it may take its time
        assert core.decoding([greedy]).stages is core.stages(GREEDY)
        core.warm_up([penalty])
        for requests in ([greedy], [sampled], [penalty], [greedy, penalty]):
            core.prepare(requests)
        assert core.decoding([sampled, penalty]).stages is core.stages(chooser_of([penalty]))
        assert core.decoding([greedy]).stages is core.stages(GREEDY)
        assert core._ready == {GREEDY, TOP, PENALTY}
        core.close()
        assert not core._ready
