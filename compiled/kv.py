"""The token-major paged key/value pool and the page arithmetic that addresses it.

A slot is one token's place in a pool: slot = physical page * PAGE + offset in the page. Physical
page 0 is scratch: inactive lanes and padding rows write there, and no live request ever reads it
(docs/design.md, "Pages")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dscale.compiled.capture import fixed, send

PAGE = 128
"""Tokens per page. Equal to FlexAttention's key/value block, so that a page is a block of the
block mask."""


class Paging(NamedTuple):
    """Where each lane's context lives. N lanes, L logical pages a request may use, P physical
    pages.

    `page_NL` int32: physical page of every logical page (0, the scratch page, where there is
    none). `logical_NP` int32: the inverse, -1 where a physical page is not the lane's. Both change
    together. `context_N` int32: committed tokens before the first row of this forward."""

    page_NL: Tensor
    logical_NP: Tensor
    context_N: Tensor


class KVPool(torch.nn.Module):
    """Keys and values of every layer, `[slots, kv_heads, head_dim]` each, zeroed when allocated,
    in storages of their own: compiled `tile_heads` would copy what shares one, or read beside it.

    Token-major, because a write by `index_put_` on dimension 0 is then a plain scatter; a
    head-major pool made Inductor copy the whole pool twice per layer (145 us a layer on an H200 at
    8B shapes)."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_pages = num_pages
        shape = (num_pages * PAGE, num_kv_heads, head_dim)
        for layer in range(num_layers):
            for name in ("key", "value"):
                zeros = fixed(torch.zeros(shape, dtype=dtype, device=device))
                self.register_buffer(f"{name}_{layer}", zeros, persistent=False)
        self._all = list(self.buffers())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (key, value) of layer `index`, each `[slots, kv_heads, head_dim]`."""
        return getattr(self, f"key_{index}"), getattr(self, f"value_{index}")

    def clear(self, pages: list[int]) -> None:
        """Zero pages in every layer; the host does not wait for a GPU."""
        buffers = self._all
        device = buffers[0].device
        if device.type != "cuda":
            for buffer in buffers:
                buffer.view(self.num_pages, -1)[pages] = 0
            return
        from dscale.kernels.clear_pages import clear_pages

        addresses = torch.tensor([b.data_ptr() for b in buffers] + pages)
        table = torch.empty_like(addresses, device=device)
        send(addresses, table)
        with torch.cuda.device(device):
            clear_pages(table, len(buffers), buffers[0].nbytes // self.num_pages)

    @property
    def num_bytes(self) -> int:
        """Device memory the pool holds, in bytes."""
        return sum(b.numel() * b.element_size() for b in self.buffers())


def slots_of(position_NT: Tensor, page_NL: Tensor) -> Tensor:
    """Map absolute positions `[N, T]` to pool slots `[N, T]` (int64) through each lane's page
    table `[N, L]`.

    Positions past the table are clamped to its last page; callers reserve room for every position
    they keep."""
    logical_NT = torch.clamp(position_NT // PAGE, max=page_NL.shape[1] - 1)
    return torch.gather(page_NL.long(), 1, logical_NT) * PAGE + position_NT % PAGE


def write(pool: tuple[Tensor, Tensor], slot_R: Tensor, key_RKE: Tensor, value_RKE: Tensor) -> None:
    """Store rows into a layer's pool in place. `slot_R` int64; rows `[R, kv_heads, head_dim]`."""
    pool[0].index_put_((slot_R,), key_RKE)
    pool[1].index_put_((slot_R,), value_RKE)
