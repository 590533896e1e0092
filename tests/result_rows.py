"""Made-up rows of the benches' result files, with numbers that are easy to follow."""

import itertools
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ABOUT = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "transformers": "5.17",
         "commit": "abc", "date": "2026-11-30", "dtype": "bfloat16"}  # fmt: skip
SHAPES = {"8b": "Qwen3-8B shape", "4b": "Qwen3-4B shape"}
PAIR = "SmolLM2-135M-Instruct"
SETS = ("gsm8k", "math500", "humaneval", "mbpp")
FACTOR = {
    ("ar", None): 0.5,
    ("dflash", None): 1.0,
    ("+tiles", None): 1.1,
    ("+budget", "half"): 1.25,
    ("dscale", "half"): 1.5,
    ("dscale", "auto"): 2.0,
}
"""Rates over the control's."""


def loop_row(model: str, name: str, c: int, method: tuple[str, str | None], **more: Any) -> Row:
    """A closed loop: the control makes 100 tokens/s per worker, and latency is its inverse."""
    rate = 100.0 * c * FACTOR.get(method, 1.0)
    latency = {k: 1e5 * c / rate * f for k, f in (("mean", 1), ("p50", 1), ("p95", 2), ("p99", 3))}
    row = ABOUT | {
        "model": model, "acceptance": "real", "source": "measured", "trace": None, "set": name,
        "mode": method[0], "budget": method[1], "concurrency": c, "temperature": 0.0,
        "tile": "per head, 128 rows" if method[0] == "dflash" else "packed heads, 16 rows",
        "requests": 128, "output_cap": 512, "repetition": 0, "tokens_per_s": rate,
        "latency_ms": latency, "ttft_ms": latency, "tokens_per_step": 3.0, "live_per_step": c,
        "rows_per_step": 16.0 * c, "step_ms": 10.0 / FACTOR.get(method, 1.0),
    }  # fmt: skip
    return row | more


def loops() -> list[Row]:
    """The pair on four sets at both temperatures, three repetitions around the middle one; the
    shapes measured at three concurrencies and replayed at seven."""
    rows = [
        loop_row(PAIR, name, c, method, repetition=r, temperature=t,
                 tokens_per_s=100.0 * c * FACTOR[method] * (0.9 + 0.1 * r))
        for name, c, method, r, t in itertools.product(
            SETS, (8, 16, 32), FACTOR, range(3), (0.0, 1.0)
        )
    ]  # fmt: skip
    simulated: Row = {"acceptance": "simulated", "output_cap": 256}
    for model, trace, method in itertools.product(SHAPES.values(), ("paper", "six"), FACTOR):
        some = simulated | {"trace": trace}
        name = "prompt128-new256"
        rows += [loop_row(model, name, c, method, requests=4 * c, **some) for c in (1, 8, 16, 32)]
        some |= {"source": "replayed"}
        if method[0] != "+budget":
            rows += [
                loop_row(model, name, c, method, requests=4 * c, replay_error=-0.02, **some)
                for c in (8, 16, 32)
            ]
            rows += [
                loop_row(model, name, c, method, requests=512, **some)
                for c in (8, 12, 16, 20, 24, 28, 32)
            ]
    return rows


def widths() -> list[Row]:
    """Fixed widths of the pair: a row costs the same as a tenth of what it brings."""
    rows = [
        loop_row(PAIR, "gsm8k", 8, ("dflash", str(w)), requests=64, tokens_per_step=1 + w / 8,
                 tokens_per_s=400.0 + 25 * w)
        for w in (4, 8, 14)
    ]  # fmt: skip
    full = loop_row(PAIR, "gsm8k", 8, ("dflash", None), requests=64, tokens_per_step=3.0)
    return [*rows, full]


def gains() -> list[Row]:
    """Decode rates at the shapes, simulated."""
    rows = []
    for model, trace, prompt, (method, factor) in itertools.product(
        SHAPES.values(), ("paper", "six"), (128, 1000), FACTOR.items()
    ):
        mode, budget = method
        for c in (1, 8, 16, 32):
            tile = "per head, 128 rows" if mode == "dflash" else "packed heads, 16 rows"
            rows.append(ABOUT | {
                "model": model, "mode": mode, "budget": budget, "tile": tile,
                "sampling": "greedy", "requests": c, "prompt": prompt, "trace": trace,
                "acceptance": "simulated", "decode_tokens_per_s": 600.0 * c * factor,
                "step_ms": 10.0 / factor, "rows_per_step": (8.0 if budget else 16.0) * c,
            })  # fmt: skip
            if mode == "+tiles":
                rows.append(rows[-1] | {"tile": "per head, 16 rows",
                                        "decode_tokens_per_s": 600.0 * c * 1.05})  # fmt: skip
    return rows


def steps() -> list[Row]:
    """Stage times at the shapes."""
    return [
        ABOUT | {
            "model": model, "mode": mode, "budget": budget, "tile": "x, 16 rows",
            "sampling": "greedy", "requests": c, "rows": 16 * c, "context": context,
            "decide_ms": 1.0, "verify_ms": 8.0, "step_ms": 10.0, "allocator_share": 0.025,
            "acceptance": "simulated",
        }
        for model, (mode, budget), c, context in itertools.product(
            SHAPES.values(), FACTOR, (8, 16, 32), (128, 1000)
        )
    ]  # fmt: skip


def write(folder: Path) -> None:
    """All files of a repository where everything has been measured."""
    pools = [
        ABOUT | {"model": model, "mode": "dscale", "budget": "auto", "requests": 500,
                 "graph_pool_mib": 700.0, "acceptance": "simulated"}
        for model in SHAPES.values()
    ]  # fmt: skip
    sampled = steps()[0] | {"mode": "dscale", "budget": "half", "sampling": "temperature 1",
                            "over_greedy": 1.04}  # fmt: skip
    graphs = {
        graph: [
            ABOUT | {"model": SHAPES["8b"], "mode": "dscale", "tile": None, "requests": 8,
                     "rows": 64, "context": 1000, f"{graph}_ms": 5.0, "floor_ms": 4.0,
                     "over_floor": 1.25}
        ]
        for graph in ("decide", "verify")
    }  # fmt: skip
    peers = [
        ABOUT | {"model": PAIR, "method": method, "batch": b, "tokens_per_s": 100.0 * b}
        for method, b in itertools.product(("generate_eager", "dscale"), (1, 8))
    ]
    for name, rows in (
        ("closed_loop", loops() + widths()),
        ("mode_gains", gains()),
        ("decode_step", steps()),
        ("graph_counters", pools),
        ("sampling_cost", [sampled]),
        ("peers", peers),
        *((f"{graph}_graph", rows) for graph, rows in graphs.items()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(rows))
