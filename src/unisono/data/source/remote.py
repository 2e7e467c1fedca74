"""Files behind a URL, by fsspec: s3://, gs://, http(s)://, hf://.

Credentials come from where the libraries look for them themselves (environment, their configuration files), retries
are fsspec's own. Whatever goes wrong is a TransferError with the URL. https and s3 are tested against real servers on
the same machine; **gs:// and hf:// take the same way but are not tested**.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from unisono.data.source.libraries import load_library
from unisono.data.source.names import scheme
from unisono.errors import DataError, TransferError

_BLOCK_BYTES = 16 * 2**20
_CONNECT_SECONDS = 30
_READ_SECONDS = 120
_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "hf": ("huggingface_hub", "remote")}
_HINTS = {
    "s3": "credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws; another server: AWS_ENDPOINT_URL",
    "gs": "credentials: GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "gcs": "credentials: GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "hf": "credentials: HF_TOKEN, or hf auth login",
}
# What identifies a version of an object; sizes alone do not.
_IDENTITIES = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "VersionId", "generation")
_MORE_IDENTITIES = ("md5Hash", "crc32c", "mtime", "updated", "blob_id", "xet_hash", "last_commit")
_LIBRARY_ERRORS = (
    ("aiohttp", ("ClientError",)),
    ("botocore.exceptions", ("BotoCoreError", "ClientError")),
    ("google.auth.exceptions", ("GoogleAuthError",)),
    ("gcsfs.retry", ("HttpError",)),
    ("huggingface_hub.errors", ("HfHubHTTPError",)),
    ("fsspec.exceptions", ("FSTimeoutError",)),
)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the name that the file has in it."""
    kind = scheme(url)
    fsspec = load_library("fsspec", "remote", url)
    if kind in ("http", "https"):
        aiohttp = load_library("aiohttp", "remote", url)
        # The library's own limit is five minutes for a whole file. And bytes are wanted as they lie there.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        client = {"timeout": timeout, "auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}
        return fsspec.filesystem(kind, client_kwargs=client), url
    load_library(*_EXTRAS[kind], url)
    found, path = fsspec.core.url_to_fs(url)
    return found, str(path)


@contextmanager
def told(url: str) -> Iterator[None]:
    """Turn what the libraries raise into a TransferError with the URL."""
    try:
        yield
    except _library_errors() as error:
        message, hint = _explain(error, scheme(url))
        raise TransferError(message, where=url, hint=hint) from error


def read_info(url: str) -> dict[str, Any]:
    """Ask the server about a file; DataError when it is not there or cannot be had."""
    with told(url):
        files, path = file_system(url)
        files.invalidate_cache()
        info: dict[str, Any] = files.info(path)
    if info.get("type") == "directory":
        raise DataError("is a folder; files are needed", where=url, hint=f"{url.rstrip('/')}/* stands for its files")
    return info


def size_of(info: dict[str, Any]) -> int | None:
    """Return the size that a server told, if it did."""
    size = info.get("size")
    return int(size) if size is not None else None


def stamp_of(url: str, info: dict[str, Any]) -> str | None:
    """Return what identifies this version of a file, or None when the server tells nothing of the kind."""
    known = {key: str(info[key]) for key in (*_IDENTITIES, *_MORE_IDENTITIES) if info.get(key)}
    if not known:
        return None
    return orjson.dumps([url, size_of(info), known], option=orjson.OPT_SORT_KEYS).decode()


def list_matches(url: str) -> list[str]:
    """Return the URLs that a pattern stands for, sorted."""
    with told(url):
        files, path = file_system(url)
        found = files.glob(path, detail=True)
        return sorted(
            name if scheme(name) else f"{scheme(url)}://{name}"
            for name, info in found.items()
            if info.get("type") != "directory"
        )


def open_remote(url: str, size: int | None) -> Any:
    """Open for one pass from the first byte to the last."""
    with told(url):
        files, path = file_system(url)
        if scheme(url) in ("http", "https"):
            return files.open(path, mode="rb", block_size=0, size=size)  # 0: one answer, no ranges
        return files.open(path, mode="rb", block_size=_BLOCK_BYTES, cache_type="readahead")


def _library_errors() -> tuple[type[BaseException], ...]:
    """Collect the errors of those libraries that are loaded; most of them are not OSErrors."""
    found: list[type[BaseException]] = [OSError, ValueError]
    for module, names in _LIBRARY_ERRORS:
        loaded = sys.modules.get(module)
        if loaded is not None:
            found += [getattr(loaded, name) for name in names]
    return tuple(found)


def _explain(error: BaseException, kind: str) -> tuple[str, str | None]:
    """Say what happened, and what to do; web errors stand behind a FileNotFoundError that hides them."""
    is_hidden = kind in ("http", "https") and isinstance(error, FileNotFoundError)
    cause = error.__cause__ if is_hidden and error.__cause__ else error
    status = vars(cause).get("status")
    text = " ".join(str(cause).split())
    if isinstance(cause, FileNotFoundError) or status == 404:
        return "the file does not exist", _HINTS.get(kind) and f"check the address; {_HINTS[kind]}"
    if isinstance(cause, PermissionError) or status in (401, 403):
        return f"the server gives no permission: {text}", _HINTS.get(kind, "check that the address needs no login")
    if "redential" in text:
        return f"there are no credentials for it: {text}", _HINTS.get(kind)
    if isinstance(status, int) and status >= 400 and vars(cause).get("message"):
        return f"the server answers {status}: {vars(cause)['message']}", _HINTS.get(kind, "try again later")
    if any(parent.__name__ == "ClientPayloadError" for parent in type(cause).__mro__):
        return "the server closed the connection early", "start again"
    if isinstance(cause, TimeoutError):
        return "the server does not answer", "check the address and the network"
    return f"cannot be read: {text or type(cause).__name__}", _HINTS.get(kind, "check the address and the network")
