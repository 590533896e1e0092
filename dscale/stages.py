"""The stages of a step for one way of choosing tokens, and which rows each mode verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dscale.compiled.attention import VERIFY_TILE, Tile
from dscale.compiled.capture import capture
from dscale.compiled.decide import Anchors, Decide
from dscale.compiled.drafter import Drafter
from dscale.compiled.packed import turns
from dscale.compiled.predictor import Predictor
from dscale.compiled.prefill import Prefill, PromptPass
from dscale.compiled.sampling import Chooser
from dscale.compiled.shares import PARTS
from dscale.compiled.target import Target
from dscale.compiled.verify import Verify
from dscale.config import EngineConfig, WeightFormat
from dscale.workspace import Workspace

Stage = Callable[..., Any]
"""Prefill or its PromptPass, Decide, Anchors or Verify, compiled or not: changes the buffers that
it is called with and returns nothing."""

CONTROL_BLOCK = 128
"""Rows of a query block in mode "dflash": the paper's baseline verifies with its prefill tile."""


@dataclass(frozen=True, slots=True)
class Stages:
    """`decide` is None where nothing is drafted. `anchors`, in the adaptive modes, takes its place
    in a step for which the budget policy drafts nothing. `host_lengths`: decide packs no rows."""

    prefill: Stage
    decide: Stage | None
    anchors: Stage | None
    verify: Stage
    host_lengths: bool


def verify_tile(config: EngineConfig, rows: int, flex: bool, parts: int = 0) -> Tile:
    """The verification tile of a mode. The gathered route takes no more rows than it needs."""
    height = VERIFY_TILE if flex or config.adaptive else rows
    if config.mode == "dflash":
        return Tile(height=height, flex=flex, per_head=True, block=CONTROL_BLOCK)
    return Tile(height=height, flex=flex, parts=parts)


def gpu(target: Target) -> bool:
    """Whether a target is on a GPU, where sub-lanes share keys."""
    return target.inv_freq.device.type != "cpu"


def build_stages(
    target: Target,
    drafter: Drafter | None,
    predictor: Predictor | None,
    workspace: Workspace,
    config: EngineConfig,
    chooser: Chooser,
    *,
    flex: bool,
    captured: bool,
    prompt: Stage | None = None,
) -> Stages:
    """Make the stages; with `captured` each is compiled at its first call. `prompt`: see
    `prompt_stage`; None makes one that is not compiled."""
    pool, draft_pool = workspace.pool, workspace.draft_pool
    if flex:
        split_products(target, drafter)
    shared = (target, pool, drafter, draft_pool)
    wrap: Callable[[Any], Stage] = capture if captured else _as_is
    # The control keeps the paper's tile.
    parts = PARTS if flex and gpu(target) and config.mode != "dflash" else 0
    rows = 1 if drafter is None else config.uniform_rows(drafter.config.block_size)
    decide = None
    if drafter is not None and draft_pool is not None and (config.adaptive or rows > 1):
        decide = wrap(
            Decide(
                target,
                drafter,
                draft_pool,
                rows=None if config.adaptive else rows,
                predictor=predictor,
                seed=config.budget_seed,
                flex=flex,
                parts=parts,
            )
        )
    tile = verify_tile(config, rows, flex, parts)
    return Stages(
        prefill=Prefill(prompt or PromptPass(*shared, flex), target, chooser),
        decide=decide,
        anchors=wrap(Anchors()) if config.adaptive else None,
        verify=wrap(Verify(*shared, rows, chooser, tile)),
        host_lengths=config.mode == "+budget",
    )


def set_weights(target: Target, drafter: Drafter | None, weights: WeightFormat) -> Drafter | None:
    """Make the 8-bit copies that a setting asks for: the target, which belongs to one engine, gets
    them in place. Returns a drafter for the same engine, over the weights of the given one, which
    stays as it is because other engines may use it, too."""
    if weights == "fp8":
        target.quantize()
    if drafter is None:
        return None
    return drafter.shared() if weights == "model" else drafter.quantized(target.head)


def check_weights(target: Target, drafter: Drafter | None, weights: WeightFormat) -> None:
    """Raise ValueError unless both have the copies that `set_weights` makes for this setting."""
    layers, drafts = target.is_quantized, drafter is not None and drafter.head is not None
    wanted = (weights == "fp8", weights != "model" and drafter is not None)
    if (layers, drafts) != wanted:
        raise ValueError(
            f"weights: expected a target and a drafter made for {weights!r}, got 8-bit layers "
            f"{layers}, 8-bit drafts {drafts}"
        )


def split_products(target: Target, drafter: Drafter | None) -> None:
    """Let each take turns at the products that kernels/linear_plans splits, in a buffer of its
    own. An engine has both for itself: the threads of several do not wait for one another."""
    for model in (target, drafter):
        if model is not None and model.turn is None:
            model.split(turns(target.inv_freq.device))


def prompt_stage(
    target: Target, drafter: Drafter | None, workspace: Workspace, *, flex: bool, captured: bool
) -> Stage:
    """The pass over prompts that all ways of choosing tokens share; eager around the compiled
    attention if not `captured`."""
    if flex:
        split_products(target, drafter)
    prompt = PromptPass(target, workspace.pool, drafter, workspace.draft_pool, flex)
    return capture(prompt) if captured else prompt


def _as_is(stage: Stage) -> Stage:
    return stage
