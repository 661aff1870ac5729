"""Buckets of S3 and of what speaks its protocol (MinIO, R2, Ceph), through boto3.

Credentials, region and endpoint are those that boto3 finds: environment, ``~/.aws``, the role of the machine. Requests
are tried again here and not in botocore: a body that was cut goes on at the byte that it had reached.
"""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.stores.contract import Stat
from ckpt8.core.files.stores.reading import IN_FLIGHT

_ATTEMPTS, _SECONDS = 5, 45
"""Tries without a byte of progress, and seconds after which no other begins: the last one may take 70 more."""

_CONNECT, _READ = 10, 60
"""Seconds that a connection may take, and the next bytes of an answer."""

_PASSING = {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "RequestTimeTooSkewed", "InternalError"}
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

R = TypeVar("R")


@functools.cache
def _client() -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as exc:
        raise UsageError("s3:// needs boto3, which is not installed; pip install 'ckpt8[s3]'") from exc
    config = Config(
        max_pool_connections=2 * IN_FLIGHT,
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=_CONNECT,
        read_timeout=_READ,
        # A range of an object has no checksum that could be compared.
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config)


os.register_at_fork(after_in_child=_client.cache_clear)  # connections are those of the parent


class S3Store:
    """A bucket."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket

    def stat(self, key: str) -> Stat | None:
        """The present version of an object, None where there is none."""

        def ask(_: _Attempts) -> Stat | None:
            answer = self._get("head_object", key)
            return None if answer is None else _version(answer, answer["ContentLength"])

        return self._persist(key, ask)

    def first(self, key: str, length: int) -> tuple[Stat, bytes] | None:
        """The present version of an object and its first bytes, at most ``length``, None where there is no object."""

        def ask(_: _Attempts) -> tuple[Stat, bytes] | None:
            answer = self._get("get_object", key, Range=f"bytes=0-{length - 1}")
            if answer is None:
                return None
            if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == _NO_RANGE:  # an empty object has no range
                version = self.stat(key)
                return None if version is None else (version, b"")
            version = _version(answer, self._extent(key, answer, 0)[1])
            head = bytearray(min(length, version.size))
            done = self._receive(answer, memoryview(head))
            if head and not done:
                raise _CutError
            if done < len(head):  # the rest of the same version
                self.fill(key, version.tag, done, memoryview(head)[done:])
            return version, bytes(head)

        return self._persist(key, ask)

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the version ``tag`` from ``start``. InputError where it is no longer there."""
        done = 0

        def ask(attempts: _Attempts) -> None:
            nonlocal done
            while done < len(buffer):
                span = f"bytes={start + done}-{start + len(buffer) - 1}"
                answer = self._get("get_object", key, Range=span, IfMatch=tag)
                # Some stores ignore If-Match.
                if answer is None or answer.get("ETag") != tag:
                    raise InputError(f"{self._url(key)}: changed while it was read; nothing was written")
                self._extent(key, answer, start + done)
                count = self._receive(answer, buffer[done:])
                done += count
                if count:
                    attempts.progress()
                if done < len(buffer):
                    raise _CutError

        self._persist(key, ask)

    def _url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def _get(self, operation: str, key: str, **options: str) -> dict[str, Any] | None:
        """The answer to a request; None where there is no such object, or not that version of it.

        That of a range which the object does not have has no body.
        """
        from botocore.exceptions import ClientError

        try:
            answer: dict[str, Any] = getattr(_client(), operation)(Bucket=self._bucket, Key=key, **options)
        except ClientError as exc:
            status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
            code = exc.response.get("Error", {}).get("Code")
            if status == _NO_RANGE:
                return dict(exc.response)
            if (status == 404 and code != "NoSuchBucket") or status == 412:
                return None
            raise
        return answer

    def _extent(self, key: str, answer: dict[str, Any], start: int) -> tuple[int, int]:
        """Where the range of an answer ends, and the size of the object."""
        match = _RANGE.fullmatch(answer.get("ContentRange", ""))
        if match is None or int(match[1]) != start:
            raise InputError(f"{self._url(key)}: the store sent another range than it was asked for")
        return int(match[2]) + 1, int(match[3])

    def _receive(self, answer: dict[str, Any], buffer: memoryview) -> int:
        """Read the body of an answer into ``buffer``; how many bytes came before it ended or was cut."""
        done = 0
        try:
            while done < len(buffer) and (count := answer["Body"].readinto(buffer[done:])):
                done += count
        except _faults():
            return done
        finally:
            answer["Body"].close()
        return done

    def _persist(self, key: str, ask: Callable[[_Attempts], R]) -> R:
        """What ``ask`` returns, after as many attempts as it takes. Raises InputError, UsageError."""
        from botocore.exceptions import BotoCoreError, ClientError

        attempts = _Attempts()
        while True:
            try:
                return ask(attempts)
            except ClientError as exc:
                status = exc.response["ResponseMetadata"]["HTTPStatusCode"]
                code = exc.response.get("Error", {}).get("Code", "")
                if not (status >= 500 or status == 429 or code in _PASSING) or attempts.are_over():
                    self._refuse(key, status, code, exc)
            except _faults() as exc:
                if attempts.are_over():
                    why = "the connection was cut" if isinstance(exc, _CutError) else _one_line(exc)
                    raise InputError(f"{self._url(key)}: cannot be read: {why}, in {attempts.count} attempts") from exc
            except BotoCoreError as exc:
                self._refuse_setting(key, exc)
            attempts.wait()

    def _refuse(self, key: str, status: int, code: str, exc: Exception) -> NoReturn:
        if code == "NoSuchBucket":
            raise InputError(f"{self._url(key)}: there is no bucket {self._bucket}") from exc
        if status in (401, 403):
            said = "" if code in ("", str(status)) else f" ({code})"
            raise InputError(
                f"{self._url(key)}: access denied{said}; reading needs s3:GetObject, and s3:ListBucket to tell a "
                "missing object from a forbidden one"
            ) from exc
        raise InputError(f"{self._url(key)}: cannot be read: {_one_line(exc)}") from exc

    def _refuse_setting(self, key: str, exc: Exception) -> NoReturn:
        if type(exc).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
            raise InputError(
                f"{self._url(key)}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, or run aws configure"
            ) from exc
        raise InputError(f"{self._url(key)}: cannot be read: {_one_line(exc)}") from exc


_NO_RANGE = 416


class _CutError(Exception):
    """A body ended before its time."""


class _Attempts:
    """Tries of one request. Progress begins them anew."""

    def __init__(self) -> None:
        self.progress()

    def progress(self) -> None:
        self.count, self._begun = 0, time.monotonic()

    def are_over(self) -> bool:
        """Count one that failed; whether it was the last."""
        self.count += 1
        return self.count >= _ATTEMPTS or time.monotonic() - self._begun > _SECONDS

    def wait(self) -> None:
        time.sleep(min(0.1 * 2**self.count, 5) * random.uniform(0.5, 1))  # noqa: S311 - spreads requests


@functools.cache
def _faults() -> tuple[type[Exception], ...]:
    """What a connection raises that another one may not."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    return (
        _CutError,
        ConnectionError,
        TimeoutError,
        HTTPError,
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
    )


def _version(answer: dict[str, Any], size: int) -> Stat:
    return Stat(size, answer["ETag"], answer["LastModified"].timestamp())


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__
