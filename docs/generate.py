"""Prints the tables of the docs from the code: ``make docs`` rewrites every page.

A table stands between ``<!-- table: name -->`` and ``<!-- end -->``; what is between them is
never written by hand.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final

import typer.main

import semel
from docs import json_keys
from docs.markdown import attribute_docs, first_sentence, rules_of, table
from docs.messaging_tables import MESSAGING
from docs.policy_tables import REFERENCE, Rows
from semel import errors, events
from semel.cli.answer import MEANS
from semel.cli.app import app
from semel.crashpoints import CrashPoint
from semel.ledger.schema import INDEXES, VERSION
from semel.ledger.schema import TABLES as LEDGER_TABLES
from semel.operate.doctor import RUNBOOKS, Kind
from semel.pipeline.cycle import FAILURES, Step
from semel.pipeline.driver import Settings
from semel.pipeline.ledger import ARROWS
from semel.pipeline.recovery import DECIDE
from semel.pipeline.sink import Found, TwoPhaseSink
from semel.pipeline.source import SourceKind
from semel.pipeline.twophase import Backoff
from semel.spark.supervise import NEXT, RESTART_BACKOFF, Exit
from semel.testing import LedgerContract, SinkContract
from semel.testing.world import Invariant

PLACE: Final = re.compile(r"^<!-- table: (?P<name>[\w-]+) -->\n.*?^<!-- end -->$", re.M | re.S)


def failures() -> str:
    """How a step can fail, and what follows."""
    rows = [(f"`{step}`", failure, verdict) for (step, failure), verdict in FAILURES.items()]
    return table(("step", "failure", "what follows"), rows)


def arrows() -> str:
    """The states of an attempt."""
    said = attribute_docs(type(next(iter(ARROWS))))
    return table(
        ("state", "meaning", "may become"),
        [
            (
                f"`{state.name}`",
                said[state.name],
                ", ".join(f"`{s.name}`" for s in ARROWS if s in ARROWS[state]) or "nothing else",
            )
            for state in ARROWS
        ],
    )


def recovery() -> str:
    """What recovery does with a transaction that a sink still holds."""
    rows = [(says, f"`{decision}`") for says, decision in DECIDE.items()]
    return table(("the ledger says", "recovery decides"), rows)


def steps() -> str:
    """The seven steps, on one line."""
    return " → ".join(f"`{step}`" for step in Step)


def findings() -> str:
    """What a sink can know of an attempt."""
    said = attribute_docs(Found)
    return table(("answer", "meaning"), [(f"`{f}`", said[f.name]) for f in Found])


def source_kinds() -> str:
    """How a source's progress is recorded."""
    said = attribute_docs(SourceKind)
    return table(("kind", "meaning"), [(f"`{k}`", said[k.name]) for k in SourceKind])


def invariants() -> str:
    """What the simulation checks in every history."""
    return "\n".join(f"{n}. {invariant}" for n, invariant in enumerate(Invariant, 1))


def crash_points() -> str:
    """Every window, by what was being done."""
    by_step: dict[str, list[str]] = {}
    for point in CrashPoint:
        by_step.setdefault(point.step, []).append(f"`{point}`")
    return table(("step", "windows"), [(f"`{s}`", ", ".join(w)) for s, w in by_step.items()])


def exit_codes() -> str:
    """What a supervised pipeline's process returns."""
    said = attribute_docs(Exit)
    codes = sorted(Exit)
    rows = [(f"{code.value}", f"`{code.name}`", said[code.name], NEXT[code]) for code in codes]
    return table(("code", "name", "meaning", "what to do next"), rows)


def event_list() -> str:
    """Every event with its fields; ``scope`` is in all of them."""
    rows = []
    for name, kind in vars(events).items():
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event:
            nouns = ", ".join(f"`{f.name}`" for f in fields(kind) if f.name != "scope")
            rows.append((f"`{name}`", first_sentence(kind), nouns))
    return table(("event", "when", "fields"), rows)


# Tests and commands have errors of their own, which users never catch.
PART_WITH_ERRORS: Final = re.compile(r"semel\.(?!(testing|demo|cli|__main__)\b)")


def error_tree() -> str:
    """Every error class below its group."""
    for module in pkgutil.walk_packages(semel.__path__, "semel."):
        if PART_WITH_ERRORS.match(module.name):
            importlib.import_module(module.name)
    rows = []
    others = []
    for group in errors.SemelError.__subclasses__():
        if group.__module__ != errors.__name__:
            others += [group] if _is_public(group) else []
            continue
        rows.append((f"**`{group.__name__}`**", first_sentence(group), ""))
        rows += [_error(leaf) for leaf in sorted(_below(group), key=lambda c: c.__name__)]
    if others:
        rows.append(("**in no group**", "", ""))
        rows += [_error(error) for error in others]
    return table(("error", "meaning", "defined in"), rows)


def _error(kind: type) -> tuple[str, str, str]:
    return f"`{kind.__name__}`", first_sentence(kind), f"`{kind.__module__}`"


def _is_public(kind: type) -> bool:
    return not kind.__name__.startswith("_") and bool(PART_WITH_ERRORS.match(kind.__module__))


