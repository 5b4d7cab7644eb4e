"""Attempts: a request to an S3 store is made again until it succeeds, cannot succeed, or its time is up.

s3fs and botocore each retry some faults and not others, multiply each other's attempts, and know no deadline. So both
are told not to, and this module does it for every request.
"""

import asyncio
import itertools
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeVar

from ibm_nodes import credentials

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_BYTE_SECONDS = 5.0
"""An answer must begin within these, unless the user's ``read_timeout`` says otherwise."""
MIN_BYTES_PER_SECOND = 1 << 20
"""A body has a second for each of these, and ``FIRST_BYTE_SECONDS`` more."""
GIVE_UP_SECONDS = 60.0
"""All attempts together have these, and a body's seconds more, unless ``give_up_seconds`` says otherwise."""
CLIENT_SECONDS = 30.0
"""Making a client, and asking for credentials to make it with, have these."""
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 5.0

RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
RETRIED_CODES = {
    "BadDigest", "IDPCommunicationError", "InternalError", "RequestThrottled", "RequestTimeTooSkewed",
    "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip
CHANGED_STATUS = {412, 416}

_jitter = random.Random()  # the global generator is the user's


class Purpose(NamedTuple):
    """What a request is for, in the words of its errors.

    Attributes:
        url: the object or the prefix.
        done: what is done with it: "read", "written", "listed", "deleted".
        part: the range of it.
        gone: what it means that it is not there.
    """

    url: str
    done: str
    part: str = ""
    gone: str = "is not there: check the bucket and the prefix"

    @property
    def place(self) -> str:
        """The object, with the range of it."""
        return self.url + self.part


class ShortRead(OSError):
    """An answer ended early or was not what was asked for."""


class Changed(OSError):
    """An object is not what was listed any more.

    Args:
        url: the object.
        sign: what says so, in words that go on with "has changed".
    """

    def __init__(self, url: str, sign: str = "") -> None:
        super().__init__(f"{url}{sign} has changed since it was listed: the run's data would be mixed; list again")


def delays() -> Iterator[float]:
    """Yields the pauses between attempts: twice as long each time, and up to half of it less, at random."""
    for attempt in itertools.count():
        yield _jitter.uniform(0.5, 1) * min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt, 10))


async def persist(
    fs: Any, purpose: Purpose, attempt: Callable[[Any], Awaitable[T]], *, size: int, seconds: float | None = None
) -> T:
    """Makes attempts until one succeeds.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        purpose: what it is for.
        attempt: is given the client, and makes the request once.
        size: bytes that the request moves; time for them is added to the deadlines.
        seconds: an attempt has these, and time for the bytes; None takes the client's ``read_timeout``.

    Raises:
        FileNotFoundError, PermissionError: at once.
        ConnectionError: at once, where the store's certificate cannot be verified; or when time is up. It names the
            object, the range, the number of attempts and the last cause.
        OSError: at once, if the object has changed since it was listed, or the request is wrong.
    """
    began, pauses, moving = time.monotonic(), delays(), size / MIN_BYTES_PER_SECOND
    limit = moving + (seconds or fs.config_kwargs.get("read_timeout") or FIRST_BYTE_SECONDS)
    give_up = moving + (getattr(fs, "give_up_seconds", None) or GIVE_UP_SECONDS)
    client = expired = None
    for number in itertools.count(1):
        try:
            client = await asyncio.wait_for(_client(fs, expired), CLIENT_SECONDS)
            return await asyncio.wait_for(attempt(client), limit)
        except Changed:
            raise
        except _errors() as error:
            cause = error
        _check_curable(purpose, cause)
        expired = client if credentials.has_expired(cause) else None
        pause = next(pauses)
        if time.monotonic() + pause - began > give_up:
            _give_up(purpose, number, cause)
        logger.debug("%s: attempt %d failed: %s; again in %.2f s", purpose.place, number, _words(cause), pause)
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


async def _client(fs: Any, expired: Any) -> Any:
    if expired is not None:
        await credentials.renew(fs, expired)
    try:
        return await fs.set_session()
    except TypeError as error:  # an option that neither s3fs nor the clients below it know
        raise ValueError(str(error)) from error


