"""Peak memory of one way to look at a model, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def peak_mebibytes(what: str, length: int) -> float:
    """Peak resident memory above the loaded model's; ``what`` is ``plain``, ``observation`` or ``eager``."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", what, str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure(what: str, length: int) -> float:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spectral_monitor.capture import Subject
    from spectral_monitor.guest import guest
    from spectral_monitor.probe import induction_probe

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=length,
        attn_implementation="eager" if what == "eager" else "sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    probe = induction_probe(32, length, vocabulary=2000)
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
    print(_measure(sys.argv[1], int(sys.argv[2])))
