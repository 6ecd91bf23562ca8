"""Docstrings, comments, error texts and pages are written in plain English.

Each phrase below reads badly for an engineer whose English is a second language:
an old word, a riddle, or a thing that acts like a person.
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


@pytest.mark.parametrize("part", ["*.md", "src", "docs", "examples", "bench"])
def test_what_people_read_is_plain_english(part):
    files = ROOT.glob(part) if "*" in part else (ROOT / part).rglob("*.[pm][yd]")
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
