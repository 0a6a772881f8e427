"""What came out of an experiment: checks that can fail, and why one failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOLDS, FAILS, UNJUDGED = "holds", "does not hold", "not judged"


@dataclass(frozen=True)
class Check:
    """One thing that must be so for the claim to hold.

    Attributes:
        name: a short name, unique in its experiment; reasons refer to it.
        says: what is asked, tolerance included, in a sentence.
        found: the figures that bear on it.
        holds: whether it is so.
    """

    name: str
    says: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Reason:
    """Why a check fails, shown only where it does.

    Attributes:
        check: the name of the check, or how it begins.
        text: the explanation.
        tested: whether an experiment backs it; otherwise it is a reading.
        scales: where it applies.
    """

    check: str
    text: str
    tested: bool
    scales: tuple[str, ...] = ("smoke", "desk", "full")


@dataclass(frozen=True)
class Verdict:
    """The checks of an experiment. The claim holds if all of them do."""

    claim: str
    checks: tuple[Check, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the claim holds; never true of nothing."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    @property
    def word(self) -> str:
        """The verdict in words."""
        if not self.checks:
            return UNJUDGED
        return HOLDS if self.holds else FAILS

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for verdict.json."""
        return {
            "claim": self.claim,
            "verdict": self.word,
            "checks": [asdict(check) for check in self.checks],
            "reasons": [
                {"check": r.check, "text": r.text, "tested": r.tested}
                for r in self.reasons
            ],
        }


def judge(
    claim: str, checks: Sequence[Check], reasons: Sequence[Reason], scale: str
) -> Verdict:
    """The verdict, with those reasons that explain a check that failed."""
    failed = [check.name for check in checks if not check.holds]
    apply = [
        reason
        for reason in reasons
        if scale in reason.scales
        and any(name.startswith(reason.check) for name in failed)
    ]
    return Verdict(claim, tuple(checks), tuple(apply))


def from_dict(values: Mapping[str, Any]) -> Verdict:
    """Read what `Verdict.to_dict` wrote."""
    return Verdict(
        values["claim"],
        tuple(Check(**check) for check in values["checks"]),
        tuple(Reason(**reason) for reason in values["reasons"]),
    )
