"""weights="fp8": what is rounded, answers of such a target, refusals, weights that change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Pair
from tiny import VOCAB, plain, tiny_drafter, tiny_model
from torch import Tensor, nn

import dscale
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import KVPool
from dscale.compiled.layer import PROJECTIONS
from dscale.compiled.quantized import check_quantizable, quantize
from dscale.config import EngineConfig
from dscale.engine import Engine
from dscale.kernels.reference_scaled import E4M3, quantize_rows
from dscale.load import build_target

IDS = torch.arange(3, 40)[None] % 50
NEW = 24
GPU_VOCAB = 512
INNER = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0]}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_model())


def rounded(x: Tensor) -> Tensor:
    """Rows to 8 bits and back."""
    values, scale = quantize_rows(x.flatten(0, -2))
    return (values.float() * scale[:, None]).to(x.dtype).view_as(x)


def rounded_model(model: Any) -> Any:
    """The same model, its layer projections and what they multiply rounded."""
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = rounded(module.weight.data)
            module.register_forward_pre_hook(lambda module, args: rounded(args[0]))
    return model


def test_a_weight_and_its_scales() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight *= torch.logspace(-20, 4, 40, base=2)[:, None].bfloat16()
    values, scale = quantize(weight)
    assert (values.dtype, scale.dtype) == (torch.float32, torch.float32)  # on a CPU
    assert torch.equal(values.to(E4M3).float(), values)
    assert (values.abs().amax(1) == 448).all()
    error = (values * scale[:, None] - weight.float()).abs()
    # 3 bits behind the leading one, nothing below 2^-9 of a scale.
    assert (error <= weight.float().abs() / 16 + scale[:, None] * 2.0**-10).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_rounded_model(family: str) -> None:
    """One pass over a prompt. Sums in another order tip a rounding here and there."""
    model = tiny_model(family)
    with torch.no_grad():
        exact = model(IDS).logits[0, -1]
        want = rounded_model(tiny_model(family))(IDS).logits[0, -1]
    settings: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    with dscale.attach(model, mode="ar", weights="fp8") as spec:
        out: Any = model.generate(IDS, max_new_tokens=1, **settings)
        layer: Any = spec.engine.target.layers[0]
        assert set(layer.quantized) == set(layer.scales) == set(PROJECTIONS)
    apart = (out.logits[0][0] - want).norm() / (want - exact).norm()
    assert apart < 0.3
    assert (want - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("budget", [None, 4])
def test_eight_bit_drafts_change_no_answer(budget: Any, drafter: Drafter) -> None:
    model = tiny_model()
    want = plain(tiny_model(), IDS, max_new_tokens=NEW)
    with dscale.attach(model, drafter, budget=budget, weights="fp8-draft") as spec:
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)
        used, target = spec.engine.drafter, spec.engine.target
        assert used is not None
        assert not target.is_quantized
        assert set(used.layer(0).scales) == set(PROJECTIONS)
    # The drafter itself may serve others, in its own dtype.
    assert drafter.head is drafter.context_copy is None
    assert not drafter.layer(0).quantized
    assert used.layer(0).down is drafter.layer(0).down


def test_eight_bit_drafts_are_nearly_the_same(drafter: Drafter) -> None:
    target = build_target(tiny_model(), drafter.config.taps)
    made = drafter.quantized(target.head)
    hidden = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    taps = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    logits = [each.logits(hidden, target) for each in (drafter, made)]
    written, heads = [], (drafter.config.num_kv_heads, drafter.config.head_dim)
    for each in (drafter, made):
        pool = KVPool(1, 2, *heads, torch.float32, torch.device("cpu"))
        at = torch.arange(12)
        each.write_context(taps, at, at + 128, pool)
        written.append(torch.cat([buffer.flatten() for buffer in pool.buffers()]))
    for exact, ours in (logits, written):
        apart = (ours - exact).norm() / exact.norm()
        assert 1e-4 < apart < 0.06


@pytest.mark.parametrize("budget", [None, 4])
def test_drafts_of_such_a_target(budget: Any, drafter: Drafter) -> None:
    """First tokens are those of mode "ar", as one pass over the prompt gives both. Later ones need
    not be: a row's sums differ in their last bit between passes, and so its roundings."""
    model = tiny_model()
    with dscale.attach(model, mode="ar", weights="fp8"):
        want = model.generate(IDS, max_new_tokens=NEW)
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)
    with dscale.attach(model, drafter, budget=budget, weights="fp8") as spec:
        got = model.generate(IDS, max_new_tokens=NEW)
        assert spec.stats.tokens == NEW - 1
    assert got.shape == want.shape
    assert (got == want).float().mean() > 0.5
    assert torch.equal(got[:, : IDS.shape[1] + 1], want[:, : IDS.shape[1] + 1])


