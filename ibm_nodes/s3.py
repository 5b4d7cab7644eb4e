"""One pinned, checked and retried range of an S3 object, read through the client that s3fs keeps.

s3fs' own reads pin nothing, hand on short answers as they are, and multiply botocore's retries with their own. Here
each attempt has a deadline, goes on from the byte that the last one reached, and must be of the version that was
listed.
"""

import asyncio
import random
import time
from typing import Any

FIRST_BYTE_SECONDS = 5.0
MIN_BYTES_PER_SECOND = 1 << 20
GIVE_UP_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 5.0
MAX_CONNECTIONS = 64
CHUNK_BYTES = 1 << 18

RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
RETRIED_CODES = {
    "BadDigest", "InternalError", "RequestThrottled", "RequestTimeTooSkewed", "RequestTimeout", "ServiceUnavailable",
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip
RENEWED_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired"}
CHANGED_STATUS = {412, 416}


_jitter = random.Random()  # the global generator is the user's


class ObjectChanged(OSError):
    """An object is not the one that was listed any more."""


class ShortRead(OSError):
    """An answer ended early or was not what was asked for."""


def client_options(options: dict[str, Any]) -> dict[str, Any]:
    """Gives s3fs arguments with our time-outs, and no retries below our own, where the user has not set them."""
    config = {
        "connect_timeout": 3,
        "read_timeout": 5,
        "max_pool_connections": MAX_CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        **options.get("config_kwargs", {}),
    }
    return {**options, "config_kwargs": config, "use_listings_cache": False}


def network_errors() -> tuple[type[BaseException], ...]:
    """Gives the classes of errors that another attempt may cure; imported late, since botocore is slow to import."""
    import aiohttp
    import botocore.exceptions as exceptions

    return (
        aiohttp.ClientError,
        asyncio.TimeoutError,
        ConnectionError,
        ShortRead,
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
    )


async def read_range(fs: Any, path: str, start: int, end: int, etag: str | None) -> bytearray:
    """Reads bytes [start, end) of an object.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        path: bucket/key.
        start: first byte.
        end: one past the last byte.
        etag: the version that the object must have, or None for any.

    Raises:
        OSError: if the object has changed since it was listed, or after ``GIVE_UP_SECONDS`` of attempts; it names the
            object, the range, the number of attempts and the last cause.
        FileNotFoundError, PermissionError: at once.
    """
    import botocore.exceptions

    bucket, _, key = path.partition("/")
    buffer, state = bytearray(end - start), _Progress()
    began, attempt, renewed = time.monotonic(), 0, False
    errors = network_errors()
    while True:
        attempt += 1
        try:
            await _attempt(fs, {"Bucket": bucket, "Key": key, **fs.req_kw}, start, buffer, etag, state)
            return buffer
        except botocore.exceptions.ClientError as error:
            cause: BaseException = error
            code = error.response.get("Error", {}).get("Code", "")
            if code in RENEWED_CODES and not renewed:
                renewed = True
                await fs.set_session(refresh=True)
            else:
                _check_curable(path, error, code)
        except errors as error:
            cause = error
        if time.monotonic() - began > GIVE_UP_SECONDS:
            raise OSError(
                f"s3://{path} bytes {start} to {end} could not be read in {attempt} attempts: {cause!r}: "
                "check the endpoint, then go on from the last state"
            ) from cause
        await asyncio.sleep(
            _jitter.uniform(0.5, 1) * min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt, 10))
        )


def _check_curable(path: str, error: Any, code: str) -> None:
    """Raises what another attempt would not cure."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in CHANGED_STATUS or code == "PreconditionFailed":
        raise _changed(path) from error
    if status == 404:
        raise FileNotFoundError(f"s3://{path} is gone since it was listed: list again") from error
    if code not in RETRIED_CODES and status not in RETRIED_STATUS:
        raise PermissionError(f"s3://{path} cannot be read: {code}: check the credentials and the policy") from error


class _Progress:
    def __init__(self) -> None:
        self.got = 0


async def _attempt(
    fs: Any, target: dict[str, Any], start: int, buffer: bytearray, etag: str | None, state: _Progress
) -> None:
    client = await fs.set_session()
    first, last = start + state.got, start + len(buffer) - 1
    pinned = {"IfMatch": etag} if etag else {}
    request = client.get_object(**target, Range=f"bytes={first}-{last}", **pinned)
    answer = await asyncio.wait_for(request, FIRST_BYTE_SECONDS)
    body = answer["Body"]
    try:
        if etag and answer.get("ETag") != etag:
            raise _changed(f"{target['Bucket']}/{target['Key']}")
        if not answer.get("ContentRange", "").startswith(f"bytes {first}-"):
            raise ShortRead(f"asked for bytes {first}-{last}, got {answer.get('ContentRange')!r}")
        left = len(buffer) - state.got
        await asyncio.wait_for(_receive(body, buffer, state), FIRST_BYTE_SECONDS + left / MIN_BYTES_PER_SECOND)
    finally:
        if state.got < len(buffer):
            body.close()  # a body that was read to its end gives its connection back by itself


async def _receive(body: Any, buffer: bytearray, state: _Progress) -> None:
    while state.got < len(buffer):
        chunk = await body.read(CHUNK_BYTES)
        if not chunk or state.got + len(chunk) > len(buffer):
            raise ShortRead(f"the answer ended after {state.got} of {len(buffer)} bytes")
        buffer[state.got : state.got + len(chunk)] = chunk
        state.got += len(chunk)


def _changed(path: str) -> ObjectChanged:
    return ObjectChanged(f"s3://{path} has changed since it was listed: the run's data would be mixed; list again")
