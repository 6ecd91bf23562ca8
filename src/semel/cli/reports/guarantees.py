"""What a pipeline, as it is configured, does once, where, and under which failures."""

from __future__ import annotations

from dataclasses import dataclass

from semel.cli.reports.weakness import Weakness, of_ledger, of_settings
from semel.cli.target import Configured
from semel.pipeline.sink import DescribesGuarantee


@dataclass(frozen=True, slots=True)
class SinkGuarantee:
    """One sink's guarantee, with its scope."""

    sink: str
    stated: bool
    """False: the sink does not say what it promises, so nothing may be assumed."""

    effect: str
    readers_see: str
    not_covered: list[str]
    weakened_by: list[str]


@dataclass(frozen=True, slots=True)
class LintReport:
    """The answer to `semel lint`."""

    scope: str
    ledger: str
    guarantee: str
    """The whole pipeline's, with its scope, in one sentence."""

    failures_covered: list[str]
    not_covered: list[str]
    sinks: list[SinkGuarantee]
    weakened_by: list[Weakness]
    strict: bool

    @property
    def needs_attention(self) -> bool:
        """Tell whether a setting weakens the guarantee; with --strict also what is unstated."""
        weak = bool(self.weakened_by) or any(sink.weakened_by for sink in self.sinks)
        return weak or (self.strict and not all(sink.stated for sink in self.sinks))


FAILURES_COVERED = (
    "the driver, an executor or a task dies at any instruction, any number of times",
    "an answer of the ledger or of a sink is lost, or comes late",
    "a second driver starts, or a stopped one wakes up: the older one is fenced",
    "the checkpoint is lost: overlap and gap are refused, not guessed",
)

NOT_COVERED = (
    "effects of the query's own code outside the sinks (calls, prints, writes of its own)",
    "loss of the ledger, or restoring an old one without `semel adopt`",
    "a source that returns other records for the same range",
    "other writers that change or delete the rows",
)


def lint_report(pipeline: Configured, strict: bool = False) -> LintReport:
    """State the guarantee of every sink and of the whole."""
    scope = f"{pipeline.app}/{pipeline.query}"
    sinks = [_of_sink(sink) for sink in pipeline.sinks]
    names = ", ".join(sink.sink for sink in sinks)
    batch = "each batch's rows" if len(sinks) == 1 else "each batch's rows, in all sinks or in none"
    return LintReport(
        scope=scope,
        ledger=pipeline.ledger.url,
        guarantee=(
            f"{batch}, become visible once in {names}; under the one decision per cycle that "
            f"ledger {pipeline.ledger.url} keeps for {scope}; whatever of the failures "
            f"below happens"
        ),
        failures_covered=list(FAILURES_COVERED),
        not_covered=list(NOT_COVERED),
        sinks=sinks,
        weakened_by=[*of_ledger(pipeline.ledger), *of_settings(pipeline.settings)],
        strict=strict,
    )


def _of_sink(sink: object) -> SinkGuarantee:
    name = str(getattr(sink, "name", sink))
    if not isinstance(sink, DescribesGuarantee):
        return SinkGuarantee(name, False, "not stated by the sink", "not stated", [], [])
    told = sink.guarantee()
    return SinkGuarantee(
        name, True, told.effect, told.readers_see, list(told.not_covered), list(told.weakened_by)
    )
