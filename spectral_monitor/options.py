"""Options that several commands share: one name, one help text. Light: the command line imports it for ``--help``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Protocol(str, Enum):
    """Probe protocols."""

    default = "default"
    published = "published"


class Baseline(str, Enum):
    """Baselines of the selectivity."""

    others = "others"
    sampled = "sampled"
    uniform = "uniform"


# -- which checkpoint -------------------------------------------------------------------------------------------------

Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub repository.", show_default=False)
]
GgufFile = Annotated[
    str | None,
    typer.Option("--gguf-file", help="Name of the GGUF file in the folder or repository.", show_default=False),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16, float16, auto. Default: float32 below 2B parameters, else bfloat16.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1 ... Default: a GPU if there is one.", show_default=False),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings along.")
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Accept .bin weights (read with weights_only=True).")]

# -- the probe --------------------------------------------------------------------------------------------------------

Rows = Annotated[int, typer.Option("--n", help="Probe rows N (published: 2000).")]
ProbeSeed = Annotated[int, typer.Option("--seed", help="Seed of the probe batch.")]
TokenRange = Annotated[
    tuple[int, int], typer.Option("--token-range", metavar="LO HI", help="Token ids are drawn from [LO, HI).")
]
ProtocolName = Annotated[
    Protocol,
    typer.Option("--protocol", help="published: the papers' batch, token for token; default: no collisions."),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", help="Probe rows a micro-batch. Default: by device.", show_default=False),
]

# -- the screen -------------------------------------------------------------------------------------------------------

BaselineName = Annotated[
    Baseline, typer.Option("--baseline", help="What selectivity divides by (sampled: the published numbers).")
]
Member = Annotated[float, typer.Option("--member", help="Selectivity from which a head belongs to a circuit.")]
Classify = Annotated[float, typer.Option("--classify", help="Selectivity from which a head gets a class.")]
PreviousToken = Annotated[float, typer.Option("--previous-token", help="The previous-token circuit's own threshold.")]
MinAttention = Annotated[
    float, typer.Option("--min-attention", help="Attention mass below which a head is never a circuit member.")
]
NullDraws = Annotated[int, typer.Option("--null-draws", help="Random targets a head for the noise floor.")]

# -- the causal check -------------------------------------------------------------------------------------------------

Draws = Annotated[int, typer.Option("--draws", help="Matched-random draws of a causal check, at most.")]