def test_the_default_keeps_no_copy(drafter: Drafter) -> None:
    model = tiny_model()
    with dscale.attach(model, drafter) as spec:
        layer: Any = spec.engine.target.layers[0]
        assert not layer.quantized
        assert not layer.scales
        own = model.model.layers[0].mlp.down_proj.weight
        assert layer.weights.down.data_ptr() == own.data_ptr()
        want = plain(tiny_model(), IDS, max_new_tokens=NEW)
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)


WRITES: list[Callable[[Any], Any]] = [
    lambda model: model.load_state_dict(tiny_model(seed=9).state_dict()),
    lambda model: model.model.layers[1].mlp.up_proj.weight.data.add_(0.5),
    lambda model: model.to(torch.float64).to(torch.float32),
]


@pytest.mark.parametrize("write", WRITES, ids=["counted", "through data", "moved"])
def test_changed_weights_are_refused_for_good(
    write: Callable[[Any], Any], drafter: Drafter
) -> None:
    model = tiny_model()
    with dscale.attach(model, drafter, weights="fp8") as spec:
        model.generate(IDS, max_new_tokens=2)
        model.generate(IDS, max_new_tokens=2)
        with torch.no_grad():
            write(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"model: its weights were .*weights='fp8'"):
                model.generate(IDS, max_new_tokens=2)
            with pytest.raises(ValueError, match="model: its weights were"):
                spec.engine.submit([1, 2, 3])
    with dscale.attach(model, drafter, weights="fp8"):
        model.generate(IDS, max_new_tokens=2)


def test_a_drafter_that_changes_is_refused_for_good(tmp_path: Path) -> None:
    """Else some of its weights would be new, and those copied old."""
    drafter = tiny_drafter(tmp_path, tiny_model())
    model, other = tiny_model(), tiny_model()
    want = plain(tiny_model(), IDS, max_new_tokens=NEW)
    with dscale.attach(model, drafter, weights="fp8-draft"), dscale.attach(other, drafter):
        model.generate(IDS, max_new_tokens=2)
        with torch.no_grad():
            drafter.layer(0).down.mul_(2)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^drafter: its weights .* weights='fp8-draft'"):
                model.generate(IDS, max_new_tokens=2)
        assert torch.equal(other.generate(IDS, max_new_tokens=NEW), want)
    with dscale.attach(model, drafter, weights="fp8-draft"):
        assert torch.equal(model.generate(IDS, max_new_tokens=NEW), want)


