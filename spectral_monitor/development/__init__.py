"""What a whole run or replay says about when circuits form (recipe section 5): pure functions of a record.

``develop(RunRecord.open(run_dir))`` gives everything; the modules beside this one hold one question each.
"""

from __future__ import annotations

from spectral_monitor.development.series import Bars, Series, series_of
from spectral_monitor.development.shapes import Shape, shape_of
from spectral_monitor.development.summary import Development, develop, develop_series, load_series

__all__ = [
    "Bars",
    "Development",
    "Series",
    "Shape",
    "develop",
    "develop_series",
    "load_series",
    "series_of",
    "shape_of",
]
