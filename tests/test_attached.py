"""An attached model: changed, copied, detached, in other modes and threads."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tiny import plain, prompt, tiny_drafter, tiny_model
from torch import nn

import dscale
from dscale import Attachment
from dscale.compiled.drafter import Drafter
from dscale.compiled.layer import PROJECTIONS
from dscale.stages import split_products
from dscale.weights import WeightWatch

IDS = torch.tensor([prompt(9)])
NEW = 20


@pytest.fixture(scope="module")
def want() -> torch.Tensor:
    tokens: torch.Tensor = plain(tiny_model(), IDS, max_new_tokens=NEW)
    return tokens


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_model())


@pytest.fixture
def spec(drafter: Drafter) -> Iterator[Attachment]:
    with dscale.attach(tiny_model(), drafter) as spec:
        yield spec


class Adapter(nn.Module):
    """A projection with something added, as adapters wrap them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight = base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * self.base(x)  # type: ignore[no-any-return]


def replace_layer(model: Any) -> None:
    model.model.layers[1] = tiny_model(seed=5).model.layers[1]


def replace_head(model: Any) -> None:
    model.lm_head = tiny_model(seed=5).lm_head


def adapt(model: Any) -> None:
    model.model.layers[2].self_attn.q_proj = Adapter(model.model.layers[2].self_attn.q_proj)


def assign(model: Any) -> None:
    model.load_state_dict(tiny_model(seed=9).state_dict(), assign=True)


CHANGES: list[Callable[[Any], Any]] = [
    replace_layer, replace_head, adapt, assign,
    lambda model: model.to(torch.bfloat16), lambda model: model.resize_token_embeddings(600),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_weights_replaced_after_attach_are_noticed(
    change: Callable[[Any], Any], spec: Attachment
) -> None:
    model = spec.model
    model.generate(IDS, max_new_tokens=2)
    change(model)
    want = plain(model, IDS, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=r"model: .*detach and attach again"):
        model.generate(IDS, max_new_tokens=NEW)
    spec.detach()
    assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)


def test_weights_changed_in_place_are_used(spec: Attachment) -> None:
    model = spec.model
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    ours = model.generate(IDS, max_new_tokens=NEW)
    assert torch.equal(ours, plain(model, IDS, max_new_tokens=NEW))
    model.load_state_dict(tiny_model(seed=9).state_dict())
    assert not torch.equal(model.generate(IDS, max_new_tokens=NEW), ours)
    assert torch.equal(
        model.generate(IDS, max_new_tokens=NEW),
        plain(tiny_model(seed=9), IDS, max_new_tokens=NEW),
    )


def test_packed_weights(drafter: Drafter, want: torch.Tensor) -> None:
    model = tiny_model()
    with dscale.attach(model, drafter, pack_weights=True):
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)
        model.load_state_dict(tiny_model(seed=9).state_dict())
        # Packed copies do not follow.
        with pytest.raises(ValueError, match=r"model: .*pack_weights"):
            model.generate(IDS, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=r"pack_weights: .*bfloat16"):
        dscale.attach(tiny_model().to(torch.bfloat16), pack_weights=True)


