"""Repositories of the Hugging Face Hub, read through huggingface_hub: ``hf://[datasets/]OWNER/NAME[@REVISION]/FILE``.

Token, endpoint and offline mode are those of huggingface_hub: ``HF_TOKEN``, ``hf auth login``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``. The first question to the Hub says at which commit a file is, and where its bytes are; ranges are
then of that commit. Such a place may be signed for a while: the Hub is asked again where it is no longer accepted.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.files.stores.attempts import Attempts, CutError, filling, one_line
from ckpt8.core.files.stores.contract import MOST_LISTED, Stat

_SECONDS = 60
"""That a connection may take, and the next bytes of an answer."""

_LONGEST_WAIT = 30
"""Seconds that the Hub may ask to wait before the next attempt; it allows so many requests in five minutes."""

_REPOSITORY = re.compile(r"((?:datasets|models|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?")

R = TypeVar("R")


class _Place(NamedTuple):
    """Where the bytes of a file are at a commit; ``is_hub`` where that is the Hub, which alone gets the token."""

    commit: str
    url: str
    is_hub: bool


class HfStore:
    """A repository at a revision, its default branch without one. Raises UsageError for a name that is none."""

    def __init__(self, repository: str) -> None:
        match = _REPOSITORY.fullmatch(repository)
        if match is None:
            raise UsageError(f"hf://{repository}: names no repository; give hf://OWNER/NAME/FILE")
        kind, self._name, self._revision = match.groups()
        self._kind = {"datasets/": "dataset", "spaces/": "space"}.get(kind, "model")
        self._root = f"hf://{repository}"
        self._places: dict[tuple[str, str], _Place] = {}
        self._commits: dict[tuple[str, str], str] = {}
        """Where a list has shown a version of a file."""

    def stat(self, key: str) -> Stat | None:
        """The present version of a file, None where there is none."""
        return self._persist(key, lambda _: self._resolve(key, self._revision))

    def first(self, key: str, length: int) -> tuple[Stat, bytes] | None:
        """The present version of a file and its first bytes, at most ``length``, None where there is no file."""
        version = self.stat(key)
        if version is None:
            return None
        head = bytearray(min(length, version.size))
        if head:
            self.fill(key, version.tag, 0, memoryview(head))
        return version, bytes(head)

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the version ``tag`` from ``start``. InputError where it is no longer there."""
        self._persist(key, filling(buffer, lambda done, rest: self._receive(key, tag, start + done, rest)))

    def objects(self, prefix: str, *, deep: bool = False) -> Mapping[str, Stat]:
        """What follows the prefix in the names of files, without slashes unless ``deep``, and their versions.

        All are of one commit, in one request.
        """
        return self._persist(prefix, lambda _: self._list(prefix, deep=deep))

    def _list(self, prefix: str, *, deep: bool) -> dict[str, Stat]:
        from huggingface_hub import HfApi

        found = HfApi(library_name="ckpt8").repo_info(
            self._name, revision=self._revision, repo_type=self._kind, timeout=_SECONDS, files_metadata=True
        )
        listed = {}
        for file in found.siblings or ():
            name = file.rfilename.removeprefix(prefix)
            tag = file.blob_id if file.lfs is None else file.lfs.sha256
            if found.sha is None or tag is None or file.size is None:
                raise InputError(f"{self._url(file.rfilename)}: the Hub does not say its commit, its size and its tag")
            if file.rfilename.startswith(prefix) and (deep or "/" not in name):
                listed[name] = Stat(file.size, tag, 0.0)
                self._commits[file.rfilename, tag] = found.sha
        require(
            len(listed) <= MOST_LISTED,
            f"{self._url(prefix)}: holds more than {MOST_LISTED:,} files; give the folder of one checkpoint",
        )
        return listed

    def _url(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def _place(self, key: str, tag: str) -> _Place:
        """Where the bytes of a version are. InputError where the Hub has another one at its commit."""
        if (key, tag) not in self._places:
            self._check_same(key, tag, self._commits[key, tag])
        return self._places[key, tag]

    def _check_same(self, key: str, tag: str, commit: str) -> None:
        found = self._resolve(key, commit)
        if found is None or found.tag != tag:
            raise InputError(f"{self._url(key)}: changed while it was read; nothing was written")

    def _resolve(self, key: str, revision: str | None) -> Stat | None:
        """The version of a file at a revision, whose place is noted; None where there is no such file."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        url = hf_hub_url(self._name, key, repo_type=self._kind, revision=revision)
        try:
            found = get_hf_file_metadata(url, timeout=_SECONDS, library_name="ckpt8")
        except EntryNotFoundError:
            return None
        if found.commit_hash is None or found.etag is None or found.size is None:
            raise InputError(f"{self._url(key)}: the Hub does not say its commit, its size and its tag")
        self._places[key, found.etag] = _Place(
            found.commit_hash, found.location, urlsplit(found.location)[:2] == urlsplit(url)[:2]
        )
        return Stat(found.size, found.etag, 0.0)

    def _receive(self, key: str, tag: str, start: int, buffer: memoryview) -> int:
        """Read a range of a version into ``buffer``; how many bytes came before it ended or was cut."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        place = self._place(key, tag)
        span = {"Range": f"bytes={start}-{start + len(buffer) - 1}", "Accept-Encoding": "identity"}
        headers = build_hf_headers(library_name="ckpt8", token=None if place.is_hub else False, headers=span)
        done = 0
        with get_session().stream("GET", place.url, headers=headers, timeout=_SECONDS) as answer:
            if answer.status_code in (401, 403):
                # What was signed for a while is signed anew, at the same commit.
                self._check_same(key, tag, place.commit)
                if self._places[key, tag] == place:
                    hf_raise_for_status(answer)
                raise CutError
            hf_raise_for_status(answer)
            stated = answer.headers.get("Content-Range", "")
            if answer.status_code != 206 or not stated.startswith(f"bytes {start}-"):
                raise InputError(f"{self._url(key)}: the Hub sent another range than it was asked for")
            try:
                for piece in answer.iter_raw():
                    stop = min(done + len(piece), len(buffer))
                    buffer[done:stop] = piece[: stop - done]
                    done = stop
            except _faults():
                return done
        return done

    def _persist(self, key: str, ask: Callable[[Attempts], R]) -> R:
        """What ``ask`` returns, after as many attempts as it takes. Raises InputError, UsageError."""
        try:
            from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
        except ImportError as exc:
            raise UsageError("hf:// needs huggingface_hub, which is not installed; pip install 'ckpt8[hf]'") from exc
        attempts = Attempts()
        while True:
            wait = 0.0
            try:
                return ask(attempts)
            except OfflineModeIsEnabled as exc:
                raise InputError(f"{self._url(key)}: HF_HUB_OFFLINE forbids to ask the Hub; unset it") from exc
            except HFValidationError as exc:
                raise UsageError(f"{self._url(key)}: {one_line(exc)}") from exc
            except HfHubHTTPError as exc:
                status = exc.response.status_code
                if not (status >= 500 or status == 429) or attempts.are_over():
                    self._refuse(key, status, exc)
                stated = exc.response.headers.get("Retry-After", "")
                wait = min(float(stated), _LONGEST_WAIT) if stated.isdecimal() else 0.0
            except _faults() as exc:
                if attempts.are_over():
                    why = "the connection was cut" if isinstance(exc, CutError) else one_line(exc)
                    raise InputError(f"{self._url(key)}: cannot be read: {why}, in {attempts.count} attempts") from exc
            attempts.wait(wait)

    def _refuse(self, key: str, status: int, exc: Exception) -> NoReturn:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        if isinstance(exc, GatedRepoError):
            why = f"{self._name} is gated; accept its terms on the Hub, and run hf auth login or set HF_TOKEN"
        elif isinstance(exc, RevisionNotFoundError):
            why = f"{self._name} has no revision {self._revision}"
        elif isinstance(exc, RepositoryNotFoundError) or status in (401, 403):
            why = f"there is no {self._kind} {self._name}, or it is private: run hf auth login, or set HF_TOKEN"
        else:
            why = f"cannot be read: {one_line(exc)}"
        raise InputError(f"{self._url(key)}: {why}") from exc


def _faults() -> tuple[type[Exception], ...]:
    """What a connection raises that another one may not."""
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return (CutError, ConnectionError, TimeoutError, client.TransportError, client.StreamError)
