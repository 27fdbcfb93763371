"""``python -m spectral_monitor``."""

from spectral_monitor.cli import main

main()
