"""The address of an object store, as a user writes it."""

from __future__ import annotations

from data_pipeline.stores.urls import ObjectPath, is_url, locate
from longctx.errors import ConfigError, DataError

_KNOWN = "Try s3://BUCKET/RUN or gs://BUCKET/RUN."


def store_place(address: str, key: str = "checkpoint.store") -> ObjectPath:
    """The folder of a store that ``address``, the value of ``key``, names; ConfigError where it names none."""
    if not is_url(address):
        raise ConfigError(f"{key}={address!r} is no URL of a store. {_KNOWN}")
    try:
        place = locate(address)
    except DataError as error:
        # What may be a secret in it is not shown.
        raise ConfigError(f"{key}: {error}") from None
    if not isinstance(place, ObjectPath):
        raise ConfigError(f"{key}={address} is a folder of this machine, which no store is. {_KNOWN}")
    if not place.key:
        raise ConfigError(f"{key}={address} is a whole bucket, which one run may not take. {_KNOWN}")
    return place
