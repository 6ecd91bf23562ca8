"""The file system calls of the files sink, each durable when it returns."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Final

from semel.errors import Permanent, Retryable, SemelError

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1

# The errors of a kernel or a file system without renameat2.
_NOT_SUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

# Errors that may go away by themselves; any other needs a person.
_PASSING: Final = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOTCONN,
    }
)


def fault(doing: str, error: OSError) -> SemelError:
    """Translate an error of the operating system."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    where = f" ({error.filename})" if error.filename else ""
    reason = f"{doing}: {name}, {error.strerror or error}{where}"
    if error.errno in _PASSING:
        return Retryable(f"{reason}; no row became visible, and it may work later")
    return Permanent(f"{reason}; semel needs to read, write and rename there")


@contextlib.contextmanager
def faults(doing: str) -> Iterator[None]:
    """Translate the operating system's errors.

    Raises:
        Retryable: the disk is full, busy or unavailable.
        Permanent: permissions, or a file system that cannot do it.
    """
    try:
        yield
    except OSError as error:
        raise fault(doing, error) from error


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(base: str, *inside: str) -> None:
    """Create *base* and the folders *inside* it, from the outermost on, durably.

    All are synced, not only the missing ones: the process that created one may have
    crashed before it was durable.
    """
    os.makedirs(base, exist_ok=True)
    # The parent folder may be searchable but not readable, and then it cannot be synced.
    with contextlib.suppress(PermissionError):
        sync_folder(os.path.dirname(base))
    for path in inside:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(base, path))
    for path in ("", *inside):
        sync_folder(os.path.join(base, path))


def write_whole(path: str, content: dict[str, Any]) -> None:
    """Write a JSON file so that it exists complete or not; its folder is not yet synced."""
    draft = f"{path}.tmp"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)


def rename_folder(source: str, target: str) -> None:
    """Move a folder in one step, and never replace another.

    Without `renameat2` the plain `rename` is as safe for a folder with a file
    in it: POSIX lets it replace only an empty folder.

    Raises:
        FileExistsError: the target exists.
    """
    if _renameat2 is not None:
        old, new = os.fsencode(source), os.fsencode(target)
        if _renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code), source, None, target)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
        raise


def remove_tree(path: str) -> None:
    """Remove a folder with everything in it; a missing folder is no error.

    A late task may still be writing there: a later sweep removes its files.
    """
    for _ in range(3):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return


def names_in(path: str) -> list[str]:
    """List a folder; empty if it does not exist."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _find_renameat2() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    path = ctypes.c_char_p
    call.argtypes = [ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call


_renameat2 = _find_renameat2()
