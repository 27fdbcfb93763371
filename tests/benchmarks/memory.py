"""Peak memory of one way to look at a model, in a fresh process.

Counted in what torch allocates for tensors, which comes out the same every time; resident memory also holds what the
allocator keeps back and what is imported meanwhile, and was seen to double from one run to the next.
"""

from __future__ import annotations

import subprocess
import sys

import torch


def peak_mebibytes(
    what: str, length: int, rows: int = 32, layers: int = 4, heads: int = 16, head_size: int = 16
) -> float:
    """Peak memory above the loaded model's, a random Llama of this size, in micro-batches of 4 rows.

    ``what`` is ``plain``, ``observation`` or ``eager`` (every attention matrix is returned).
    """
    numbers = [str(number) for number in (length, rows, layers, heads, head_size)]
    command = [sys.executable, "-m", "tests.benchmarks.memory", what, *numbers]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure(what: str, length: int, rows: int, layers: int, heads: int, head_size: int) -> float:
    from spectral_monitor.capture import Subject
    from spectral_monitor.guest import guest
    from spectral_monitor.probe import induction_probe
    from tests.benchmarks.measuring import random_llama

    model = random_llama(layers, heads, length, head_size)
    if what == "eager":
        model.set_attn_implementation("eager")
    probe = induction_probe(rows, length, vocabulary=2000)
    subject = Subject(model, probe.take(slice(0, 1))) if what == "observation" else None
    with torch.profiler.profile(profile_memory=True) as profiler:
        if subject is not None:
            subject.read(probe, 4, null_draws=20)
        else:
            with guest(model):
                for start in range(0, probe.rows, 4):
                    tokens = torch.from_numpy(probe.tokens[start : start + 4])
                    if what == "eager":
                        model(tokens, use_cache=False, output_attentions=True)
                    else:
                        model(tokens, use_cache=False, logits_to_keep=1)
    return _peak(profiler) / 2**20


def _peak(profiler: torch.profiler.profile) -> int:
    """Highest sum of allocations and releases, in bytes, in order of time."""
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    print(_measure(sys.argv[1], *(int(number) for number in sys.argv[2:])))
