"""The training loop of a drafter: steps, self-check, checkpoints that resume exactly, logging."""

import json
import math
import time
from pathlib import Path
from typing import Any

import drafter_batches as batches
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from drafter_batches import Batch
from drafter_features import FeatureCache, Ints
from drafter_loss import Chunk, chunk_loss, soft_cross_entropy
from drafter_model import TrainableDrafter
from drafter_replay import replay
from drafter_steps import (
    Progress,
    StageTimes,
    TrainOptions,
    build_optimizers,
    learning_rate,
    remove,
)
from torch import Tensor
from tqdm import tqdm


class Trainer:
    """One drafter, its data and its optimisers under an Accelerator."""

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: TrainableDrafter,
        embedding_VD: Tensor,
        head_VD: Tensor,
        train: FeatureCache,
        val: FeatureCache,
        options: TrainOptions,
    ) -> None:
        self.accelerator, self.options = accelerator, options
        self.embedding_VD, self.head_VD, self.train_cache, self.val_cache = (
            embedding_VD,
            head_VD,
            train,
            val,
        )
        self.own = drafter
        self.progress = Progress()
        self.batch_size = min(options.sequences, train.num_sequences)
        self.reach_T = batches.reach(train, greedy=options.greedy_labels)
        self.chunk: Chunk = chunk_loss
        self.times: dict[str, float] = {}
        optimizers = build_optimizers(drafter, options)
        self.model, *self.optimizers = accelerator.prepare(drafter, *optimizers)
        accelerator.register_for_checkpointing(self.progress)

    def batch(self, step: int) -> Batch:
        """The input of step `step` (from 0): a function of the step and the seed alone."""
        o, world = self.options, self.accelerator.num_processes
        per_epoch = max(1, self.train_cache.num_sequences // self.batch_size // world)
        order = self._epoch(step // per_epoch)
        part = order[(step % per_epoch * world + self.accelerator.process_index) % len(order)]
        rng = np.random.default_rng([o.seed, 5, step, self.accelerator.process_index])
        offset = batches.draw_anchors(self.train_cache, part, o.anchors, rng)
        return batches.plan(
            self.train_cache,
            part,
            offset,
            self.reach_T,
            gamma=o.gamma,
            kl=o.kl,
            greedy=o.greedy_labels,
            pad_length=o.pad_length,
            pad_rows=o.loss_rows,
        )

    def _epoch(self, epoch: int) -> list[Ints]:
        held = getattr(self, "_order", None)
        if held is None or held[0] != epoch:
            held = (
                epoch,
                batches.epoch_order(self.train_cache, self.batch_size, self.options.seed, epoch),
            )
            self._order = held
        return held[1]

    def hidden(self, batch: Batch) -> Tensor:
        """The drafter's final hidden states of a batch's loss rows `[R, D]`."""
        shape = self.own.shape
        size = (*batch.anchor_BA.shape, shape.block_size, shape.hidden_size)
        block = self.embedding_VD[shape.mask_token_id].expand(size).clone()
        block[:, :, 0] = self.embedding_VD[batch.anchor_token_BA]
        out: Tensor = self.model(batch.feature_BSF, block, batch.anchor_BA, batch.row_R)
        return out

    def loss(self, batch: Batch, hidden_RD: Tensor) -> Tensor:
        """Mean soft cross-entropy of a batch by weight."""
        total = soft_cross_entropy(
            hidden_RD,
            self.head_VD,
            batch.token_RK,
            batch.mass_RK,
            batch.weight_R,
            rows=self.options.loss_rows,
            function=self.chunk,
        )
        return total / max(batch.weight_sum, 1e-9)

    def compile(self) -> dict[str, Any]:
        """Compile the layers and the loss, and compare them with the eager code on two batches.

        Raises RuntimeError when gradients differ by more than 5 %: run with `--compile 0` then.
        """
        some = sorted((self.batch(s) for s in range(4)), key=lambda b: b.feature_BSF.shape[1])
        ends = [some[0], some[-1]]
        eager = [self._gradients(batch) for batch in ends]
        began = time.monotonic()
        for layer in self.own.layers:
            layer.compile(fullgraph=True)
        self.chunk = torch.compile(chunk_loss, fullgraph=True, dynamic=False)
        found = []
        for batch, (loss, slope) in zip(ends, eager, strict=True):
            new_loss, new_slope = self._gradients(batch)
            error = float((new_slope - slope).norm() / slope.norm())
            found.append(
                {
                    "context": batch.feature_BSF.shape[1],
                    "loss": round(loss, 5),
                    "compiled_loss": round(new_loss, 5),
                    "gradient_error": round(error, 5),
                }
            )
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        spent = round(time.monotonic() - began, 1)
        report = {"batches": found, "seconds": spent, "graphs": graphs}
        self.say(f"self-check of the compiled step: {json.dumps(report)}")
        worst = max(f["gradient_error"] for f in found)
        if not worst < 0.05:
            raise RuntimeError(f"compiled gradients differ by {worst:.3f}: use --compile 0")
        return report

    def _gradients(self, batch: Batch) -> tuple[float, Tensor]:
        loss = self.loss(batch, self.hidden(batch))
        self.accelerator.backward(loss)
        slope = torch.cat([p.grad.flatten() for p in self.own.parameters() if p.grad is not None])
        out = float(loss.detach()), slope.clone()
        self.own.zero_grad(set_to_none=True)
        return out

    def step(self, timer: StageTimes | None = None) -> tuple[Tensor, Tensor]:
        """One optimisation step; returns loss and gradient norm without waiting for them."""
        mark = timer.mark if timer is not None else lambda name: None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.options, self.progress.step, self.progress.total)
        mark("")
        batch = self.batch(self.progress.step)
        mark("gather")
        hidden = self.hidden(batch)
        mark("drafter forward")
        loss = self.loss(batch, hidden)
        mark("loss")
        self.accelerator.backward(loss)
        mark("drafter backward")
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        self.progress.step += 1
        return loss.detach(), norm.detach()

    def run(self, folder: Path) -> bool:
        """Train until the last step, or until `stop_seconds` of this call are over.

        Checkpoints into `folder / "state"`, appends to `folder / "log.jsonl"`. Returns whether
        the last step was reached. Raises RuntimeError when the loss is no longer finite.
        """
        o, p = self.options, self.progress
        p.total = p.total or o.steps
        began, before, saved = time.monotonic(), p.seconds, time.monotonic()
        window: list[tuple[Tensor, Tensor]] = []
        bar = tqdm(
            total=p.total or None,
            initial=p.step,
            desc="train",
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
        while not p.total or p.step < p.total:
            timed = p.step % 1000 >= 480 and p.step % 1000 < 500
            timer = self._timer() if timed else None
            window.append(self.step(timer))
            bar.update()
            if timed and p.step % 1000 == 500 and timer is not None:
                self.times = timer.read()
                self.say(f"milliseconds of a step: {json.dumps(self.times)}")
            if p.step % o.log_every and p.step != p.total:
                continue
            p.seconds = before + time.monotonic() - began
            self._fix_total(bar)
            self._log(folder, window, bar)
            window.clear()
            now = torch.tensor(time.monotonic() - began, device=self.accelerator.device)
            over = bool(self.accelerator.reduce(now, "mean") > o.stop_seconds)
            if over or time.monotonic() - saved > o.checkpoint_seconds:
                self.checkpoint(folder)
                saved = time.monotonic()
            if over:
                break
        p.seconds = before + time.monotonic() - began
        self.checkpoint(folder)
        bar.close()
        return bool(p.total) and p.step >= p.total

    def _timer(self) -> StageTimes:
        if not hasattr(self, "_stage_times"):
            self._stage_times = StageTimes(self.accelerator.device)
        return self._stage_times

    def _fix_total(self, bar: Any) -> None:
        """Set the number of steps once the pace is known: from four logs, the first left out."""
        o, p = self.options, self.progress
        if p.total or p.step < 4 * o.log_every:
            return
        pace = (p.seconds - p.history[0]["seconds"]) / (p.step - p.history[0]["step"])
        left = [p.step + max(1, int((o.train_seconds - p.seconds) / max(pace, 1e-9)))]
        broadcast_object_list(left)
        p.total = left[0]
        bar.reset(p.total)
        bar.update(p.step)
        self.say(f"{pace * 1e3:.1f} ms a step: {p.total} steps in {o.train_seconds:.0f} s")

    def _log(self, folder: Path, window: list[tuple[Tensor, Tensor]], bar: Any) -> None:
        o, p = self.options, self.progress
        loss = float(torch.stack([pair[0] for pair in window]).mean())
        norm = float(torch.stack([pair[1] for pair in window]).mean())
        row: dict[str, Any] = {
            "step": p.step,
            "seconds": round(p.seconds, 2),
            "loss": round(loss, 4),
            "gradient_norm": round(norm, 3),
            "lr": learning_rate(o, p.step - 1, p.total),
        }
        if not math.isfinite(loss):
            raise RuntimeError(
                f"loss: expected a finite value, got {loss} near step {p.step}; "
                "resume from the checkpoint with a smaller --lr"
            )
        if p.step % o.validate_every == 0 or p.step == p.total:
            row |= {"val": self.replay(self.val_cache)["all"]}
            row |= {"step_times_ms": self.times}
        p.history.append(row)
        bar.set_postfix(loss=row["loss"], val=row.get("val", {}).get("tokens_per_pass", "-"))
        if self.accelerator.is_main_process:
            with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if "val" in row:
                self.say(json.dumps(row))

    def replay(self, cache: FeatureCache, groups: list[str] | None = None) -> dict[str, Any]:
        """Tokens per pass over a cache's responses; see `drafter_replay.replay`."""
        o = self.options
        settings = {"sequences": o.sequences, "anchors": o.anchors, "pad_length": o.pad_length}
        return replay(
            self.hidden, self.head_VD, cache, groups=groups, pad_rows=o.loss_rows, **settings
        )

    def checkpoint(self, folder: Path) -> None:
        """Save everything `resume` needs, replacing the older checkpoint only when it is whole."""
        fresh, place = folder / "state.new", folder / "state"
        self.accelerator.save_state(str(fresh))
        if self.accelerator.is_main_process:
            remove(place)
            fresh.rename(place)
        self.accelerator.wait_for_everyone()

    def resume(self, folder: Path) -> bool:
        """Load the checkpoint in `folder`, if there is one; the run is as if never stopped."""
        if not (folder / "state").is_dir():
            return False
        self.accelerator.load_state(str(folder / "state"))
        self.say(f"resumed at step {self.progress.step} of {self.progress.total or 'unknown'}")
        return True

    def say(self, text: str) -> None:
        """Print on the main process, past the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)
