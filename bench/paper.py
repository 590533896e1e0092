"""What the DScale paper publishes, as data, each with where it stands; and what was measured of
SGLang for comparison.

Only numbers that the paper's text gives: points that can be read off its figures alone are not
here. Shares and gains are fractions (0.439 is 43.9 %). Keys "8b" and "4b" are Qwen3-8B and
Qwen3-4B, the paper's targets."""

from __future__ import annotations

from typing import Any, NamedTuple

SETUP = "Qwen3-8B and Qwen3-4B with released drafters, real acceptance, one A100-40GB, SGLang"

CONCURRENCIES = (8, 12, 16, 20, 24, 28, 32)
SETS = ("gsm8k", "math500", "humaneval", "mbpp")
SET_NAMES = {"gsm8k": "GSM8K", "math500": "MATH500", "humaneval": "HumanEval", "mbpp": "MBPP"}
MODELS = {"8b": "Qwen3-8B", "4b": "Qwen3-4B"}
WIDTHS = (4, 6, 8, 10, 12, 14, 16)


class Published(NamedTuple):
    """`value`: a number, or a dict of numbers by model, system, concurrency, data set or width."""

    value: Any
    where: str


def _of_sets(*gains: float) -> dict[str, float]:
    return dict(zip(SETS, gains, strict=True))


PAPER = {
    "progress_mean": Published(6.09, "II-B, Fig. 2: data sets mixed"),
    "width_progress": Published(
        {4: 3.37, 8: 4.96, 14: 5.83, 16: 5.92}, "II-B, Fig. 3: GSM8K, concurrency 8"
    ),
    "width_throughput_loss": Published({8: 0.15}, "II-B, Fig. 3: GSM8K, concurrency 8"),
    "gap_spearman": Published({"8b": 0.741, "4b": 0.722}, "II-B, Fig. 4"),
    "gpu_time": Published(
        {"draft": 0.109, "verify": 0.833, "outside": 0.057},
        "II: Qwen3-8B, GSM8K, concurrency 16, summed kernel time",
    ),
    "masked_rows": Published(0.875, "II-A: 112 of 128 tile rows"),
    "gain_dflash": Published({"8b": 0.439, "4b": 0.488}, "IV-B, Fig. 7"),
    "gain_dspark": Published({"8b": 0.222, "4b": 0.377}, "IV-B, Fig. 7"),
    "gain_domino": Published({"8b": 0.244, "4b": 0.320}, "IV-B, Fig. 7"),
    "gain_at_dflash": Published(
        {"8b": {8: 0.232, 16: 0.428, 32: 0.596}, "4b": {8: 0.240, 16: 0.497, 32: 0.623}},
        "IV-B, concurrency scaling",
    ),
    "gain_at_dspark": Published(
        {"8b": {8: 0.204, 16: 0.258, 32: 0.234}, "4b": {8: 0.279, 16: 0.398, 32: 0.438}},
        "IV-B, concurrency scaling",
    ),
    "gain_at_domino": Published(
        {"8b": {8: 0.067, 32: 0.391}, "4b": {8: 0.105, 32: 0.434}}, "IV-B, concurrency scaling"
    ),
    "gain_of_dflash": Published(
        {"8b": _of_sets(0.400, 0.441, 0.465, 0.453), "4b": _of_sets(0.449, 0.514, 0.507, 0.485)},
        "IV-B, data set differences",
    ),
    "gain_of_dspark": Published(
        {"8b": _of_sets(0.077, 0.408, 0.280, 0.148), "4b": _of_sets(0.174, 0.601, 0.467, 0.303)},
        "IV-B, data set differences",
    ),
    "gain_of_domino": Published(
        {"8b": _of_sets(0.016, 0.339, 0.347, 0.306), "4b": _of_sets(0.063, 0.441, 0.451, 0.366)},
        "IV-B, data set differences",
    ),
    "gain_sampled": Published({"8b": 0.452, "4b": 0.458}, "IV-B: temperature 1"),
    "gain_two_gpus": Published((0.439, 0.558), "IV-B: two GPUs, temperatures 0 and 1"),
    "latency_dflash": Published(
        {
            "8b": {"mean": 0.314, "p95": 0.307, "p99": 0.293},
            "4b": {"mean": 0.331, "p95": 0.329, "p99": 0.319},
        },
        "IV-C, Fig. 8",
    ),
    "latency_dspark": Published(
        {
            "8b": {"mean": 0.184, "p95": 0.168, "p99": 0.131},
            "4b": {"mean": 0.271, "p95": 0.264, "p99": 0.268},
        },
        "IV-C, Fig. 8",
    ),
    "latency_domino": Published(
        {
            "8b": {"mean": 0.202, "p95": 0.223, "p99": 0.214},
            "4b": {"mean": 0.247, "p95": 0.285, "p99": 0.270},
        },
        "IV-C, Fig. 8",
    ),
    "p99_of_sets": Published((0.261, 0.346), "IV-C: range over data sets and models"),
    "ablation_tiles": Published({"8b": 0.147, "4b": 0.208}, "IV-D, Fig. 9: over the control"),
    "ablation_budget": Published({"8b": 0.118, "4b": 0.039}, "IV-D, Fig. 9: over + tiles"),
    "ablation_graph": Published({"8b": 0.098, "4b": 0.152}, "IV-D, Fig. 9: over + budget"),
    "ablation_budget_all": Published({"8b": 0.282, "4b": 0.255}, "IV-D, Fig. 9: over the control"),
    "ablation_graph_all": Published({"8b": 0.408, "4b": 0.446}, "IV-D, Fig. 9: over the control"),
    "predictor_r2": Published({"8b": 0.70, "4b": 0.68}, "IV-D: held-out prompts"),
    "retention_raw": Published({"8b": 0.716, "4b": 0.705}, "IV-D, Fig. 10"),
    "retention_adjusted": Published({"8b": 0.913, "4b": 0.916}, "IV-D, Fig. 10: 8N rows"),
    "raw_window": Published({"8b": 5.11, "4b": 5.08}, "IV-D: rows a request"),
    "interval_reduction": Published((0.308, 0.525), "IV-D, Fig. 11 (a, b): both targets, c 8-32"),
    "interval_two_gpus": Published({"8b": 0.507, "4b": 0.528}, "IV-D: two GPUs, concurrency 32"),
    "allocator_share": Published({"8b": 0.0308, "4b": 0.0408}, "IV-D, Fig. 11 (c): concurrency 8"),
    "graph_pool_mib": Published({"8b": 832, "4b": 724}, "IV-E, Fig. 11 (d): 32 requests"),
    "graph_pool_below": Published(
        {
            "8b": {"dflash": 0.202, "dspark": 0.271, "domino": 0.424},
            "4b": {"dflash": 0.113, "dspark": 0.261, "domino": 0.365},
        },
        "IV-E, Fig. 11 (d)",
    ),
}
"""Gains and reductions are DScale's (half the rows) over the system named in the key."""

