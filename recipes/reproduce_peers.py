"""What else one could run: SGLang's DFlash at the paper's shapes, and, on the SmolLM2 pair, what
transformers offers.

    python -m bench.decode_step --models 8b 4b --parts gains --requests 1 8 16 32
    python -m bench.closed_loop_simulated --models 8b 4b
    python -m bench.peers
    python recipes/reproduce_peers.py
"""

from pathlib import Path
from typing import Any

import reproduced
from reproduced import KINDS, TIME_STEPS, Experiment, Row, Rows, Section, kind_of, number, where
from reproduced_loops import read_loops
from reproduced_plots import PAPER as BLACK
from reproduced_plots import figure, legend, series

from bench.aggregate import geometric_mean, medians
from bench.paper import SGLANG

CONCURRENCIES = (1, 8, 16, 32)
PROMPTS = {("8b", 1): 1000}
"""Where SGLang was measured behind a prompt of 1,024 tokens; 128 elsewhere."""

METHODS = (("dflash", None), ("dscale", "half"), ("dscale", "auto"))
LABELS = ("DFlash control", "DScale, half", "DScale, auto")
AIMS = {"8b": (1.5, 1.5, 1.7, 1.9), "4b": (2.0, 2.0, 1.9, 1.9)}
"""Decode rate of `auto` over SGLang's that this project aims at, by concurrency."""

COMMANDS = (
    TIME_STEPS,
    "python -m bench.closed_loop_simulated --models 8b 4b",
    "python -m bench.peers --prompts DATA",
    "python recipes/reproduce_peers.py",
)
ABOUT = ("gpu", "torch", "commit", "date", "dtype", "model")
GAIN_FIELDS = (*ABOUT, "mode", "budget", "requests", "prompt", "trace", "decode_tokens_per_s")
PEER_FIELDS = (*ABOUT, "method", "batch", "tokens_per_s")


def compute(folder: Path) -> Rows:
    """Rows of two kinds: "sglang" (rates and steps in the setting SGLang was measured in) and
    "user" (rates of every way to generate with the SmolLM2 pair)."""
    found: Rows = []
    rows = reproduced.newest(reproduced.read("mode_gains.json", GAIN_FIELDS, folder))
    for row in where(rows, trace="six", sampling="greedy"):
        if row["prompt"] != PROMPTS.get((kind_of(row["model"]), row["requests"]), 128):
            continue
        if kind_of(row["model"]) in SGLANG and (row["mode"], row["budget"]) in METHODS:
            values = {key: row[key] for key in ("decode_tokens_per_s", "step_ms")}
            found.append(kept(row, "sglang", row["requests"]) | values)
    served = where(read_loops(folder), acceptance="simulated", source="measured", temperature=0.0)
    for row in medians(reproduced.one_trace(where(served, set="prompt128-new256"))):
        if kind_of(row["model"]) in SGLANG and (row["mode"], row["budget"]) in METHODS:
            tokens = {"tokens_per_s": row["tokens_per_s"], "trace": row["trace"]}
            found.append(kept(row, "sglang", row["concurrency"]) | tokens)
    users = reproduced.read("peers.json", PEER_FIELDS, folder)
    users = users or reproduced.read("smollm2_generate.json", PEER_FIELDS, folder)
    for row in users:
        keys = ("tokens_per_s", "tokens_per_pass", "note", "error")
        found.append(kept(row, "user", row["batch"]) | {key: row.get(key) for key in keys})
        word = ", prompts compiled" if row.get("compile_prefill") else ""
        found[-1]["method"] = row["method"] + word
    return reproduced.on_gpu(found)


def kept(row: Row, kind: str, requests: int) -> Row:
    """What tells a row of this recipe apart, and where it comes from."""
    about = {key: row[key] for key in ABOUT} | {"kind": kind, "requests": requests}
    acceptance = "real" if kind == "user" else "simulated"
    return about | {"acceptance": acceptance, "mode": row.get("mode"), "budget": row.get("budget")}


def value(rows: Rows, name: str, method: tuple[str, str | None], at: int, key: str) -> Any:
    """A figure of one model and mode at one concurrency, None where it was not measured."""
    mode, budget = method
    some = where(rows, kind="sglang", mode=mode, budget=budget, requests=at)
    found = (row[key] for row in some if kind_of(row["model"]) == name and key in row)
    return next(found, None)


def over_sglang(rows: Rows, name: str, method: tuple[str, str | None] = METHODS[2]) -> Rows:
    """Decode rates over SGLang's, one row for each concurrency measured."""
    peer = SGLANG[name]["decode_tokens_per_s"]
    found = [(c, value(rows, name, method, c, "decode_tokens_per_s")) for c in CONCURRENCIES]
    return [{"requests": c, "ratio": rate / peer[c]} for c, rate in found if rate]


def mean_over_sglang(rows: Rows, name: str, method: tuple[str, str | None]) -> float | None:
    """Geometric mean of these ratios at concurrencies 8 and more."""
    ratios = [r["ratio"] for r in over_sglang(rows, name, method) if r["requests"] >= 8]
    return geometric_mean(ratios) if ratios else None


