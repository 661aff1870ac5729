"""Buckets of S3 and of what speaks its protocol (MinIO, R2, Ceph), through botocore.

Credentials, region and endpoint are those that botocore finds: environment, ``~/.aws``, the role of the machine.
Requests are tried again here: a body that was cut goes on at the byte that it had reached. boto3, which wraps botocore,
would take a third longer to begin.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, NoReturn, TypeVar

from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError, require
from ckpt8.core.files.atomic import exists_error
from ckpt8.core.files.stores.attempts import Attempts, CutError, filling, one_line
from ckpt8.core.files.stores.contract import MOST_LISTED, Part, Stat, Write
from ckpt8.core.files.stores.reading import IN_FLIGHT

_CONNECT, _READ = 10, 60
"""Seconds that a connection may take, and the next bytes of an answer."""

_PASSING = {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "RequestTimeTooSkewed", "InternalError"}
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

_WRITE = "ckpt8-write"
"""The metadata of an object that hold the id of its Write."""

_LEFT_BEHIND = timedelta(days=1)
"""The age of an upload that nobody goes on with."""

_NEWER = {"NotImplemented", "InvalidArgument", "XAmzContentSHA256Mismatch", "InvalidRequest"}
"""What stores answer that do not know the checksums of S3."""

R = TypeVar("R")


class _Purpose(NamedTuple):
    """What a request is for, in its errors."""

    error: type[Ckpt8Error]
    act: str
    needs: str


_READING = _Purpose(
    InputError, "read", "reading needs s3:GetObject, and s3:ListBucket to tell a missing object from a forbidden one"
)
_LISTING = _Purpose(InputError, "listed", "a folder needs s3:ListBucket")
_WRITING = _Purpose(OutputError, "written", "writing needs s3:PutObject, s3:GetObject and s3:AbortMultipartUpload")
_REMOVING = _Purpose(OutputError, "removed", "removing needs s3:DeleteObject and s3:GetObject")


@functools.cache
def _client() -> Any:
    try:
        from botocore.config import Config
        from botocore.session import get_session
    except ImportError as exc:
        raise UsageError("s3:// needs botocore, which is not installed; pip install 'ckpt8[s3]'") from exc
    config = Config(
        max_pool_connections=2 * IN_FLIGHT,
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=_CONNECT,
        read_timeout=_READ,
        # A range of an object has no checksum that could be compared.
        response_checksum_validation="when_required",
    )
    return get_session().create_client("s3", config=config)


os.register_at_fork(after_in_child=_client.cache_clear)  # connections are those of the parent


class S3Store:
    """A bucket."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket

    def stat(self, key: str) -> Stat | None:
        """The present version of an object, None where there is none."""
        return self._persist(key, lambda _: self._stat(key))

    def _stat(self, key: str) -> Stat | None:
        answer = self._get("head_object", key)
        return None if answer is None else _version(answer, answer["ContentLength"])

    def first(self, key: str, length: int) -> tuple[Stat, bytes] | None:
        """The present version of an object and its first bytes, at most ``length``, None where there is no object."""

        def ask(_: Attempts) -> tuple[Stat, bytes] | None:
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
                raise CutError
            if done < len(head):  # the rest of the same version
                self.fill(key, version.tag, done, memoryview(head)[done:])
            return version, bytes(head)

        return self._persist(key, ask)

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the version ``tag`` from ``start``. InputError where it is no longer there."""

        def receive(done: int, rest: memoryview) -> int:
            span = f"bytes={start + done}-{start + len(buffer) - 1}"
            answer = self._get("get_object", key, Range=span, IfMatch=tag)
            # Some stores ignore If-Match.
            if answer is None or answer.get("ETag") != tag:
                raise InputError(f"{self._url(key)}: changed while it was read; nothing was written")
            self._extent(key, answer, start + done)
            return self._receive(answer, rest)

        self._persist(key, filling(buffer, receive))

    def objects(self, prefix: str, *, deep: bool = False) -> Mapping[str, Stat]:
        """What follows the prefix in the names of objects, without slashes unless ``deep``, and their versions."""

        def ask(_: Attempts) -> dict[str, Stat]:
            listed = dict[str, Stat]()
            depth = {} if deep else {"Delimiter": "/"}
            pages = _client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix, **depth):
                found = (each for each in page.get("Contents", ()) if each["Key"] != prefix)
                listed |= {each["Key"][len(prefix) :]: _version(each, each["Size"]) for each in found}
                require(
                    len(listed) <= MOST_LISTED,
                    f"{self._url(prefix)}: holds more than {MOST_LISTED:,} objects; give the folder of one checkpoint",
                )
            return listed

        return self._persist(prefix, ask, _LISTING)

    def put(self, write: Write, content: bytes) -> None:
        """Write an object. OutputError where another is there than the one that is to be replaced."""

        def ask(_: Attempts) -> None:
            _client().put_object(
                **self._at(write), **_condition(write), Body=io.BytesIO(content), Metadata={_WRITE: write.id}
            )

        self._make(write, ask)

    def begin(self, write: Write) -> str:
        """Begin an upload."""

        def ask(_: Attempts) -> str:
            client = _client()
            # botocore sends a checksum with each part, and S3 takes it where the upload has stated which.
            checksum = {"ChecksumAlgorithm": _CHECKSUM} if _sends_checksums(client) else {}
            answer = client.create_multipart_upload(**self._at(write), **checksum, Metadata={_WRITE: write.id})
            upload: str = answer["UploadId"]
            return upload

        return self._persist(write.key, ask, _WRITING)

    def send(self, write: Write, upload: str, number: int, content: bytes, is_given_up: Callable[[], bool]) -> Part:
        """Send a part, whose number counts from 1. OutputError as soon as it ``is_given_up``."""
        place = {**self._at(write), "UploadId": upload, "PartNumber": number}

        def ask(_: Attempts) -> Part:
            if is_given_up():
                raise OutputError(f"{self._url(write.key)}: was given up")
            client = _client()
            checksum = {"ChecksumAlgorithm": _CHECKSUM} if _sends_checksums(client) else {}
            answer = client.upload_part(**place, **checksum, Body=_Body(content, is_given_up))
            return {"PartNumber": number, **{name: answer[name] for name in ("ETag", _CHECKED) if name in answer}}

        return self._persist(write.key, ask, _WRITING)

    def complete(self, write: Write, upload: str, parts: Sequence[Part]) -> bool:
        """Make an object of the parts; whether the answer shows that it is of them."""
        stated = ""

        def ask(_: Attempts) -> None:
            nonlocal stated
            answer = _client().complete_multipart_upload(
                **self._at(write), **_condition(write), UploadId=upload, MultipartUpload={"Parts": parts}
            )
            stated = answer.get("ETag", "")

        self._make(write, ask)
        return stated == _tag_of(parts)

    def abort(self, write: Write, upload: str) -> None:
        """Remove what was sent of an upload."""
        with suppress(Exception):  # a rule of the bucket removes what is left
            _client().abort_multipart_upload(**self._at(write), UploadId=upload)

    def tidy(self, write: Write, upload: str) -> None:
        """Remove the parts that killed processes left of this very object, long ago."""
        with suppress(Exception):  # many may not list uploads
            before = datetime.now(timezone.utc) - _LEFT_BEHIND
            answer = _client().list_multipart_uploads(Bucket=self._bucket, Prefix=write.key)
            for each in answer.get("Uploads", ()):
                if each["Key"] == write.key and each["UploadId"] != upload and each["Initiated"] < before:
                    self.abort(write, each["UploadId"])

    def delete(self, key: str, tag: str) -> None:
        """Remove the version ``tag`` of an object. OutputError where another is there; none at all is fine."""
        from botocore.exceptions import ClientError

        changed = OutputError(f"{self._url(key)}: changed meanwhile; it stays as it is")

        def ask(_: Attempts) -> None:
            # Some stores ignore If-Match. A first attempt may have removed it, and its answer been lost.
            found = self._stat(key)
            if found is not None and found.tag != tag:
                raise changed
            if found is not None:
                try:
                    _client().delete_object(Bucket=self._bucket, Key=key, IfMatch=tag)
                except ClientError as exc:
                    if _status(exc)[0] in (409, 412):
                        raise changed from exc
                    raise

        self._persist(key, ask, _REMOVING)

    def check(self, write: Write, size: int) -> None:
        """Raise OutputError unless the object is that of ``write``, with this size."""
        found = self._persist(write.key, lambda _: self._stat(write.key), _WRITING)
        if found is None or found.size != size or found.write != write.id:
            raise OutputError(
                f"{self._url(write.key)}: the store holds another object than the {size} bytes that were written"
            )

    def _at(self, write: Write) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": write.key}

    def _make(self, write: Write, ask: Callable[[Attempts], None]) -> None:
        """Do what ends a write. The answer to a first attempt may be lost: then the object is there at the second."""
        from botocore.exceptions import ClientError

        def ask_once_more(attempts: Attempts) -> None:
            try:
                ask(attempts)
            except ClientError as exc:
                status, code = _status(exc)
                if code == "NoSuchBucket" or status not in (404, 409, 412):
                    raise
                found = self._stat(write.key)
                if found is not None and found.write == write.id:
                    return
                url = self._url(write.key)
                if status == 404 and found is None and write.replaces is None:
                    raise OutputError(f"{url}: somebody removed the parts of it that were sent") from exc
                if write.replaces is None:
                    raise exists_error(url) from exc
                raise OutputError(f"{url}: changed while its successor was written; it stays as it is") from exc

        self._persist(write.key, ask_once_more, _WRITING)

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
            status, code = _status(exc)
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

    def _persist(self, key: str, ask: Callable[[Attempts], R], purpose: _Purpose = _READING) -> R:
        """What ``ask`` returns, after as many attempts as it takes. Raises the error of the purpose, UsageError."""
        from botocore.exceptions import BotoCoreError, ClientError

        attempts = Attempts()
        while True:
            try:
                return ask(attempts)
            except ClientError as exc:
                status, code = _status(exc)
                is_passing = (status >= 500 and code not in _NEWER) or status == 429 or code in _PASSING
                if not is_passing or attempts.are_over():
                    self._refuse(key, purpose, exc)
            except _faults() as exc:
                if attempts.are_over():
                    why = "the connection was cut" if isinstance(exc, CutError) else one_line(exc)
                    raise purpose.error(
                        f"{self._url(key)}: cannot be {purpose.act}: {why}, in {attempts.count} attempts"
                    ) from exc
            except BotoCoreError as exc:
                self._refuse_setting(key, purpose, exc)
            attempts.wait()

    def _refuse(self, key: str, purpose: _Purpose, exc: Any) -> NoReturn:
        status, code = _status(exc)
        why = f"cannot be {purpose.act}: {one_line(exc)}"
        if code == "NoSuchBucket":
            why = f"there is no bucket {self._bucket}"
        elif status in (401, 403):
            said = "" if code in ("", str(status)) else f" ({code})"
            why = f"access denied{said}; {purpose.needs}"
        elif purpose is _WRITING and code in _NEWER:
            why += "; for a store without the checksums of S3 set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
        raise purpose.error(f"{self._url(key)}: {why}") from exc

    def _refuse_setting(self, key: str, purpose: _Purpose, exc: Exception) -> NoReturn:
        why = f"cannot be {purpose.act}: {one_line(exc)}"
        if type(exc).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
            why = (
                "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run "
                "aws configure"
            )
        raise purpose.error(f"{self._url(key)}: {why}") from exc


_NO_RANGE = 416

_CHECKSUM, _CHECKED = "CRC32", "ChecksumCRC32"


def _sends_checksums(client: Any) -> bool:
    """Whether botocore is set to send checksums, as it is by default."""
    return bool(client.meta.config.request_checksum_calculation == "when_supported")


def _tag_of(parts: Sequence[Part]) -> str:
    """The tag of an object of these parts, where those of the parts are their MD5: not under some encryptions."""
    tags = [str(part["ETag"]).strip('"') for part in parts]
    if not all(re.fullmatch("[0-9a-f]{32}", tag) for tag in tags):
        return "unknown"
    whole = hashlib.md5(bytes.fromhex("".join(tags)), usedforsecurity=False)
    return f'"{whole.hexdigest()}-{len(tags)}"'


def _condition(write: Write) -> dict[str, str]:
    """What must be at the place of an object when it is made."""
    return {"IfNoneMatch": "*"} if write.replaces is None else {"IfMatch": write.replaces}


def _status(exc: Any) -> tuple[int, str]:
    """The status and the code of a ClientError."""
    return exc.response["ResponseMetadata"]["HTTPStatusCode"], exc.response.get("Error", {}).get("Code", "")


_SENT_AT_ONCE = 1 << 18
"""Bytes of a part between two looks whether it is given up."""


class _Body(io.BytesIO):
    """The bytes of a part, which end with an error once the upload is given up."""

    def __init__(self, content: bytes, is_given_up: Callable[[], bool]) -> None:
        super().__init__(content)
        self._is_given_up = is_given_up

    def read(self, size: int | None = -1, /) -> bytes:
        if self._is_given_up():
            raise CutError
        # A connection asks for 16 KiB, and has to wait for the interpreter's lock after each piece.
        return super().read(size if size is None or size < 0 else max(size, _SENT_AT_ONCE))


@functools.cache
def _faults() -> tuple[type[Exception], ...]:
    """What a connection raises that another one may not."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    return (
        CutError,
        ConnectionError,
        TimeoutError,
        HTTPError,
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
    )


def _version(answer: dict[str, Any], size: int) -> Stat:
    # A list has parts of a second, an answer has none.
    changed = float(int(answer["LastModified"].timestamp()))
    return Stat(size, answer["ETag"], changed, answer.get("Metadata", {}).get(_WRITE, ""))
