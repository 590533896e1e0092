"""The custom operations: schemas, shapes, argument checks and dispatch, without Triton; those of
a layer have files of their own.

On the CPU an operation is its eager reference; its Triton launcher is imported when it first runs
on a GPU. All are functional: results are new tensors, and a stage that hands them on in a
fixed-address buffer copies them there.

Shapes: R rows, V vocabulary, N lanes, C = W - 1 candidates per lane, M packed rows, T = 16 tile
rows, L logical pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference_rows, reference_statistics
from dscale.kernels.gated_ops import gated as gated
from dscale.kernels.head_ops import tile_heads as tile_heads
from dscale.kernels.linear_ops import linear as linear
from dscale.kernels.reference_rows import SEEDS, TILE, PackedRows
from dscale.kernels.reference_statistics import TOP, RowStatistics
from dscale.kernels.registry import expect, expect_tensor, implement
from dscale.kernels.scaled_linear_ops import gated_rows as gated_rows
from dscale.kernels.scaled_linear_ops import scaled_linear as scaled_linear
from dscale.kernels.share_ops import merge_shares as merge_shares
from dscale.kernels.share_ops import share_pages as share_pages

MAX_LANES = 256
"""Lanes one budget or pack program holds."""

_SCHEMAS = {
    "row_statistics": "(Tensor logit) -> (Tensor, Tensor, Tensor, Tensor)",
    "argmax": "(Tensor logit) -> Tensor",
    "allocate_budget": "(Tensor score, Tensor live, Tensor limit, Tensor room, str seed)"
    " -> Tensor",
    "pack_rows": (
        "(Tensor length, Tensor candidate, Tensor anchor, Tensor context, Tensor page_table,"
        " SymInt rows, int page) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "accept_prefix": (
        "(Tensor candidate, Tensor length, Tensor offset, Tensor choice) -> (Tensor, Tensor)"
    ),
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"dscale::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))

_row_statistics: Any = torch.ops.dscale.row_statistics.default
_argmax: Any = torch.ops.dscale.argmax.default
_allocate_budget: Any = torch.ops.dscale.allocate_budget.default
_pack_rows: Any = torch.ops.dscale.pack_rows.default
_accept_prefix: Any = torch.ops.dscale.accept_prefix.default


def row_statistics(logit_RV: Tensor) -> RowStatistics:
    """Largest logits, argmax, log-sum-exp and entropy of rows; reference_statistics says how.

    Raises ValueError unless `logit_RV` is bfloat16, float16 or float32 `[R, V]` with V >= 1."""
    return RowStatistics(*_row_statistics(logit_RV))


def argmax(logit_RV: Tensor) -> Tensor:
    """`torch.argmax` of each row, `[R]` int64: the lowest index among equals; the first NaN, if
    there is one.

    Raises ValueError unless `logit_RV` is bfloat16, float16 or float32 `[R, V]` with V >= 1."""
    index_R: Tensor = _argmax(logit_RV)
    return index_R


def allocate_budget(
    score_NC: Tensor, live_N: Tensor, limit_N: Tensor, room: Tensor, seed: str = "none"
) -> Tensor:
    """Rows each lane verifies, `[N]` int32 (Algorithm 1); reference_rows says how.

    `room` int32 [2]: (rows there is room for, rows per live request), read on the device only, so
    one captured graph serves every budget; the first must be at least N, the second in 1..W.
    Raises ValueError for other shapes or dtypes, an unknown seed, or more than MAX_LANES lanes."""
    length_N: Tensor = _allocate_budget(score_NC, live_N, limit_N, room, seed)
    return length_N


def pack_rows(
    length_N: Tensor,
    candidate_NC: Tensor,
    anchor_N: Tensor,
    context_N: Tensor,
    page_NL: Tensor,
    rows: int,
    page: int,
) -> PackedRows:
    """Pack the lanes' rows flat; reference_rows says how.

    Raises ValueError for other shapes or dtypes, rows below max(1, N), or more than MAX_LANES
    lanes. Lengths are read on the device only: their sum must be at most `rows`."""
    return PackedRows(
        *_pack_rows(length_N, candidate_NC, anchor_N, context_N, page_NL, rows, page)
    )


def accept_prefix(
    candidate_NC: Tensor, length_N: Tensor, offset_N: Tensor, choice_M: Tensor
) -> tuple[Tensor, Tensor]:
    """(accepted `[N]`, successor `[N]`) int64 of packed rows; reference_rows.accept_rows says how.

    Raises ValueError for other shapes or dtypes, or no row at all."""
    accepted_N, successor_N = _accept_prefix(candidate_NC, length_N, offset_N, choice_M)
    return accepted_N, successor_N


def _check_logit(logit: Tensor) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    ok = logit.ndim == 2 and logit.shape[1] >= 1 and logit.dtype in floats
    expected = "bfloat16, float16 or float32 [R, V] with V >= 1"
    expect(ok, "logit", expected, f"{logit.dtype} {list(logit.shape)}")


def _check_candidates(name: str, x: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    ok = x.ndim == 2 and 1 <= x.shape[1] < TILE and x.shape[0] <= MAX_LANES and x.dtype == dtype
    expected = f"{dtype} [N, C] with N <= {MAX_LANES} and 1 <= C <= {TILE - 1}"
    expect(ok, name, expected, f"{x.dtype} {list(x.shape)}")
    return x.shape[0], x.shape[1]


def _check_allocate_budget(
    score: Tensor, live: Tensor, limit: Tensor, room: Tensor, seed: str
) -> None:
    lanes, _ = _check_candidates("score", score, torch.float32)
    expect_tensor("live", live, torch.bool, (lanes,))
    expect_tensor("limit", limit, torch.int32, (lanes,))
    expect_tensor("room", room, torch.int32, (2,))
    expect(seed in SEEDS, "seed", f"one of {SEEDS}", repr(seed))


def _check_pack_rows(
    length: Tensor,
    candidate: Tensor,
    anchor: Tensor,
    context: Tensor,
    page_table: Tensor,
    rows: int,
    page: int,
) -> None:
    lanes, _ = _check_candidates("candidate", candidate, torch.int64)
    expect(lanes >= 1, "candidate", "at least one lane", lanes)
    expect_tensor("length", length, torch.int32, (lanes,))
    expect_tensor("anchor", anchor, torch.int64, (lanes,))
    expect_tensor("context", context, torch.int32, (lanes,))
    expect(page_table.ndim == 2, "page_table", "[N, L]", list(page_table.shape))
    pages = max(1, page_table.shape[1])
    expect_tensor("page_table", page_table, torch.int32, (lanes, pages))
    expect(rows >= lanes, "rows", f"at least one per lane ({lanes})", rows)
    expect(page >= 1, "page", "at least 1 token", page)


def _check_accept_prefix(
    candidate: Tensor, length: Tensor, offset: Tensor, choice: Tensor
) -> None:
    lanes, _ = _check_candidates("candidate", candidate, torch.int64)
    expect_tensor("length", length, torch.int32, (lanes,))
    expect_tensor("offset", offset, torch.int64, (lanes,))
    ok = choice.ndim == 1 and choice.shape[0] >= 1 and choice.dtype == torch.int64
    expected = f"{torch.int64} [M] with M >= 1"
    expect(ok, "choice", expected, f"{choice.dtype} {list(choice.shape)}")


def _fake_row_statistics(logit: Tensor) -> tuple[Tensor, ...]:
    rows = logit.shape[0]
    top, lse, entropy = (
        logit.new_empty(shape, dtype=torch.float32) for shape in ((rows, TOP), (rows,), (rows,))
    )
    return top, logit.new_empty((rows,), dtype=torch.int64), lse, entropy


def _fake_argmax(logit: Tensor) -> Tensor:
    return logit.new_empty((logit.shape[0],), dtype=torch.int64)


def _fake_allocate_budget(score: Tensor, *rest: Any) -> Tensor:
    return score.new_empty((score.shape[0],), dtype=torch.int32)


def _fake_pack_rows(
    length: Tensor,
    candidate: Tensor,
    anchor: Tensor,
    context: Tensor,
    page_table: Tensor,
    rows: int,
    page: int,
) -> tuple[Tensor, ...]:
    lanes = candidate.shape[0]
    shapes = ((lanes,), *((rows,) for _ in range(5)), (lanes, TILE))
    return tuple(anchor.new_empty(shape) for shape in shapes)


def _fake_accept_prefix(candidate: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lanes = candidate.shape[0]
    return candidate.new_empty((lanes,)), candidate.new_empty((lanes,))


implement(
    "row_statistics",
    _check_logit,
    reference_statistics.row_statistics,
    _fake_row_statistics,
)
implement("argmax", _check_logit, lambda logit: logit.argmax(1), _fake_argmax)
implement(
    "allocate_budget",
    _check_allocate_budget,
    reference_rows.allocate_budget,
    _fake_allocate_budget,
)
implement("pack_rows", _check_pack_rows, reference_rows.pack_rows, _fake_pack_rows)
implement("accept_prefix", _check_accept_prefix, reference_rows.accept_rows, _fake_accept_prefix)