def test_refusals(drafter: Drafter) -> None:
    model = tiny_model()
    for wrong in ("int8", None, True):
        with pytest.raises(ValueError, match="weights: expected one of"):
            dscale.attach(model, drafter, weights=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pack_weights: expected False with weights 'fp8'"):
        dscale.attach(model, drafter, weights="fp8", pack_weights=True)
    assert "generate" not in vars(model)
    target = build_target(tiny_model())
    with pytest.raises(ValueError, match=r"weights: expected .* made for 'fp8'"):
        Engine(target, None, EngineConfig(mode="ar", weights="fp8"))
    with pytest.raises(ValueError, match=r"weights: expected .* made for 'fp8-draft'"):
        Engine(target, drafter, EngineConfig(weights="fp8-draft"))
    with pytest.raises(ValueError, match=r"weights: expected .* made for 'model'"):
        Engine(target, drafter.quantized(target.head), EngineConfig())
    target.quantize()
    with pytest.raises(ValueError, match=r"weights: expected .* made for 'model'"):
        Engine(target, None, EngineConfig(mode="ar"))


def test_one_call(drafter: Drafter) -> None:
    model = tiny_model()
    with dscale.attach(model, mode="ar", weights="fp8"):
        want = model.generate(IDS, max_new_tokens=1)
        with pytest.raises(ValueError, match="weights: the model is attached already"):
            dscale.generate(model, IDS, weights="fp8")
    assert torch.equal(dscale.generate(model, IDS, weights="fp8", max_new_tokens=1), want)
    with pytest.raises(ValueError, match="weights: expected 'model' or 'fp8' in mode 'ar'"):
        dscale.generate(model, IDS, weights="fp8-draft")
    with pytest.raises(ValueError, match=r"weights: expected one of .*, got ''"):
        dscale.generate(model, IDS, weights="")  # type: ignore[arg-type]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = torch.bfloat16
    check_quantizable(torch.device("cpu"), torch.float32, (5,))
    with pytest.raises(ValueError, match=r"^weights: expected 'model' .* got 'fp8' on meta"):
        check_quantizable(torch.device("meta"), bf16)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, ok in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        found = capability

        def of(device: Any, found: Any = found) -> Any:
            return found

        monkeypatch.setattr(torch.cuda, "get_device_capability", of)
        if ok:
            check_quantizable(torch.device("cuda:0"), bf16, (32, 16))
        else:
            with pytest.raises(ValueError, match=r"^weights: .* capability 8\.0"):
                check_quantizable(torch.device("cuda:0"), bf16, (32, 16))
    with pytest.raises(ValueError, match=r"^weights: .* torch\.float32 model on a GPU"):
        check_quantizable(torch.device("cuda:0"), torch.float32)
    with pytest.raises(ValueError, match=r"^weights: .* of 40 numbers.* got 'fp8-draft'$"):
        check_quantizable(torch.device("cuda:0"), bf16, (32, 40), "fp8-draft")


def pair_for_8_bits(folder: Path, device: str = "cuda") -> Pair:
    """A pair in bfloat16 whose projections, the LM head among them, a GPU takes."""
    pair = Pair(folder, device)
    pair.model, pair.reference = (
        tiny_model(num_hidden_layers=2, vocab_size=GPU_VOCAB).to(device).bfloat16()
        for _ in range(2)
    )
    pair.drafter = tiny_drafter(folder / "bf16", pair.model, dflash_config=INNER)
    return pair


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("mode", "budget"), [("dflash", None), ("dscale", "half")])
def test_captured_eight_bit_drafts(mode: Any, budget: Any, tmp_path: Path) -> None:
    """Answers in bfloat16 may differ where a pass has other rows; here drafts alone differ."""
    torch._dynamo.reset()
    pair = pair_for_8_bits(tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 30, "pad_token_id": 0}
    answers = []
    for weights in ("model", "fp8-draft"):
        with pair.attach(mode=mode, budget=budget, capture=True, weights=weights) as spec:
            answers.append(pair.got(5, **settings))
            assert spec.stats.uncaptured_steps == 0
    assert (answers[0] == answers[1]).float().mean() > 0.8


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("mode", "budget"), [("ar", None), ("dflash", None), ("dscale", "half")])
def test_captured_steps(mode: Any, budget: Any, tmp_path: Path) -> None:
    """They run, on 8-bit weights, and begin as the rounded model does."""
    torch._dynamo.reset()
    pair = pair_for_8_bits(tmp_path)
    with torch.no_grad():
        want = rounded_model(pair.reference)(IDS.cuda()).logits[0, -1].float()
    settings: dict[str, Any] = {"max_new_tokens": 30, "pad_token_id": 0}
    with pair.attach(mode=mode, budget=budget, capture=True, weights="fp8") as spec:
        layer: Any = spec.engine.target.layers[0]
        for count in (5, 1, 3):
            got = pair.got(count, **settings)
            assert got.shape[0] == count
            assert got.max() < GPU_VOCAB
        assert layer.weights.qkv.dtype == E4M3
        assert spec.stats.uncaptured_steps == 0
        out: Any = pair.model.generate(
            IDS.cuda(), max_new_tokens=1, output_logits=True, return_dict_in_generate=True
        )
    assert (out.logits[0][0].float() - want).norm() < 0.1 * want.norm()
