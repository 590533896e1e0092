"""The command line: `dscale generate | batch | bench | doctor`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, TextStreamer

import dscale
from dscale.cli_pair import DEMO, ON_CPU, packs, pair
from dscale.cli_text import check_target, encode, opened, record, rows_of
from dscale.doctor import checks
from dscale.load import load_model
from dscale.text import check_text, numbered_rows, read_lines, read_prompts

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
DTYPES = ("float32", "bfloat16", "float16")
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
    with errors_as_messages():
        for text in (prompts := prompt or read_lines(sys.stdin)):
            check_text(text)
    how = (model, drafter, mode, budget, dtype, predictor)
    with attached(*how, weights=weights) as (loaded, tokenizer, spec):
        for text in prompts:
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            before, began = (spec.stats.tokens, spec.stats.passes), time.perf_counter()
            with errors_as_messages():
                ids = rows_of(tokenizer, text, raw, 1).to(loaded.device)
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
        rows = read_prompts(source) if str(source) != "-" else numbered_rows(sys.stdin)
    how = (model, drafter, mode, budget, dtype, predictor)
    with attached(*how, max_concurrency=concurrency, weights=weights) as (_, tokenizer, spec):
        inputs = [encode(tokenizer, row["prompt"], raw) for row in rows]
        seeds = [seed + i for i in range(len(rows))] if temperature > 0 else None
        options = settings(max_new_tokens, temperature, None)
        began, tokens, failed = time.perf_counter(), 0, 0
        with (
            errors_as_messages(),
            opened(target) as lines,
            tqdm(total=len(rows), unit="request") as bar,
        ):
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
            with errors_as_messages():
                ids = rows_of(tokenizer, prompt, False, requests).to(loaded.device)
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
        if kind not in DTYPES:
            raise ValueError(f"dtype: expected one of {DTYPES}, got {kind!r}")
        loaded, tokenizer = load(model, getattr(torch, kind))
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
    except BrokenPipeError:  # nobody reads on, and nobody is told
        raise
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def load(model: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model, on the GPU where there is one, and its tokenizer."""
    if model == DEMO:
        return dscale.demo.load(dtype=dtype)
    return load_model(model, dtype=dtype), AutoTokenizer.from_pretrained(model)


def settings(max_new_tokens: int, temperature: float, seed: int | None) -> dict[str, Any]:
    """Arguments of generate: greedy at temperature 0, else the model's distribution at it."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"max_new_tokens": max_new_tokens, **how} | ({} if seed is None else {"seed": seed})
