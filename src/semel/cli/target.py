"""The target of a command: a ledger that exists, or a pipeline by its name.

A command that asks changes nothing: it never creates a ledger.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from semel.cli.answer import Answer
from semel.cli.options import LEDGER_VARIABLE, PIPELINE_VARIABLE
from semel.errors import Misuse, SemelError, reason_of
from semel.ledgers import open_ledger
from semel.operate.status import Pipeline
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.txn import Scope


@runtime_checkable
class MayBeMissing(Protocol):
    """A ledger that the first use would make."""

    def exists(self) -> bool:
        """Return whether the ledger exists, without creating it."""
        ...


@dataclass(frozen=True, slots=True)
class Configured:
    """What the user's program says, before any ledger or sink is asked."""

    app: str
    query: str
    ledger: Ledger
    """Not opened yet."""

    sinks: tuple[TwoPhaseSink, ...]
    settings: Settings


@dataclass(frozen=True, slots=True)
class Target:
    """The scopes that a command is about, and the sinks where they can be asked."""

    answer: Answer
    ledger: Ledger
    scopes: tuple[Scope, ...]
    pipeline: Pipeline | None = None


def find_target(
    answer: Answer, ledger: str | None, pipeline: str | None, app: str | None, query: str | None
) -> Target:
    """Open what the options, or else the environment, name.

    Raises:
        Misuse: nothing is named, or two things, or something that does not exist.
    """
    if ledger and pipeline:
        raise Misuse("give --ledger or --pipeline, not both: a pipeline has its own ledger")
    if not ledger and not pipeline:
        pipeline = os.environ.get(PIPELINE_VARIABLE)
        ledger = None if pipeline else os.environ.get(LEDGER_VARIABLE)
    if pipeline:
        found = need_pipeline(answer, pipeline)
        scope = found.scope
        if (app or scope.app, query or scope.query) != (scope.app, scope.query):
            raise Misuse(f"pipeline {pipeline} is {scope}, not {app or '*'}/{query or '*'}")
        return Target(answer, found.ledger, (scope,), found)
    if not ledger:
        raise Misuse(
            f"say which ledger with --ledger URL (or ${LEDGER_VARIABLE}), or which pipeline with "
            f"--pipeline module:name (or ${PIPELINE_VARIABLE})"
        )
    opened = open_existing(answer, ledger)
    return Target(answer, opened, _filtered(opened, app, query))


def need_pipeline(answer: Answer, spec: str | None) -> Pipeline:
    """Load the pipeline that a command needs, and check that its ledger exists.

    Raises:
        Misuse: none is named, or it does not exist, or its ledger does not.
    """
    found = need_configured(answer, spec)
    for sink in found.sinks:
        answer.later(sink.close)
    answer.later(found.ledger.close)
    ledger = existing(found.ledger)
    scope = Scope(ledger.ledger_id, found.app, found.query)
    return Pipeline(ledger, scope, found.sinks, found.settings)


def need_configured(answer: Answer, spec: str | None) -> Configured:
    """Import the pipeline that ``module:name`` names; its ledger need not exist yet.

    Raises:
        Misuse: none is named; or names the module, the attribute, and what was found instead.
    """
    spec = spec or os.environ.get(PIPELINE_VARIABLE)
    if not spec:
        raise Misuse(
            f"`semel {answer.command}` asks the sinks: name the pipeline with --pipeline "
            f"module:name (or ${PIPELINE_VARIABLE})"
        )
    from semel.spark.exactly_once import ExactlyOnce

    what = f"--pipeline {spec}"
    found = load_object("--pipeline", spec)
    made = ""
    if not isinstance(found, Driver | ExactlyOnce):
        if not callable(found) or isinstance(found, type):
            raise Misuse(f"{what}: found {_described(found)}; {_WANTED}")
        found, made = _called(what, found), "it returned "
    if isinstance(found, Driver):
        scope = found.scope
        return Configured(scope.app, scope.query, found.ledger, found.sinks, found.settings)
    if not isinstance(found, ExactlyOnce):
        raise Misuse(f"{what}: {made or 'found '}{_described(found)}; {_WANTED}")
    given = found.given_ledger
    if isinstance(given, str):
        answer.hide(given)
    ledger = open_ledger(given)
    return Configured(found.app, found.query, ledger, found.sinks, found.settings)


