"""What the commands read and write: prompts as token ids, results as lines of JSON."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from dscale.handle import Result
from dscale.text import check_text


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Token ids of a prompt, as a user turn where the tokenizer has a chat template."""
    if raw or tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return list(ids)


def rows_of(tokenizer: Any, text: str, raw: bool, rows: int) -> Tensor:
    """A prompt's token ids, repeated, int64 [rows, length]. Raises ValueError without any."""
    check_text(text)
    ids = encode(tokenizer, text, raw)
    if not ids:
        raise ValueError(f"prompt: expected at least one token, got none of {text!r}")
    return torch.tensor([ids] * rows)


def check_target(source: Path, target: Path) -> None:
    """Raise ValueError for results that have nowhere to go, or would replace the prompts."""
    if str(target) == "-":
        return
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"target: expected a file in a folder that exists, got {str(target)!r}")
    if str(source) != "-" and target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"target: expected another file than the prompts', got {str(target)!r}")


def opened(target: Path) -> AbstractContextManager[TextIO]:
    """Where results go."""
    return nullcontext(sys.stdout) if str(target) == "-" else target.open("w", encoding="utf-8")


def record(name: str, result: Result, tokenizer: Any) -> dict[str, Any]:
    """One result as a JSON object."""
    seconds = None
    if result.finished_at is not None and result.queued_at is not None:
        seconds = round(result.finished_at - result.queued_at, 4)
    return {
        "id": name,
        "text": tokenizer.decode(result.generated_tokens, skip_special_tokens=True),
        "tokens": len(result.generated_tokens),
        "finish_reason": result.finish_reason,
        "error": result.error,
        "tokens_per_pass": round(result.tokens_per_pass, 3),
        "seconds": seconds,
    }
