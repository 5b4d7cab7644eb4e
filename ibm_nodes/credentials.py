"""Credentials of an S3 store that have expired, and what the SDK's chain of sources gives in their place.

The SDK renews by itself what it knows to expire. This is for the store saying so first.
"""

import asyncio
import weakref
from typing import Any

EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired"}
OPERATIONS = ("AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials")
"""What the SDK asks other services than the store."""
NAMES = ("Credential", "InvalidConfig", "Login", "NoAuth", "NoCredentials", "PartialCredentials")

_locks: "weakref.WeakKeyDictionary[Any, asyncio.Lock]" = weakref.WeakKeyDictionary()


class NotRenewed(Exception):
    """Credentials have expired, and there are no others."""


def has_expired(error: BaseException) -> bool:
    """Tells whether the store has said that the credentials of a request are too old."""
    return _code(error) in EXPIRED_CODES and not is_about(error)


def is_about(error: BaseException) -> bool:
    """Tells whether an error is of the search for credentials, and not of the store."""
    import botocore.exceptions as exceptions

    return (
        getattr(error, "operation_name", None) in OPERATIONS
        or type(error) is FileNotFoundError  # the file of a web identity's token
        or (isinstance(error, RuntimeError) and "credentials" in str(error))  # new ones that have expired already
        or isinstance(error, (exceptions.ProfileNotFound, exceptions.SSOError, exceptions.TokenRetrievalError))
        or (isinstance(error, exceptions.BotoCoreError) and type(error).__name__.startswith(NAMES))
    )


def may_come(error: BaseException) -> bool:
    """Tells whether a search for credentials that ended in this error may find some later."""
    import botocore.exceptions as exceptions

    return type(error) is FileNotFoundError or (
        isinstance(error, exceptions.CredentialRetrievalError) or _code(error) in EXPIRED_CODES
    )


async def renew(fs: Any, client: Any) -> None:
    """Makes a client with new credentials, once for all requests that were refused with the same old ones.

    The chain is searched anew, so files are read again. Where it has the same credentials still, nothing is made.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        client: the one whose credentials have expired.

    Raises:
        NotRenewed: if nothing renews them, or they would come from another source than before.
    """
    async with _locks.setdefault(fs, asyncio.Lock()):
        if await fs.set_session() is not client:
            return
        if fs.anon or fs.key or "aws_access_key_id" in fs.client_kwargs:
            raise NotRenewed("storage_options")
        before = await fs.session.get_credentials()
        after = await type(fs.session)(**fs.kwargs).get_credentials()
        if before is None or after is None or before.method != after.method:
            raise NotRenewed(f"{_source(before)}, which is not where new ones would come from ({_source(after)})")
        if await before.get_frozen_credentials() != await after.get_frozen_credentials():
            await fs.set_session(refresh=True)
        elif before.method == "env":
            raise NotRenewed("the environment")


def _source(found: Any) -> str:
    return "nowhere" if found is None else f"the source {found.method}"


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
