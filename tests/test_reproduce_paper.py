"""The paper's published numbers agree with each other, which mistyped ones would not."""

import pytest

from bench.aggregate import geometric_mean
from bench.paper import CAPABILITIES, MODELS, PAPER, SETS, SGLANG, SYSTEMS


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("model", MODELS)
def test_gains_of_data_sets_come_to_the_gain_over_all(model: str, system: str) -> None:
    by_set = PAPER[f"gain_of_{system}"].value[model]
    assert tuple(by_set) == SETS
    mean = geometric_mean(1 + gain for gain in by_set.values()) - 1
    assert mean == pytest.approx(PAPER[f"gain_{system}"].value[model], abs=6e-4)


@pytest.mark.parametrize("model", MODELS)
def test_ablation_steps_multiply(model: str) -> None:
    tiles, budget, graph = (
        1 + PAPER[f"ablation_{step}"].value[model] for step in ("tiles", "budget", "graph")
    )
    assert tiles * budget - 1 == pytest.approx(
        PAPER["ablation_budget_all"].value[model], abs=1.1e-3
    )
    assert tiles * budget * graph - 1 == pytest.approx(
        PAPER["ablation_graph_all"].value[model], abs=1.1e-3
    )


def test_shares_fill_a_step_and_say_where_they_are_from() -> None:
    assert sum(PAPER["gpu_time"].value.values()) == pytest.approx(1, abs=2e-3)
    assert PAPER["masked_rows"].value == 1 - 16 / 128
    assert all(published.where for published in PAPER.values())
    assert len({len(row) for row in CAPABILITIES}) == 1


@pytest.mark.parametrize("model", SGLANG)
def test_sglang_s_rates_and_steps_are_one_measurement(model: str) -> None:
    """Tokens a step and request come to 6.0 at every concurrency."""
    steps, rates = SGLANG[model]["step_ms"], SGLANG[model]["decode_tokens_per_s"]
    for c, step in steps.items():
        assert rates[c] * step / 1e3 / c == pytest.approx(6.0, abs=0.1)