def _errors() -> tuple[type[BaseException], ...]:
    """Gives what may escape from the clients, which share no base class; botocore is imported late, as it is slow."""
    import aiohttp
    import botocore.exceptions
    import botocore.parsers

    return (
        OSError,
        RuntimeError,
        ValueError,
        asyncio.TimeoutError,
        credentials.NotRenewed,
        aiohttp.ClientError,
        botocore.exceptions.BotoCoreError,
        botocore.exceptions.ClientError,
        botocore.parsers.ResponseParserError,
    )


def _check_curable(purpose: Purpose, cause: BaseException) -> None:
    """Raises what another attempt would not cure."""
    import botocore.exceptions as exceptions

    place, refused = purpose.place, f"{purpose.place} cannot be {purpose.done}"
    if isinstance(cause, credentials.NotRenewed):
        raise PermissionError(
            f"{refused}: the credentials have expired, and are from {cause}: give new ones, or a source that the SDK "
            "renews, such as a web identity or a profile"
        ) from cause
    if isinstance(cause, exceptions.ClientError):
        _check_answer(purpose, cause)
    elif credentials.is_about(cause):
        if not credentials.may_come(cause):
            raise PermissionError(
                f"{refused}: {_words(cause)}: give storage_options, the SDK's variables or profile, or anon=True"
            ) from cause
    elif origin := _certificate_fault(cause):
        raise ConnectionError(
            f"{refused}: the store's certificate cannot be trusted: {origin}: set AWS_CA_BUNDLE or storage_options' "
            "client_kwargs={'verify': '/path/to/ca.pem'} to the file of the authority that signed it"
        ) from cause
    elif isinstance(cause, RuntimeError):
        raise cause
    elif isinstance(cause, ValueError) or not isinstance(cause, _network_errors()):
        raise ValueError(f"{place} cannot be {purpose.done}: {_words(cause)}: check storage_options") from cause


def _check_answer(purpose: Purpose, error: Any) -> None:
    """Raises what the store, or the service that gives credentials, would answer again."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    refused = f"{purpose.place} cannot be {purpose.done}"
    if code in RETRIED_CODES or status in RETRIED_STATUS or code in credentials.EXPIRED_CODES:
        return
    if credentials.is_about(error):
        raise PermissionError(
            f"{refused}: no credentials, since {error.operation_name} was refused ({code}): check the role, its trust "
            "policy and the token file"
        ) from error
    if status in CHANGED_STATUS or code == "PreconditionFailed":
        raise Changed(purpose.url) from error
    if status == 404:
        raise FileNotFoundError(f"{purpose.url} {purpose.gone} ({code})") from error
    if status in (401, 403):
        raise PermissionError(f"{refused}: {code}: check the credentials and the policy") from error
    message = error.response.get("Error", {}).get("Message", "")
    raise OSError(f"{refused}: {status} {code}: {message}: check the URL and storage_options") from error


def _network_errors() -> tuple[type[BaseException], ...]:
    """Gives the classes of errors that another attempt may cure."""
    import aiohttp
    import botocore.exceptions as exceptions
    import botocore.parsers

    return (
        OSError,
        asyncio.TimeoutError,
        aiohttp.ClientError,
        exceptions.ChecksumError,
        exceptions.ConnectionError,
        exceptions.FlexibleChecksumError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.MetadataRetrievalError,
        botocore.parsers.ResponseParserError,
    )


def _certificate_fault(cause: BaseException | None) -> BaseException | None:
    """Gives the error at the origin of another, if it is of a certificate, or of the file to check one with."""
    import botocore.exceptions

    is_client = isinstance(cause, botocore.exceptions.HTTPClientError)
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError) or (is_client and type(cause) is FileNotFoundError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _give_up(purpose: Purpose, number: int, cause: BaseException) -> NoReturn:
    failed = f"{purpose.place} could not be {purpose.done} in {number} attempts: {_words(cause)}"
    if credentials.has_expired(cause) or credentials.is_about(cause):
        raise PermissionError(f"{failed}: check what gives the credentials") from cause
    raise ConnectionError(f"{failed}: check the endpoint and the network, then go on from the last state") from cause


def _words(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}" if str(cause) else "no answer in time"
