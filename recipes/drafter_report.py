"""What a training run leaves: the drafter's folder, its model card, and measured figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafter_data as data
import numpy as np
from drafter_generate import pad_left, responses_of, stop_ids
from drafter_model import DrafterShape, TrainableDrafter
from safetensors.torch import save_file
from tqdm import tqdm

import dscale


def config_of(shape: DrafterShape) -> dict[str, Any]:
    """The `config.json` of z-lab's checkpoints for this shape."""
    s = shape
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": s.block_size,
        "dflash_config": {
            "mask_token_id": s.mask_token_id,
            "target_layer_ids": list(s.taps),
        },
        "num_target_layers": s.num_target_layers,
        "num_hidden_layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": s.rms_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": s.max_positions,
        "layer_types": ["full_attention"] * s.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": s.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "vocab_size": s.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def save(model: TrainableDrafter, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16) in z-lab's format."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(model.shape), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(model.checkpoint(), folder / "model.safetensors", {"format": "pt"})


def measure(
    model: Any,
    tokenizer: Any,
    folder: Path,
    files: Sequence[Path],
    *,
    limit: int,
    rows: int,
    max_new: int,
) -> dict[str, Any]:
    """Decode measured prompts greedily with the runtime and the saved drafter, `rows` at a time.

    Returns, for each file and overall, tokens per pass with and without looping answers: committed
    tokens over target passes, both counted in decode only.
    """
    jobs = [
        (path.name.split(".")[0], prompt.tokens)
        for path in files
        for prompt in data.load_prompts(
            tokenizer, [path], split="eval", max_tokens=1 << 30, limit=limit
        )
    ]
    # Longest first: the engine sizes its caches by the first call.
    jobs.sort(key=lambda job: -len(job[1]))
    counts: dict[str, list[tuple[int, int, bool]]] = {
        path.name.split(".")[0]: [] for path in files
    }
    with dscale.attach(model, drafter=folder, mode="dflash") as spec:
        for start in tqdm(range(0, len(jobs), rows), desc="measure"):
            part = jobs[start : start + rows]
            pad = model.generation_config.pad_token_id or 0
            ids, mask = pad_left([tokens for _, tokens in part], pad, model.device)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, do_sample=False)
            answers = responses_of(out[:, ids.shape[1] :], stop_ids(model))
            for (name, _), answer, progress in zip(
                part, answers, spec.stats.last_progress, strict=True
            ):
                looped = data.loop_start(answer) is not None
                counts[name].append((sum(progress), len(progress), looped))
    groups = {**counts, "all": [row for rows_ in counts.values() for row in rows_]}
    return {name: _rates(rows_) for name, rows_ in groups.items()}


def _rates(rows: Sequence[tuple[int, int, bool]]) -> dict[str, Any]:
    def rate(some: list[tuple[int, int, bool]]) -> float:
        return round(sum(r[0] for r in some) / max(1, sum(r[1] for r in some)), 4)

    plain = [r for r in rows if not r[2]]
    return {
        "requests": len(rows),
        "looping": len(rows) - len(plain),
        "tokens_per_pass": rate(list(rows)),
        "tokens_per_pass_no_loops": rate(plain),
        "mean_of_requests_no_loops": round(
            float(np.mean([r[0] / r[1] for r in plain if r[1]] or [0.0])), 4
        ),
    }


def model_card(report: dict[str, Any], shape: DrafterShape) -> str:
    """The README of a drafter's folder, written from the report of its training alone."""
    train, corpus, options = report["train"], report["corpus"], report["options"]
    lines = [
        f"# DFlash drafter for {options['model_name']}",
        "",
        f"{shape.num_layers} layers, {report['parameters'] / 1e6:.1f}M parameters, bfloat16, "
        f"z-lab's checkpoint format. Block of {shape.block_size}, target layers "
        f"{', '.join(map(str, shape.taps))}, mask token {shape.mask_token_id}. Embedding and "
        "LM head are the target's. Trained with `recipes/train_drafter.py`.",
        "",
        "## Tokens per pass",
        "",
        "Committed tokens over target passes in decode, greedy, at most "
        f"{options['max_new']} new tokens. An answer loops when an 8-gram comes over 4 times.",
        "",
        *_table(report),
        "## Data",
        "",
        f"{corpus['train_responses']:,} responses ({corpus['train_tokens']:,} tokens) that "
        f"the target wrote itself to training prompts: {corpus['greedy']:,} greedy, the others "
        f"sampled at temperatures {options['temperatures']}; {corpus['cut_loops']:,} were cut "
        "where they began to loop. Prompts are disjoint from the measured sets; those the target "
        "wrote (`self_*`) share no 13 words in a row with them.",
        "",
        "| source | responses | tokens |",
        "| --- | ---: | ---: |",
        *(
            f"| {name} | {row['responses']:,} | {row['tokens']:,} |"
            for name, row in corpus["by_source"].items()
        ),
        "",
        "## Training",
        "",
        f"{train['steps']:,} steps of {options['sequences']} sequences x "
        f"{options['anchors']} anchors ({train['epochs']:.1f} epochs) "
        f"in {train['seconds']:.0f} s on {report['device']}; "
        f"{options['optimizer']}, peak learning rate {options['lr']}, cosine to "
        f"{options['final_lr']} of it; weights exp(-(k - 1) / {options['gamma']:g}); labels: "
        + ("the target's greedy choice" if options["greedy_labels"] else "the response's token")
        + f", {options['kl']:g} of the weight on its distribution.",
        "",
        "| step | loss | tokens per pass, held out | slot-1 accuracy, held out |",
        "| ---: | ---: | ---: | ---: |",
        *_curve(train["history"]),
        "",
    ]
    return "\n".join(lines)


def _table(report: dict[str, Any]) -> list[str]:
    out, real, held = [], report.get("measured", {}), report.get("replay", {})
    if real:
        out += ["| set | requests | looping | all answers | without loops |"]
        out += ["| --- | ---: | ---: | ---: | ---: |"]
        for name, row in real.items():
            out.append(
                f"| {name} | {row['requests']} | {row['looping']} | {row['tokens_per_pass']:.2f} "
                f"| {row['tokens_per_pass_no_loops']:.2f} |"
            )
        out.append("")
    if held:
        out += [
            "Replayed over the target's own greedy answers (loops excluded), teacher-forced:",
            "",
        ]
        out += ["| answers | tokens per pass | slot-1 accuracy |", "| --- | ---: | ---: |"]
        for name, row in held.items():
            out.append(f"| {name} | {row['tokens_per_pass']:.2f} | {row['slot_1_accuracy']:.3f} |")
        out.append("")
    return out


def _curve(history: Sequence[dict[str, Any]]) -> list[str]:
    rows = [r for r in history if "val" in r]
    picked = [rows[i] for i in sorted({round(x) for x in np.linspace(0, len(rows) - 1, 10)})]
    return [
        f"| {r['step']:,} | {r['loss']:.3f} | {r['val']['tokens_per_pass']:.3f} "
        f"| {r['val']['slot_1_accuracy']:.3f} |"
        for r in (picked if rows else [])
    ]


def write_report(report: dict[str, Any], folder: Path, shape: DrafterShape) -> None:
    """Write `report.json` beside the drafter's folder and the model card into it."""
    text = json.dumps(report, indent=1) + "\n"
    (folder.parent / "report.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(model_card(report, shape), encoding="utf-8")
