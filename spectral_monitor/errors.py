"""Errors a user can cause or meet. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class SpectralMonitorError(Exception):
    """Base of every error that this package raises on purpose."""


class ProbeError(SpectralMonitorError, ValueError):
    """The probe batch cannot be built, or does not fit the model."""


class CaptureError(SpectralMonitorError, RuntimeError):
    """The model's attention heads cannot be read, or would be read wrong."""


class ThresholdError(SpectralMonitorError, ValueError):
    """A threshold is out of range, or cannot be reached on this probe."""


class ScheduleError(SpectralMonitorError, ValueError):
    """The observation schedule makes no sense."""


class RecordError(SpectralMonitorError, RuntimeError):
    """A run directory cannot be written, read, or belongs to something else."""


class LoadError(SpectralMonitorError, RuntimeError):
    """A checkpoint cannot be loaded."""


class RankError(SpectralMonitorError, RuntimeError):
    """Another rank of a distributed run failed, so this one does not go on either."""
