"""Training a predictor on traces: the split by prompt, the inputs, the loss, the loop."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from predictor_traces import Traces
from torch import Tensor
from tqdm import trange

from dscale.compiled.predictor import Predictor, PredictorConfig, batch_context, falling

MAX_LIVE, MAX_BUDGET = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`count_weight`: of the squared error of the summed scores, beside the mean binary
    cross-entropy (paper, section III-C). `patience`: epochs without a better validation loss
    before it stops. `average`: decay of the running mean of the weights that is kept."""

    epochs: int = 40
    batch_size: int = 1024
    lr: float = 1e-3
    weight_decay: float = 0.02
    dropout: float = 0.1
    count_weight: float = 0.02
    average: float = 0.99
    patience: int = 8
    seed: int = 0


def split_prompts(traces: Traces, share: float, seed: int) -> tuple[Traces, Traces]:
    """Passes of the prompts to train on, and of the `share` held out: no prompt is in both.

    Prompts of one task in two wordings (they share the last part of their id, and their source up
    to `_stub`) stay together. Raises ValueError when a side would be empty."""
    task = [(source.removesuffix("_stub"), name.rsplit("/", 1)[-1])
            for source, name in traces.prompts]  # fmt: skip
    tasks = sorted(set(task))
    order = np.random.default_rng([seed, 4]).permutation(len(tasks))
    held = {tasks[i] for i in order[: max(1, round(share * len(tasks)))]}
    is_held_Q = torch.tensor([t in held for t in task], device=traces.prompt.device)
    is_held_P = is_held_Q[traces.prompt.long()]
    train, val = traces.select(~is_held_P), traces.select(is_held_P)
    if not len(train) or not len(val):
        raise ValueError(
            f"prompts: expected passes on both sides of the split, got {len(train)} to train on"
            f" and {len(val)} held out, of {len(traces.prompts)} prompts"
        )
    return train, val


def usable(traces: Traces, loops: str) -> Traces:
    """Passes whose label is known: not the last of an answer; `loops` "drop" leaves out looping
    answers too, unless there are no others."""
    kept = ~traces.cut
    if loops == "drop" and bool((kept & ~traces.looped).any()):
        kept = kept & ~traces.looped
    return traces.select(kept)


def labels(accepted: Tensor, candidates: int) -> Tensor:
    """1 where at least j drafted tokens were accepted, j = 1..C: float32 [P, C]."""
    return (accepted[:, None] > torch.arange(candidates, device=accepted.device)).float()


def loss_of(odds: Tensor, accepted: Tensor, count_weight: float) -> Tensor:
    """Mean binary cross-entropy over the C labels, plus `count_weight` times the squared error of
    the summed sigmoids, before the cumulative minimum."""
    cross_entropy = F.binary_cross_entropy_with_logits(odds, labels(accepted, odds.shape[1]))
    count = F.mse_loss(odds.sigmoid().sum(1), accepted.float())
    return cross_entropy + count_weight * count


def random_context(traces: Traces, generator: torch.Generator) -> Tensor:
    """Batch contexts [P, 6] as a run may show them: any number of live requests, any budget, and
    histories that a budget cut at random."""
    count, device = len(traces), traces.accepted.device

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=generator, device=device)

    budget = draw(1, MAX_BUDGET)
    # Half of the histories stay whole; the others come from rows between the budget and a block.
    limit = torch.maximum(draw(0, MAX_BUDGET - 1), budget - 1)
    limit = torch.where(draw(0, 1) == 0, MAX_BUDGET - 1, limit)
    recent = torch.minimum(traces.recent, limit[:, None].int())
    live = torch.exp2(draw(0, 6 * 16) / 16).round()
    context = batch_context(limit >= 0, budget.float(), recent, traces.position)
    context[:, 0] = torch.log2(1 + live) / 8
    return context


