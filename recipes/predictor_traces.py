"""Traces for a predictor: full-width verification passes with the drafter's signals, and files."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dscale.compiled.decide import Decide
from dscale.compiled.flow import Requests, Step
from dscale.compiled.predictor import RECENT
from dscale.kernels.ops import row_statistics
from dscale.kernels.reference_statistics import features_from_statistics

MAX_FILE_BYTES = 15_000_000
ROW_FIELDS = ("feature", "projected", "recent", "position", "accepted", "prompt", "cut", "looped")


@dataclass(slots=True, kw_only=True)
class Traces:
    """Verification passes at full width, P of them, C draft positions each, on any device.

    `feature` float32 [P, C, 18], `projected` float32 [P, C, J]: what the predictor sees. `recent`
    int32 [P, 3]: accepted in the passes before, newest first, -1 where there was none. `position`
    int32: committed tokens before the anchor. `accepted` int32: the label, 0..C. `prompt` int32:
    which of `prompts` it belongs to. `cut`: the last pass of an answer, whose count a stop id or
    the token limit may have cut. `looped`: the whole answer loops.

    `projection` [D, J], `hidden_mean` [D]: the fixed map from hidden states to `projected`.
    `prompts`: (source, id) of every prompt that was run."""

    feature: Tensor
    projected: Tensor
    recent: Tensor
    position: Tensor
    accepted: Tensor
    prompt: Tensor
    cut: Tensor
    looped: Tensor
    projection: Tensor
    hidden_mean: Tensor
    prompts: list[tuple[str, str]]
    drafter: str
    block_size: int
    temperature: float
    max_new: int

    def __len__(self) -> int:
        return self.accepted.shape[0]

    def select(self, index: Tensor) -> "Traces":
        """Some passes, by a boolean mask or an index [P]."""
        rows = {name: getattr(self, name)[index] for name in ROW_FIELDS}
        return Traces(**({f.name: getattr(self, f.name) for f in fields(self)} | rows))

    def to(self, device: torch.device | str) -> "Traces":
        """The same traces on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return Traces(**moved)


