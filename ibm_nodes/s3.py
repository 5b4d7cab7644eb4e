"""S3 through the client that s3fs keeps: listings, pinned and checked ranges, whole objects, puts, deletes.

s3fs' own reads pin nothing and hand on short answers as they are; its listings ask with HEAD, too. Here an attempt goes
on from the byte that the last one reached, or the page of a listing, and must be of the version that was listed.
"""

from typing import Any

from ibm_nodes import attempts
from ibm_nodes.attempts import Changed, Purpose, ShortRead, persist

MAX_CONNECTIONS = 64
CHUNK_BYTES = 1 << 18
PAGE_BYTES = 1 << 20
"""A page of a listing has the time of so many bytes."""
WRITE_SECONDS = 10.0
"""An attempt to write has these, and the time of its bytes."""

CHECKSUMS = ("request_checksum_calculation", "response_checksum_validation")
"""Options of botocore 1.36 and newer."""
GONE = "is gone since it was listed: list again"


def client_options(options: dict[str, Any]) -> dict[str, Any]:
    """Gives s3fs arguments with our time-outs, and no retries below our own, where the user has not set them.

    Checksums of AWS' own are left to those who ask for them: other stores refuse them, or send wrong ones with ranges.
    """
    from botocore.config import Config

    config = {
        **{name: "when_required" for name in CHECKSUMS if name in Config.OPTION_DEFAULTS},
        "connect_timeout": 3,
        "read_timeout": attempts.FIRST_BYTE_SECONDS,
        "max_pool_connections": MAX_CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        **options.get("config_kwargs", {}),
    }
    return {**options, "config_kwargs": config, "use_listings_cache": False}


async def read_range(fs: Any, path: str, start: int, end: int, etag: str | None) -> bytearray:
    """Reads bytes [start, end) of an object that was listed.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        path: bucket/key.
        start: first byte.
        end: one past the last byte.
        etag: the version that the object must have, or None for any.

    Raises:
        OSError: if the object has changed since it was listed, and as ``persist`` does.
    """
    buffer, got = bytearray(end - start), 0
    if not buffer:
        return buffer
    pinned = {"IfMatch": etag} if etag else {}

    async def attempt(client: Any) -> bytearray:
        nonlocal got
        first = start + got
        wanted = f"bytes={first}-{end - 1}"
        answer = await _call(fs, client, "get_object", path, Range=wanted, **pinned)
        body = answer["Body"]
        try:
            if etag and answer.get("ETag", "").strip('"') != etag.strip('"'):
                raise Changed(f"s3://{path}")
            if not answer.get("ContentRange", "").startswith(f"bytes {first}-"):
                raise ShortRead(f"asked for {wanted}, got {answer.get('ContentRange')!r}")
            async for chunk in _chunks(body, len(buffer) - got):
                buffer[got : got + len(chunk)] = chunk
                got += len(chunk)
        finally:
            if got < len(buffer):
                body.close()  # a body that was read to its end gives its connection back by itself
        return buffer

    purpose = Purpose(f"s3://{path}", "read", f" bytes {start} to {end}", GONE)
    return await persist(fs, purpose, attempt, size=len(buffer))


async def read_whole(fs: Any, path: str) -> bytes:
    """Reads one small object that was not listed; raises as ``persist`` does."""

    async def attempt(client: Any) -> bytes:
        answer = await _call(fs, client, "get_object", path)
        body = answer["Body"]
        parts = []
        try:
            async for chunk in _chunks(body, answer["ContentLength"]):
                parts.append(chunk)
        except BaseException:
            body.close()
            raise
        return b"".join(parts)

    return await persist(fs, Purpose(f"s3://{path}", "read"), attempt, size=PAGE_BYTES)


async def write(fs: Any, path: str, data: bytes) -> None:
    """Writes an object by one PUT; raises as ``persist`` does.

    aiohttp waits for ever for the "100 Continue" before the body, so the time-outs of a client are not enough.
    """
    purpose = Purpose(f"s3://{path}", "written")
    await persist(
        fs,
        purpose,
        lambda client: _call(fs, client, "put_object", path, Body=data),
        size=len(data),
        seconds=WRITE_SECONDS,
    )


async def delete(fs: Any, path: str) -> None:
    """Deletes an object; raises as ``persist`` does."""
    purpose = Purpose(f"s3://{path}", "deleted")
    await persist(fs, purpose, lambda client: _call(fs, client, "delete_object", path), size=0)


async def find(fs: Any, path: str, url: str) -> list[dict[str, Any]]:
    """Lists what is under a prefix, or else the one object that has its name; raises as ``persist`` does.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        path: bucket, or bucket/prefix without a slash at its end.
        url: the same as the user wrote it, for errors.

    Returns:
        What S3 says of each object: ``Key`` (without the bucket), ``Size``, ``ETag``.
    """
    bucket, _, key = path.partition("/")
    purpose = Purpose(url, "listed")
    found: list[dict[str, Any]] = []
    asked: dict[str, Any] = {"Prefix": f"{key}/" if key else ""}
    while asked:

        async def page(client: Any, asked: dict[str, Any] = asked) -> dict[str, Any]:
            answer: dict[str, Any] = await _call(fs, client, "list_objects_v2", bucket, **asked)
            if answer.get("IsTruncated") and not answer.get("NextContinuationToken"):
                raise ShortRead("a page of the listing says that there are more and not where")
            return answer

        answer = await persist(fs, purpose, page, size=PAGE_BYTES)
        found += answer.get("Contents", [])
        token = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
        asked = {**asked, "ContinuationToken": token} if token else {}
    if not found and key:  # the first key that begins so is the very name, if it is there
        answer = await persist(
            fs,
            purpose,
            lambda client: _call(fs, client, "list_objects_v2", bucket, Prefix=key, MaxKeys=1),
            size=PAGE_BYTES,
        )
        found = [item for item in answer.get("Contents", []) if item["Key"] == key]
    return found


async def _call(fs: Any, client: Any, method: str, path: str, **given: Any) -> Any:
    """Makes a request, with what the user's options say of requests of its kind."""
    bucket, _, key = path.partition("/")
    target = {"Bucket": bucket, "Key": key} if key else {"Bucket": bucket}
    known = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method]).input_shape.members
    more = {**fs.s3_additional_kwargs, **fs.req_kw}
    more = {name: value for name, value in more.items() if name in known}
    return await getattr(client, method)(**more, **target, **given)


async def _chunks(body: Any, size: int) -> Any:
    """Yields a body of so many bytes, no more and no less."""
    while size:
        chunk = await body.read(CHUNK_BYTES)
        if not chunk or len(chunk) > size:
            raise ShortRead(f"the answer ended with {size} bytes to come")
        size -= len(chunk)
        yield chunk