def fixed_context(traces: Traces, live: int, budget: float) -> Tensor:
    """Batch contexts [P, 6] of cohorts of `live` requests at one budget, histories as logged."""
    is_live = torch.ones(len(traces), dtype=torch.bool, device=traces.accepted.device)
    context = batch_context(is_live, budget, traces.recent, traces.position)
    context[:, 0] = math.log2(1 + live) / 8
    return context


def make_predictor(traces: Traces, generator: torch.Generator) -> Predictor:
    """An untrained predictor with the traces' projection and standardisation."""
    config = PredictorConfig(
        hidden_size=traces.projection.shape[0],
        block_size=traces.block_size,
        projected=traces.projection.shape[1],
        drafter=traces.drafter,
    )
    predictor = Predictor(config).to(traces.accepted.device)
    context = random_context(traces, generator)
    x = torch.cat((traces.feature.flatten(1), traces.projected.flatten(1), context), 1)
    x = x[~x.isnan().any(1)].double()
    predictor.projection.copy_(traces.projection)
    predictor.hidden_mean.copy_(traces.hidden_mean)
    predictor.mean.copy_(x.mean(0))
    predictor.std.copy_(x.std(0) + 1e-3)
    return predictor


@torch.no_grad()
def scores(predictor: Predictor, traces: Traces, context: Tensor) -> Tensor:
    """Scores [P, C] of every pass."""
    return falling(predictor.raw(traces.feature, traces.projected, context))


def train(train: Traces, val: Traces, options: TrainOptions) -> tuple[Predictor, dict[str, Any]]:
    """Fit a predictor; stops early, and keeps the epoch with the lowest validation loss.

    Returns it in eval mode with the history of losses."""
    device = train.accepted.device
    torch.manual_seed(options.seed)
    generator = torch.Generator(device).manual_seed(options.seed)
    predictor = make_predictor(train, generator)
    average = copy.deepcopy(predictor)
    optimizer = torch.optim.AdamW(
        predictor.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    batch = min(options.batch_size, len(train))
    steps = options.epochs * (len(train) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    )
    val_context = fixed_context(val, 16, 8.0)
    history: list[dict[str, float]] = []
    best: dict[str, Any] = {"loss": math.inf, "epoch": 0, "state": {}}
    done = 0
    bar = trange(options.epochs, desc="train predictor", unit="epoch")
    for epoch in bar:
        context = random_context(train, generator)
        order = torch.randperm(len(train), generator=generator, device=device)
        losses = []
        for rows in order[: len(train) // batch * batch].view(-1, batch):
            odds = dropped_odds(predictor, train, rows, context[rows], options.dropout)
            loss = loss_of(odds, train.accepted[rows], options.count_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            done += 1
            follow(average, predictor, min(options.average, done / (done + 10)))
        with torch.no_grad():
            odds = average.log_odds(val.feature, val.projected, val_context)
            held = float(loss_of(odds, val.accepted, options.count_weight))
        history.append(
            {"train": round(float(torch.stack(losses).mean()), 5), "val": round(held, 5)}
        )
        bar.set_postfix(history[-1])
        if held < best["loss"]:
            best = {"loss": held, "epoch": epoch, "state": copy.deepcopy(average.state_dict())}
        elif epoch - best["epoch"] >= options.patience:
            break
    average.load_state_dict(best["state"])
    average.eval().requires_grad_(False)
    return average, {"best_epoch": best["epoch"] + 1, "epochs": len(history), "history": history}


def dropped_odds(
    predictor: Predictor, traces: Traces, rows: Tensor, context: Tensor, dropout: float
) -> Tensor:
    """Log-odds of some passes, with dropout on the hidden layers' outputs."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, x: (F.dropout(x[0], dropout),))
        for layer in (predictor.second, predictor.last)
    ]
    odds = predictor.log_odds(traces.feature[rows], traces.projected[rows], context)
    for hook in hooks:
        hook.remove()
    return odds


@torch.no_grad()
def follow(average: Predictor, predictor: Predictor, decay: float) -> None:
    """Move the running mean of the weights."""
    for mean, value in zip(average.parameters(), predictor.parameters(), strict=True):
        mean.lerp_(value, 1 - decay)
