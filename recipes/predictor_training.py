"""Training a predictor on traces: the split by prompt, the inputs, the loss, the loop."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from predictor_traces import Traces, task_of
from torch import Tensor
from tqdm import trange

from dscale.compiled.predictor import Predictor, PredictorConfig, batch_context, falling

MAX_LIVE, MAX_BUDGET = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`count_weight`: of the squared error of the summed scores, beside the mean binary
    cross-entropy (paper, section III-C). `patience`: epochs without a better validation loss
    before it stops. `average`: decay of the running mean of the weights that is kept.
    `projected`: dims the predictor sees of a hidden state. `projection_lr`: of the map from the
    traces' axes to these, relative to `lr`; 0 keeps the first axes. `hidden` 0: a projection of
    zeros, so that the predictor sees nothing of the hidden states."""

    epochs: int = 40
    batch_size: int = 1024
    lr: float = 1e-3
    weight_decay: float = 0.02
    dropout: float = 0.1
    count_weight: float = 0.02
    average: float = 0.99
    patience: int = 8
    projected: int = 8
    hidden: int = 1
    projection_lr: float = 0.3
    projection_decay: float = 1.0
    seed: int = 0


def split_prompts(traces: Traces, share: float, seed: int) -> tuple[Traces, Traces]:
    """Passes of the prompts to train on, and of the `share` held out: no prompt is in both.

    Prompts of one task (`task_of`) stay together. Raises ValueError when a side would be empty."""
    task = [task_of(source, name) for source, name in traces.prompts]
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


def make_predictor(traces: Traces, projected: int, generator: torch.Generator) -> Predictor:
    """An untrained predictor with the traces' first axes and their standardisation."""
    config = PredictorConfig(
        hidden_size=traces.projection.shape[0],
        block_size=traces.block_size,
        projected=projected,
        drafter=traces.drafter,
    )
    if traces.projection.shape[1] < projected:
        got = traces.projection.shape[1]
        raise ValueError(f"projected: expected at most the traces' {got} dims, got {projected}")
    predictor = Predictor(config).to(traces.accepted.device)
    context = random_context(traces, generator)
    axes = traces.projected[..., :projected]
    x = torch.cat((traces.feature.flatten(1), axes.flatten(1), context), 1)
    x = x[~x.isnan().any(1)].double()
    predictor.projection.copy_(traces.projection[:, :projected])
    predictor.hidden_mean.copy_(traces.hidden_mean)
    predictor.mean.copy_(x.mean(0))
    predictor.std.copy_(x.std(0) + 1e-3)
    return predictor


def reduction_of(predictor: Predictor, traces: Traces) -> Tensor:
    """The map [J, projected] from the traces' dims to the predictor's: its projection lies in the
    span of the traces' orthonormal axes."""
    return traces.projection.T @ predictor.projection


@torch.no_grad()
def scores(predictor: Predictor, traces: Traces, context: Tensor) -> Tensor:
    """Scores [P, C] of every pass."""
    projected = traces.projected @ reduction_of(predictor, traces)
    return falling(predictor.raw(traces.feature, projected, context))


class Run:
    """One training run: the predictor, the running mean of its weights, the optimizer.

    While it trains, the predictor's projection is a parameter `reduction` over the traces' dims;
    `average` has it folded in."""

    def __init__(self, train: Traces, options: TrainOptions) -> None:
        device = train.accepted.device
        torch.manual_seed(options.seed)
        self.train, self.options = train, options
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.predictor = make_predictor(train, options.projected, self.generator)
        self.average = copy.deepcopy(self.predictor).eval()
        self.predictor.dropout = options.dropout
        axes = torch.eye(train.projection.shape[1], options.projected, device=device)
        self.reduction = (axes * bool(options.hidden)).requires_grad_()
        self.batch = min(options.batch_size, len(train))
        self.steps, self.done = options.epochs * (len(train) // self.batch), 0
        own = {"params": list(self.predictor.parameters()), "weight_decay": options.weight_decay}
        shared = {"params": [self.reduction], "lr": options.lr * options.projection_lr}
        shared["weight_decay"] = options.projection_decay
        learned = options.projection_lr > 0 and options.hidden
        groups = [own, shared] if learned else [own]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.reduction_mean = self.reduction.detach().clone()

    def rate(self, step: int) -> float:
        """Cosine from 1 to 0.02 over the run."""
        return 0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))

    def epoch(self) -> float:
        """Train on every pass once, in random order; returns the mean loss."""
        train, count = self.train, len(self.train) // self.batch * self.batch
        context = random_context(train, self.generator)
        order = torch.randperm(len(train), generator=self.generator, device=train.accepted.device)
        losses = []
        for rows in order[:count].view(-1, self.batch):
            projected = train.projected[rows] @ self.reduction
            odds = self.predictor.log_odds(train.feature[rows], projected, context[rows])
            loss = loss_of(odds, train.accepted[rows], self.options.count_weight)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.detach())
            self.follow()
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def follow(self) -> None:
        """Move the running mean of the weights, faster at first."""
        self.done += 1
        decay = min(self.options.average, self.done / (self.done + 10))
        pairs = zip(self.average.parameters(), self.predictor.parameters(), strict=True)
        for mean, value in (*pairs, (self.reduction_mean, self.reduction)):
            mean.lerp_(value, 1 - decay)

    @torch.no_grad()
    def held_out_loss(self, val: Traces, context: Tensor) -> float:
        """Fold the reduction into the mean weights and measure them."""
        self.average.projection.copy_(self.train.projection @ self.reduction_mean)
        odds = self.average.log_odds(val.feature, val.projected @ self.reduction_mean, context)
        return float(loss_of(odds, val.accepted, self.options.count_weight))


def train(train: Traces, val: Traces, options: TrainOptions) -> tuple[Predictor, dict[str, Any]]:
    """Fit a predictor; stops early, and keeps the epoch with the lowest validation loss.

    Returns it in eval mode with the history of losses."""
    run = Run(train, options)
    val_context = fixed_context(val, 16, 8.0)
    history: list[dict[str, float]] = []
    best: dict[str, Any] = {"loss": run.held_out_loss(val, val_context), "epoch": -1}
    best["state"] = copy.deepcopy(run.average.state_dict())
    bar = trange(options.epochs, desc="train predictor", unit="epoch")
    for epoch in bar:
        loss, held = run.epoch(), run.held_out_loss(val, val_context)
        history.append({"train": round(loss, 5), "val": round(held, 5)})
        bar.set_postfix(history[-1])
        if held < best["loss"]:
            state = copy.deepcopy(run.average.state_dict())
            best = {"loss": held, "epoch": epoch, "state": state}
        elif epoch - best["epoch"] >= options.patience:
            break
    run.average.load_state_dict(best["state"])
    run.average.eval().requires_grad_(False)
    found = {"best_epoch": best["epoch"] + 1, "epochs": len(history), "val_loss": best["loss"]}
    return run.average, found | {"history": history}
