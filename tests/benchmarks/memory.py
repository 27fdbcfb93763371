"""Peak memory of one way to look at a model, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def peak_mebibytes(
    what: str, length: int, rows: int = 32, layers: int = 4, heads: int = 16, head_size: int = 16
) -> float:
    """Peak resident memory above the loaded model's, a random Llama of this size, in micro-batches of 4 rows.

    ``what`` is ``plain``, ``observation`` or ``eager`` (every attention matrix is returned).
    """
    numbers = [str(number) for number in (length, rows, layers, heads, head_size)]
    command = [sys.executable, "-m", "tests.benchmarks.memory", what, *numbers]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure(what: str, length: int, rows: int, layers: int, heads: int, head_size: int) -> float:
    import torch

    from spectral_monitor.capture import Subject
    from spectral_monitor.guest import guest
    from spectral_monitor.probe import induction_probe
    from tests.benchmarks.measuring import random_llama

    model = random_llama(layers, heads, length, head_size)
    if what == "eager":
        model.set_attn_implementation("eager")
    probe = induction_probe(rows, length, vocabulary=2000)
    subject = Subject(model, probe.take(slice(0, 1))) if what == "observation" else None
    warm = torch.from_numpy(probe.tokens[:1, :16])
    with torch.no_grad():
        model(warm, use_cache=False)
    before = _start()
    if subject is not None:
        subject.read(probe, 4)
    else:
        with guest(model):
            for start in range(0, probe.rows, 4):
                tokens = torch.from_numpy(probe.tokens[start : start + 4])
                if what == "eager":
                    model(tokens, use_cache=False, output_attentions=True)
                else:
                    model(tokens, use_cache=False, logits_to_keep=1)
    return _status("VmHWM") - before


def _start() -> float:
    """Forget the peak so far (the kernel's high-water mark) and return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) / 1024
    raise RuntimeError(f"this kernel does not tell {name}: measure memory on Linux")


if __name__ == "__main__":
    print(_measure(sys.argv[1], *(int(number) for number in sys.argv[2:])))
