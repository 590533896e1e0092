"""What the tests of captured stages share: a pair, its ids, a policy that tries every bucket."""

from pathlib import Path
from typing import Any

import pytest
from scripted import overrule, random_predictor
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model
from torch import Tensor

import dscale
from dscale.policy import MULTIPLES, AutoBudget, Choice, Floats
from dscale.request import Request

LENGTHS = [3, 130, 17, 1, 64]
POOL = 12 * 128
SAMPLED = {"do_sample": True, "top_k": 7, "top_p": 0.9, "seed": 5}
SETTINGS: list[dict[str, Any]] = [{}, SAMPLED]


def rows(count: int) -> dict[str, Tensor]:
    lengths = (LENGTHS * count)[:count]
    return left_padded([prompt(n) for n in lengths], pad=VOCAB - 1)


class EveryBucket(AutoBudget):
    """Budget "auto" that goes through every capacity in turn, none drafted among them."""

    turn = 0

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """The next one, none twice running."""
        super().choose(lanes, score_NC, context)
        EveryBucket.turn += 1
        multiple = (*MULTIPLES, 0)[5 * EveryBucket.turn % (len(MULTIPLES) + 1)]
        return Choice(max(1, multiple) * lanes, 16, draft=multiple > 0)


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


def like(count: int, new: int = 60, **settings: Any) -> list[Request]:
    """Requests that need what those of a call need, for warming up."""
    how: dict[str, Any] = {}
    if settings.get("do_sample"):
        how = {"temperature": 1.0, "top_k": settings["top_k"], "top_p": settings["top_p"]}
    return [Request(prompt=[0] * 130, max_new_tokens=new, **how) for _ in range(count)]
