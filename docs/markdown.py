"""What every table of the docs is made with."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the strings below a class's attributes, by attribute."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, node in zip(body.body, body.body[1:], strict=False):
        match before, node:
            case (
                (ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name))),
                ast.Expr(ast.Constant(str(text))),
            ):
                docs[name] = as_markdown(text)
    return docs


def as_markdown(text: str) -> str:
    """Turn a docstring's quotes into Markdown's, on one line."""
    return " ".join(text.split()).replace("``", "`")


def first_sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring, with Markdown's code quotes."""
    text = inspect.getdoc(thing) or ""
    return as_markdown(text.split("\n\n")[0])


def rules_of(contract: type) -> str:
    """List a contract's tests by the class that holds them."""
    lines = []
    for part in contract.__mro__:
        rules = [name for name in vars(part) if name.startswith("test_")]
        if rules:
            lines.append(f"*{first_sentence(part).rstrip('.')}*\n")
            lines += [f"- {rule.removeprefix('test_').replace('_', ' ')}" for rule in rules]
            lines.append("")
    return "\n".join(lines).rstrip()
