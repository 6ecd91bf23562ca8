"""From a policy's text to a `Policy`, or to every problem that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Annotated

from semel.policy.document import Notes, read_document
from semel.policy.keys import Key, Section
from semel.policy.model import ROOT, Policy, Source
from semel.policy.problems import PolicyInvalid, PolicyProblem, nearest


@dataclass(frozen=True, slots=True)
class Document:
    """The whole file."""

    delivery_semantics: Annotated[Policy, Key("What topics promise and consumers keep.")]


def load_policy(path: FilePath) -> Policy:
    """Read a policy file.

    Raises:
        PolicyInvalid: with every problem of the file.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = PolicyProblem(None, "", f"the file cannot be read: {error.strerror}")
        raise PolicyInvalid(str(path), [problem]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise PolicyInvalid(
            str(path), [PolicyProblem(line, "", "the file is not UTF-8")]
        ) from error
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str) -> Policy:
    """Read a policy's text.

    Raises:
        PolicyInvalid: with every problem of the text.
    """
    notes = Notes()
    root = read_document(text, notes)
    if root is None:
        if not notes.problems:
            notes.wrong((), None, "the file is empty", f"the key {ROOT}")
        raise PolicyInvalid(name, notes.problems)
    document = Section(Document).read(root, (), notes)
    found: Policy | None = getattr(document, "delivery_semantics", None)
    if found is not None:
        _check_topics(found, notes)
    if found is None or notes.problems:
        raise PolicyInvalid(name, notes.problems)
    return replace(found, source=Source(name, notes.lines))


def _check_topics(policy: Policy, notes: Notes) -> None:
    """See that consumers read topics that exist; whatever was wrong is None by now."""
    known = [*(policy.topics or ())]
    for consumer, own in (policy.consumers or {}).items():
        for number, topic in enumerate(getattr(own, "topics", None) or ()):
            if topic in (None, *known):
                continue
            place = (ROOT, "consumers", consumer, "topics", number)
            notes.wrong(
                place,
                notes.lines.get(place),
                f"there is no topic {topic!r}",
                f"one of {', '.join(known) or 'the topics of this file, which has none'}",
                nearest(topic, known),
            )
