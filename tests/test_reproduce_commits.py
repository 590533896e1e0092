"""Recipes on gains measured at several commits."""

import json
import sys
from pathlib import Path
from typing import Any

import result_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import reproduce_ablation
import reproduce_peers
import reproduced


def test_rows_of_several_commits(tmp_path: Path) -> None:
    """The newest stand for the engine; an ablation takes the commit that has most of its steps,
    of two that have as many the newer one."""
    old, new = result_rows.gains(), result_rows.gains()
    for row in new:
        row["commit"], row["decode_tokens_per_s"] = "newer", 3 * row["decode_tokens_per_s"]
    fewer = [row for row in new if row["mode"] != "+budget"]

    def written(rows: list[dict[str, Any]]) -> Path:
        (tmp_path / "mode_gains.json").write_text(json.dumps(rows))
        return tmp_path

    assert reproduced.newest(old + fewer)[-1]["commit"] == "newer"
    assert len(reproduced.newest(old + fewer)) == len(old)
    for name in ("8b", "4b"):
        for rows, commit in ((old + fewer, old[0]["commit"]), (old + new, "newer")):
            found = reproduce_ablation.compute(written(rows))
            some = dict(reproduce_ablation.series_of(found))[name]
            assert {row["commit"] for row in some} == {commit}
    peers = reproduce_peers.compute(written(old + fewer))
    assert {row["commit"] for row in peers if row["mode"] != "+budget"} == {"newer"}
