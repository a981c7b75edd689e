"""Locations given by a user: a path or an object store URL.

``ObjectPath`` has the ``Path`` methods that the readers use, so listing and reading work for both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from data_pipeline.stores.client import ObjectKey, is_folder, open_object, size_of
from longctx.errors import DataError

SCHEMES = ("s3", "gs")
_KNOWN = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, file:///FOLDER or a path"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class ObjectPath(ObjectKey):
    """Folder or object in a store; ``locate`` creates it from a URL."""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """Last path component."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> ObjectPath:
        """Parent folder; a bucket is its own parent."""
        return ObjectPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the object as a buffered, seekable file; raise FileNotFoundError if it is missing, DataError if reading
        fails.
        """
        assert mode == "rb"
        return open_object(self)

    def read_bytes(self) -> bytes:
        """Return the object's content; raise FileNotFoundError if it is missing, DataError if reading fails."""
        with self.open() as file:
            return file.read()

    def is_file(self) -> bool:
        """Return whether the object exists; raise DataError if the store does not answer."""
        return size_of(self) is not None

    def is_dir(self) -> bool:
        """Return whether objects exist below this path; raise DataError if the store does not answer."""
        return is_folder(self)

    def exists(self) -> bool:
        """Return whether this is an object or a nonempty folder."""
        return self.is_file() or self.is_dir()


Location = Path | ObjectPath


def is_url(spec: str) -> bool:
    """Return whether a string has the form of a URL."""
    return _URL.fullmatch(spec) is not None


def locate(spec: str | Path | ObjectPath) -> Location:
    """Return the location for a user's path or URL; raise DataError for an invalid URL."""
    if not isinstance(spec, str):
        return spec
    match = _URL.fullmatch(spec)
    if match is None:
        return Path(spec)
    scheme, rest = match[1].lower(), match[2]
    # Check this first and do not echo the URL: the text before an @ may be a secret.
    if "@" in rest.partition("/")[0]:
        raise DataError(
            f"a {scheme}:// URL must not have a name or key before its @. Set keys in the environment, which is never "
            "logged: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS."
        )
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise DataError(f"{spec} names a file on another host. Try file:///{path or 'FOLDER'}.")
        return Path("/" + unquote(path))
    if scheme not in SCHEMES:
        raise DataError(f"{spec}: {scheme}:// is not known. Try {_KNOWN}.")
    return _object_path(spec, scheme, rest)


def below(folder: str, name: str) -> str:
    """Return the path to folder ``name`` inside ``folder``."""
    # Path would collapse a URL's two slashes.
    if is_url(folder):
        return f"{folder.rstrip('/')}/{name}"
    return str(Path(folder) / name)


def _object_path(spec: str, scheme: str, rest: str) -> ObjectPath:
    bucket, _, key = rest.partition("/")
    # S3 and Google Cloud Storage accept further characters in names. We accept only names that every Arrow client reads
    # back unchanged, and that cannot be mistaken for patterns or query strings.
    if not _BUCKET.fullmatch(bucket):
        raise DataError(f"{spec}: {bucket!r} is not a valid bucket name. Try {scheme}://BUCKET/FOLDER.")
    names = key.strip("/").split("/")
    if key.strip("/") and any(name in ("", ".", "..") for name in names):
        raise DataError(f"{spec}: a path in a store must not contain empty names, or . or .. as a name. Write it out.")
    invalid = re.search(r"[\x00-\x1f\x7f?#*\\]", key)
    if invalid is not None:
        raise DataError(
            f"{spec!r} has {invalid[0]!r} in it, which a store URL must not contain. Name a folder or an "
            "object; set an endpoint as AWS_ENDPOINT_URL, and patterns with --include."
        )
    return ObjectPath(scheme, bucket, key.strip("/"))
