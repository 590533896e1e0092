"""The model card of a predictor, written from the report of its training alone."""

import json
from typing import Any


def model_card(report: dict[str, Any]) -> str:
    """README.md of a predictor's folder."""
    options, train, traces = report["options"], report["train"], report["traces"]["all"]
    answers = "greedy" if traces["temperature"] == 0 else f"temperature {traces['temperature']}"
    left_out = "left out of" if options["loops"] == "drop" else "kept in"
    lines = [
        f"# Acceptance predictor for {report['model_name']} and its DFlash drafter",
        "",
        f"{report['parameters']:,} parameters, float32. It guesses, for each drafted token, how "
        "likely verification is to keep the draft up to there. Trained with "
        "`recipes/train_predictor.py`; it loads only with the drafter it was made for.",
        "",
        "## Fit, on prompts it was not trained on",
        "",
        *_fits(report),
        "## Accepted tokens retained",
        "",
        "Of what full-width verification accepts, single step, logged histories; 95 % intervals "
        "over prompts. Adjusted to the budget from the seed that retains most on held-out prompts "
        f"(`{report['best_seed']}`); raw: the windows of two seeds before adjustment. "
        "Cohorts of 16 requests; all others are in the result rows.",
        "",
        *_retentions(report),
        "## Calibration",
        "",
        *_calibrations(report),
        "## Data and training",
        "",
        f"{traces['passes']:,} full-width passes over {traces['prompts']:,} training prompts "
        f"({answers}, at most {traces['max_new']} new tokens; {traces['looping_share']:.0%} in "
        f"looping answers, {left_out} training), "
        f"{traces['tokens_per_pass']} tokens per pass. {options['held_out']:.0%} of the prompts "
        f"held out. The best of {len(train['trials'])} trials by held-out loss, "
        f"{json.dumps(train['options'])}: {train['epochs']} epochs, the best was number "
        f"{train['best_epoch']}; "
        f"{report['seconds']} seconds on {report['environment']['gpu']}.",
        "",
    ]
    return "\n".join(lines)


def _fits(report: dict[str, Any]) -> list[str]:
    out = [
        "| prompts | answers | passes | R^2 | Spearman | of the Top1-Top2 gap "
        "| R^2, running product | Spearman, running product | calibration error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, fits in report["fit"].items():
        for answers, fit in fits.items():
            out.append(
                f"| {name} | {answers} | {fit['passes']:,} | {fit['r2']:.3f} | "
                f"{fit['spearman']:.3f} | {fit['spearman_gap']:.3f} | "
                f"{fit['r2_running_product']:.3f} | {fit['spearman_running_product']:.3f} | "
                f"{fit['calibration_error']:.3f} |"
            )
    return [*out, ""]


def _retentions(report: dict[str, Any]) -> list[str]:
    out = [
        "| prompts | answers | rows per request | raw `paper` | raw `plus_anchor` | fixed width "
        "| running product | predictor | oracle | over running product |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    seed = report["best_seed"]
    rows = [row for row in report["rows"] if row.get("cohort") == 16]
    for key in dict.fromkeys((r["set"], r["answers"], r["budget_per_request"]) for r in rows):
        some = [r for r in rows if (r["set"], r["answers"], r["budget_per_request"]) == key]
        found = {r["policy"]: r for r in some if r["seed"] in (None, seed)}
        found["running_product"] = max(
            (r for r in some if r["policy"] == "running_product"), key=lambda r: r["retention"]
        )
        best = found["predictor"]
        raw = {r["seed"]: r["retention"] for r in some if r["policy"] == "raw"}
        cells = [f"{raw[name]:.4f}" for name in ("paper", "plus_anchor")]
        cells += [f"{found[p]['retention']:.4f}" for p in ("fixed", "running_product")]
        cells.append(f"{best['retention']:.4f} [{best['low']:.4f}, {best['high']:.4f}]")
        cells.append(f"{found['oracle']['retention']:.4f}")
        lead = [best[f"over_running_product{end}"] for end in ("", "_low", "_high")]
        cells.append(f"{lead[0]:+.4f} [{lead[1]:+.4f}, {lead[2]:+.4f}]")
        out.append(f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + " |")
    return [*out, ""]


def _calibrations(report: dict[str, Any]) -> list[str]:
    out: list[str] = []
    for name, fits in report["fit"].items():
        out += [f"{name}, all answers:", "", "| score | count | predicted | observed |"]
        out += ["| ---: | ---: | ---: | ---: |"]
        for row in fits["all"]["calibration"]:
            end = row["bin"] + 0.1
            out.append(
                f"| {row['bin']:.1f} to {end:.1f} | {row['count']:,} | {row['predicted']:.3f} | "
                f"{row['observed']:.3f} |"
            )
        out.append("")
    return out
