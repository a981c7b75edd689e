"""Locations given by a user: a path, or a URL of an object store.

An ``ObjectPath`` has the methods of ``Path`` that the readers use, so that listing and reading work for both.
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
    """A folder or an object of a store; ``locate`` makes it from a URL."""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> ObjectPath:
        """The folder that holds it; a bucket is its own parent."""
        return ObjectPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the object as a buffered, seekable file; raise FileNotFoundError if it is missing, else DataError."""
        assert mode == "rb"
        return open_object(self)

    def read_bytes(self) -> bytes:
        """Return the object's content; raise FileNotFoundError if there is none, DataError for other failures."""
        with self.open() as file:
            return file.read()

    def is_file(self) -> bool:
        """Return whether there is such an object; raise DataError if the store does not answer."""
        return size_of(self) is not None

    def is_dir(self) -> bool:
        """Return whether there are objects below it; raise DataError if the store does not answer."""
        return is_folder(self)

    def exists(self) -> bool:
        """Return whether it is an object or a nonempty folder."""
        return self.is_file() or self.is_dir()


Location = Path | ObjectPath


def is_url(spec: str) -> bool:
    """Return whether a string begins like a URL."""
    return _URL.fullmatch(spec) is not None


def locate(spec: str | Path | ObjectPath) -> Location:
    """Return the location that a user has named; raise DataError for a URL that names none."""
    if not isinstance(spec, str):
        return spec
    match = _URL.fullmatch(spec)
    if match is None:
        return Path(spec)
    scheme, rest = match[1].lower(), match[2]
    # First, and without showing the URL: the part before an @ may be a secret.
    if "@" in rest.partition("/")[0]:
        raise DataError(
            f"a URL of {scheme}:// has a name or key before its @. Keys come from the environment, where no log shows "
            "them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS."
        )
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise DataError(f"{spec} names a file of another host. Try file:///{path or 'FOLDER'}.")
        return Path("/" + unquote(path))
    if scheme not in SCHEMES:
        raise DataError(f"{spec}: {scheme}:// is not known. Try {_KNOWN}.")
    return _object_path(spec, scheme, rest)


def below(folder: str, name: str) -> str:
    """Return the path of the folder ``name`` inside ``folder``."""
    # A Path would collapse a URL's two slashes.
    if is_url(folder):
        return f"{folder.rstrip('/')}/{name}"
    return str(Path(folder) / name)


def _object_path(spec: str, scheme: str, rest: str) -> ObjectPath:
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise DataError(f"{spec}: {bucket!r} is no name of a bucket. Try {scheme}://BUCKET/FOLDER.")
    names = key.strip("/").split("/")
    if key.strip("/") and any(name in ("", ".", "..") for name in names):
        raise DataError(f"{spec}: a path in a store has no empty name, . or .. in it. Write it out.")
    strange = re.search(r"[\x00-\x1f\x7f?#*\\]", key)
    if strange is not None:
        raise DataError(
            f"{spec!r} has {strange[0]!r} in it, which the URL of a store may not have. Name a folder or an "
            "object; an endpoint belongs into AWS_ENDPOINT_URL, patterns into --include."
        )
    return ObjectPath(scheme, bucket, key.strip("/"))
