"""Settings of a drafter's training step: options, optimisers, learning rate, measured times.

Expected time of a step on one H200 (32,768 block rows = 64 sequences x 32 anchors x 16, 3 layers
of SmolLM2's shape, about 22,000 loss rows, bfloat16), to compare with the measured split:
  drafter   6 x 10.6M weights x 32,768 rows + context = 2.3 TFLOP at 350 TFLOP/s    6.5 ms
            attention products and softmax, 200 MB of scores a layer, 9 passes      1.5 ms
            norms, rotary, SwiGLU, residuals: 4.4 GB a layer at 4 TB/s              3.3 ms
  loss      4 x 576 x 49,152 x 22,000 = 2.5 TFLOP at 450 TFLOP/s                    5.5 ms
            five passes over 2.2 GB of logits                                       2.7 ms
  gather    20,000 feature rows of 5.8 KB, read and written                         0.1 ms
  optimizer AdamW 0.2 ms; Muon about 600 small kernels more                         0.2 to 3 ms
"""

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drafter_model import TrainableDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Settings of the loop. `steps` 0: as many as fit into `train_seconds`, found by timing."""

    sequences: int = 64
    anchors: int = 32
    steps: int = 0
    train_seconds: float = 600.0
    stop_seconds: float = math.inf
    checkpoint_seconds: float = 120.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: int = 200
    final_lr: float = 0.02
    weight_decay: float = 0.01
    gamma: float = 7.0
    kl: float = 0.5
    greedy_labels: bool = True
    pad_length: int = 64
    loss_rows: int = 2048
    compile: bool = True
    log_every: int = 100
    validate_every: int = 1000
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """What a checkpoint holds beside weights and optimisers; `step` fixes the data order."""

    step: int = 0
    total: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.__slots__:
            setattr(self, name, state[name])


class StageTimes:
    """Mean milliseconds of the named parts of some steps, by events that nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", []  # type: ignore[var-annotated]

    def mark(self, name: str) -> None:
        """Note that the part `name` ends here ("" only starts the clock)."""
        if not self.cuda:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.marks.append((name, event))

    def read(self) -> dict[str, float]:
        """Wait once, and average."""
        if self.cuda:
            torch.cuda.synchronize()
        sums: dict[str, list[float]] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            if name:
                spent = before.elapsed_time(after) if self.cuda else (after - before) * 1e3
                sums.setdefault(name, []).append(spent)
        self.marks.clear()
        return {name: round(sum(v) / len(v), 3) for name, v in sums.items()}


def build_optimizers(drafter: TrainableDrafter, options: TrainOptions) -> list[Any]:
    """AdamW for everything, or Muon for the matrices with AdamW for the norms."""
    decay: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    fused = next(drafter.parameters()).is_cuda
    adamw: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "fused": fused}
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    norms = [p for p in drafter.parameters() if p.ndim < 2]
    if options.optimizer == "adamw":
        groups = [{"params": matrices, **decay}, {"params": norms, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, **adamw)]
    if options.optimizer == "muon":
        # Steps of AdamW's size, so that one learning rate serves both.
        muon = torch.optim.Muon(matrices, **decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(norms, weight_decay=0.0, **adamw)]
    raise ValueError(f"optimizer: expected 'adamw' or 'muon', got {options.optimizer!r}")


def learning_rate(options: TrainOptions, step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr` of the peak; flat while `total` is 0."""
    warm = min(1.0, (step + 1) / max(1, options.warmup))
    if not total:
        return options.lr * warm
    done = min(1.0, step / max(1, total))
    low = options.final_lr
    return options.lr * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def remove(folder: Path) -> None:
    """Delete a checkpoint folder of ours, if it is there."""
    if folder.is_dir():
        shutil.rmtree(folder)
