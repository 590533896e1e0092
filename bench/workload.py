"""Which prompts a serving benchmark sends, in which order: manifests, prompt files, Hub sets."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dscale.text import read_prompts

DATA = Path(__file__).parent / "data"
SETS = ("gsm8k", "math500", "humaneval", "mbpp")
"""The paper's four sets; each has a manifest in bench/data."""

WARM_UP, MEASURED = 32, 512
"""Requests of one configuration, as the paper runs them (IV-A)."""

POOL, SEED = 256, 42


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in the order they are sent; `source`: where they came from."""

    name: str
    warmup: list[str]
    measured: list[str]
    source: str

    def first(self, requests: int, warmup: int = WARM_UP) -> Workload:
        """The same with fewer requests. Raises ValueError for more than there are."""
        for name, want, have in (
            ("requests", requests, len(self.measured)),
            ("warmup", warmup, len(self.warmup)),
        ):
            if not 0 < want <= have:
                raise ValueError(f"{name}: expected 1 to {have} in {self.name}, got {want}")
        return Workload(self.name, self.warmup[:warmup], self.measured[:requests], self.source)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Ids of a prompt file's rows in the order they are sent."""

    dataset: str
    file: str
    warmup: list[str]
    measured: list[str]


def load_workload(name: str, prompts: Path | None = None) -> Workload:
    """The requests of a set.

    `name`: one of SETS, the path of a manifest, or a Hub data set as
    `owner/name:config:split:column` (config may be empty). `prompts`: the folder with the prompt
    file that the manifest names; without one the 16 rows a set has in bench/data/identity.jsonl
    stand in for it, over and over. Raises ValueError for an unknown set, a manifest or prompt file
    that does not hold what it should, and ids the prompt file lacks."""
    if name.count(":") == 3:
        return hub_workload(name)
    path = DATA / f"manifest_{name}.json" if name in SETS else Path(name)
    if name not in SETS and path.suffix != ".json":
        raise ValueError(
            f"set: expected one of {SETS}, the path of a manifest (.json) or a Hub data set as "
            f"owner/name:config:split:column, got {name!r}"
        )
    manifest = read_manifest(path)
    if prompts is None:
        return _stand_in(manifest)
    source = Path(prompts) / manifest.file
    if not source.is_file():
        raise ValueError(f"prompts: expected a folder with {manifest.file}, got {str(prompts)!r}")
    text = {row["id"]: row["prompt"] for row in read_prompts(source)}
    missing = [i for i in (*manifest.warmup, *manifest.measured) if i not in text]
    if missing:
        raise ValueError(
            f"{path}: expected ids of {manifest.file}, got {missing[0]!r} "
            f"and {len(set(missing)) - 1} others that it lacks"
        )
    warmup, measured = ([text[i] for i in ids] for ids in (manifest.warmup, manifest.measured))
    return Workload(manifest.dataset, warmup, measured, manifest.file)


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ValueError naming the file and what is wrong with it."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: expected a manifest, got {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON manifest, got {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(found).__name__}")
    for key in ("dataset", "file"):
        if not isinstance(found.get(key), str) or not found[key]:
            raise ValueError(f"{path}: {key}: expected a name, got {found.get(key)!r}")
    for key in ("warmup", "measured"):
        ids = found.get(key)
        if not isinstance(ids, list) or not ids or not all(isinstance(i, str) for i in ids):
            shown = repr(ids)[:60]
            raise ValueError(f"{path}: {key}: expected a list of row ids, got {shown}")
    return Manifest(*(found[key] for key in ("dataset", "file", "warmup", "measured")))


def _stand_in(manifest: Manifest) -> Workload:
    rows = read_prompts(DATA / "identity.jsonl")
    own = [row["prompt"] for row in rows if row["set"] == manifest.dataset]
    if not own:
        raise ValueError(
            f"prompts: expected the folder of {manifest.file}; bench/data has no prompts of "
            f"{manifest.dataset!r} to stand in for it"
        )
    sizes = (len(manifest.warmup), len(manifest.measured))
    warmup, measured = (list(islice(cycle(own), size)) for size in sizes)
    return Workload(manifest.dataset, warmup, measured, "identity.jsonl")


def hub_workload(name: str) -> Workload:
    """Requests of a Hub data set, drawn by the rule of the manifests; needs `datasets`.

    Raises ValueError for a name of another form, a column that is not there or holds no text, and
    whatever `datasets` cannot load."""
    parts = name.split(":")
    if len(parts) != 4 or not all((parts[0], *parts[2:])):
        raise ValueError(f"set: expected owner/name:config:split:column, got {name!r}")
    path, config, split, column = parts
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"set: {name!r} needs the package datasets (pip install datasets)"
        ) from None
    try:
        rows = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:
        raise ValueError(f"set: {path!r} could not be loaded: {error}") from error
    if column not in rows.column_names:
        raise ValueError(f"set: expected a column of {rows.column_names}, got {column!r}")
    return drawn(name, list(rows[column]))


def drawn(name: str, prompts: Sequence[str]) -> Workload:
    """Requests by the rule of the manifests: a pool of at most 256 rows drawn with seed 42, sent
    over and over; the first 32 are the warm-up."""
    if not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
        raise ValueError(f"set: expected rows of text in {name!r}, got others or none")
    pool = random.Random(SEED).sample(list(prompts), min(POOL, len(prompts)))
    sent = list(islice(cycle(pool), WARM_UP + MEASURED))
    return Workload(name, sent[:WARM_UP], sent[WARM_UP:], name)
