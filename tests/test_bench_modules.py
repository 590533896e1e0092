"""Floors, operators, peers and merged files: the benches that need no closed loop."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_drafter, tiny_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import graphs, merge, operators, peers, shared_keys
from bench.aggregate import read_rows
from bench.result_files import ResultFile
from bench.shapes import SHAPES, build
from dscale.compiled.attention import VERIFY_TILE, Tile

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("requests", "rows", "floor"),
    [(8, 64, 3.83), (16, 128, 4.11), (32, 256, 6.01), (16, 256, 5.46), (32, 512, 10.92)],
)
def test_the_verify_floor_of_8b(requests: int, rows: int, floor: float) -> None:
    """At a context of 1,000, as docs/results.md has them."""
    found = graphs.verify_floor(SHAPES["8b"], 2)
    assert found.weights == 7_568_097_280
    assert found.milliseconds(rows, requests, 1000) == pytest.approx(floor, abs=0.005)


def test_floors_count_the_weights_of_products() -> None:
    models = build(SHAPES["tiny"], CPU, torch.float32)
    floors = graphs.floors_of(SHAPES["tiny"], 4)
    head = models.target.head.numel()

    def matrices(part: torch.nn.Module) -> int:
        return sum(p.numel() for p in part.parameters() if p.dim() == 2)

    assert floors["verify"].weights == matrices(models.target.layers) + head
    drafter = matrices(models.drafter.layers) + models.drafter.qkv.numel()
    assert floors["decide"].weights == drafter + head
    c = models.drafter.config
    assert floors["decide"].kv == 2 * c.num_layers * c.num_kv_heads * c.head_dim
    # Few rows: the weights' bytes; many: the arithmetic.
    weights = floors["decide"].weights
    assert floors["decide"].milliseconds(1, 0, 0) == pytest.approx(4e3 * weights / 4.26e12)
    assert floors["decide"].milliseconds(10**6, 0, 0) == pytest.approx(2e9 * weights / 790e12)


def test_graph_rows_out_of_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step: dict[str, Any] = dict.fromkeys(graphs.ENVIRONMENT, "x")
    step |= {"model": "Qwen3-8B shape", "dtype": "bfloat16", "sampling": "greedy"}
    step |= {"mode": "dscale", "budget": "half", "tile": "packed heads, 16 rows"}
    step |= {"requests": 8, "rows": 64, "context": 1000, "verify_ms": 7.66, "decide_ms": 1.36}
    others = [{"mode": "ar", "rows": 8}, {"sampling": "temperature 1"}, {"model": "mine"}]
    unmeasured = {k: v for k, v in step.items() if k != "verify_ms"} | {"context": 9}
    path = tmp_path / "decode_step.json"
    path.write_text(json.dumps([step, unmeasured, *(step | other for other in others)]))
    arguments = ["x", "--from-steps", str(path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    graphs.main()
    [verify] = read_rows(tmp_path / "verify_graph.json", graphs.VERIFY_KEYS)
    assert (verify["floor_ms"], verify["over_floor"]) == pytest.approx((3.83, 2.0), abs=0.005)
    assert verify["gpu"] == "x"
    [decide] = read_rows(tmp_path / "decide_graph.json", graphs.DECIDE_KEYS)
    assert (decide["rows"], decide["decide_ms"]) == (128, 1.36)
    path.write_text(json.dumps([{"model": "m"}]))
    with pytest.raises(ValueError, match="row 0: expected a field 'mode'"):
        graphs.main()


def test_graphs_and_operators_write_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (graphs, operators):
        monkeypatch.setattr(
            sys, "argv", ["x", "--tiny", "--out", str(tmp_path), "--commit", "one"]
        )
        module.main()
    verify = read_rows(tmp_path / "verify_graph.json", (*graphs.VERIFY_KEYS, "verify_ms"))
    decide = read_rows(tmp_path / "decide_graph.json", (*graphs.DECIDE_KEYS, "decide_ms"))
    assert sorted((r["mode"], r["requests"], r["rows"]) for r in verify) == [
        ("+tiles", 2, 32), ("+tiles", 3, 48), ("dflash", 2, 32), ("dflash", 3, 48),
        ("dscale", 2, 16), ("dscale", 3, 24),
    ]  # fmt: skip
    assert {r["rows"] for r in decide} == {32, 48}
    assert all(row["over_floor"] > 1 for row in verify + decide)
    found = read_rows(tmp_path / "operators.json", (*operators.KEYS, "us", "floor_us"))
    assert len({row["operator"] for row in found}) == 6


def test_layers_find_the_same_in_shared_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ["--requests", "3", "--contexts", "200", "--sub-lanes", "0", "2", "16"]
    monkeypatch.setattr(shared_keys, "TINY", {"models": ["tiny"]})
    monkeypatch.setattr(shared_keys, "POOLS", 1)  # a pool whose pages serve two layers
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", *cell, "--out", str(tmp_path)])
    shared_keys.main()
    rows = read_rows(tmp_path / "shared_keys.json", (*shared_keys.KEYS, "us", "keys_us"))
    assert [row["sub_lanes"] for row in rows] == [0, 16], "2 would be 3, as many as lanes"
    shape = SHAPES["tiny"]
    torch.manual_seed(0)
    layers = shared_keys.Layers(shape, 3, 200, CPU, torch.float32)
    tiles = [Tile(height=VERIFY_TILE, parts=parts) for parts in (0, 16)]
    want, got = (layers.run(tile, shared_keys.attention(shape, tile))() for tile in tiles)
    assert len(want) == layers.count == 2
    for x, y in zip(want, got, strict=True):
        assert x.abs().max() > 0.1
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_runs_are_merged(tmp_path: Path) -> None:
    parts = []
    for at, rates in enumerate((((8, 1.0), (16, 2.0)), ((16, 3.0), (32, 4.0)))):
        parts.append(tmp_path / f"{at}.json")
        rows = [{"operator": "a", "requests": n, "model": "m", "us": us} for n, us in rates]
        parts[-1].write_text(json.dumps(rows))
    into = tmp_path / "operators.json"
    assert merge.merge(parts, into) == 3
    assert [row["us"] for row in json.loads(into.read_text())] == [1.0, 3.0, 4.0]
    parts[0].write_text('[{"requests": 8}]')
    with pytest.raises(ValueError, match=r"0.json: row 0: expected a field 'operator'"):
        merge.merge(parts, into)
    with pytest.raises(ValueError, match=r"into: expected one of .*, got 'none.json'"):
        merge.merge(parts, tmp_path / "none.json")


class Tokenizer:
    """Characters as ids."""

    pad_token_id = 0

    def apply_chat_template(self, chat: list[dict[str, str]], **settings: Any) -> str:
        return chat[0]["content"][:12]

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 400 for letter in text]}


def test_peers_give_every_method_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 7
    tiny_drafter(tmp_path / "drafter", model)
    setup = peers.Setup(model, Tokenizer(), 5, tmp_path / "drafter", None)
    assert setup.length([3, 7, 5]) == 2
    assert setup.length([3, 5]) == 2
    ours = ["generate_eager", "prompt_lookup", "ar", "dflash", "dscale"]
    args = argparse.Namespace(
        prompts=None, methods=["assisted"], batches=[1, 2], alone=2, repeats=1
    )
    file = ResultFile(tmp_path / "peers.json", peers.KEYS, {"model": "tiny"})

    def refuse(setup: peers.Setup, method: str) -> peers.Peer:
        raise TypeError("unsupported operand")

    with monkeypatch.context() as patch:  # what makes a method fail is in its row
        patch.setattr(peers, "make", refuse)
        assert peers.run(setup, args, file) == ["assisted 1"]
    args.methods = ours
    assert peers.run(setup, args, file) == []
    rows = {(row["method"], row["batch"]): row for row in file.rows.values()}
    assert rows["assisted", 1]["tokens_per_s"] is None
    assert "unsupported operand" in rows["assisted", 1]["error"]
    assert set(rows) == {(m, b) for m in ours for b in (1, 2)} - {("prompt_lookup", 2)} | {
        ("assisted", 1)
    }
    # Greedy, the same model and prompts: everyone says as much.
    assert {rows[method, 1]["tokens"] for method in ours} == {rows["ar", 1]["tokens"]}
    assert rows["ar", 2]["tokens_per_pass"] == 1
    assert rows["dscale", 1]["budget"] == "auto"
    assert "generate" not in model.__dict__  # put back


def test_z_lab_s_own_loop(tmp_path: Path) -> None:
    pytest.importorskip("dflash.model", reason="needs PyPI dflash (z-lab's loop)")
    model = tiny_model()
    model.generation_config.eos_token_id = 7
    tiny_drafter(tmp_path, model)
    setup = peers.Setup(model, Tokenizer(), 6, tmp_path, None)
    peer = peers.make(setup, "zlab_dflash")
    ids = setup.ids("Once upon a time")
    assert peer.run([ids, ids]) == 2 * setup.generate([ids])
