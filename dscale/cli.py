"""The command line: `dscale generate | batch | bench | doctor`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, TextStreamer

import dscale
from dscale.cli_pair import DEMO, ON_CPU, packs, pair
from dscale.doctor import checks
from dscale.handle import Result
from dscale.load import load_model
from dscale.text import read_prompts

app = typer.Typer(
    help="Speculative decoding for Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help="'demo' (SmolLM2-135M-Instruct), a folder or a Hub id")]
DrafterOption = Annotated[
    str | None,
    typer.Option(help="a folder or Hub id; the demo model has its own, 'none' for none"),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        help="ar, dflash, +tiles, +budget or dscale; without mode and budget dscale, on a CPU "
        f"dflash with a budget of {ON_CPU['budget']}"
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option(help="rows per request and pass, 1 to 16, 'half' or 'auto'")
]
PredictorOption = Annotated[
    str | None,
    typer.Option(help="a folder; the demo model's drafter has its own, 'none' for none"),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        help="fp8-draft: 8-bit floats for drafts; fp8: for the model's layers, too, which changes "
        "its answers"
    ),
]
DtypeOption = Annotated[str | None, typer.Option(help="default: bfloat16 on a GPU, else float32")]
NewTokens = Annotated[int, typer.Option(min=1, help="tokens to generate at most")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy")]
Seed = Annotated[int, typer.Option(help="of the sampling noise")]
Raw = Annotated[bool, typer.Option("--raw", help="no chat template around the prompts")]


@app.command()
def generate(
    prompt: Annotated[list[str] | None, typer.Argument(help="default: lines of stdin")] = None,
    model: Model = DEMO,
    drafter: DrafterOption = None,
    mode: ModeOption = None,
    budget: BudgetOption = None,
    predictor: PredictorOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = "model",
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    raw: Raw = False,
) -> None:
    """Answer prompts, live."""
    prompts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise typer.BadParameter("expected a prompt, as an argument or on stdin")
    how = (model, drafter, mode, budget, dtype, predictor)
    with attached(*how, weights=weights) as (loaded, tokenizer, spec):
        for text in prompts:
            ids = torch.tensor([encode(tokenizer, text, raw)], device=loaded.device)
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            before, began = (spec.stats.tokens, spec.stats.passes), time.perf_counter()
            with errors_as_messages():
                out = loaded.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=streamer,
                    **settings(max_new_tokens, temperature, seed),
                )
            seconds, new = time.perf_counter() - began, out.shape[1] - ids.shape[1]
            tokens, passes = spec.stats.tokens - before[0], spec.stats.passes - before[1]
            rate = f"{tokens / max(passes, 1):.2f} tokens per pass"
            typer.echo(f"[{new} tokens, {new / seconds:.1f} tokens/s, {rate}]", err=True)


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(help=".jsonl(.gz): id, prompt; '-' is stdin")],
    target: Annotated[Path, typer.Argument(help="results as .jsonl; '-' is stdout")],
    model: Model = DEMO,
    drafter: DrafterOption = None,
    mode: ModeOption = None,
    budget: BudgetOption = None,
    predictor: PredictorOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = "model",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 32,
    raw: Raw = False,
) -> None:
    """Answer a file of prompts, many at a time; one JSON line each, in the order they finish.
    Exits with 1 if requests failed: their lines have an error."""
    with errors_as_messages():
        check_target(source, target)
        rows = read_prompts(source) if str(source) != "-" else stdin_rows()
    how = (model, drafter, mode, budget, dtype, predictor)
    with attached(*how, max_concurrency=concurrency, weights=weights) as (_, tokenizer, spec):
        inputs = [encode(tokenizer, row["prompt"], raw) for row in rows]
        seeds = [seed + i for i in range(len(rows))] if temperature > 0 else None
        options = settings(max_new_tokens, temperature, None)
        to_file = str(target) != "-"
        out = target.open("w", encoding="utf-8") if to_file else nullcontext(sys.stdout)
        bar = tqdm(total=len(rows), unit="request", desc="dscale")
        began, tokens, failed = time.perf_counter(), 0, 0
        with out as lines, bar:
            for result in spec.engine.stream(inputs, seeds=seeds, **options):
                row = rows[int(result.request_id.removeprefix("req_"))]
                lines.write(json.dumps(record(row["id"], result, tokenizer)) + "\n")
                tokens += len(result.generated_tokens)
                failed += result.error is not None
                rate = tokens / (time.perf_counter() - began)
                per_pass = f"{spec.stats.tokens_per_pass:.2f}"
                bar.set_postfix_str(f"{rate:.0f} tokens/s, {per_pass} tokens per pass")
                bar.update()
    if failed:
        typer.echo(f"{failed} of {len(rows)} requests failed", err=True)
        raise typer.Exit(1)


@app.command()
def bench(
    model: Model = DEMO,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = "model",
    prompt: Annotated[str, typer.Option(help="the prompt of every request")] = (
        "Write a Python function that returns the n-th Fibonacci number."
    ),
    requests: Annotated[int, typer.Option(min=1, help="requests at once")] = 1,
    max_new_tokens: NewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="timed calls of each, the best counts")] = 2,
) -> None:
    """Time plain generate(), mode ar and the default mode on one prompt, in this process."""
    rows: list[tuple[str, float, float]] = []
    for name in ("generate()", "ar", "default"):
        used = drafter if name == "default" else "none"
        how = (model, used, None, None, dtype)
        kept = "model" if name != "default" and weights == "fp8-draft" else weights
        with attached(*how, weights=kept) as (loaded, tokenizer, spec):
            name = spec.engine.config.mode if name == "default" else name
            if name == "generate()":
                spec.detach()
            ids = torch.tensor([encode(tokenizer, prompt, False)] * requests).to(loaded.device)
            options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            options["max_new_tokens"] = max_new_tokens
            loaded.generate(ids, **options)
            spec.stats.reset()
            best = 0.0
            for _ in range(repeats):
                began = time.perf_counter()
                out = loaded.generate(ids, **options).cpu()
                new = (out.shape[1] - ids.shape[1]) * requests
                best = max(best, new / (time.perf_counter() - began))
            rows.append((name, best, spec.stats.tokens_per_pass or 1.0))
    for name, rate, per_pass in rows:
        ratio = rate / rows[0][1]
        typer.echo(
            f"{name:12} {rate:9.1f} tokens/s {ratio:6.2f} x {per_pass:6.2f} tokens per pass"
        )


@app.command()
def doctor() -> None:
    """Say what is installed, which kernels run, and whether a tiny model's tokens are right."""
    failed = 0
    for check in checks():
        mark = {True: "ok  ", False: "FAIL", None: "    "}[check.ok]
        typer.echo(f"{mark} {check.name:16} {check.detail}")
        failed += check.ok is False
    if failed:
        typer.echo(f"{failed} checks failed", err=True)
        raise typer.Exit(1)


