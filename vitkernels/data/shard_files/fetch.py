"""Fetch complete files from an fsspec URL, with retries and a time limit."""

import hashlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitkernels.data.image_source import SourceError
from vitkernels.errors import UsageError
from vitkernels.files import is_disk_error

log = logging.getLogger(__name__)

WRONG_CONTENTS = 3  # downloads of a file with the wrong size or checksum after which fetching fails
_LONGEST_WAIT = 30.0  # seconds between two attempts
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FINAL_NAMES = ("Credentials", "ParamValidation")  # in the names of errors of botocore and google.auth
_TRANSIENT_STATUS = (408, 425, 429)  # client errors of HTTP worth a retry: timeout, too early, too many requests


@dataclass(frozen=True)
class Patience:
    """Time limits of fetching, in seconds.

    total: time after a file's first failure until fetching fails. stall: time without receiving a byte until an attempt
        is aborted. first_wait: delay before the second attempt; later delays double, up to 30 s.
    """

    total: float = 600.0
    stall: float = 60.0
    first_wait: float = 1.0


DEFAULT = Patience()


def is_url(root: object) -> bool:
    """Return whether a root is a URL rather than a path."""
    return isinstance(root, str) and "://" in root


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the path in it. UsageError without its packages."""
    try:
        import fsspec
    except ImportError as error:
        message = f"{url}: URLs need fsspec, which is not installed: pip install 'vitkernels[shards]'"
        raise UsageError(message, code="data.package", package="fsspec") from error
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        try:
            import aiohttp
        except ImportError as error:
            message = f"{url}: HTTP needs aiohttp, which is not installed: pip install aiohttp"
            raise UsageError(message, code="data.package", package="aiohttp") from error
        # aiohttp's default ends any transfer after 5 minutes; Patience.stall ends those that make no progress.
        options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30)}
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # of s3fs, gcsfs and the like
        raise UsageError(f"{url}: {error}", code="data.package", package=str(error.name)) from error
    except ValueError as error:
        raise UsageError(
            f"root={url}: {error}. Expected a path or a URL such as gs://, s3://, hf:// or https://",
            code="data.root",
            root=url,
        ) from error


def fetch(url: str, path: Path, patience: Patience, *, size: int | None = None, sha256: str = "") -> str:
    """Copy a file to `path`, which appears once it is complete and verified; return its sha256.

    An attempt fails if the connection does, if no byte comes for patience.stall seconds, or if the file does not have
    the given size or checksum.

    Raises:
        UsageError: of `filesystem`.
        SourceError: data.fetch if the file does not exist or may not be read, and if attempts fail for patience.total
            seconds; data.shard_changed if it arrives three times with the wrong contents; data.cache_full.
    """
    fs, remote = filesystem(url)
    failed: float | None = None
    wait, wrong = patience.first_wait, 0
    while True:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # not the file of an aborted attempt
        try:
            _attempt(partial(fs.get_file, remote, str(temporary)), temporary, patience.stall)
            found = _verified(temporary, size, sha256)
            os.replace(temporary, path)
            return found
        except Exception as error:  # each filesystem raises its own errors
            if is_final(error):
                raise ended(url, _told(error)) from error
            if is_disk_error(error):
                raise SourceError(
                    f"no room for {url} in {path.parent} ({error}): free some space, or lower cache_gb",
                    code="data.cache_full",
                    folder=str(path.parent),
                ) from error
            wrong += isinstance(error, _WrongContent)
            if wrong == WRONG_CONTENTS:
                raise SourceError(
                    f"{url} is not the file that was indexed: {error}, {wrong} times. Restore it, or write the index "
                    "again",
                    code="data.shard_changed",
                    path=url,
                    how=str(error),
                ) from error
            now = time.monotonic()
            failed = failed or now
            if now + wait - failed > patience.total:
                raise ended(url, f"{_told(error)}; no attempt succeeded in {now - failed:.0f} s") from error
            log.warning("could not fetch %s (%s); trying again in %.3g s", url, _told(error), wait)
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        finally:
            temporary.unlink(missing_ok=True)


class _WrongContent(Exception):
    """The downloaded file does not have the expected size or checksum."""


def _attempt(transfer: Callable[[], Any], path: Path, stall: float) -> None:
    """Copy a file to `path` once. TimeoutError if no byte comes for `stall` seconds."""
    outcome: list[BaseException | None] = []
    aborted = threading.Event()

    def run() -> None:
        try:
            transfer()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)
        if aborted.is_set():
            path.unlink(missing_ok=True)  # the transfer may have created the file after the caller deleted it

    # A separate thread, because few filesystems support timeouts. An aborted thread keeps writing to a deleted file,
    # and ends at the latest with the process.
    thread = threading.Thread(target=run, daemon=True, name=f"fetch {path.name}")
    thread.start()
    seen, since = -1, time.monotonic()
    try:
        while thread.is_alive():
            thread.join(min(0.2, stall / 4))
            there = path.stat().st_size if path.exists() else -1
            if there != seen:
                seen, since = there, time.monotonic()
            elif time.monotonic() - since > stall and thread.is_alive():
                raise TimeoutError(f"no byte for {stall:g} s, after {max(0, seen)} bytes")
    except BaseException:
        aborted.set()
        raise
    if outcome[0] is not None:
        raise outcome[0]


def _verified(path: Path, size: int | None, sha256: str) -> str:
    """Return the sha256 of a file; raise _WrongContent if size or checksum are not the expected ones."""
    with open(path, "rb") as file:
        got = os.fstat(file.fileno()).st_size
        if size is not None and got != size:
            raise _WrongContent(f"{got} bytes instead of {size}")
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 and found != sha256:
        raise _WrongContent(f"sha256 {found} instead of {sha256}")
    return found


def fetch_if_there(url: str, path: Path, patience: Patience) -> bool:
    """Fetch a file; return False if it does not exist. Raises SourceError like `fetch`."""
    try:
        fetch(url, path, patience)
    except SourceError as error:
        if is_absent(error.__cause__):
            return False
        raise
    return True


def patiently(what: str, url: str, action: Callable[[], Any], patience: Patience) -> Any:
    """Return action(), such as a listing of `url`; retry until patience ends.

    Raises:
        UsageError: data.root at once, if the URL does not exist or may not be read.
        SourceError: data.fetch once patience ends.
    """
    begin, wait = time.monotonic(), patience.first_wait
    while True:
        try:
            return action()
        except UsageError:
            raise
        except Exception as error:  # each filesystem raises its own errors
            if is_final(error):
                message = f"{what} failed ({_told(error)}): correct the URL, or get permission to read it"
                raise UsageError(message, code="data.root", root=url) from error
            if time.monotonic() + wait - begin > patience.total:
                raise ended(what, _told(error)) from error
            log.warning("%s failed (%s); trying again in %.3g s", what, _told(error), wait)
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)


def is_final(error: BaseException) -> bool:
    """Return whether a later attempt would also fail: the file does not exist, or this account may not read it."""
    error = _reported(error)
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TRANSIENT_STATUS
    named = any(part in type(error).__name__ for part in _FINAL_NAMES)
    return named or isinstance(error, _FINAL) or type(error) is ValueError


def is_absent(error: BaseException | None) -> bool:
    """Return whether the error means that the file does not exist; a bucket may report this as a refusal."""
    if error is None:
        return False
    error = _reported(error)
    return isinstance(error, FileNotFoundError | PermissionError) or _status(error) in (403, 404, 410)


def _reported(error: BaseException) -> BaseException:
    """Return the underlying error: over HTTP, fsspec's `info` raises "not found" from any failure."""
    aiohttp, cause = sys.modules.get("aiohttp"), error.__cause__
    of_network = isinstance(cause, ConnectionError | TimeoutError)
    of_network = of_network or (aiohttp is not None and isinstance(cause, aiohttp.ClientError))
    return cause if of_network and cause is not None else error


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of aiohttp, gcsfs or huggingface_hub; None if it has none."""
    for holder, name in ((error, "status"), (error, "code"), (getattr(error, "response", None), "status_code")):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def ended(url: str, reason: str) -> SourceError:
    return SourceError(
        f"could not fetch {url}: {reason}. Once it can be read again, resume the run from its newest checkpoint",
        code="data.fetch",
        url=url,
        reason=reason,
    )
