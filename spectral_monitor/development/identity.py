"""Is it the same circuit? Jaccard between two sets of heads, against what chance gives (recipe section 5).

Chance: the second set keeps its number of heads in each layer and is otherwise drawn at random, so two circuits that
merely sit in the same layers do not look alike. The overlap in a layer is then hypergeometric, the layers are
independent, and the distribution of the whole overlap is their convolution: exact, nothing is sampled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spectral_monitor.heads import Head


@dataclass(frozen=True)
class Overlap:
    """Two sets of heads, compared.

    Attributes:
        size_a, size_b, shared: heads.
        jaccard: shared / union; NaN when both are empty.
        expected: mean Jaccard by chance, the layers kept; ``expected_anywhere``: with heads drawn from all layers.
        p_value: chance of at least this overlap, the layers kept.
    """

    size_a: int
    size_b: int
    shared: int
    jaccard: float
    expected: float
    expected_anywhere: float
    p_value: float


def overlap(a: Iterable[Head], b: Iterable[Head], heads: Iterable[Head]) -> Overlap:
    """Compare two sets of heads of a model whose heads are ``heads``."""
    a, b = set(a), set(b)
    shared, union = len(a & b), len(a | b)
    if not union:
        return Overlap(0, 0, 0, math.nan, math.nan, math.nan, math.nan)
    of_layer = Counter(head.layer for head in heads)
    in_a, in_b = Counter(head.layer for head in a), Counter(head.layer for head in b)
    kept = np.ones(1)
    for layer, number in of_layer.items():
        kept = np.convolve(kept, _overlaps(number, in_a[layer], in_b[layer]))
    anywhere = _overlaps(sum(of_layer.values()), len(a), len(b))
    return Overlap(
        size_a=len(a),
        size_b=len(b),
        shared=shared,
        jaccard=shared / union,
        expected=_mean_jaccard(kept, len(a) + len(b)),
        expected_anywhere=_mean_jaccard(anywhere, len(a) + len(b)),
        p_value=float(min(1.0, kept[shared:].sum())),
    )


def _overlaps(number: int, a: int, b: int) -> np.ndarray:
    """Distribution of the overlap of an a-set and a random b-set among ``number`` heads (hypergeometric)."""
    ways = [math.comb(a, shared) * math.comb(number - a, b - shared) for shared in range(min(a, b) + 1)]
    return np.array([count / math.comb(number, b) for count in ways])


def _mean_jaccard(distribution: np.ndarray, sizes: int) -> float:
    shared = np.arange(len(distribution))
    return float((distribution * shared / (sizes - shared)).sum())