@contextmanager
def attached(
    model: str,
    drafter: str | None,
    mode: str | None,
    budget: str | None,
    dtype: str | None,
    predictor: str | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Any, dscale.Attachment]]:
    """The loaded model, its tokenizer and the attachment."""
    kind = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    with errors_as_messages():
        found = getattr(torch, kind, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point type of torch, got {kind!r}")
        loaded, tokenizer = load(model, found)
        rows: Any = int(budget) if budget is not None and budget.isdecimal() else budget
        options |= pair(model, drafter, predictor, mode, rows)
        plain = options.get("weights", "model") == "model"
        options["pack_weights"] = plain and packs(model, loaded)
        spec = dscale.attach(loaded, **options)
    with spec:
        yield loaded, tokenizer, spec


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """End the command with the message of an error, without its traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def load(model: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model, on the GPU where there is one, and its tokenizer."""
    if model == DEMO:
        return dscale.demo.load(dtype=dtype)
    return load_model(model, dtype=dtype), AutoTokenizer.from_pretrained(model)


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Token ids of a prompt, as a user turn where the tokenizer has a chat template."""
    if raw or tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return list(ids)


def settings(max_new_tokens: int, temperature: float, seed: int | None) -> dict[str, Any]:
    """Arguments of generate: greedy at temperature 0, else the model's distribution at it."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"max_new_tokens": max_new_tokens, **how} | ({} if seed is None else {"seed": seed})


def check_target(source: Path, target: Path) -> None:
    """Raise ValueError for results that have nowhere to go, or would replace the prompts."""
    if str(target) == "-":
        return
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"target: expected a file in a folder that exists, got {str(target)!r}")
    if str(source) != "-" and target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"target: expected another file than the prompts', got {str(target)!r}")


def stdin_rows() -> list[dict[str, Any]]:
    """A prompt a line, numbered."""
    lines = [line.strip() for line in sys.stdin if line.strip()]
    return [{"id": str(number), "prompt": line} for number, line in enumerate(lines)]


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
