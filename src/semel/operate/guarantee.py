"""The guarantee of a pipeline: what happens once, under which failures, and what weakens it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from semel.lease import Takeover
from semel.pipeline.driver import Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import DescribesGuarantee, Guarantee, TwoPhaseSink

# A renewal is due after a third of the lease; a pause of the JVM or of the
# network for two thirds of it hands the scope to another process.
SHORT_LEASE_SECONDS: Final = 10.0
LONG_LEASE_SECONDS: Final = 600.0

# With fewer, `semel verify` on Monday cannot compare the cycles of Saturday.
FEW_CYCLES: Final = 100

_FLEETING: Final = re.compile(r"/(tmp|var/tmp|dev/shm|run)/")


@dataclass(frozen=True, slots=True)
class Weakness:
    """One setting, where it is, and the way out."""

    where: str
    what: str


FAILURES_COVERED: Final = (
    "the driver, an executor or a task dies at any instruction, any number of times",
    "an answer of the ledger or of a sink is lost, or comes late",
    "a second driver starts, or a stopped one wakes up: the older one is fenced",
    "the checkpoint is lost: overlap and gap are refused, not guessed",
)

NOT_COVERED: Final = (
    "effects of the query's own code outside the sinks (calls, prints, writes of its own)",
    "loss of the ledger, or restoring an old one without `semel adopt`",
    "a source that returns other records for the same range",
    "other writers that change or delete the rows",
)

_UNSTATED: Final = Guarantee("not stated by the sink", "not stated")


@dataclass(frozen=True, slots=True)
class SinkGuarantee:
    """One sink's guarantee, with its scope."""

    sink: str
    stated: bool
    """False: the sink does not say what it promises, so nothing may be assumed."""

    guarantee: Guarantee


@dataclass(frozen=True, slots=True)
class PipelineGuarantee:
    """The answer of `guarantee_of`."""

    scope: str
    ledger: str
    guarantee: str
    """The whole pipeline's, with its scope, in one sentence."""

    failures_covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    sinks: list[SinkGuarantee]
    weakened_by: list[Weakness]
    strict: bool

    @property
    def needs_attention(self) -> bool:
        """Return whether a setting weakens the guarantee or, if *strict*, a sink states none."""
        weak = bool(self.weakened_by) or any(sink.guarantee.weakened_by for sink in self.sinks)
        return weak or (self.strict and not all(sink.stated for sink in self.sinks))


def guarantee_of(
    scope: str,
    ledger: Ledger,
    sinks: Sequence[TwoPhaseSink],
    settings: Settings,
    *,
    strict: bool = False,
) -> PipelineGuarantee:
    """State the guarantee of every sink and of the whole pipeline; opens nothing."""
    names = ", ".join(sink.name for sink in sinks)
    batch = "each batch's rows" if len(sinks) == 1 else "each batch's rows, in all sinks or in none"
    return PipelineGuarantee(
        scope=scope,
        ledger=ledger.url,
        guarantee=(
            f"{batch}, become visible once in {names}; under the one decision per cycle that "
            f"ledger {ledger.url} keeps for {scope}; even under the failures listed below"
        ),
        failures_covered=FAILURES_COVERED,
        not_covered=NOT_COVERED,
        sinks=[
            SinkGuarantee(sink.name, True, sink.guarantee())
            if isinstance(sink, DescribesGuarantee)
            else SinkGuarantee(sink.name, False, _UNSTATED)
            for sink in sinks
        ],
        weakened_by=[*of_ledger(ledger), *of_settings(settings)],
        strict=strict,
    )


def weaknesses(
    ledger: Ledger, sinks: Sequence[TwoPhaseSink], settings: Settings | None
) -> list[Weakness]:
    """List every setting that weakens the guarantee."""
    return [*of_ledger(ledger), *of_settings(settings), *of_sinks(sinks)]


def of_ledger(ledger: Ledger) -> Iterable[Weakness]:
    """Judge where the ledger is."""
    where = f"ledger {ledger.url}"
    if ledger.url.startswith("memory:"):
        yield Weakness(where, "it is gone with its process; use sqlite:///… or postgresql://…")
    elif found := _FLEETING.search(ledger.url):
        yield Weakness(
            where,
            f"/{found[1]} is emptied by reboots or clean-ups, and with the ledger every decision "
            f"and position is gone; keep it on a disk that is backed up",
        )


def of_settings(settings: Settings | None) -> Iterable[Weakness]:
    """Judge how patient and how tidy the driver is."""
    if settings is None:
        return
    lease, keep = settings.lease_seconds, settings.keep_cycles
    weak = (
        (
            lease < SHORT_LEASE_SECONDS,
            f"lease_seconds={lease:g}: a pause of two thirds of it loses the scope to another "
            f"start; use {SHORT_LEASE_SECONDS:g} or more",
        ),
        (
            lease > LONG_LEASE_SECONDS,
            f"lease_seconds={lease:g}: after the loss of a host its successor waits that long; "
            f"use {LONG_LEASE_SECONDS:g} or less",
        ),
        (
            settings.takeover is Takeover.FORCE,
            "takeover=force: every start fences an owner that may be alive and well; use "
            "takeover=wait, and force a single start with `semel recover --takeover`",
        ),
        (
            settings.commit_backoff.tries < 2,
            "commit_backoff.tries=1: a moment's silence of one sink ends the query with a stranded "
            "transaction; use 2 or more",
        ),
        (
            keep < FEW_CYCLES,
            f"keep_cycles={keep}: older cycles can neither be verified nor looked up; use "
            f"{FEW_CYCLES} or more",
        ),
    )
    yield from (Weakness("settings", what) for is_weak, what in weak if is_weak)


def of_sinks(sinks: Sequence[TwoPhaseSink]) -> Iterable[Weakness]:
    """Ask the sinks which of their settings weaken it."""
    for sink in sinks:
        if isinstance(sink, DescribesGuarantee):
            for what in sink.guarantee().weakened_by:
                yield Weakness(f"sink {sink.name}", what)
