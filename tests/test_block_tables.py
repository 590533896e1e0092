"""Block tables keep their strides when compiled: FlexAttention addresses lanes by them."""

import pytest
import torch
from paged import shuffled_paging
from torch import Tensor

from dscale.compiled.attention import Tile, block_tables
from dscale.compiled.kv import Paging

seen: list[tuple[int, ...]] = []
library = torch.library.Library("dscale_tests", "DEF")
# Without this tag Inductor would copy the argument into the layout it was traced with.
library.define("note_strides(Tensor x) -> Tensor", tags=[torch.Tag.flexible_layout])


def note_strides(x: Tensor) -> Tensor:
    seen.append(tuple(x.stride()))
    return x.clone()


library.impl("note_strides", note_strides, "CPU")
torch.library.register_fake("dscale_tests::note_strides", torch.empty_like, lib=library)


@pytest.mark.parametrize(("height", "group"), [(16, 3), (16, 4), (16, 7), (128, 3)])
def test_compiled_tables_have_the_strides_of_their_shape(height: int, group: int) -> None:
    torch._dynamo.reset()
    pages = shuffled_paging([5, 130, 260, 127], pages=4, num_pages=20)
    lane_N = torch.tensor([2, 0, 3, 1])
    torch._dynamo.mark_dynamic(lane_N, 0)

    def tables(
        lane_N: Tensor, page_SL: Tensor, logical_SP: Tensor, context_S: Tensor
    ) -> list[Tensor]:
        paging = Paging(page_SL[lane_N], logical_SP[lane_N], context_S[lane_N])
        made = block_tables(paging, Tile(height=height), group)
        return [torch.ops.dscale_tests.note_strides(table) for table in made]

    want = tables(lane_N, *pages)
    seen.clear()
    got = torch.compile(tables, fullgraph=True)(lane_N, *pages)
    assert len(seen) == 4
    for table, reference, strides in zip(got, want, seen, strict=True):
        assert torch.equal(table, reference)
        assert strides == torch.empty(table.shape).stride()
