"""The table in the documentation, held by a fast subset of the sweep: one family for each way of being read."""

from __future__ import annotations

import pytest
import transformers

from tests.architectures.sweep import CHECKED, DIFFERS, REFUSED, TABLE, check, families, table
from tests.architectures.tiny import tiny_probe

#: What is special about each; the whole sweep is ``python -m tests.architectures.sweep``.
SUBSET = {
    "bloom": "ALiBi, softmax over [rows * heads, T, T]",
    "mpt": "ALiBi, softmax",
    "falcon": "multi-query, its own SDPA call",
    "gpt_neo": "softmax, local attention",
    "gptj": "softmax, parallel attention",
    "xglm": "bypasses the registry",
    "gpt_bigcode": "multi-query",
    "deepseek_v3": "latent attention, value heads of another size",
    "qwen3_next": "gated output, hybrid",
    "bitnet": "norm between heads and projection",
    "beam": "gate as wide as the heads",
    "granite_swa": "sinks that eager rows leave out",
    "inkling2_text": "sinks that depend on the data, relative bias, attention over depth",
    "gemma4_text": "head sizes that differ by layer",
    "llama4_text": "chunked attention",
    "zamba": "shared block",
    "hrm_text": "layers that run more than once",
    "longcat_flash": "two attentions a layer",
    "diffllama": "differential attention",
    "rwkv": "no attention",
}


@pytest.mark.parametrize("model_type", list(SUBSET))
def test_a_family_of_each_kind_agrees_with_the_textbook_path_or_is_refused(model_type: str) -> None:
    if model_type not in families():
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    finding = check(model_type, tiny_probe())
    assert finding.outcome in (CHECKED, REFUSED), finding.note
    if transformers.__version__ in TABLE.read_text(encoding="utf-8"):
        assert table()[model_type] == finding.outcome


def test_the_table_holds_every_family_and_no_difference() -> None:
    if f"transformers {transformers.__version__}," not in TABLE.read_text(encoding="utf-8"):
        pytest.skip(f"the table is of another version than transformers {transformers.__version__}")
    outcomes = table()
    assert list(outcomes) == families()
    assert DIFFERS not in outcomes.values()
