"""Compiled stages: whole graphs, one compile for all batches, and on a GPU the captured run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import overrule, random_predictor
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model
from torch import Tensor, nn

import dscale
import dscale.compiled.capture
import dscale.core
import dscale.stages
import dscale.timing
from dscale.compiled.capture import own_forward
from dscale.compiled.prefill import Prefill
from dscale.core import Core
from dscale.policy import MULTIPLES, AutoBudget, Choice, Floats
from dscale.request import Request
from dscale.timing import Runner
from dscale.workspace import bucket_of

LENGTHS = [3, 130, 17, 1, 64]
POOL = 8 * 128
NEW = 14
SAMPLED = {"do_sample": True, "top_k": 7, "top_p": 0.9, "seed": 5}
SETTINGS: list[dict[str, Any]] = [{}, SAMPLED]
ADAPTIVE = ["Anchors", "Decide", "Verify"]


def rows(count: int) -> dict[str, Tensor]:
    return left_padded([prompt(n) for n in LENGTHS[:count]], pad=VOCAB - 1)


class EveryBucket(AutoBudget):
    """Budget "auto" that goes through every capacity in turn, none drafted among them."""

    turn = 0

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """The next one, none twice running."""
        super().choose(lanes, score_NC, context)
        EveryBucket.turn += 1
        multiple = (*MULTIPLES, 0)[5 * EveryBucket.turn % (len(MULTIPLES) + 1)]
        return Choice(max(1, multiple) * lanes, 16, draft=multiple > 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compile the stages without a GPU; lists the stage of every graph compiled."""
    torch._dynamo.reset()
    compiled: list[str] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def trace(stage: nn.Module) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(type(stage).__name__)
            return aot_eager(graph, inputs)

        forward = own_forward(stage)
        wrapped: Callable[..., Any] = torch.compile(forward, fullgraph=True, backend=backend)
        return wrapped

    def milliseconds(self: Runner, lanes: int, rows: int | None) -> float:
        return 1.0 + 0.01 * (rows or 0)

    def gathered(*arguments: Any) -> Prefill:
        return Prefill(*arguments[:-1], flex=False)  # eager FlexAttention takes seconds

    if not torch.cuda.is_available():
        # In a CUDA build of torch 2.11 this crashes on a thread of its own when there is no GPU.
        guard = "_ensureCUDADeviceGuardSet"
        monkeypatch.setattr(torch._C, guard, lambda: None, raising=False)
    monkeypatch.setattr(dscale.stages, "capture", trace)
    monkeypatch.setattr(dscale.stages, "Prefill", gathered)
    monkeypatch.setattr(dscale.timing, "CAPTURE_RUNS", 1)
    monkeypatch.setattr(Runner, "milliseconds", milliseconds)
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield compiled
    assert not counters["graph_break"]
    torch._dynamo.reset()


