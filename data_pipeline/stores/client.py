"""Object store access through Arrow's S3 and Google Cloud Storage clients, imported when a URL is first used.

Keys, profile, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE,
AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_APPLICATION_CREDENTIALS) and never appear in messages.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from longctx.errors import DataError


@dataclass(frozen=True)
class ObjectKey:
    """Identifier for a folder or object in a store."""

    scheme: str
    bucket: str
    key: str
    """Path components joined by ``/``, without leading or trailing ``/``; empty for the bucket itself."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


if TYPE_CHECKING:
    import pyarrow.fs as pafs

_READ_BYTES = 4 << 20
"""Read size per request: a request takes tens of milliseconds, whatever its size."""
_SENT_BYTES = 16 << 20
_ATTEMPTS = 5
_CONNECT_SECONDS = 10
_S3_TIMEOUT_SECONDS, _GCS_RETRY_SECONDS = 60, 20
"""Timeout without a received byte. AWS's default, three seconds, is too short for a busy store or host. Google's client
retries for this long, and may request keys first."""
_GOOGLES = re.compile(r"with a last message of (.*?) error_info=")
"""The cause in a Google client message, a paragraph that repeats it three times."""
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


@contextlib.contextmanager
def store_errors(path: ObjectKey) -> Iterator[None]:
    """Convert store errors to a DataError that names the object and suggests a fix.

    FileNotFoundError passes through: the caller may expect a missing object.
    """
    try:
        yield
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:
        # Catch every class: Arrow's errors derive from those in two third-party libraries.
        raise DataError(
            f"{path} cannot be reached: {_without_secrets(str(error))}\n{_hint(path, str(error))}"
        ) from None


def open_object(path: ObjectKey) -> BinaryIO:
    """Open an object as a buffered, seekable file; raise FileNotFoundError if it is missing.

    Later read errors are DataErrors.
    """
    with store_errors(path):
        native = _client(path).open_input_file(_inner(path))
    return cast(BinaryIO, io.BufferedReader(_ObjectFile(path, native), buffer_size=_READ_BYTES))


def size_of(path: ObjectKey) -> int | None:
    """Return an object's size in bytes; None if it is missing."""
    info = _info(path)
    if info.is_file:
        return info.size
    return None


def written_at(path: ObjectKey) -> float | None:
    """Return an object's modification time in seconds since 1970; None if it is missing or its time is unknown."""
    info = _info(path)
    if info.is_file and info.mtime is not None:
        return info.mtime.timestamp()
    return None


def is_folder(path: ObjectKey) -> bool:
    """Return whether objects exist below a path."""
    # Some stores report any prefix as a folder and others never do; only a prefix's contents are reliable.
    return bool(list_names(path)) or bool(list_objects(path))


def list_objects(folder: ObjectKey) -> dict[str, int]:
    """Return object sizes in bytes by relative path; empty if the folder does not exist."""
    return {name: size for name, size in _list_entries(folder, recursive=True) if size is not None}


def list_names(folder: ObjectKey) -> list[str]:
    """Return the sorted names directly inside a folder."""
    return sorted(name for name, _ in _list_entries(folder, recursive=False))


def upload(file: Path, to: ObjectKey, *, each: Callable[[bytes], None] | None = None) -> None:
    """Upload a file to an object, which appears only when complete; raise DataError if the store refuses.

    ``each`` receives every buffer before it is sent; if it raises, discard the object.
    """
    with file.open("rb") as source, _written(to) as sink:
        while block := source.read(_SENT_BYTES):
            if each is not None:
                each(block)
            sink.write(block)


def write_object(to: ObjectKey, content: bytes) -> None:
    """Write an object; raise DataError if the store refuses."""
    with _written(to) as sink:
        sink.write(content)


@contextlib.contextmanager
def _written(to: ObjectKey) -> Iterator[Any]:
    try:
        # Without ``compression=None``, Arrow would compress by file suffix, and a .zst file twice.
        with store_errors(to), _client(to).open_output_stream(_inner(to), compression=None) as sink:
            yield sink
    except FileNotFoundError as error:
        raise DataError(
            f"{to} cannot be written: bucket {to.bucket} does not exist. Create it, or name another."
        ) from error


def remove(path: ObjectKey) -> None:
    """Remove an object if it exists."""
    with store_errors(path), contextlib.suppress(FileNotFoundError):
        _client(path).delete_file(_inner(path))


