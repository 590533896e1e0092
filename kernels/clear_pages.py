"""Triton launcher that zeroes pages of any number of buffers: one launch for all layers.

A loop over buffers has as many launches, 82 for an 8B model and its drafter, and the GPU nothing
to do but wait for them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Words of 8 bytes that a program clears."""


def clear_pages(table: Tensor, buffers: int, page_bytes: int) -> None:
    """Zero pages in place. `table` int64: the addresses of `buffers` buffers, then page numbers.
    Page p of a buffer begins at p * `page_bytes`, a multiple of 8."""
    pages, words = table.numel() - buffers, page_bytes // 8
    parts = triton.cdiv(words, BLOCK)
    _clear_pages[(pages * parts, buffers)](table, buffers, words, parts, BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["buffers", "words", "parts"])  # type: ignore[untyped-decorator]
def _clear_pages(
    table: tl.tensor,
    buffers: tl.tensor,
    words: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK words of a page of a buffer."""
    program = tl.program_id(0)
    start = tl.load(table + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    page = tl.load(table + buffers + program // parts)
    word = program % parts * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(start + page * words + word, zero, mask=word < words)
