"""A kept folder, and how to look around in it."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from examples.demo.place import Place
from semel.testing import services

PORT_FILE: Final = "ports"

PIPELINE: Final = '''\
"""The demo's pipeline, for `semel ... --pipeline pipeline:payments` in this folder."""

import os
from pathlib import Path

from examples.demo.pipeline import pipeline
from examples.demo.place import Place

os.environ.update({keys!r})
payments = pipeline(Place(Path(__file__).parent, {url!r}, {bootstrap!r}, {s3!r}, {catalog!r}))
'''


def keep(
    folder: Path,
    server: services.PostgresServer,
    store: services.SeaweedServer,
    place: Place,
    console: Console,
) -> None:
    """Leave what `look` and the commands need, and print how they are called."""
    ports = [server.port, store.port, store.catalog_port]
    (folder / PORT_FILE).write_text(json.dumps(ports))
    pipeline = place.folder / "pipeline.py"
    pipeline.touch(mode=0o600)  # the password is in the URL
    servers = {"bootstrap": place.bootstrap, "s3": place.s3, "catalog": place.catalog}
    pipeline.write_text(PIPELINE.format(keys=store.environment, url=place.url, **servers))
    semel = "semel" if shutil.which("semel") else Path(sys.executable).with_name("semel")
    say = (
        f"\nEverything is kept in {folder}",
        "Start its Postgres and its object store again, in another terminal, until Ctrl-C:",
        f"  {sys.executable} -m examples.demo --look {folder}",
        "Then look around:",
        f"  cd {place.folder}",
        f"  {semel} status --ledger {place.ledger}",
        f"  {semel} doctor --pipeline pipeline:payments",
        f"  {semel} verify --pipeline pipeline:payments",
    )
    for line in say:
        console.print(line, soft_wrap=True)


def look(folder: Path, console: Console) -> int:
    """Run the servers of a kept folder until Ctrl-C; return the exit code."""
    kept = folder / PORT_FILE
    if not kept.is_file():
        console.print(f"{folder} was not kept by the demo: it has no file {PORT_FILE}")
        return 2
    server = services.PostgresServer(directory=folder.resolve() / "postgres")
    store = services.SeaweedServer(directory=folder.resolve() / "store")
    server.port, store.port, store.catalog_port = json.loads(kept.read_text())
    with server, store:
        answers = f"Postgres answers at {server.url}, S3 at {store.endpoint}"
        console.print(f"{answers} until Ctrl-C.", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            while True:
                signal.pause()
    return 0
