"""The Hugging Face hub: its address, its token, and what it lists of a repository at one commit."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Sequence

from deltafin.errors import BadRequest, NetworkError, Refused
from deltafin.indexer.answers import Expected, ShardFile
from deltafin.indexer.mirrors import MirroredFiles, mirror_address
from deltafin.indexer.remote import Denied, RemoteFiles, RetryPolicy

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_LISTING_NBYTES = 64 << 20


def hub_endpoint() -> str:
    """HF_ENDPOINT as set now, else huggingface_hub's default; without a trailing slash."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if not endpoint:
        from huggingface_hub import constants  # only now: its import stumbles over a malformed HF_ENDPOINT

        endpoint = constants.ENDPOINT
    try:
        parts = urllib.parse.urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        shown = re.sub(r"//.*@", "//...@", endpoint[:200])  # never a password
        raise BadRequest(f"HF_ENDPOINT must be an address like https://huggingface.co (it is {shown[:80]!r})")
    return endpoint.rstrip("/")


def hub_token() -> str | None:
    """The user's token, where huggingface_hub would send it: HF_TOKEN, or what `hf auth login` has stored."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def hub_files(repo: str, commit: str, policy: RetryPolicy | None = None, mirrors: Sequence[str] = ()) -> RemoteFiles:
    """The files of a repository at a commit, with the user's token for the hub's own host.

    `mirrors` are asked before it, in their order, and get no token. Opens no connection yet.
    """
    base = f"{hub_endpoint()}/{repo}/resolve/{commit}"
    if not mirrors:
        return RemoteFiles(base, hub_token(), policy)
    return MirroredFiles([mirror_address(text, repo, commit) for text in mirrors], base, hub_token(), policy)


def hub_listing(repo: str, revision: str | None, policy: RetryPolicy | None = None) -> tuple[str, dict[str, ShardFile]]:
    """The commit that a revision means now, and the repository's files by name.

    Raises Refused if there is no such thing, or a commit was asked for and the hub answers with another:
    the hash is what was wanted, so a server that has something else does not have it.
    """
    wanted = f"{repo}@{revision}" if revision else repo
    endpoint = hub_endpoint()
    hub = urllib.parse.urlsplit(endpoint).hostname
    path = f"{repo}/revision/{urllib.parse.quote(revision, safe='')}" if revision else repo
    files = RemoteFiles(f"{endpoint}/api/models", hub_token(), policy)
    try:
        raw = files.read_file(f"{path}?blobs=True", _MAX_LISTING_NBYTES, Expected())
    except Denied as e:
        raise Refused(f"{wanted if e.code == 'RevisionNotFound' else repo}: {_meaning(e)}") from None
    finally:
        files.close()
    commit, listed = _parse(raw, wanted, hub)
    if revision is not None and _COMMIT.fullmatch(revision) and commit != revision:
        raise Refused(
            f"{repo}: asked for commit {revision}, the hub has {commit}; is HF_ENDPOINT a mirror of something else?"
        )
    return commit, listed


def _meaning(refusal: Denied) -> str:
    if refusal.code == "RevisionNotFound":
        return "no such revision"
    if refusal.code == "GatedRepo" or refusal.status == 403:
        return "gated; accept its terms on the hub and set HF_TOKEN"
    return "no such repository, or it is private and HF_TOKEN is not set or not accepted"


def _parse(raw: bytes, wanted: str, hub: str | None) -> tuple[str, dict[str, ShardFile]]:
    """Of everything that a hub could send, what is no commit and no file is passed over or refused."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise NetworkError(f"{wanted}: the answer of {hub} is no listing of a repository; check HF_ENDPOINT")
    commit = answer.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise NetworkError(f"{wanted}: the answer of {hub} has no commit (field 'sha'), so nothing could be pinned")
    siblings = answer.get("siblings")
    found = [_listed(entry) for entry in siblings] if isinstance(siblings, list) else []
    return commit, {file.name: file for file in found if file is not None}


def _listed(entry: object) -> ShardFile | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("rfilename"), str):
        return None
    size, blob, lfs = entry.get("size"), entry.get("blobId"), entry.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    return ShardFile(
        entry["rfilename"],
        size if type(size) is int and size >= 0 else None,
        blob if isinstance(blob, str) else None,
        sha256 if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) else None,
    )