SYSTEMS = {"dflash": "DFlash", "dspark": "DSpark", "domino": "Domino"}

CAPABILITIES = (
    ("attention tile as high as the verify width", "no: 128 rows", "no: 128 rows", "-", "yes",
     "yes: `+tiles` and later modes"),
    ("lengths that differ between requests", "no", "yes", "-", "yes", "yes: `+budget`, `dscale`"),
    ("rows of a verify graph for N requests", "16 N", "smallest bucket that holds them", "-",
     "8 N", "8 N with `half`; 2 to 16 N with `auto`"),
    ("works with the DFlash drafter as released", "yes", "no: a drafter of its own",
     "no: a drafter of its own", "yes", "yes"),
    ("needs no offline calibration of confidences", "-", "no: temperature scaling", "-", "yes",
     "yes"),
    ("needs no profile of the hardware's speed", "-", "no: steps per second at start-up", "-",
     "yes", "`half`: yes; `auto`: times its buckets when it captures them"),
    ("lengths from this step's scores alone", "-", "no: total from two steps before", "-", "yes",
     "`half`: yes; `auto`: total from one step before"),
    ("no host read between decide and verify", "-", "-", "-", "yes", "yes: `dscale`"),
)  # fmt: skip
"""Table I: capability, DFlash, DSpark, Domino, DScale, and what this repository does. The table's
cells did not reach us: the paper's columns are what its text says (II-A to II-C, III, IV-A), "-"
where it says nothing."""

SGLANG = {
    "8b": {
        "step_ms": {1: 7.78, 8: 9.47, 16: 12.30, 32: 20.10},
        "decode_tokens_per_s": {1: 771, 8: 5070, 16: 7803, 32: 9552},
        "tokens_per_s": {1: 672, 8: 4500, 16: 6846, 32: 8335},
        "ar_step_ms": {8: 5.46, 16: 5.39, 32: 5.78},
    },
    "4b": {
        "step_ms": {1: 6.49, 8: 6.38, 16: 7.74, 32: 12.02},
        "decode_tokens_per_s": {1: 924, 8: 7523, 16: 12406, 32: 15975},
        "tokens_per_s": {},
        "ar_step_ms": {8: 3.66, 32: 4.16},
    },
}
"""SGLang 0.5.14 DFlash on an H200, by concurrency: FA3, full CUDA graphs, overlap scheduler, the
shapes of the targets and of five-layer drafters, dummy weights, simulated acceptance of 6.0 tokens
a request and step on average, prompt 128 (1,024 for 8b at concurrency 1), 256 new tokens."""
