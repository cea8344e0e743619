"""What the errors of a store mean: whether to try again, and what to tell, without what gives access."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Iterator

_TRY_AGAIN_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "Throttling", "ThrottlingException",
     "RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted", "XAmzContentSHA256Mismatch", "BadDigest"}
)  # fmt: skip
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_LASTING_NUMBERS = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMFILE}
)
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|ACCESS_KEY|ACCOUNT_KEY|SAS_|CREDENTIAL|CONNECTION_STRING", re.I)
_MEANINGS = {
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's by too much; set it, by NTP",
    "ExpiredToken": "the credentials have expired; get new ones",
    "InvalidAccessKeyId": "the store does not know these credentials; check them, and the endpoint",
    "SignatureDoesNotMatch": "the store refuses these credentials; check the secret key, and the endpoint",
    "NoSuchBucket": "there is no such bucket; check its name, and the endpoint",
    "PreconditionFailed": "it was changed while it was read; open it again",
    "412": "it was changed while it was read; open it again",
    "SlowDown": "the store asks to slow down; try again later",
    "503": "the store asks to slow down; try again later",
}


class ShortAnswerError(Exception):
    """A store gave fewer bytes than were asked for, or others."""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised for."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = here.__cause__ or here.__context__


def _code_of(error: BaseException) -> tuple[str, int]:
    """Return the store's own code and the HTTP status of an error, "" and 0 where there is none."""
    code, status = "", 0
    for one in chain_of(error):
        answer = getattr(one, "response", None)
        if isinstance(answer, dict):
            code = code or str(answer.get("Error", {}).get("Code", ""))
            status = status or int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        told = getattr(one, "status", None)
        if told is None and type(one).__module__.partition(".")[0] != "aiohttp":  # whose codes are of its parser
            told = getattr(one, "code", None)
        status = status or (told if isinstance(told, int) and 100 <= told < 600 else 0)
    return code, status or (int(code) if code.isdigit() else 0)


def lacks_bucket(error: BaseException) -> bool:
    """Tell whether a store says that not even the bucket is there, in which something was looked for."""
    return _code_of(error)[0] == "NoSuchBucket"


def what_failed(error: Exception) -> Exception:
    """Return why a web server gave nothing: fsspec says that a file is not there, whatever the server answers."""
    cause = error.__cause__
    web = isinstance(error, FileNotFoundError) and type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if web and isinstance(cause, Exception) and _code_of(cause)[1] not in (404, 410) else error


def is_broken_off(error: BaseException) -> bool:
    """Tell whether a connection died, or brought too little: no answer of a store that it is busy."""
    return is_passing(error) and _code_of(error) == ("", 0)


def is_passing(error: BaseException) -> bool:
    """Tell whether to try again after an error: a connection died, or the store is busy."""
    code, status = _code_of(error)
    if code in _TRY_AGAIN_CODES or status in (408, 425, 429) or status >= 500:
        return True
    if code or status >= 400:
        return False
    for one in chain_of(error):
        if isinstance(one, ShortAnswerError | EOFError | asyncio.TimeoutError | TimeoutError | ConnectionError):
            return True
        name, module = type(one).__name__, type(one).__module__.partition(".")[0]
        if name == "FSTimeoutError" or (module == "aiohttp" and name.startswith(("Client", "Server"))):
            return True
        if module in ("botocore", "aiobotocore", "urllib3"):  # no credentials, bad parameters: they last
            return any(base.__name__ in ("HTTPClientError", "HTTPError", "ConnectionError") for base in type(one).mro())
        if isinstance(one, _LASTING):
            return False
        if isinstance(one, OSError):
            return one.errno not in _LASTING_NUMBERS
    return False


def reason_of(error: BaseException) -> str:
    """Say in a few words what went wrong, and what to do; never what gives access."""
    code, status = _code_of(error)
    if code in _MEANINGS:
        return f"{code}: {_MEANINGS[code]}"
    first = next((one for one in chain_of(error) if isinstance(one, OSError) and not isinstance(one, _LASTING)), error)
    names = [type(one).__name__ for one in chain_of(error)]
    if any("Credential" in name for name in names):
        return "there are no credentials, or not all of them; give them by the environment, see docs/remote.md"
    if isinstance(error, PermissionError) or status in (401, 403):
        what = f"{code or status or 'access denied'}"
        return f"{what}: the store denies access; check the credentials, and what they allow"
    if isinstance(error, FileNotFoundError) or status == 404:
        return "it is not there"
    if status == 416:
        return "it is shorter than it was; it was changed while it was read, open it again"
    if status in (429, 503):
        return f"{status}: {_MEANINGS['503']}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; make room, or name another folder by TMPDIR"
    told = " ".join(str(first).split())[:200]
    said = f"{code or type(first).__name__}{f' ({told})' if told else ''}"
    again = "the store cannot be reached or breaks off; check the endpoint and the network, and try again"
    return f"{without_secrets(said)}: {again}" if is_passing(error) else without_secrets(said)


def without_secrets(text: str) -> str:
    """Return a text without what the environment holds of secrets, nor the queries of signed URLs."""
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\")]*", r"\1?***", text)