def sglang_table(rows: Rows, name: str, key: str, title: str, digits: int) -> tuple[Any, Any]:
    """SGLang's figures beside ours."""
    show = number(digits)
    ratio = "step of control / SGLang" if key == "step_ms" else "`auto` / SGLang"
    head = [f"{title}, {KINDS[name]} (simulated)", "SGLang", "`dflash`", "`half`", "`auto`", ratio]
    body = []
    for c in CONCURRENCIES:
        peer = SGLANG[name][key].get(c)
        ours = [value(rows, name, method, c, key) for method in METHODS]
        compared = ours[0] if key == "step_ms" else ours[2]
        quotient = f"{compared / peer:.2f}" if compared and peer else "-"
        if key == "decode_tokens_per_s":
            quotient += f" (aim {AIMS[name][CONCURRENCIES.index(c)]})"
        cells = [show(x) if x else "not yet" for x in ours]
        body.append([f"concurrency {c}", show(peer) if peer else "-", *cells, quotient])
    return head, body


def trace_of(rows: Rows, name: str) -> str:
    """Which trace the closed loops of a model followed."""
    traces = {row["trace"] for row in rows if "trace" in row and kind_of(row["model"]) == name}
    return f", trace {' and '.join(sorted(traces))}" if traces else ""


def user_table(rows: Rows) -> tuple[Any, Any]:
    """Tokens per second of every method and batch on the SmolLM2 pair: geometric means over data
    sets, and of which commits they are."""
    some = where(rows, kind="user")
    batches = sorted({row["requests"] for row in some}) or [1, 8, 32]
    head = ["SmolLM2 pair, tokens/s", *(f"batch {batch}" for batch in batches), "tokens per pass",
            "commits"]  # fmt: skip
    body = []
    for method in dict.fromkeys(row["method"] for row in some):
        cells, passes = [], []
        for batch in batches:
            here = where(some, method=method, requests=batch)
            rates = [row["tokens_per_s"] for row in here if row["tokens_per_s"]]
            failed = "failed" if any(row.get("error") for row in here) else "-"
            cells.append(f"{geometric_mean(rates):,.0f}" if rates else failed)
            passes += [row["tokens_per_pass"] for row in here if row.get("tokens_per_pass")]
        each = f"{min(passes):.2f} to {max(passes):.2f}" if passes else "-"
        commits = ", ".join(dict.fromkeys(row["commit"] for row in where(some, method=method)))
        body.append([f"`{method}`", *cells, each, commits])
    return head, body or [[reproduced.NOT_MEASURED, *["-"] * (len(batches) + 2)]]


def section(rows: Rows) -> Section:
    """Peers on the page."""
    notes = dict.fromkeys(row["note"] for row in where(rows, kind="user") if row.get("note"))
    pair = where(rows, kind="user")
    shapes = where(rows, kind="sglang")
    tables = []
    for name in SGLANG:
        tables.append(sglang_table(rows, name, "decode_tokens_per_s", "decode tokens/s", 0))
        tables.append(sglang_table(rows, name, "step_ms", "decode step, ms", 2))
        title = "closed loop tokens/s, prefill included" + trace_of(rows, name)
        tables.append(sglang_table(rows, name, "tokens_per_s", title, 0))
    return Section(
        "Against other engines",
        "",
        commands=COMMANDS,
        plots=("peers.png",) if shapes else (),
        caption="SGLang 0.5.14 DFlash (FA3, full CUDA graphs, overlap scheduler) was measured on "
        "an H200 with dummy weights and a simulated acceptance of 6.0 tokens a request and step "
        "on average, prompt 128, 256 new tokens (8B at concurrency 1: prompt 1,024, ours 1,000). "
        "Our decode rates and steps follow the trace with the same mean; the trace of a closed "
        "loop stands beside it (`paper`: 6.0 tokens a step in the control's loops, too).",
        ours=[
            f"{what}: {reproduced.conditions(some)}" + "".join(f"; {note}" for note in notes)
            for what, some, notes in (
                ("Qwen3 shapes, simulated acceptance", shapes, ()),
                ("SmolLM2 pair", pair, notes),
            )
            if some
        ],
        tables=(*tables, user_table(rows)),
    )


def draw(rows: Rows) -> None:
    """Decode rates beside SGLang's, where there are any."""
    shapes = where(rows, kind="sglang")
    names = [name for name in SGLANG if any(kind_of(row["model"]) == name for row in shapes)]
    if not names:
        return
    caption = "Simulated acceptance, 6.0 tokens a request and step at full width, prompt 128, "
    caption += "256 new tokens (8B at 1: prompt 1,024, ours 1,000). SGLang 0.5.14: H200. Ours: "
    caption += f"{reproduced.conditions(shapes)}."
    with figure("peers.png", caption, columns=len(names)) as axes:
        for ax, name in zip(axes[0], names, strict=True):
            for index, (method, label) in enumerate(zip(METHODS, LABELS, strict=True)):
                rates = [value(rows, name, method, c, "decode_tokens_per_s")
                         for c in CONCURRENCIES]  # fmt: skip
                points = [(c, r) for c, r in zip(CONCURRENCIES, rates, strict=True) if r]
                if points:
                    ax.plot(*zip(*points, strict=True), label=label, **series((1, 2, 0)[index]))
            peer = SGLANG[name]["decode_tokens_per_s"]
            ax.plot(list(peer), list(peer.values()), **BLACK, label="SGLang, DFlash")
            ax.set(title=f"{KINDS[name]} (simulated)", xlabel="concurrency", ylim=(0, None))
            ax.set(ylabel="decode tokens/s", xticks=CONCURRENCIES)
        legend(axes[0, 0])


EXPERIMENT = Experiment("peers", (*ABOUT, "kind", "requests"), section, draw, compute)

if __name__ == "__main__":
    EXPERIMENT.command(__doc__)