class Pair:
    """A model to attach to, its drafter and predictor, and the ids of plain decoding."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.device = device
        self.model = tiny_model(num_hidden_layers=2).to(device)
        self.reference = tiny_model(num_hidden_layers=2).to(device)
        inner = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0]}
        self.drafter = tiny_drafter(folder / "drafter", self.model, dflash_config=inner)
        self.predictor = random_predictor(self.drafter, folder / "predictor")

    def want(self, count: int, **settings: Any) -> Tensor:
        """Greedy by transformers, sampled by the uncaptured mode "ar"."""
        inputs = {k: v.to(self.device) for k, v in rows(count).items()}
        if "do_sample" not in settings:
            ids: Tensor = plain(self.reference, **inputs, **settings)
            return ids.cpu()
        with dscale.attach(self.reference, mode="ar", capture=False) as spec:
            out = spec.generate(**inputs, **settings)
        assert isinstance(out, Tensor)
        return out.cpu()

    def attach(self, **settings: Any) -> dscale.Attachment:
        drafter = None if settings.get("mode") == "ar" else self.drafter
        fixed = {"pool_tokens": POOL, "prefill_chunk": 128}
        return dscale.attach(self.model, drafter, **(fixed | settings))

    def got(self, count: int, **settings: Any) -> Tensor:
        inputs = {k: v.to(self.device) for k, v in rows(count).items()}
        out: Tensor = self.model.generate(**inputs, **settings)
        return out.cpu()

    def overrule(self, patch: pytest.MonkeyPatch, want: Tensor, **settings: Any) -> None:
        """Make the drafter propose the tokens of `want`, partly."""
        longest = max(LENGTHS[: len(want)])
        texts = [row[longest - n :].tolist() for row, n in zip(want, LENGTHS, strict=False)]
        overrule(patch, texts, device=self.device, **settings)


def like(count: int, **settings: Any) -> list[Request]:
    """Requests that need what those of a call need, for warming up."""
    how: dict[str, Any] = {}
    if settings.get("do_sample"):
        how = {"temperature": 1.0, "top_k": settings["top_k"], "top_p": settings["top_p"]}
    return [Request(prompt=[0] * 130, max_new_tokens=60, **how) for _ in range(count)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.mark.parametrize(("settings", "predicted"), [({}, True), (SAMPLED, False)], ids=str)
def test_one_graph_of_each_stage_for_every_bucket(
    settings: dict[str, Any],
    predicted: bool,
    graphs: list[str],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    settings = {**settings, "max_new_tokens": NEW}
    want = pair.want(5, **settings)
    pair.overrule(monkeypatch, want, real_scores=predicted)
    predictor = pair.predictor if predicted else None
    with pair.attach(mode="dscale", predictor=predictor) as spec:
        assert torch.equal(pair.got(5, **settings), want)
        assert sorted(graphs) == ADAPTIVE
        assert max(map(max, spec.stats.last_progress)) > 2
        for count in (1, 3, 2):
            got = pair.got(count, **settings)
            offset = want.shape[1] - got.shape[1]
            assert torch.equal(got, want[:count, offset:]), count
        assert sorted(graphs) == ADAPTIVE


@pytest.mark.parametrize(
    ("mode", "budget"), [("ar", None), ("dflash", 5), ("+budget", "auto"), ("dscale", 3)]
)
def test_warm_up_compiles_each_stage_once(
    mode: str, budget: Any, graphs: list[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    want = pair.want(3, max_new_tokens=NEW)
    if mode != "ar":
        pair.overrule(monkeypatch, want)
    stages = {"ar": ["Verify"], "+budget": ADAPTIVE}.get(mode, ["Decide", "Verify"])
    with pair.attach(mode=mode, budget=budget) as spec:
        spec.engine.warm_up(like(3))
        assert sorted(graphs) == stages
        for count in (3, 1):
            got = pair.got(count, max_new_tokens=NEW)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :])
        assert sorted(graphs) == stages
        assert spec.stats.tokens_per_pass > 1 or budget is None


def test_ways_of_choosing_tokens_do_not_share_a_compile_limit(
    graphs: list[str], pair: Pair
) -> None:
    ways: list[dict[str, Any]] = [{}, SAMPLED]
    with torch._dynamo.config.patch(recompile_limit=1), pair.attach(mode="ar"):
        for way in ways:
            settings = {**way, "max_new_tokens": 3}
            assert torch.equal(pair.got(2, **settings), pair.want(2, **settings)), way
    assert graphs == ["Verify"] * len(ways)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.calls.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.calls.append([])


@pytest.mark.parametrize("mode", ["ar", "dflash", "+budget", "dscale"])
def test_late_results_change_nothing(
    mode: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, stats and streamer calls are the same when results are read a step later."""
    settings = {"max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    want = pair.want(5, **settings)
    settings["eos_token_id"] = [int(want[0, 130 + 21]), int(want[2, 130 + 9])]
    budget = {"ar": None, "dflash": 9}.get(mode, 5)
    seen: list[Any] = []
    make = dscale.core.Decoding
    for late in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(
                dscale.core,
                "Decoding",
                lambda *a, late=late, **k: make(*a, **{**k, "late": late}),
            )
            if mode != "ar":
                pair.overrule(patch, want)
            with pair.attach(mode=mode, budget=budget, pool_tokens=None) as spec:
                recorder = Recorder()
                outs = [pair.got(n, **settings) for n in (5, 3)]
                outs.append(pair.got(1, **settings, streamer=recorder))
                stats = spec.stats
                figures = [getattr(stats, n) for n in (
                    "calls", "requests", "steps", "passes", "tokens", "drafted", "accepted",
                    "prompt_tokens", "last_progress",
                )]  # fmt: skip
                seen.append((outs, recorder.calls, figures))
    for ours, theirs in zip(seen[0][0], seen[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert seen[0][1:] == seen[1][1:]
    assert len(seen[0][1]) > 5
    assert seen[0][2][3] > 5


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [("ar", None), ("dflash", None), ("dflash", 5), ("+tiles", None), ("+budget", "half"),
         ("+budget", "auto"), ("dscale", 3), ("dscale", "half"), ("dscale", "auto")]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("mode", "budget"), CASES)
def test_the_captured_run_equals_the_eager_one_and_plain_decoding(
    mode: str,
    budget: Any,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    pair = Pair(tmp_path, "cuda")
    settings = {**settings, "max_new_tokens": 30, "pad_token_id": 0}
    want = pair.want(5, **settings)
    if mode != "ar":
        pair.overrule(monkeypatch, want)
    forwards: list[tuple[str, Any]] = []

    def remembered(stage: nn.Module) -> Callable[..., Any]:
        forwards.append((type(stage).__name__, own_forward(stage)))
        return forwards[-1][1]

    monkeypatch.setattr(dscale.compiled.capture, "own_forward", remembered)
    stops = [int(want[0, 130 + 11]), int(want[2, 130 + 5])]
    for captured in (False, True):
        with pair.attach(mode=mode, budget=budget, capture=captured) as spec:
            if captured:
                spec.engine.warm_up(like(5, **settings))
            for count in (5, 3, 4, 1, 2, 5, 1):
                got = pair.got(count, **settings)
                assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :]), count
            ended = pair.got(5, **settings, eos_token_id=stops)
            assert torch.equal(ended, pair.want(5, **settings, eos_token_id=stops))
            assert spec.stats.tokens_per_pass > 1 or mode == "ar"
        for stage, forward in forwards:
            entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
            assert len(entries) == 1, stage
    assert forwards
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("mode", "budget"), [("dscale", "auto"), ("dscale", 4), ("+tiles", None)])
def test_each_bucket_is_recorded_once(
    mode: str, budget: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    recorded: list[int] = []
    record = cudagraph_trees.CUDAGraphTreeManager.record_function

    def counted(self: Any, *args: Any) -> Any:
        recorded.append(1)
        return record(self, *args)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphTreeManager, "record_function", counted)
    pair = Pair(tmp_path, "cuda")
    want = pair.want(5, max_new_tokens=30)
    pair.overrule(monkeypatch, want)
    with pair.attach(mode=mode, budget=budget) as spec:
        spec.engine.warm_up(like(5))
        buckets = len({bucket_of(n) for n in range(1, 6)})
        # Verify once per capacity; decide and anchors once per lane count.
        per_lanes = {"auto": len(MULTIPLES) + 1 + 2, 4: 2, None: 2}[budget]
        assert len(recorded) == buckets * per_lanes
        for count in (5, 2, 4, 1, 3, 5):
            got = pair.got(count, max_new_tokens=30)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :])
        assert len(recorded) == buckets * per_lanes
