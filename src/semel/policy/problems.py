"""What is wrong with a policy file: every problem, with its line, its key and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from semel.errors import Misuse

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value; a number is a place in a list."""


def path_words(path: Path) -> str:
    """Write a path as people do: ``consumers.mailer.sideEffects[0].name``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """One thing that makes a policy file invalid."""

    line: int | None
    """Counts from 1; None where the file as a whole is meant."""

    key: str
    """The path of the key, empty where the text is not even YAML."""

    what: str
    expected: str = ""
    suggestion: str = ""
    """The known word that is nearest to the one that was found."""

    def __str__(self) -> str:
        parts = [self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.suggestion:
            parts.append(f"did you mean {self.suggestion}?")
        return (f"{self.key}: " if self.key else "") + "; ".join(parts)


class PolicyInvalid(Misuse):
    """A policy file cannot be read; nothing of it is in force."""

    def __init__(self, name: str, problems: Sequence[PolicyProblem]) -> None:
        super().__init__(name, tuple(problems))
        self.name = name
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(
            f"{self.name}:{problem.line}: {problem}" if problem.line else f"{self.name}: {problem}"
            for problem in sorted(self.problems, key=lambda problem: problem.line or 0)
        )


class PolicyNameUnknown(Misuse):
    """A policy has no consumer or topic of that name, or the one does not read the other."""

    def __init__(self, what: str, name: str, known: Sequence[str]) -> None:
        super().__init__(what, name, tuple(known))
        self.what = what
        self.name = name
        self.known = tuple(known)

    def __str__(self) -> str:
        near = nearest(self.name, self.known)
        meant = f"; did you mean {near}?" if near else ""
        return f"{self.what} {self.name!r}: known are {', '.join(self.known) or 'none'}{meant}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that *word* most likely stands for; empty where none is near."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""