class _ObjectFile(io.RawIOBase):
    """Raw file over an object. A failed read raises DataError, so callers never mistake it for a damaged file."""

    def __init__(self, path: ObjectKey, native: Any) -> None:
        self._path, self._native = path, native

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with the next bytes and return their number; 0 at the end."""
        with self._read_errors():
            block = self._native.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def readall(self) -> bytes:
        """Return the remaining bytes in one request; Python's default reads 8 KiB at a time."""
        with self._read_errors():
            return self._native.read()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte offset without a request to the store."""
        with self._read_errors():
            self._native.seek(offset, whence)
            return self._native.tell()

    def tell(self) -> int:
        """Return the current offset."""
        return self._native.tell()

    def close(self) -> None:
        if not self.closed:
            self._native.close()
        super().close()

    @contextlib.contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            with store_errors(self._path):
                yield
        except FileNotFoundError as error:
            raise DataError(f"{self._path} was removed while it was read.") from error


def _inner(path: ObjectKey) -> str:
    """Return a path in Arrow's format."""
    return f"{path.bucket}/{path.key}".rstrip("/")


def _info(path: ObjectKey) -> pafs.FileInfo:
    with store_errors(path):
        return _client(path).get_file_info(_inner(path))


def _list_entries(folder: ObjectKey, *, recursive: bool) -> list[tuple[str, int | None]]:
    """Return relative paths and sizes in bytes for everything below a folder; folders have size None."""
    import pyarrow.fs as pafs

    selector = pafs.FileSelector(_inner(folder), allow_not_found=True, recursive=recursive)
    with store_errors(folder):
        found = _client(folder).get_file_info(selector)
    begin = len(_inner(folder)) + 1
    sizes = {True: lambda info: info.size, False: lambda info: None}
    entries = [(info.path[begin:], sizes[info.is_file](info)) for info in found]
    # Web consoles create an empty object to show a folder.
    return [(name, size) for name, size in entries if name and not name.endswith("/")]


def _client(path: ObjectKey) -> pafs.FileSystem:
    # One client per bucket, because each bucket has its own region.
    return _connected(path.scheme, path.bucket, os.getpid())


@cache
def _connected(scheme: str, bucket: str, process: int) -> pafs.FileSystem:
    """Return the client for a bucket, cached per process: its threads do not survive a fork."""
    import pyarrow.fs as pafs

    try:
        if scheme == "s3":
            return pafs.S3FileSystem(
                retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
                connect_timeout=_CONNECT_SECONDS,
                request_timeout=_S3_TIMEOUT_SECONDS,
                **_s3_options(bucket),
            )
        return pafs.GcsFileSystem(retry_time_limit=datetime.timedelta(seconds=_GCS_RETRY_SECONDS), **_gcs_options())
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"this pyarrow was built without its {scheme}:// client ({error}).\n"
            "Install pyarrow from PyPI (pip install --force-reinstall pyarrow), or copy the folder here first."
        ) from error


def _s3_options(bucket: str) -> dict[str, Any]:
    """Return options from environment variables that Arrow's client does not read."""
    import pyarrow.fs as pafs

    options: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    if endpoint:
        scheme, separator, host = endpoint.rpartition("://")
        options["endpoint_override"] = host.rstrip("/")
        options["scheme"] = scheme if separator else "https"
        # Private stores have no regions, but the protocol requires one.
        region = region or "us-east-1"
    elif proxy:
        options["proxy_options"] = proxy
    if not region and "AWS_PROFILE" not in os.environ:
        # Look up the bucket's region; if that fails, rely on the client's guess.
        with contextlib.suppress(OSError):
            region = pafs.resolve_s3_region(bucket)
    if region:
        options["region"] = region
    if os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true"):
        options["anonymous"] = True
    return options


def _gcs_options() -> dict[str, Any]:
    """Return options for the emulator that Google's own clients would use, if configured."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return {}
    scheme, _, host = emulator.rpartition("://")
    return {"endpoint_override": host, "scheme": scheme or "http", "anonymous": True}


def _without_secrets(message: str) -> str:
    """Return the first line of a library's message with secrets from the environment masked."""
    for name in _SECRETS:
        secret = os.environ.get(name)
        if secret:
            message = message.replace(secret, f"${name}")
    if (reason := _GOOGLES.search(message)) is not None:
        message = reason[1]
    return message.strip().splitlines()[0] if message.strip() else "the store did not report a reason"


def _hint(path: ObjectKey, message: str) -> str:
    """Suggest what to check."""
    keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (AWS_NO_SIGN_REQUEST=yes for a public bucket)"
    network = "Is the network up, and is AWS_ENDPOINT_URL right?"
    if path.scheme == "gs":
        # Without keys, the client requests them from the local metadata server, as if this host ran on Google Cloud.
        keys, network = "GOOGLE_APPLICATION_CREDENTIALS", "Is the network up, and GOOGLE_APPLICATION_CREDENTIALS set?"
    if any(word in message for word in ("NETWORK_CONNECTION", "connect", "resolve host")):
        return f"{network} deepspeed forwards only the variables in .deepspeed_env."
    return f"Check the bucket, the name, and {keys} on this host."
