"""Every way in which the range server misbehaves, against every command that uses the network.

Either the exact bytes arrive, or the command ends with one line that names file and cause; what it kept is right,
no more is sent than the spans need, the token reaches no other host, and nothing written down holds a secret.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deltafin.indexer import RetryPolicy
from deltafin.store import open_store

REPO, TOKEN = "org/tiny", "hf_dummyTokenThatMustNotBeSeen"
SHARD = "model-00004-of-000012.safetensors"  # holds layer 3
EVER = 10**9

COMMANDS = {
    "index": ["df-index", "build", REPO],
    "warm": ["df-fetch", "warm", REPO, "--layers", "2-3", "--experts", "0-5"],
    "spine": ["df-fetch", "spine", REPO],
    "all": ["df-fetch", "all", REPO],
    "run": ["df-run", REPO, "--prompt-ids", "1 2 3", "--max-new", "2", "--ids"],
}
PROGRAM = {"index": "df-index", "run": "df-run"}


@dataclass(frozen=True)
class Case:
    """A mode of the server with arguments, and how it must end: with a cause to be named, or well (None)."""

    mode: str
    args: dict[str, object] = field(default_factory=dict)
    cause: str | None = None

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.cause is None else ' for ever'}"


PASSING = [
    Case("ok"),
    Case("ignore_range", {"times": 3}),
    Case("truncate", {"times": 3}),
    Case("reset_midway", {"times": 3}),
    Case("wrong_length", {"times": 3}),
    Case("short_206", {"times": 20}),
    Case("redirect_cross_host_expiring", {"life": 60}),
    Case("429_retry_after", {"times": 3, "seconds": 0.05}),
    Case("503_burst", {"times": 4}),
    Case("slow_drip", {"bytes": 30_000, "every": 0.001}),
    Case("stall", {"times": 2, "hold": 2}),
    Case("gzip_range"),
    Case("gzip_forced", {"times": 3}),
    Case("416", {"times": 3}),
    Case("no_content_range", {"times": 3}),
    Case("wrong_content_range", {"times": 3}),
    Case("mirror_bare"),
    Case("gated_401"),  # there is a token
]
LASTING = [
    Case("ignore_range", cause="ignored the range"),
    Case("truncate", {"keep": 0}, "broke off"),
    Case("reset_midway", {"keep": 0}, "broke off"),
    Case("wrong_length", {"delta": EVER}, "are missing"),
    Case("redirect_cross_host_expiring", {"life": -1}, "link that the hub gave was refused with status 403"),
    Case("redirect_loop", cause="redirects without end"),
    Case("429_retry_after", {"times": EVER, "seconds": 0.01}, "status 429"),
    Case("503_burst", {"times": EVER}, "status 503"),
    Case("stall", {"keep": 0, "hold": 1}, "fell silent"),
    Case("etag_change", {"after": 5}, "the file changed on the server"),
    Case("gzip_forced", cause="encoded as 'gzip'"),
    Case("416", cause="status 416"),
    Case("no_content_range", cause="without a usable Content-Range"),
    Case("wrong_content_range", cause="asked for bytes"),
    Case("gone_404", {"path": SHARD}, "no such file on the server"),
]
# The right length, and wrong bytes: only a digest tells, or what an expert or a header can be.
UNPROVEN = [Case("corrupt_byte"), Case("zero_tail")]
IN_HEADER = {"at": 40, "keep": 0.0005}
# Whole shards, or spans without a label that counts, until they are hung up on.
SENT_UNASKED = ("ignore_range", "gzip_range", "gzip_forced", "no_content_range")


def test_every_mode_of_the_server_is_here(range_server):
    assert {case.mode for case in (*PASSING, *LASTING, *UNPROVEN)} == set(range_server.MODES)


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    """Insists as often as the commands do, without their patience."""
    policy = RetryPolicy(
        attempts=5, backoff_s=0.005, max_backoff_s=0.02, max_pause_s=1.0, connect_timeout_s=2.0, read_timeout_s=0.4
    )
    monkeypatch.setattr("deltafin.indexer.remote.RetryPolicy", lambda: policy)


@pytest.fixture(scope="module")
def right_ids(tiny_dir, tmp_path_factory) -> str:
    """What df-run says with the shards at hand."""
    import deltafin

    with deltafin.open(tiny_dir, cache_dir=tmp_path_factory.mktemp("cache")) as model:
        return " ".join(map(str, model.generate(model.sequence(), [1, 2, 3], max_new=2))) + "\n"


class Outcome:
    """A command that has met a fault, and everything that can be said of what it left."""

    def __init__(self, done, server, cache: Path, shards: Path) -> None:
        self.done, self.server, self.cache, self.shards = done, server, cache, shards

    @property
    def complaint(self) -> str:
        """The one line on stderr that is no log record."""
        lines = [line for line in self.done.err.splitlines() if not any(f": {w}: " in line for w in LEVELS)]
        assert len(lines) == 1, self.done.err
        return lines[0]

    def check_secrets(self) -> None:
        files = [path.read_bytes().decode("latin-1") for path in self.cache.rglob("*") if path.is_file()]
        for text in (self.done.out, self.done.err, *files):
            assert TOKEN not in text and "Signature=" not in text and "Bearer" not in text
        assert not self.server.stats()["auth_seen_on_cdn"]

    def check_kept(self) -> None:
        """Objects are whole and are bytes of this checkpoint; nothing half-done lies about."""
        blobs = [path.read_bytes() for path in self.shards.glob("*.safetensors")]
        for path in (self.cache / "objects").rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert hashlib.sha256(content).hexdigest() == path.name
                assert any(content in blob for blob in blobs), path.name
        assert not list((self.cache / "tmp").glob("*"))
        assert not list(self.cache.rglob("*.part"))

    def check_sent(self, needed: int, mode: str) -> None:
        """What was needed, a part of it again, and of whole shards no more than the server was let send."""
        unasked = 5 * max(path.stat().st_size for path in self.shards.glob("*.safetensors")) * 8
        assert self.server.stats()["bytes_sent"] <= 1.3 * needed + 300_000 + (unasked if mode in SENT_UNASKED else 0)
        assert self.server.stats()["accept_encoding_seen"] in ([], ["identity"])


LEVELS = ("debug", "info", "warning")


@pytest.fixture
def meet(df, hub, tiny_dir, tmp_path, tiny_cache, monkeypatch) -> Callable[..., Outcome]:
    def run(command: str, case: Case, token: str | None = TOKEN) -> Outcome:
        cache = tmp_path / "cache"
        if command != "index":
            shutil.copytree(tiny_cache / "catalogs", cache / "catalogs", dirs_exist_ok=True)
        args = dict(case.args)
        if command == "index":  # of the small files only a listing with digests tells, and this one has none
            args = {"path": "*.safetensors", **(IN_HEADER if case in UNPROVEN else {}), **args}
        server = hub(tiny_dir)
        server.set_mode(case.mode, **args)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        done = df(*COMMANDS[command], "-vv", "--yes") if command != "index" else df(*COMMANDS[command], "-vv")
        return Outcome(done, server, cache, tiny_dir)

    return run


@pytest.fixture(scope="module")
def needed(tiny_cache) -> dict[str, int]:
    """Bytes that each command has to fetch, or more."""
    from deltafin.store import all_items, expert_items, spine_items

    with open_store(REPO, cache_dir=tiny_cache, offline=True) as store:
        catalog = store.catalog

        def nbytes(items) -> int:
            return sum(item.span.nbytes for item in items)

        return {
            "index": 13 << 16,
            "warm": nbytes(expert_items(catalog, [2, 3], range(6))),
            "spine": nbytes(spine_items(catalog)),
            "all": nbytes(all_items(catalog)),
            "run": nbytes(all_items(catalog)),
        }


def well(command: str, case: Case) -> bool:
    """A header starts at byte 0, before which there is no other place to answer for."""
    return case.cause is None or (command, case.mode) == ("index", "wrong_content_range")


def subset(case: Case, command: str) -> bool:
    """Run always; the others take a minute together."""
    return (case.mode, command) in {
        ("truncate", "all"), ("redirect_cross_host_expiring", "run"), ("429_retry_after", "run"), ("416", "run"),
        ("etag_change", "all"), ("gone_404", "warm"), ("ignore_range", "index"), ("mirror_bare", "run"),
    }  # fmt: skip


CASES = [
    pytest.param(command, case, id=f"{command}-{case}", marks=() if subset(case, command) else pytest.mark.slow)
    for command in COMMANDS
    for case in (*PASSING, *LASTING)
]


@pytest.mark.parametrize(("command", "case"), CASES)
def test_the_bytes_are_exact_or_one_line_says_why_not(meet, needed, right_ids, command, case):
    met = meet(command, case)
    met.check_secrets()
    met.check_kept()
    met.check_sent(needed[command], case.mode)
    if well(command, case):
        assert met.done.status == 0, met.done.err
        if command == "run":
            assert met.done.out == right_ids
        if case.mode == "redirect_cross_host_expiring":
            assert met.server.stats()["auth_seen_on_hub"]
        return
    assert met.done.status == 1 and "Traceback" not in met.done.err
    named = r"(model-\d{5}-of-000012\.safetensors|config\.json) from 127\.0\.0\.1: "
    assert re.match(f"{PROGRAM.get(command, 'df-fetch')}: {named}", met.complaint), met.complaint
    assert case.cause in met.complaint
    if command == "index":
        assert not list(met.cache.rglob("*.catalog"))
    assert met.server.stats()["requests"] < 400


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_token_a_gated_file_is_refused_and_the_advice_is_to_set_one(meet, command):
    met = meet(command, Case("gated_401"), token=None)
    met.check_kept()
    assert met.done.status == 1
    assert "access refused (status 401); set HF_TOKEN" in met.complaint


@pytest.mark.slow
@pytest.mark.parametrize("case", UNPROVEN, ids=str)
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_bytes_of_the_right_length_are_found_where_anything_can_tell(meet, command, case, needed):
    """A header contradicts itself; an expert of zeros is none. What nothing can tell is kept as unproven."""
    met = meet(command, case)
    met.check_secrets()
    met.check_sent(3 * needed[command], case.mode)  # what is refused is fetched three times
    assert "Traceback" not in met.done.err
    if command == "index":
        assert met.done.status == 1 and "model-0" in met.complaint and not list(met.cache.rglob("*.catalog"))
    elif case.mode == "zero_tail" and command in ("warm", "all"):
        assert met.done.status == 1 and "all zeros" in met.complaint
        assert "nothing of it was kept" in met.complaint
    elif command == "all":
        assert met.done.status == 1 and "do not have the published SHA-256" in met.complaint
        met.check_kept()
    elif met.done.status != 0:
        assert met.done.status == 1 and met.complaint


@pytest.fixture
def manifest(df, hub, tiny_dir, tiny_cache, tmp_path) -> Path:
    """The digests of a cache that was fetched from a sound server."""
    source, file = tmp_path / "source", tmp_path / "tiny.manifest"
    shutil.copytree(tiny_cache, source)
    hub(tiny_dir)
    assert df("df-fetch", "all", REPO, cache=source).status == 0
    assert df("df-fetch", "manifest", "export", REPO, "-o", str(file), cache=source).status == 0
    return file


@pytest.mark.parametrize(
    ("command", "mode", "times"),
    [
        pytest.param(command, mode, times, marks=() if (command, times) == ("run", 2) else pytest.mark.slow)
        for command in ("warm", "spine", "all", "run")
        for mode in ("corrupt_byte", "zero_tail")
        for times in (2, EVER)
    ],
)
def test_with_a_manifest_no_wrong_byte_is_ever_kept_or_computed_with(
    meet, manifest, df, tiny_cache, tmp_path, right_ids, command, mode, times
):
    shutil.copytree(tiny_cache / "catalogs", tmp_path / "cache" / "catalogs")
    assert df("df-fetch", "manifest", "import", REPO, str(manifest)).status == 0
    met = meet(command, Case(mode, {"times": times}))
    met.check_secrets()
    met.check_kept()
    if times == EVER:
        assert met.done.status == 1 and "contradict the proven digest" in met.complaint and met.done.out == ""
    else:
        assert met.done.status == 0, met.done.err
        assert command != "run" or met.done.out == right_ids


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_without_a_manifest_a_whole_fetch_finds_what_came_wrong_and_brings_it_again(meet, times):
    met = meet("all", Case("corrupt_byte", {"times": times, "after": 30}))
    assert met.done.status == 0, met.done.err
    assert met.done.err.count("came otherwise this time") == times
    met.check_kept()
