"""A pipeline as operators see it: a scope of a ledger, with its sinks and settings."""

from __future__ import annotations

from dataclasses import dataclass

from semel.errors import Misuse
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.txn import CycleId, Scope


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A scope of a ledger that exists, with its sinks, as the user's program configures them."""

    ledger: Ledger
    scope: Scope
    sinks: tuple[TwoPhaseSink, ...]
    settings: Settings

    @classmethod
    def of(cls, driver: Driver) -> Pipeline:
        """Take what a driver was made with; the driver itself is not used."""
        return cls(driver.ledger, driver.scope, driver.sinks, driver.settings)


def cycle_of(scope: Scope, label: str) -> CycleId:
    """Read ``g1.b42``.

    Raises:
        Misuse: it is not a cycle's label.
    """
    try:
        return CycleId.parse(scope, label)
    except ValueError as error:
        raise Misuse(f"--cycle {label}: write it as g1.b42, as `semel history` does") from error
