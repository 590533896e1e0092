"""Repetition penalty: the logits of tokens that a row has seen, its request's and its block's.

Shapes: S request slots, M rows, V vocabulary, C candidates of a block, N lanes, T tokens each."""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(
    logit_MV: Tensor, seen_SV: Tensor, request_M: Tensor, penalty_M: Tensor, block_MC: Tensor
) -> Tensor:
    """Logits after transformers' repetition penalty, float32 `[M, V]`: a seen token's is
    multiplied by the penalty when negative and divided by it otherwise, once however often it was
    seen.

    `seen_SV` bool: tokens each request has seen, the anchor included; `request_M` int64: the slot
    of each row's request. `penalty_M` float32, 1 is off. `block_MC` int64: tokens the row has seen
    besides, C may be 0; repeats and tokens already in `seen_SV` do no harm, so they can fill a
    short row."""
    out_MV = _penalised(logit_MV.float(), penalty_M[:, None], seen_SV[request_M])
    if not block_MC.shape[1]:
        return out_MV
    # From the logits as they came: a token twice in the block gets the same value twice.
    value_MC = logit_MV.gather(1, block_MC).float()
    seen = torch.ones_like(value_MC, dtype=torch.bool)
    return out_MV.scatter(1, block_MC, _penalised(value_MC, penalty_M[:, None], seen))


def _penalised(value_MX: Tensor, penalty_M1: Tensor, seen_MX: Tensor) -> Tensor:
    # Few are seen, so that on a CPU neither choice is a coin toss for the branch predictor.
    divided_MX = torch.where(seen_MX, value_MX / penalty_M1, value_MX)
    return torch.where(seen_MX & (value_MX < 0), value_MX * penalty_M1, divided_MX)


def block_before(token_M: Tensor, tile_row_M: Tensor, candidates: int) -> Tensor:
    """Candidates up to and including each row's own, int64 `[M, candidates]`, filled with its own
    token.

    A lane's rows lie one after the other: `token_M` int64 are the tokens they embed, the anchor
    (tile row 0) first, `tile_row_M` int64 their places in the block. So row j's block is all it
    has seen of the block, and an anchor's row repeats the anchor."""
    row_M1 = torch.arange(token_M.shape[0], device=token_M.device)[:, None]
    column_C = torch.arange(1, candidates + 1, device=token_M.device)
    tile_row_M1 = tile_row_M[:, None]
    return token_M[row_M1 - tile_row_M1 + torch.minimum(column_C, tile_row_M1)]


def see(seen_SV: Tensor, slot_N: Tensor, token_NT: Tensor, count_N: Tensor) -> None:
    """Mark the first `count_N` of each lane's tokens as seen by its request, in place.

    The rest, and all of an idle lane's (count 0), go to the last slot, which is never live."""
    index_T = torch.arange(token_NT.shape[1], device=token_NT.device)
    idle = seen_SV.shape[0] - 1
    slot_NT = torch.where(index_T < count_N[:, None], slot_N[:, None], idle)
    true = torch.ones((), dtype=torch.bool, device=seen_SV.device)
    seen_SV.index_put_((slot_NT, token_NT), true)
