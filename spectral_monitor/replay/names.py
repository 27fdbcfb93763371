"""Names of published checkpoints, read into step, tokens, stage and ingredient.

A name that does not match as a whole is unknown: nothing is guessed from a part of it, and nothing is assumed about
where it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Factor of a token count's suffix: thousands, millions, billions (also written G), trillions.
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_COUNT = r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[KMBGT])?[BT]?"
_NAME = re.compile(
    r"(?:stage(?P<stage>\d+)-)?"
    r"(?:ingredient(?P<ingredient>\d+)-)?"
    r"(?:step[-_]?(?P<step>\d+)(?:-tokens" + _COUNT + r"|-(?P<short>\d+(?:\.\d+)?)(?P<short_unit>[KMBG])T)?"
    r"|checkpoint-(?P<checkpoint>\d+))"
)

#: Tokens in one optimizer step, where a repository's own documentation states it. First match of the pattern counts.
KNOWN_TOKENS_PER_STEP: tuple[tuple[re.Pattern[str], int, str], ...] = (
    # The withdrawn "-v0" Pythias of some sizes had another batch size; they are left out.
    (re.compile(r"EleutherAI/pythia-(?!.*-v0)[\w.-]+\Z"), 2_097_152, "Pythia: 1,024 sequences of 2,048 tokens"),
    (re.compile(r"HuggingFaceTB/SmolLM2-1\.7B-intermediate-checkpoints\Z"), 2_097_152, "SmolLM2-1.7B model card"),
    (re.compile(r"HuggingFaceTB/SmolLM3-3B-checkpoints\Z"), 2_359_296, "SmolLM3-3B model card"),
)


@dataclass(frozen=True)
class RevisionName:
    """What a checkpoint's name says.

    Attributes:
        name: the name itself.
        step: finished optimizer updates.
        tokens: training tokens by the label; None where it has none.
        rounding: the label's tokens may be off by this much (half a unit of its last digit); None without tokens.
        stage, ingredient: numbers of the training stage and its data mix; None where not named.
    """

    name: str
    step: int
    tokens: float | None = None
    rounding: float | None = None
    stage: int | None = None
    ingredient: int | None = None

    @property
    def series(self) -> str:
        """Checkpoints of one series lie on one axis: ``""``, ``"stage1"``, ``"stage2-ingredient1"``."""
        parts = [] if self.stage is None else [f"stage{self.stage}"]
        return "-".join(parts + ([] if self.ingredient is None else [f"ingredient{self.ingredient}"]))

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorting key: stage, ingredient, then step as a number."""
        return (
            -1 if self.stage is None else self.stage,
            -1 if self.ingredient is None else self.ingredient,
            self.step,
            self.name,
        )


def parse_name(name: str) -> RevisionName | None:
    """Read ``name``; None when it is not one of the known forms.

    Known: ``step3000``, ``step_360``, ``step-125000``, ``step1000-tokens4B``, ``step-001000-2BT``,
    ``stage1-step102500-tokens860B``, ``stage2-ingredient1-step23852-tokens51B``, ``checkpoint-10``; token counts may
    have decimals and the suffixes K, M, B, G and T.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = match.groupdict()
    tokens = rounding = None
    for number, unit in ((found["count"], found["unit"]), (found["short"], found["short_unit"])):
        if number is not None:
            factor = _FACTORS[unit] if unit else 1.0
            tokens = float(number) * factor
            rounding = 0.5 * factor / 10 ** len(number.partition(".")[2]) if unit else 0.0
    return RevisionName(
        name=name,
        step=int(found["step"] or found["checkpoint"]),
        tokens=tokens,
        rounding=rounding,
        stage=None if found["stage"] is None else int(found["stage"]),
        ingredient=None if found["ingredient"] is None else int(found["ingredient"]),
    )


def parse_names(names: Iterable[str]) -> tuple[list[RevisionName], list[str]]:
    """Parsed names in numeric order, and the unknown ones in order of text."""
    known, unknown = [], []
    for name in names:
        parsed = parse_name(name)
        if parsed is None:
            unknown.append(name)
        else:
            known.append(parsed)
    return sorted(known, key=lambda item: item.order), sorted(unknown)


def tokens_per_step(repo: str) -> tuple[int, str] | None:
    """Tokens in one step of ``repo``'s training and where that is stated; None when not known here."""
    for pattern, count, source in KNOWN_TOKENS_PER_STEP:
        if pattern.match(repo):
            return count, source
    return None
