"""Files that are whole at every moment, whoever reads them and whenever the writer dies; and who may use them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, BinaryIO

from underwatt.helper.journal import sync_folder
from underwatt.helper.lock import FileLock as FileLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write_atomically(
    path: Path,
    content: str | bytes | Callable[[BinaryIO], object],
    *,
    durable: bool = False,
    shared: bool = False,
    previous: Path | None = None,
) -> None:
    """Write a draft beside a file, then put it in its place: readers see the old file or the new one, whole.

    ``content`` may be a function that writes to the open draft. Once a ``durable`` file was written it survives a
    power cut. A ``shared`` file may have several writers at once, each with a draft of its own; otherwise the draft
    has one name, so that those of killed writers do not pile up. The file that was there is kept as ``previous``.
    """
    draft = path.with_suffix(".tmp")
    if shared:
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with draft.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep_as(path, previous)
        draft.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _keep_as(path: Path, previous: Path) -> None:
    """Give a file a second name; where a file system knows no such thing, it is without the first for a moment."""
    link = previous.with_suffix(".tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        link.replace(previous)
    except OSError:
        path.replace(previous)


def open_plain(path: Path | str, *, follow_links: bool = True) -> BinaryIO:
    """Open a file for reading, unless it is a pipe, a device or a folder: these may block for ever, or have no end."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise
