"""Docstrings, comments, error texts and pages are written in plain English.

Each phrase below reads badly for an engineer whose English is a second language:
an old word, a riddle, or a thing that acts like a person.  The parts in `CLEAN` must
not contain any of them; a part that becomes clean is added there, and none is removed.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# fmt: off
BANNED = {
    # phrase                                         what to write
    r"whoever|whomever|whosever":                    "the subject: the process, the caller",
    r"nobody|no one('s)?":                           "the fact: no process, is unknown, cannot be",
    r"everybody|everyone":                           "every process, every caller",
    r"whichever":                                    "any, or the one that …",
    r"see that":                                     "check that, raise if",
    r"tells? whether|told whether":                  "return whether, True if",
    r"tells? (from|apart)|told (from|apart)":        "distinguish",
    r"can(not)? tell|can't tell":                    "is unknown, cannot know",
    r"(is|are|was|were|be|been) told":               "is reported, is logged, is set to",
    r"so (many|often|long) (at|in|again|per|keys)":  "this many, this long",
    r"takes? \w+ along|took \w+ along":              "in the same transaction",
    r"owes?|owed|owing":                             "must still write",
    r"bur(y|ies|ied|ial)|burying":                   "dead-letter",
    r"acquit(s|ted|ting|tal)?":                      "clear the note",
    r"lets? (it|them|\w+s) go|lets? go( of)?":       "release",
    r"waiting room|the room":                        "waiting table",
    r"puts? aside|putting aside|kept aside":         "quarantine, dead-letter or park",
    r"(say|says|said|saying) aloud":                 "emit an event",
    r"says? nothing of|knows? nothing of":           "does not contain, is not in",
    r"more than (nothing|none|no \w+)":              "greater than 0",
    r"not less than none|none at least":             "at least 0",
    r"from 1 on":                                    "at least 1",
    r"the \{?\w*\}?\d*\. time":                      "attempt N",
    r"whatever (it|they|he|the|its|their) \w+":      "any, regardless of, even if",
    r"whatever (happens|happened|else|comes|came)":  "in every case, any other",
    r"by (its|their|his) own word|(its|'s) word":    "by its own setting",
    r"behind its back":                              "unnoticed",
    r"say goodbye|good-bye|farewell":                "close the connection",
    r"is no (message|offset|number|text|plain|id)":  "is not a …",
    r"that is no \w+ of":                            "that is not a …",
    r"without (a word|end)":                         "silently; without a limit",
    r"as it stands|as they stand":                   "unchanged",
    r"outlived?":                                    "lasts longer than, survives",
    r"for good":                                     "permanently",
}
# fmt: on
"""By regular expression: what to write instead."""

ALLOWED = {
    "src/semel/testing/services/postgres.py": ("nobody", "the name of a Unix user"),
}
"""By file: a phrase that it may contain, and the reason."""

SRC = "src/semel"
CLEAN = (
    "CONTRIBUTING.md",
    "bench",
    "docs/cadence.md",
    "docs/concepts.md",
    "docs/decisions/2026-11-16-attempts.md",
    "docs/decisions/2026-11-16-blame-after-a-crash.md",
    "docs/decisions/2026-11-16-chunks-with-savepoints.md",
    "docs/decisions/2026-11-16-crash-points-in-the-code.md",
    "docs/decisions/2026-11-16-held-transaction.md",
    "docs/decisions/2026-11-16-no-pending-flag.md",
    "docs/decisions/2026-11-16-one-waiting-table.md",
    "docs/decisions/2026-11-16-plain-sql-in-the-ledger.md",
    "docs/decisions/2026-11-16-positions-not-batch-numbers.md",
    "docs/decisions/2026-11-16-row-hash.md",
    "docs/decisions/2026-11-16-the-claim-is-the-first-statement.md",
    "docs/decisions/2026-11-16-the-handlers-session-cannot-end.md",
    "docs/decisions/2026-11-16-the-ledger-decides.md",
    "docs/decisions/2026-11-16-the-relay-deletes.md",
    "docs/decisions/2026-11-16-win-abort-when-in-doubt.md",
    "docs/decisions/2026-11-18-five-front-doors.md",
    "docs/decisions/2026-11-18-marks-with-the-batch.md",
    "docs/decisions/2026-11-18-one-guard.md",
    "docs/decisions/index.md",
    "docs/glossary.md",
    "docs/guarantees.md",
    "docs/howto/adopt.md",
    "docs/howto/batches.md",
    "docs/howto/claims.md",
    "docs/howto/cluster.md",
    "docs/howto/consumer.md",
    "docs/howto/external-effects.md",
    "docs/howto/files.md",
    "docs/howto/handler-rules.md",
    "docs/howto/inbox.md",
    "docs/howto/kafka-source.md",
    "docs/howto/memory-broker.md",
    "docs/howto/sinks/memory.md",
    "docs/howto/migrate-processed-messages.md",
    "docs/howto/ordering-and-gaps.md",
    "docs/howto/outbox.md",
    "docs/howto/own-consumer-proof.md",
    "docs/howto/own-sink.md",
    "docs/howto/policy.md",
    "docs/howto/postgres.md",
    "docs/howto/replay.md",
    "docs/howto/retention-and-erasure.md",
    "docs/howto/retries-dead-letters-parking.md",
    "docs/howto/several-queries.md",
    "docs/howto/sinks/delta.md",
    "docs/howto/sinks/iceberg.md",
    "docs/howto/stateful-queries.md",
    "docs/index.md",
    "docs/operate/index.md",
    "docs/operate/runbooks/consumer-behind.md",
    "docs/operate/runbooks/dead-letters-arriving.md",
    "docs/operate/runbooks/duplicate-spike.md",
    "docs/operate/runbooks/lost-checkpoint.md",
    "docs/operate/runbooks/lost-lease.md",
    "docs/operate/runbooks/outbox-grows.md",
    "docs/operate/runbooks/poison.md",
    "docs/operate/runbooks/sink-not-finished.md",
    "docs/operate/runbooks/slow-commits.md",
    "docs/operate/runbooks/stale-claim.md",
    "docs/operate/runbooks/stuck-key.md",
    "docs/operate/runbooks/wrong-ledger.md",
    "docs/performance.md",
    "docs/pitfalls.md",
    "docs/policy_tables.py",
    "docs/quickstart.md",
    "docs/reference/consuming.md",
    "docs/reference/crash-points.md",
    "docs/reference/cycle.md",
    "docs/reference/errors.md",
    "docs/reference/events.md",
    "docs/reference/json.md",
    "docs/reference/ledger.md",
    "docs/reference/metrics.md",
    "docs/reference/policy.md",
    "docs/reference/settings.md",
    "docs/visibility.md",
    "examples",
    f"{SRC}/*.py",
    f"{SRC}/arrow",
    f"{SRC}/cli",
    f"{SRC}/files",
    f"{SRC}/ledger",
    f"{SRC}/memory",
    f"{SRC}/messaging/classic.py",
    f"{SRC}/messaging/handler.py",
    f"{SRC}/messaging/database.py",
    f"{SRC}/messaging/failed",
    f"{SRC}/messaging/failure.py",
    f"{SRC}/messaging/handle",
    f"{SRC}/messaging/outcome.py",
    f"{SRC}/messaging/records.py",
    f"{SRC}/messaging/receive",
    f"{SRC}/messaging/redact.py",
    f"{SRC}/messaging/send",
    f"{SRC}/messaging/settings.py",
    f"{SRC}/operate",
    f"{SRC}/pipeline",
    f"{SRC}/policy",
    f"{SRC}/postgres",
    f"{SRC}/spark",
    f"{SRC}/sql",
    f"{SRC}/testing",
)
"""The parts that are clean: files, folders with everything in them, or patterns."""


def files_of(part: str) -> list[Path]:
    """Return the Python modules and Markdown pages of a part."""
    found = ROOT.glob(part) if "*" in part else [ROOT / part]
    return sorted(
        path
        for one in found
        for path in (one.rglob("*") if one.is_dir() else [one])
        if path.suffix in {".py", ".md"}
    )


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what people read in a file, each with its line: no names, no code."""
    text = path.read_text()
    yield from prose_of_page(text) if path.suffix == ".md" else prose_of_module(text)


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments of a module."""
    tree = ast.parse(text)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts_of_others = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        if id(node) in parts_of_others:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    # Neighbouring lines of a comment are one text: a phrase may cross the line's end.
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, " ".join(block)
                block, first = [], token.start[0]
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield first, " ".join(block)


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page, without its code."""
    without_code = re.sub(
        r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S
    )
    line = 1
    for paragraph in without_code.split("\n\n"):
        yield line, re.sub(r"`[^`]*`", "…", paragraph)
        line += paragraph.count("\n") + 2