def test_weights_are_not_read_while_requests_run(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that would wait for the step under way."""
    looks, same = [], WeightWatch.same

    def watched(self: WeightWatch) -> bool:
        looks.append(self)
        return same(self)

    monkeypatch.setattr(WeightWatch, "same", watched)
    with dscale.attach(tiny_model(), drafter, pack_weights=True, prefix_cache=False) as spec:
        held = threading.Event()
        spec.engine._worker.tell(lambda batcher: held.wait(60))
        first, looked = spec.engine.submit([1, 2, 3], max_new_tokens=2), len(looks)
        second = spec.engine.submit([4, 5, 6], max_new_tokens=2)
        assert len(looks) == looked > 0
        held.set()
        for handle in (first, second):
            handle.result()
        spec.engine.submit([4, 5, 6], max_new_tokens=2).result()
        assert len(looks) > looked


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_attached_model_is_plain(
    how: str, spec: Attachment, drafter: Drafter, want: torch.Tensor
) -> None:
    spec.model.generate(IDS, max_new_tokens=2)
    if how == "deepcopy":
        other = copy.deepcopy(spec.model)
    else:
        file = io.BytesIO()
        torch.save(spec.model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert len(file.getvalue()) < 6e5
    assert torch.equal(other.generate(IDS, max_new_tokens=NEW), want)
    calls = spec.stats.calls
    with dscale.attach(other, drafter) as second:
        assert torch.equal(other.generate(IDS, max_new_tokens=NEW), want)
        assert second.stats.calls == 1
    assert spec.stats.calls == calls
    spec.detach()
    assert torch.equal(other.generate(IDS, max_new_tokens=NEW), want)


def test_detach_lets_everything_go(spec: Attachment, want: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="model: already attached"):
        dscale.attach(spec.model)
    target = weakref.ref(spec.engine.target)
    spec.model.generate(IDS, max_new_tokens=NEW)
    spec.detach()
    gc.collect()
    assert target() is None
    assert spec.stats.calls == 1
    with pytest.raises(ValueError, match="model: detached"):
        spec.generate(IDS, max_new_tokens=NEW)
    assert torch.equal(spec.model.generate(IDS, max_new_tokens=NEW), want)
    spec.model.generate = lambda *args: "the user's own"
    with dscale.attach(spec.model) as again:
        assert torch.equal(again.generate(IDS, max_new_tokens=NEW), want)
    assert spec.model.generate() == "the user's own"


def test_inference_mode_comes_and_goes(drafter: Drafter, want: torch.Tensor) -> None:
    model = tiny_model()
    for attach_in, first_in, second_in in ((0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0)):
        with torch.inference_mode(bool(attach_in)):
            spec = dscale.attach(model, drafter)
        for mode, ids in ((first_in, IDS), (second_in, IDS.clone())):
            with torch.inference_mode(bool(mode)):
                assert torch.equal(model.generate(ids, max_new_tokens=NEW), want)
        with torch.inference_mode(bool(attach_in)):
            spec.detach()
        model(IDS, labels=IDS).loss.backward()


def test_autocast_does_not_reach_in(spec: Attachment, want: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(spec.model.generate(IDS, max_new_tokens=NEW), want)


def test_training_mode(spec: Attachment, want: torch.Tensor) -> None:
    spec.model.train()
    assert torch.equal(spec.model.generate(IDS, max_new_tokens=NEW), want)
    assert spec.model.training


def test_threads_take_turns(spec: Attachment) -> None:
    prompts = [torch.tensor([prompt(9 + i)]) for i in range(6)]
    wants = [plain(tiny_model(), ids, max_new_tokens=NEW) for ids in prompts]
    outs: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        outs[index] = spec.model.generate(prompts[index], max_new_tokens=NEW)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [torch.equal(outs[i], want) for i, want in enumerate(wants)] == [True] * 6


def test_a_call_from_within_a_streamer(spec: Attachment, want: torch.Tensor) -> None:
    class Nested:
        outs: ClassVar[list[torch.Tensor]] = []
        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 3:
                self.outs.append(spec.model.generate(IDS, max_new_tokens=NEW))

        def end(self) -> None: ...

    assert torch.equal(spec.model.generate(IDS, max_new_tokens=NEW, streamer=Nested()), want)
    assert [torch.equal(out, want) for out in Nested.outs] == [True]


def test_a_drafter_that_is_handed_in_stays_as_it_is(drafter: Drafter, want: torch.Tensor) -> None:
    """What an engine keeps beside its weights goes with the engine, and is no other engine's."""
    models = [tiny_model(), tiny_model()]
    with dscale.attach(models[0], drafter, pack_weights=True) as packed:
        with dscale.attach(models[1], drafter) as other:
            for model in models:
                assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)
            used = [spec.engine.drafter for spec in (packed, other)]
            assert used[0] is not None
            assert used[1] is not None
            split_products(other.engine.target, used[1])
            assert [set(each.layer(0).aids) for each in used] == [set(PROJECTIONS), set()]
            assert used[1].turn is not None
            assert used[0].turn is None
    assert not drafter.layer(0).aids
    assert drafter.turn is None


@pytest.mark.parametrize("settings", [{"pack_weights": True}, {"weights": "fp8-draft"}], ids=str)
def test_no_memory_for_copies(
    settings: Any, drafter: Drafter, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    model = tiny_model()
    with monkeypatch.context() as patch:
        patch.setattr("dscale.compiled.drafter.pack", full)
        patch.setattr("dscale.compiled.drafter.quantize", full)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            dscale.attach(model, drafter, **settings)
    assert "generate" not in vars(model)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    with dscale.attach(model, drafter, **settings):
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)


def test_hooks_after_attach() -> None:
    model = tiny_model()
    with dscale.attach(model) as spec:
        model(IDS, output_hidden_states=True)  # those of transformers may stay
        want = model.generate(IDS, max_new_tokens=4)
        hook = model.model.layers[1].register_forward_hook(lambda *args: None)
        with pytest.raises(ValueError, match=r"^model: expected no forward hooks.*layers.1'"):
            model.generate(IDS, max_new_tokens=4)
        with pytest.raises(ValueError, match=r"^model: expected no forward hooks"):
            spec.engine.submit(prompt(9), max_new_tokens=4)
        hook.remove()
        assert torch.equal(model.generate(IDS, max_new_tokens=4), want)