@dataclass(slots=True)
class Recorder:
    """Keeps what the drafter shows of every step, on the device; `finish` adds the outcome.

    `dims`: principal axes of the hidden states to keep, 0 for all. The hidden states of the first
    `fit_steps` steps are kept whole until the axes are known; later ones are projected at once."""

    dims: int
    fit_steps: int
    projection: Tensor | None = None
    hidden_mean: Tensor | None = None
    _steps: list[tuple[Tensor, ...]] = field(default_factory=list)
    _unprojected: list[Tensor] = field(default_factory=list)
    _rows: list[dict[str, Tensor]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts, every draft of every engine is recorded."""
        original: Callable[..., Tensor] = Decide.draft

        def draft(decide: Decide, requests: Requests, step: Step) -> Tensor:
            hidden_NWD = original(decide, requests, step)
            self._record(decide, requests, step, hidden_NWD)
            return hidden_NWD

        Decide.draft = draft  # type: ignore[method-assign]
        try:
            yield
        finally:
            Decide.draft = original  # type: ignore[method-assign]

    def _record(self, decide: Decide, requests: Requests, step: Step, hidden_NWD: Tensor) -> None:
        slot_N = step.slot_N.clone()
        drafted_NCD = hidden_NWD[:, 1:].clone()
        statistics = row_statistics(decide.target.logits(drafted_NCD).flatten(0, 1))
        feature_NCF = features_from_statistics(statistics, drafted_NCD.shape[1])
        if self.projection is None:
            self._unprojected.append(drafted_NCD)
            kept = drafted_NCD[:, :0]
        else:
            kept = self._project(drafted_NCD)
        state = (requests.live_S[slot_N], requests.context_S[slot_N])
        self._steps.append((slot_N, *state, feature_NCF, kept))
        if self.projection is None and len(self._steps) >= self.fit_steps:
            self.fit()

    def _project(self, hidden: Tensor) -> Tensor:
        assert self.projection is not None
        assert self.hidden_mean is not None
        return (hidden.float() - self.hidden_mean) @ self.projection

    def fit(self) -> None:
        """Fix the projection: the principal axes of the hidden states kept so far."""
        if self.projection is not None:
            return
        live = torch.cat([live_N for _, live_N, *_ in self._steps])
        hidden_XD = torch.cat(self._unprojected)[live].flatten(0, 1).double()
        self.hidden_mean = hidden_XD.mean(0).float()
        centred = hidden_XD - self.hidden_mean.double()
        _, axes = torch.linalg.eigh(centred.T @ centred)
        self.projection = axes[:, -self.dims :].flip(1).float().contiguous()
        for index, hidden_NCD in enumerate(self._unprojected):
            self._steps[index] = (*self._steps[index][:-1], self._project(hidden_NCD))
        self._unprojected.clear()

    def finish(
        self, prompts: Sequence[int], lengths: Sequence[int], progress: Sequence[Sequence[int]],
        looped: Sequence[bool],
    ) -> int:  # fmt: skip
        """Join one call's steps with what came out; returns its passes.

        For each request of the call, in order: index and length of its prompt, its progress in
        every pass, whether its answer loops. Raises RuntimeError unless every recorded position
        follows from them."""
        if not self._steps:
            return 0
        self.fit()
        slot, live, context, feature, projected = map(torch.cat, zip(*self._steps, strict=True))
        self._steps.clear()
        # Passes of one request after another, each in the order of its steps.
        slots = torch.where(live, slot, len(prompts)).cpu()
        order = slots.argsort(stable=True)[: int((slots < len(prompts)).sum())]
        passes = [len(p) for p in progress]
        count = torch.tensor([c for p in progress for c in p], dtype=torch.int32)
        before = [[length + sum(p[:i]) for i in range(len(p))]
                  for p, length in zip(progress, lengths, strict=True)]  # fmt: skip
        position = torch.tensor([x for row in before for x in row], dtype=torch.int32)
        request = torch.repeat_interleave(torch.arange(len(passes)), torch.tensor(passes))
        here = order.to(slot.device)
        if not torch.equal(slots[order], request) or not torch.equal(
            context[here].cpu(), position
        ):
            raise RuntimeError(
                f"traces: expected {passes} passes at positions that follow from the progress, "
                f"got {torch.bincount(slots, minlength=len(passes)).tolist()}"
            )
        device = slot.device
        self._rows.append({
            "feature": feature[here],
            "projected": projected[here],
            "recent": recent_of(progress).to(device),
            "position": position.to(device),
            "accepted": (count - 1).to(device),
            "prompt": torch.tensor(prompts, dtype=torch.int32)[request].to(device),
            "cut": torch.tensor([i == n - 1 for n in passes for i in range(n)]).to(device),
            "looped": torch.tensor(looped)[request].to(device),
        })  # fmt: skip
        return len(order)

    def traces(self, prompts: list[tuple[str, str]], **about: Any) -> Traces:
        """Everything recorded, as one."""
        assert self.projection is not None
        assert self.hidden_mean is not None
        rows = {name: torch.cat([part[name] for part in self._rows]) for name in ROW_FIELDS}
        return Traces(
            **rows,
            projection=self.projection,
            hidden_mean=self.hidden_mean,
            prompts=prompts,
            **about,
        )


def task_of(source: str, name: str) -> tuple[str, str]:
    """What a prompt asks: one task in two wordings shares the last part of its id, and its source
    up to `_stub`."""
    return source.removesuffix("_stub"), name.rsplit("/", 1)[-1]


def recent_of(progress: Sequence[Sequence[int]]) -> Tensor:
    """Accepted counts of the three passes before each pass, newest first, int32 [P, 3]."""
    out = []
    for counts in progress:
        padded = [-1] * RECENT + [count - 1 for count in counts]
        out += [padded[i : i + RECENT][::-1] for i in range(len(counts))]
    return torch.tensor(out, dtype=torch.int32).view(-1, RECENT)


def save_traces(traces: Traces, folder: Path) -> list[Path]:
    """Write `traces-0.npz` (what is not per pass) and the passes to `traces-1.npz` on, floats as
    float16, each file at most 15 MB; removes the files of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"prompts": traces.prompts, "drafter": traces.drafter}
    about |= {"block_size": traces.block_size, "temperature": traces.temperature}
    about |= {"max_new": traces.max_new}
    about["max_new"] = traces.max_new
    rows = {name: getattr(traces, name).cpu().numpy() for name in ROW_FIELDS}
    for name in ("feature", "projected"):
        limit = np.finfo(np.float16).max
        rows[name] = np.clip(rows[name], -limit, limit).astype(np.float16)
    row_bytes = sum(array[:1].nbytes for array in rows.values())
    parts = max(1, -(-len(traces) * row_bytes // (MAX_FILE_BYTES - 100_000)))
    files = [folder / f"traces-{i}.npz" for i in range(parts + 1)]
    np.savez_compressed(
        files[0],
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
        projection=traces.projection.cpu().numpy(),
        hidden_mean=traces.hidden_mean.cpu().numpy(),
    )
    for path, index in zip(files[1:], np.array_split(np.arange(len(traces)), parts), strict=True):
        np.savez_compressed(path, **{name: array[index] for name, array in rows.items()})
    for stale in set(folder.glob("traces-*.npz")) - set(files):
        stale.unlink()
    return files


def load_traces(folder: Path) -> Traces:
    """Read what `save_traces` wrote, on the CPU. Raises ValueError when there is none."""
    if not (folder / "traces-0.npz").is_file():
        raise ValueError(f"traces: expected traces-0.npz in {folder}, found none")
    with np.load(folder / "traces-0.npz") as head:
        about = json.loads(head["about"].tobytes())
        shared = {name: torch.from_numpy(head[name]) for name in ("projection", "hidden_mean")}
    about["prompts"] = [(source, name) for source, name in about["prompts"]]
    files = sorted(folder.glob("traces-*.npz"), key=lambda p: int(p.stem.split("-")[1]))[1:]
    parts: dict[str, list[Tensor]] = {name: [] for name in ROW_FIELDS}
    for path in files:
        with np.load(path) as part:
            for name in ROW_FIELDS:
                array = torch.from_numpy(part[name])
                parts[name].append(array.float() if array.is_floating_point() else array)
    rows = {name: torch.cat(part) for name, part in parts.items()}
    return Traces(**rows, **shared, **about)
