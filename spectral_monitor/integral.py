"""The PR integral of a trajectory: arrays alone, so that records can be analysed without torch."""

from __future__ import annotations

import numpy as np

from spectral_monitor.observation import FloatArray


def pr_integral(tokens: FloatArray, pr: FloatArray) -> FloatArray:
    """``I = sum_t max(PR_t - 1, 0) * (log tokens_t - log tokens_{t-1})`` (recipe section 2).

    Args:
        tokens: [S] in increasing order. Observations at 0 tokens carry no weight: they have no logarithm.
        pr: [S] or [S, K]; a NaN (dead head, non-finite observation) adds nothing for its interval.

    Returns:
        [] or [K].
    """
    tokens = np.asarray(tokens, dtype=np.float64)
    pr = np.asarray(pr, dtype=np.float64)
    after = tokens > 0
    tokens, pr = tokens[after], pr[after]
    width = np.diff(np.log(tokens)) if len(tokens) > 1 else np.zeros(0)
    excess = np.nan_to_num(np.maximum(pr[1:] - 1, 0), nan=0.0)
    integral: FloatArray = np.tensordot(width, excess, axes=(0, 0))
    return integral
