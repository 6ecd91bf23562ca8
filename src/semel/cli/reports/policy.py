"""What the lint says of a policy file, and what is wrong with a file that is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semel.policy import (
    Answer,
    Finding,
    Linted,
    Policy,
    PolicyInvalid,
    Review,
    Severity,
    lint_policy,
)


@dataclass(frozen=True, slots=True)
class ProblemInFile:
    """One thing that makes a policy file invalid."""

    line: int | None
    key: str
    what: str
    expected: str
    suggestion: str
    """The known word that is nearest to the one that was found."""

    words: str
    """All of it in one line."""


@dataclass(frozen=True, slots=True)
class InvalidReport:
    """The answer about a file that cannot be read; the exit code is 2."""

    error: str
    file: str
    problems: list[ProblemInFile]

    @property
    def needs_attention(self) -> bool:
        """Tell that a person must mend it."""
        return True


@dataclass(frozen=True, slots=True)
class PolicyFinding:
    """One finding, where it is, and the way out."""

    severity: str
    """note, warn or refused."""

    code: str
    sentence: str
    fix: str
    key: str
    line: int | None
    anti_pattern: str | None


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """One of the twenty questions, answered."""

    number: int
    question: str
    status: str
    """ok, unknown, warn or refused."""

    text: str
    key: str
    """The key that decides it."""

    line: int | None


@dataclass(frozen=True, slots=True)
class PolicyPromise:
    """The semantics of one effect, with its scope."""

    semantics: str
    what: str
    under: list[str]
    caveat: str
    sentence: str


@dataclass(frozen=True, slots=True)
class PolicyReview:
    """One consumer on one topic."""

    consumer: str
    topic: str | None
    guarantee: str
    """The real one, with its scope, in one sentence."""

    promises: list[PolicyPromise]
    """The same, effect by effect."""

    findings: list[PolicyFinding]
    answers: list[PolicyAnswer]


@dataclass(frozen=True, slots=True)
class PolicyLintReport:
    """The answer to `semel policy lint`."""

    file: str
    refused: int
    """How many findings refuse a combination."""

    warnings: int
    reviews: list[PolicyReview]
    findings: list[PolicyFinding]
    """Those that belong to no consumer."""

    @property
    def needs_attention(self) -> bool:
        """Tell whether anything is refused or warned of; notes do not count."""
        return bool(self.refused or self.warnings)


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """The answer to `semel policy schema`."""

    schema: dict[str, Any]
    """The JSON Schema; without --json it is all that is printed."""

    @property
    def needs_attention(self) -> bool:
        """Tell that this only prints."""
        return False


def lint_report(policy: Policy, consumer: str | None) -> PolicyLintReport:
    """Lint a policy, or one consumer of it."""
    linted = lint_policy(policy, consumer)
    return PolicyLintReport(
        file=policy.source.name,
        refused=_count(linted, Severity.REFUSED),
        warnings=_count(linted, Severity.WARN),
        reviews=[_review(one) for one in linted.reviews],
        findings=[_finding(one) for one in linted.findings],
    )


def invalid_report(error: PolicyInvalid) -> InvalidReport:
    """Put the problems of a file into plain values."""
    return InvalidReport(
        f"{error.name}: the policy is invalid",
        error.name,
        [
            ProblemInFile(p.line, p.key, p.what, p.expected, p.suggestion, str(p))
            for p in sorted(error.problems, key=lambda problem: problem.line or 0)
        ],
    )


def _count(linted: Linted, severity: Severity) -> int:
    return sum(finding.severity is severity for finding in linted.every_finding)


def _review(one: Review) -> PolicyReview:
    promises = [
        PolicyPromise(str(p.semantics), p.what, list(p.under), p.caveat, p.sentence)
        for p in one.guarantee.promises
    ]
    return PolicyReview(
        one.consumer,
        one.topic,
        one.guarantee.sentence,
        promises,
        [_finding(finding) for finding in one.findings],
        [_answer(answer) for answer in one.answers],
    )


def _finding(one: Finding) -> PolicyFinding:
    named = None if one.anti_pattern is None else str(one.anti_pattern)
    return PolicyFinding(
        str(one.severity), one.code, one.sentence, one.fix, one.key, one.line, named
    )


def _answer(one: Answer) -> PolicyAnswer:
    return PolicyAnswer(one.number, one.question, str(one.status), one.text, one.key, one.line)
