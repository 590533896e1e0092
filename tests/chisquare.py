"""Goodness of fit of counts, without scipy."""

import torch
from torch import Tensor


def p_value(count: Tensor, probability: Tensor) -> float:
    """Chance that counts from these probabilities fit as badly (Pearson's chi-square).

    Cells that expect fewer than 5 are merged into one. Counts where the probability is 0 give 0.
    """
    count, probability = count.double().flatten(), probability.double().flatten()
    assert abs(float(probability.sum()) - 1) < 1e-5
    if count[probability == 0].sum() > 0:
        return 0.0
    expected = probability * count.sum()
    large = expected >= 5
    cells = [(count[large], expected[large])]
    rest = count[~large].sum()[None], expected[~large].sum()[None]
    if float(rest[1]) > 0:
        cells.append(rest)
    observed, wanted = (torch.cat(x) for x in zip(*cells, strict=True))
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
