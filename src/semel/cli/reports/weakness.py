"""Settings in force that make the guarantee weaker than it could be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from semel.lease import Takeover
from semel.pipeline.driver import Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import DescribesGuarantee, TwoPhaseSink

# A renewal is due after a third of the lease; a pause of the JVM or of the
# network for two thirds of it hands the scope to somebody else.
SHORT_LEASE_SECONDS: Final = 10.0
LONG_LEASE_SECONDS: Final = 600.0

# Fewer, and a `semel verify` on Monday cannot look at Saturday.
FEW_CYCLES: Final = 100

_FLEETING: Final = re.compile(r"/(tmp|var/tmp|dev/shm|run)/")


@dataclass(frozen=True, slots=True)
class Weakness:
    """One setting, where it is, and the way out."""

    where: str
    what: str


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
    if settings.lease_seconds < SHORT_LEASE_SECONDS:
        yield Weakness(
            "settings",
            f"lease_seconds={settings.lease_seconds:g}: a pause of two thirds of it loses the "
            f"scope to another start; use {SHORT_LEASE_SECONDS:g} or more",
        )
    if settings.lease_seconds > LONG_LEASE_SECONDS:
        yield Weakness(
            "settings",
            f"lease_seconds={settings.lease_seconds:g}: after the loss of a host its successor "
            f"waits that long; use {LONG_LEASE_SECONDS:g} or less",
        )
    if settings.takeover is Takeover.FORCE:
        yield Weakness(
            "settings",
            "takeover=force: every start fences an owner that may be alive and well; use "
            "takeover=wait, and force a single start with `semel recover --takeover`",
        )
    if settings.commit_backoff.tries < 2:
        yield Weakness(
            "settings",
            "commit_backoff.tries=1: a moment's silence of one sink ends the query with a stranded "
            "transaction; use 2 or more",
        )
    if settings.keep_cycles < FEW_CYCLES:
        yield Weakness(
            "settings",
            f"keep_cycles={settings.keep_cycles}: older cycles can neither be verified nor looked "
            f"up; use {FEW_CYCLES} or more",
        )


def of_sinks(sinks: Sequence[TwoPhaseSink]) -> Iterable[Weakness]:
    """Ask the sinks themselves."""
    for sink in sinks:
        if isinstance(sink, DescribesGuarantee):
            for what in sink.guarantee().weakened_by:
                yield Weakness(f"sink {sink.name}", what)
