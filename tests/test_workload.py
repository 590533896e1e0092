"""Workloads, the closed-loop client and result rows: what is sent, what is counted, and what a
broken file says."""

import json
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.aggregate import (
    LOOP_FIELDS,
    gains,
    geometric_mean,
    medians,
    read_rows,
    reduction,
)
from bench.client import Intervals, closed_loop, figures, spread
from bench.loop_cells import GRIDS, all_cases, grid, shard
from bench.workload import DATA, SETS, drawn, load_workload, read_manifest
from dscale.request import Request
from dscale.stats import Stats


@pytest.mark.parametrize("name", SETS)
def test_the_paper_s_sets_are_there(name: str) -> None:
    workload = load_workload(name)
    assert (len(workload.warmup), len(workload.measured)) == (32, 512)
    # Without the prompt files, 16 rows stand in for the set, in their order.
    assert len(set(workload.measured)) == 16
    assert workload.warmup == workload.measured[:32]
    assert workload.source == "identity.jsonl"
    manifest = read_manifest(DATA / f"manifest_{name}.json")
    assert len(set(manifest.measured)) == {"humaneval": 164}.get(name, 256)


def written(folder: Path, **changes: Any) -> Path:
    rows = [{"id": f"r{i}", "prompt": f"question {i}"} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest: Any = {"dataset": "own", "file": "rows.jsonl"}
    manifest |= {"warmup": ["r0"], "measured": ["r1", "r3", "r1"]} | changes
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


def test_a_manifest_of_one_s_own(tmp_path: Path) -> None:
    workload = load_workload(str(written(tmp_path)), tmp_path)
    assert workload.measured == ["question 1", "question 3", "question 1"]
    assert workload.name == "own"
    few = workload.first(2, 1)
    assert (few.warmup, few.measured) == (["question 0"], ["question 1", "question 3"])
    with pytest.raises(ValueError, match="requests: expected 1 to 3 in own, got 4"):
        workload.first(4, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": []}, "warmup: expected a list of row ids, got \\[\\]"),
        ({"measured": [1, 2]}, "measured: expected a list of row ids"),
        ({"file": None}, "file: expected a name, got None"),
        ({"measured": ["r1", "r9"]}, "expected ids of rows.jsonl, got 'r9' and 0 others"),
    ],
)
def test_a_wrong_manifest(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_workload(str(path), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dataset": "own", ', "expected a JSON manifest, got"),
        ("[1, 2]", "expected a JSON object, got a list"),
        (None, "expected a manifest, got"),
    ],
)
def test_a_corrupt_manifest(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "broken.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"broken.json: {message}"):
        load_workload(str(path), tmp_path)


def test_an_unknown_set_and_missing_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set: expected one of .*gsm8k.*, got 'gsm9k'"):
        load_workload("gsm9k")
    with pytest.raises(ValueError, match="bench/data has no prompts of 'own'"):
        load_workload(str(written(tmp_path)))
    with pytest.raises(ValueError, match=r"^prompts: expected a folder with .*, got 'no'"):
        load_workload("gsm8k", Path("no"))


class Rows:
    column_names = ("text", "number")

    def __getitem__(self, column: str) -> list[Any]:
        return [f"row {i}" if column == "text" else i for i in range(300)]


def test_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, config: str | None, split: str) -> Rows:
        if path == "none/such":
            raise FileNotFoundError("no such data set")
        asked.append((path, config, split))
        return Rows()

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    workload = load_workload("owner/name::test:text")
    assert asked == [("owner/name", None, "test")]
    assert workload == drawn("owner/name::test:text", Rows()["text"])
    assert len({*workload.warmup, *workload.measured}) == 256
    assert workload.measured[256 - 32 : 256] == workload.warmup
    for name, message in (
        ("owner/name::test:none", "expected a column of .*'text', 'number'.*, got 'none'"),
        ("owner/name::test:number", "expected rows of text"),
        ("none/such::test:text", "'none/such' could not be loaded: no such data set"),
        (":::", "expected owner/name:config:split:column, got ':::'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_workload(name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets"):
        load_workload("owner/name::test:text")


def test_drawing_is_the_manifests_rule() -> None:
    rows = [f"row {i}" for i in range(164)]
    found = drawn("x", rows)
    pool = list(dict.fromkeys(found.warmup + found.measured))
    assert sorted(pool) == sorted(rows)
    assert found.measured[:132] == pool[32:]
    assert found.measured[132:164] == pool[:32]


class Server:
    """Ends each request after `max_new_tokens` hundredths of a second, `at_once` at a time."""

    def __init__(self, fail: int | None = None) -> None:
        self.running, self.most, self.order, self.fail = 0, 0, list[int](), fail
        self.lock = threading.Lock()

    def submit(self, requests: list[Request]) -> None:
        with self.lock:
            self.running += len(requests)
            self.most = max(self.most, self.running)
            self.order += [r.seed for r in requests]
        for request in requests:
            request.queued_at = time.time()
            threading.Timer(request.max_new_tokens / 100, self.end, [request]).start()

    def end(self, request: Request) -> None:
        with self.lock:
            self.running -= 1
        if request.seed == self.fail:
            request.finish("error", ArithmeticError("not finite"))
            return
        request.progress += [request.max_new_tokens - 1]
        request.give([7] * request.max_new_tokens)
        request.finish("length")


def test_workers_send_their_next_when_their_last_is_done() -> None:
    server = Server()
    requests = [Request(prompt=[1], max_new_tokens=2 + i % 3, seed=i) for i in range(11)]
    served = closed_loop(server.submit, requests, 3)
    assert server.most == 3
    assert server.order == list(range(11))
    assert all(r.finished for r in requests)
    stats = Stats(steps=10, passes=22, tokens=21, drafted=5)
    row = figures(served, stats, Intervals(8, 21, 0.4), output_cap=4)
    tokens = sum(r.max_new_tokens for r in requests)
    assert row["output_tokens"] == tokens
    assert row["tokens_per_s"] == pytest.approx(tokens / served.seconds, rel=0.01)
    assert row["window_s"] >= 0.08
    assert (row["decode_tokens_per_s"], row["step_ms"]) == (52.5, 50.0)
    assert (row["live_per_step"], row["rows_per_step"]) == (2.2, 2.7)
    assert row["capped"] == 3
    assert row["progress_counts"][:5] == [0, 4, 4, 3, 0]
    assert row["tokens_per_step_uncapped"] == 1.5
    assert 20 <= row["latency_ms"]["p50"] <= row["latency_ms"]["p99"] < 1e3 * served.seconds
    assert row["ttft_ms"]["mean"] <= row["latency_ms"]["mean"]


def test_a_failed_request_ends_the_loop_with_its_error() -> None:
    requests = [Request(prompt=[1], max_new_tokens=1, seed=i) for i in range(4)]
    with pytest.raises(ArithmeticError, match="not finite"):
        closed_loop(Server(fail=2).submit, requests, 2)


def test_latency_is_mean_and_percentiles() -> None:
    assert spread([i / 1000 for i in range(1, 101)]) == pytest.approx(
        {"mean": 50.5, "p50": 50.5, "p95": 95.05, "p99": 99.01}
    )


def loop_row(mode: str, rate: float, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": "m", "acceptance": "real", "source": "measured", "trace": None, "set": "gsm8k",
        "concurrency": 8, "temperature": 0.0, "requests": 4, "output_cap": 9, "mode": mode,
        "budget": None, "repetition": 0, "tokens_per_s": rate,
        "latency_ms": {"mean": 1e3 / rate, "p95": 2e3 / rate}, "ttft_ms": {"mean": 1.0},
    }  # fmt: skip
    return row | changes


def test_medians_gains_and_reductions() -> None:
    rows = [loop_row("dflash", rate, repetition=i) for i, rate in enumerate((90, 100, 170))]
    rows += [
        loop_row("dscale", rate, repetition=i, budget="auto") for i, rate in enumerate((200,))
    ]
    rows += [loop_row("dflash", 50, set="mbpp"), loop_row("dscale", 25, set="mbpp", budget="auto")]
    rows += [loop_row("dscale", 1, set="humaneval", budget="auto")]  # nothing to compare with
    found = medians(rows)
    assert [(r["set"], r["mode"], r["tokens_per_s"], r["repetitions"]) for r in found][:2] == [
        ("gsm8k", "dflash", 100, 3),
        ("gsm8k", "dscale", 200, 1),
    ]
    assert found[0]["latency_ms"]["mean"] == 10
    assert "repetition" not in found[0]
    ratios = gains(rows, ("dscale", "auto"), ("dflash", None))
    assert sorted(ratios.values()) == [0.5, 2.0]
    assert geometric_mean(ratios.values()) == pytest.approx(1.0)
    half = [r for r in rows if r["set"] == "gsm8k"]
    assert reduction(half, ("dscale", "auto"), ("dflash", None), "latency_ms.p95") == 0.5
    with pytest.raises(ValueError, match="expected positive numbers, got \\[\\]"):
        geometric_mean([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON rows"),
        ('{"rows": []}', "expected a list of rows, got a dict"),
        ("[3]", "row 0: expected an object, got 3"),
        ('[{"model": "m"}]', "row 0: expected a field 'acceptance', got \\['model'\\]"),
    ],
)
def test_a_result_file_of_another_schema(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "closed_loop.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(path, LOOP_FIELDS)
    with pytest.raises(ValueError, match=r"none\.json: expected a result file"):
        read_rows(tmp_path / "none.json", LOOP_FIELDS)


def test_grids_are_what_they_say() -> None:
    cells = {name: make() for name, make in GRIDS.items()}
    assert len(cells["full"]) == 2 * 4 * 7 * 6 * 5
    assert {cell.requests for cell in cells["full"]} == {512}
    assert len(cells["committed"]) == 4 * 3 * 6 * 3 + 4 * 3 * 2 * 3 + 7 * 2
    assert len(cells["reduced"]) == 4 * 3 * 6 * 3
    assert {all_cases()[cell.case].budget for cell in cells["widths"]} == {
        None, 4, 6, 8, 10, 12, 14,
    }  # fmt: skip
    for found in cells.values():
        rows = [json.dumps(cell.fields) for cell in found]
        assert len(set(rows)) == len(rows)
    # Modes are innermost: what drifts over time meets all of them.
    assert [cell.case for cell in cells["committed"][:3]] == ["ar", "dflash", "+tiles"]


def test_shards_part_the_cells_by_set() -> None:
    cells = grid(("a", "b", "c"), (8,), ("ar", "dflash"), repetitions=2, requests=4)
    parts = [shard(cells, f"{i}/2") for i in range(2)]
    assert [{cell.set for cell in part} for part in parts] == [{"a", "c"}, {"b"}]
    assert sorted(map(repr, parts[0] + parts[1])) == sorted(map(repr, cells))
    for wrong in ("2/2", "1", "a/b", "-1/2"):
        with pytest.raises(ValueError, match="shard: expected i/n"):
            shard(cells, wrong)
