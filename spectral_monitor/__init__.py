"""Watch attention circuits form while a language model trains.

The public names are loaded on first use, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "ProbeBatch": "probe",
    "induction_probe": "probe",
    "SpectralMonitor": "monitor",
    "default_probe": "monitor",
    "SpectralMonitorCallback": "attach.trainer",
    "LogSchedule": "schedule",
    "Thresholds": "screen",
    "CheckOptions": "causal",
    "WarningParameters": "warning",
    "Actions": "response",
    "RunRecord": "record",
    "Head": "heads",
    "Observation": "observation",
    "Event": "observation",
    "Verdict": "observation",
    "SpectralMonitorError": "errors",
}

__all__ = [
    "Actions",
    "CheckOptions",
    "Event",
    "Head",
    "LogSchedule",
    "Observation",
    "ProbeBatch",
    "RunRecord",
    "SpectralMonitor",
    "SpectralMonitorCallback",
    "SpectralMonitorError",
    "Thresholds",
    "Verdict",
    "WarningParameters",
    "default_probe",
    "induction_probe",
]

if TYPE_CHECKING:
    from spectral_monitor.attach.trainer import SpectralMonitorCallback
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.errors import SpectralMonitorError
    from spectral_monitor.heads import Head
    from spectral_monitor.monitor import SpectralMonitor, default_probe
    from spectral_monitor.observation import Event, Observation, Verdict
    from spectral_monitor.probe import ProbeBatch, induction_probe
    from spectral_monitor.record import RunRecord
    from spectral_monitor.response import Actions
    from spectral_monitor.schedule import LogSchedule
    from spectral_monitor.screen import Thresholds
    from spectral_monitor.warning import WarningParameters


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