def _below(group: type) -> list[type]:
    found = []
    for leaf in filter(_is_public, group.__subclasses__()):
        found += [leaf, *_below(leaf)]
    return found


def settings() -> str:
    """The fields of `semel.Settings`."""
    return table(("setting", "default", "meaning"), _fields(Settings, SETTINGS_SAID))


def backoff() -> str:
    """The fields of a back-off, and the three that are used."""
    uses = [
        ("a cycle's attempts", Settings().cycle_backoff),
        ("a sink's commit, in place", Settings().commit_backoff),
        ("the query's restarts", RESTART_BACKOFF),
    ]
    names = [f.name for f in fields(Backoff)]
    rows = [(what, *(f"{getattr(b, n):g}" for n in names)) for what, b in uses]
    return table(("between", *(f"`{name}`" for name in names)), rows)


SETTINGS_SAID: Final = {
    "lease_seconds": "How long a lease lasts unless renewed, which happens every third of it.",
    "takeover": "Whether a start waits for another owner's live lease, or takes the scope at once.",
    "cycle_backoff": "How long to wait between two attempts.",
    "commit_backoff": "How often and how patiently a sink's commit is repeated in place.",
}


def _fields(kind: type, said: dict[str, str]) -> list[Sequence[str]]:
    docs = attribute_docs(kind)
    return [
        (f"`{f.name}`", f"`{_default(f)}`", docs.get(f.name) or said[f.name]) for f in fields(kind)
    ]


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required"
    if isinstance(field.default, Backoff):
        return "see below"
    return str(field.default) if isinstance(field.default, str) else repr(field.default)


def sink_methods() -> str:
    """The methods of a sink, with the first sentence of each."""
    rows = [
        (f"`{name}`", first_sentence(member.fget if isinstance(member, property) else member))
        for name, member in vars(TwoPhaseSink).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    return table(("method", "what it does"), rows)


def sink_rules() -> str:
    """What the sink contract tests, as its own sentences."""
    return rules_of(SinkContract)


def ledger_rules() -> str:
    """What the ledger contract tests, as its own sentences."""
    return rules_of(LedgerContract)


def commands() -> str:
    """Every command with the first sentence of its help."""
    rows = []
    for name, command in _leaves(typer.main.get_command(app), ()):
        options = [p.opts[0] for p in command.params if p.name not in ("as_json", "debug")]
        shown = ", ".join(f"`{option}`" for option in options if option.startswith("-"))
        rows.append((f"`semel {name}`", first_sentence(command.callback), shown))
    return table(("command", "what it does", "options"), rows)


def _leaves(command: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        return [(" ".join(path), command)]
    return [leaf for name, sub in below.items() for leaf in _leaves(sub, (*path, name))]


def command_exit_codes() -> str:
    """What the exit code of a command means."""
    rows = [(code.value, f"`{code.name}`", words) for code, words in MEANS.items()]
    return table(("code", "name", "meaning"), rows)


def doctor() -> str:
    """What the doctor finds, and what to read about it."""
    said = attribute_docs(Kind)
    rows = []
    for kind in Kind:
        page = RUNBOOKS[kind].removeprefix("docs/operate/")
        rows.append((f"`{kind}`", said.get(kind.name, ""), f"[{Path(page).stem}]({page})"))
    return table(("finding", "meaning", "runbook"), rows)


def ledger_schema() -> str:
    """The statements that make the ledger's tables."""
    lines = [f"-- version {VERSION}"]
    for statement in (*LEDGER_TABLES.values(), *INDEXES):
        lines.append(f"{textwrap.dedent(statement).strip()};")
    return "```sql\n" + "\n\n".join(lines) + "\n```"


def _printer(rows: Callable[[], Rows]) -> Callable[[], str]:
    return lambda: table(*rows())


TABLES: Final[dict[str, Callable[[], str]]] = {
    "arrows": arrows,
    "backoff": backoff,
    "command-exit-codes": command_exit_codes,
    "commands": commands,
    "crash-points": crash_points,
    "doctor": doctor,
    "errors": error_tree,
    "events": event_list,
    "exit-codes": exit_codes,
    "failures": failures,
    "findings": findings,
    "invariants": invariants,
    "ledger-rules": ledger_rules,
    "ledger-schema": ledger_schema,
    "recovery": recovery,
    "settings": settings,
    "sink-methods": sink_methods,
    "sink-rules": sink_rules,
    "source-kinds": source_kinds,
    "steps": steps,
    **{name: _printer(rows) for name, rows in REFERENCE.items()},
    **MESSAGING,
}
"""By the name that stands in the page."""


def regenerated(text: str) -> str:
    """Return a page with every table as the code has it now."""

    def renew(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return PLACE.sub(renew, text)


def main() -> None:
    """Rewrite every page whose tables have changed."""
    root = Path(__file__).parents[1]
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text()
        new = json_keys.page() if page.name == "json.md" else regenerated(text)
        if new != text:
            page.write_text(new)
            print(f"rewrote {page.relative_to(root)}")


if __name__ == "__main__":
    main()