def violations(prose: Iterator[tuple[int, str]]) -> list[str]:
    """Return the banned phrases in *prose*, each with its line and what to write instead."""
    found = []
    for line, text in prose:
        sentence = " ".join(text.split())
        for phrase, instead in BANNED.items():
            for match in re.finditer(rf"(?<![\w-])(?:{phrase})(?![\w-])", sentence, re.IGNORECASE):
                around = sentence[max(0, match.start() - 30) : match.end() + 30]
                found.append(f"line {line}: {match[0]!r} in {around!r}; write: {instead}")
    return found


@pytest.mark.parametrize("part", CLEAN)
def test_a_clean_part_stays_clean(part):
    files = files_of(part)
    assert files, f"{part} does not exist"

    found: dict[str, list[str]] = {}
    for path in files:
        name = str(path.relative_to(ROOT))
        allowed = repr(ALLOWED[name][0]) if name in ALLOWED else None
        bad = [why for why in violations(prose_of(path)) if f": {allowed} in " not in why]
        if bad:
            found[name] = bad

    assert found == {}


@pytest.mark.parametrize(
    ("module", "phrase"),
    [
        ('"""Tell whether it works."""', "Tell whether"),
        ("# A comment that nobody\n# reads.", "nobody"),
        ('raise ValueError(f"{name} is told")', "is told"),
        ("# It lets\n# go of the key.", "lets go"),
    ],
)
def test_a_phrase_is_found_in_docstrings_comments_and_messages(module, phrase):
    (found,) = violations(prose_of_module(module))

    assert phrase.split()[0] in found


def test_code_is_not_prose():
    assert violations(prose_of_module("nobody = lets_go(whoever)")) == []
    assert violations(prose_of_page("Read:\n\n```python\nnobody = 1\n```\n\nCall `nobody`.")) == []
