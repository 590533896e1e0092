"""Paged caches for tests: lanes on shuffled physical pages, as a running engine leaves them."""

import torch
from torch import Tensor

from dscale.compiled.kv import Paging


def shuffled_paging(context: list[int], pages: int, num_pages: int, seed: int = 0) -> Paging:
    """Give each lane `pages` of the physical pages 1.. in random order, and its context."""
    lanes = len(context)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_pages - 1, generator=generator)[: lanes * pages] + 1
    page_NL = order.view(lanes, pages).int()
    logical_NP = torch.full((lanes, num_pages), -1, dtype=torch.int32)
    logical_NP.scatter_(1, page_NL.long(), torch.arange(pages).int().expand(lanes, -1))
    return Paging(page_NL, logical_NP, torch.tensor(context, dtype=torch.int32))


def slot(paging: Paging, lane: int, position: int) -> int:
    """The pool slot of one token, spelt out."""
    return int(paging.page_NL[lane, position // 128]) * 128 + position % 128


def slots(paging: Paging, lane: int, start: int, stop: int) -> Tensor:
    """The pool slots of positions start..stop - 1 of one lane, int64."""
    return torch.tensor([slot(paging, lane, position) for position in range(start, stop)])


def idle_behind(paging: Paging) -> tuple[Tensor, Tensor]:
    """Both page tables with an idle slot behind the lanes, which sees the scratch page."""
    scratch = torch.full_like(paging.logical_NP[:1], -1)
    scratch[:, 0] = 0
    page_NL = torch.cat((paging.page_NL, torch.zeros_like(paging.page_NL[:1])))
    return page_NL, torch.cat((paging.logical_NP, scratch))