def need_ledger(answer: Answer, url: str | None) -> Ledger:
    """Open the ledger that a command needs.

    Raises:
        Misuse: none is named, or it does not exist.
    """
    return open_existing(answer, ledger_url(answer, url))


def ledger_url(answer: Answer, url: str | None) -> str:
    """Return the ledger's URL, given or from the environment.

    Raises:
        Misuse: there is neither.
    """
    url = url or os.environ.get(LEDGER_VARIABLE)
    if not url:
        raise Misuse(f"say which ledger with --ledger URL (or ${LEDGER_VARIABLE})")
    answer.hide(url)
    return url


def open_existing(answer: Answer, url: str, way_out: str = "") -> Ledger:
    """Open a ledger, and never make one.

    Raises:
        Misuse: there is no ledger at *url*, or it is not a ledger's URL.
        LedgerUnavailable, LedgerUnusable: it does not answer, or cannot be read.
    """
    answer.hide(url)
    if url.startswith("memory:"):
        raise Misuse("a ledger in memory is seen by its own process only: use --pipeline")
    ledger = open_ledger(url)
    answer.later(ledger.close)
    return existing(ledger, way_out)


def existing(ledger: Ledger, way_out: str = "") -> Ledger:
    """Return *ledger* if it is there.

    Raises:
        Misuse: it is not, and asking does not make it.
    """
    if isinstance(ledger, MayBeMissing) and not ledger.exists():
        raise Misuse(
            f"there is no ledger at {ledger.url}: look at the path, or the database and its "
            f"schema; the first start of the pipeline makes it{way_out}"
        )
    return ledger


def _called(what: str, function: Callable[[], Any]) -> Any:
    try:
        with redirect_stdout(sys.stderr):
            return function()
    except SemelError:
        raise
    except Exception as error:
        raise Misuse(f"{what}: calling it raised {reason_of(error)}") from error


def load_object(option: str, spec: str) -> Any:
    """Import what ``module:name`` names.

    Raises:
        Misuse: names the module or the attribute that is missing.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise Misuse(f"{option} {spec}: write it as module:name, such as payments:pipeline")
    module = _import(option, spec, module_name)
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            known = [n for n in vars(module) if not n.startswith("_")]
            raise Misuse(
                f"{option} {spec}: module {module_name} ({_file_of(module)}) has no {path!r}; it "
                f"has: {', '.join(known[:12]) or 'nothing'}"
            ) from error
    return found


def _import(option: str, spec: str, name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # What the module prints must not end up in the middle of a JSON document.
        with redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise Misuse(f"{option} {spec}: module {name} needs {error.name!r}: {error}") from error
        raise Misuse(
            f"{option} {spec}: there is no module {error.name!r} in {folder} or on Python's path"
        ) from error
    except SemelError:
        raise
    except SystemExit as error:
        raise Misuse(
            f"{option} {spec}: importing module {name} ended the program; put what runs the query "
            f"below `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise Misuse(
            f"{option} {spec}: importing module {name} raised {reason_of(error)}"
        ) from error


_WANTED = "it must be an ExactlyOnce, a Driver, or a function without arguments that returns one"


def _described(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    return "None" if found is None else f"a {type(found).__name__}"


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or "made in memory"


def _filtered(ledger: Ledger, app: str | None, query: str | None) -> tuple[Scope, ...]:
    every = ledger.scopes()
    kept = [s for s in every if s.app == (app or s.app) and s.query == (query or s.query)]
    if every and not kept:
        names = ", ".join(str(scope) for scope in every)
        raise Misuse(
            f"ledger {ledger.url} has no scope {app or '*'}/{query or '*'}; it has: {names}"
        )
    return tuple(kept)
