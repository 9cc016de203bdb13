"""Where checkpoints come from: a folder, a Hugging Face cache, a repository; and what each says of its files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from deltafin.errors import BadCheckpoint, BadRequest, DeltafinError, NetworkError, NotFound, Refused
from deltafin.indexer import source_of

COMMIT = "0123456789" * 4
SHARD_5 = "model-00005-of-000012.safetensors"


# ---- the cache of huggingface_hub -----------------------------------------------------------------


@pytest.fixture
def hub_cache(tiny_dir, tmp_path) -> Path:
    """models--some--model as huggingface_hub leaves it: blobs named by their digest, a snapshot of links to them."""
    folder = tmp_path / "hub" / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for path in tiny_dir.iterdir():
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            digest = hashlib.sha256(raw).hexdigest()
        else:
            digest = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
        (folder / "blobs" / digest).write_bytes(raw)
        (snapshot / path.name).symlink_to(Path("../../blobs") / digest)
    return folder


@pytest.mark.parametrize("asked", ["snapshot", "repository-folder", "relative", "link"])
def test_a_cache_snapshot_gives_repository_commit_and_digests(hub_cache, tiny_dir, build, tmp_path, monkeypatch, asked):
    snapshot = hub_cache / "snapshots" / COMMIT
    (tmp_path / "link").symlink_to(snapshot)
    monkeypatch.chdir(hub_cache.parent)
    model = {
        "snapshot": snapshot,
        "repository-folder": hub_cache,
        "relative": f"models--some--model/snapshots/{COMMIT}/",
        "link": tmp_path / "link",
    }[asked]
    catalog = build(model)
    where = catalog.location
    assert (where.path, where.repo, where.commit) == (str(snapshot), "some/model", COMMIT)
    assert catalog.identity == f"some/model@{COMMIT[:12]}"
    for shard in catalog.shards:
        assert shard.sha256 == hashlib.sha256((tiny_dir / shard.name).read_bytes()).hexdigest()
    assert catalog.layout_sha256 == build(tiny_dir, "plain").layout_sha256


def test_a_plain_folder_claims_no_digest(tiny_dir, build):
    catalog = build(tiny_dir)
    assert {shard.sha256 for shard in catalog.shards} == {None}
    assert (catalog.location.path, catalog.location.repo, catalog.location.commit) == (str(tiny_dir), None, None)
    assert catalog.identity == f"built@{catalog.layout_sha256[:12]}"


def test_a_link_to_a_file_of_another_name_claims_no_digest(tiny_copy, build, tmp_path):
    shard = tiny_copy.path(5)
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    assert {s.sha256 for s in build(tiny_copy.folder).shards} == {None}


def test_a_link_into_a_cache_that_was_cleaned_is_named(hub_cache, build):
    shard = hub_cache / "snapshots" / COMMIT / SHARD_5
    shard.resolve().unlink()
    with pytest.raises(NotFound, match=rf"{SHARD_5}: No such file .* cache that was cleaned"):
        build(hub_cache)


def test_a_cache_folder_whose_snapshot_is_gone_says_so(hub_cache, build):
    shutil.rmtree(hub_cache / "snapshots" / COMMIT)
    with pytest.raises(DeltafinError, match=COMMIT):
        build(hub_cache)


def test_a_snapshot_without_one_of_its_shards_is_incomplete(hub_cache, build):
    (hub_cache / "snapshots" / COMMIT / SHARD_5).unlink()
    with pytest.raises(BadCheckpoint, match=f"1 of 12 shards are missing: {SHARD_5}"):
        build(hub_cache)


# ---- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_small_file_that_is_not_small_is_refused(tiny_copy, build, name):
    with open(tiny_copy.folder / name, "wb") as f:
        f.truncate(9 << 20)
    with pytest.raises(BadCheckpoint, match=f"{name}: larger than the "):
        build(tiny_copy.folder)


@pytest.mark.parametrize("name", ["config.json", SHARD_5])
def test_a_folder_in_place_of_a_file_is_named(tiny_copy, build, name):
    (tiny_copy.folder / name).unlink()
    (tiny_copy.folder / name).mkdir()
    with pytest.raises(DeltafinError, match=f"{name}: .*(not a file|directory|bytes)"):
        build(tiny_copy.folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_shard_that_may_not_be_read_is_named(tiny_copy, build):
    tiny_copy.path(5).chmod(0)
    with pytest.raises(DeltafinError, match=f"{SHARD_5}: cannot read at 0: Permission denied"):
        build(tiny_copy.folder)


def test_files_beside_the_shards_are_no_matter(tiny_copy, build):
    for name in ("model-1-of-2.safetensors", "model-00001-of-000012.safetensors.part", "consolidated.safetensors"):
        (tiny_copy.folder / name).write_bytes(b"x")
    assert build(tiny_copy.folder).totals.shards == 12


def test_the_source_of_a_catalog_is_found_again(tiny_copy, build):
    catalog = build(tiny_copy.folder)
    source = source_of(catalog.location)
    assert source.location == catalog.location
    assert len(source.shard_files()) == 12
    shutil.rmtree(tiny_copy.folder)
    with pytest.raises(NotFound, match="no such directory"):
        source_of(catalog.location)


# ---- repositories ---------------------------------------------------------------------------------


def asked_paths(server, kind: str) -> list[str]:
    return [row["path"] for row in server.state.log if row["kind"] == kind]


@pytest.mark.parametrize("listed", [False, True])
def test_a_repository_gives_the_same_catalog_as_its_files_and_their_digests(
    tiny_dir, hub, listing, build, quick, listed
):
    server = hub(tiny_dir)
    if listed:
        listing()
    catalog = build("some/model", "remote")
    local = build(tiny_dir, "local")
    assert catalog.layout_sha256 == local.layout_sha256
    assert catalog.totals == local.totals
    for layer in local.config.moe_layers:
        assert catalog.expert_spans(layer, range(16)) == local.expert_spans(layer, range(16))
    assert [catalog.spine(layer) for layer in range(9)] == [local.spine(layer) for layer in range(9)]
    where = catalog.location
    assert (where.path, where.repo, where.revision, where.commit) == (None, "some/model", None, "a" * 40)
    for shard in catalog.shards:
        digest = hashlib.sha256((tiny_dir / shard.name).read_bytes()).hexdigest()
        assert shard.sha256 == digest
        assert shard.etag is not None
    # One commit for all, no HEAD, nothing but shards and the small files that are kept, each shard read once.
    files = asked_paths(server, "file")
    assert all(path.startswith(f"/some/model/resolve/{'a' * 40}/") for path in files)
    assert {path.rpartition("/")[2] for path in files} == {"config.json", *(s.name for s in catalog.shards)}
    assert {row["method"] for row in server.state.log} == {"GET"}
    assert len(files) == 13
    assert server.stats()["bytes_sent"] < 13 * (64 << 10)


def test_only_headers_are_read_of_large_shards(tiny_dir, hub, build, make_checkpoint, tmp_path):
    """Their first 64 KiB, and exactly the rest where a header is longer."""
    make_checkpoint.generate(tmp_path / "ckpt", "tiny", overrides={"experts": 128, "top_k": 4, "layers": 3})
    server = hub(tmp_path / "ckpt")
    catalog = build("some/model")
    long = [s for s in catalog.shards if s.header_nbytes > 64 << 10]
    assert len(long) == 2
    for shard in catalog.shards:
        rows = [row for row in server.state.log if row["path"].endswith(shard.name)]
        first = f"bytes=0-{(64 << 10) - 1}"
        rest = [f"bytes={64 << 10}-{8 + shard.header_nbytes - 1}"] if shard in long else []
        assert [row["range"] for row in rows] == [first, *rest]


def test_the_revision_asked_for_is_resolved_once_and_kept(tiny_dir, hub, build):
    server = hub(tiny_dir)
    where = build("some/model@v1.0").location
    assert (where.revision, where.commit) == ("v1.0", "a" * 40)
    assert asked_paths(server, "api") == ["/api/models/some/model/revision/v1.0"]


def test_kimi_k3_means_its_pinned_revision(tiny_dir, hub, listing, build, monkeypatch, range_server):
    from deltafin.indexer import sources
    from deltafin.indexer.sources import K3_REVISION

    monkeypatch.setattr(sources, "_K3_REVISIONS", frozenset())  # whose small files are known
    monkeypatch.setattr(range_server.Handler, "commit", lambda self: K3_REVISION)
    server = hub(tiny_dir)
    where = build("moonshotai/Kimi-K3", "pinned").location
    assert where.revision == K3_REVISION
    assert asked_paths(server, "api") == [f"/api/models/moonshotai/Kimi-K3/revision/{K3_REVISION}"]
    build("moonshotai/Kimi-K3@main", "main")
    build("some/Kimi-K3", "other")
    assert asked_paths(server, "api")[1:] == [
        "/api/models/moonshotai/Kimi-K3/revision/main", "/api/models/some/Kimi-K3",
    ]  # fmt: skip


def test_a_hub_that_has_another_commit_than_the_one_asked_for_is_refused(tiny_dir, hub, build, tmp_path):
    """The hash is what was wanted; what else the hub has is not it, whatever it is."""
    server = hub(tiny_dir)
    with pytest.raises(Refused, match=f"some/model: asked for commit {COMMIT}, the hub has {'a' * 40}"):
        build(f"some/model@{COMMIT}")
    with pytest.raises(Refused, match="moonshotai/Kimi-K3: asked for commit f831ab66"):
        build("moonshotai/Kimi-K3")
    assert asked_paths(server, "file") == []
    assert not list(tmp_path.rglob("*.catalog"))


def test_small_files_of_kimi_k3_must_be_the_released_ones(tiny_dir, hub, listing, build, range_server, monkeypatch):
    """Even where a mirror lists another file with a digest that fits."""
    from deltafin.indexer.sources import K3_REVISION

    hub(tiny_dir)
    listing()
    monkeypatch.setattr(range_server.Handler, "commit", lambda self: K3_REVISION)
    with pytest.raises(Refused, match=r"config\.json from moonshotai/Kimi-K3: digest [0-9a-f]{64}, expected 9710e121"):
        build("moonshotai/Kimi-K3")
    assert build("some/model", "other").location.commit == K3_REVISION


def test_small_files_must_have_the_digest_of_their_listing(demo_dir, hub, listing, build):
    hub(demo_dir)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model"):

        def lie(answer, name=name):
            (entry,) = [s for s in answer["siblings"] if s["rfilename"] == name]
            if "lfs" in entry:
                entry["lfs"]["sha256"] = "0" * 64
            else:
                entry["blobId"] = "0" * 40

        listing(lie)
        with pytest.raises(Refused, match=f"{name} from some/model: digest .*, expected 0000.*nothing of it was used"):
            build("some/model")
    listing()
    assert build("some/model").file("tiktoken.model") == (demo_dir / "tiktoken.model").read_bytes()


@pytest.mark.parametrize("path", ["config.json", "tiktoken.model"])
def test_a_small_file_with_one_wrong_byte_is_refused(demo_dir, hub, listing, build, path):
    hub(demo_dir, "corrupt_byte", path=path)
    listing()
    with pytest.raises(Refused, match=f"{path} from some/model: digest"):
        build("some/model")


@pytest.mark.parametrize(("field", "value"), [("size", 1), ("sha256", "0" * 64)])
def test_a_shard_that_is_not_the_listed_one_is_refused(tiny_dir, hub, listing, build, field, value):
    def lie(answer):
        (entry,) = [s for s in answer["siblings"] if s["rfilename"] == SHARD_5]
        if field == "size":
            entry["size"] += value
        else:
            entry["lfs"]["sha256"] = value

    hub(tiny_dir)
    listing(lie)
    with pytest.raises(Refused, match=rf"{SHARD_5} from 127\.0\.0\.1: .*changed on the server|indexed with"):
        build("some/model")


def test_names_in_a_listing_lead_nowhere_else(tiny_dir, hub, listing, build):
    """Only names of shards and of the four small files are ever asked for."""
    shard = "model-00001-of-000012.safetensors"
    odd = [f"../../{shard}", f"/etc/{shard}", f"..\\{shard}", f"{shard}\n", "x/config.json", ""]
    server = hub(tiny_dir)
    listing(
        lambda answer: answer["siblings"].extend({"rfilename": name, "size": 9, "blobId": "0" * 40} for name in odd)
    )
    assert build("some/model").totals.shards == 12
    assert {path.count("/") for path in asked_paths(server, "file")} == {5}


def test_a_repository_without_one_of_its_shards_is_incomplete(tiny_copy, hub, build):
    tiny_copy.path(5).unlink()
    hub(tiny_copy.folder)
    with pytest.raises(BadCheckpoint, match=f"some/model@a{{40}}: 1 of 12 shards are missing: {SHARD_5}"):
        build("some/model")


def test_a_repository_of_something_else_says_so(tmp_path, hub, build):
    (tmp_path / "README.md").write_text("x")
    hub(tmp_path)
    with pytest.raises(NotFound, match=r"some/model: there is no config\.json"):
        build("some/model")


def answering(status: int, body: bytes, **headers: str):
    return lambda handler, path: handler.reply(
        status, {k.replace("_", "-"): v for k, v in headers.items()}, body, False
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answering(401, b"{}", X_Error_Code="RepoNotFound"), "some/model: no such repository, or it is private"),
        (answering(404, b"{}", X_Error_Code="RepoNotFound"), "some/model: no such repository, or it is private"),
        (answering(403, b"{}", X_Error_Code="GatedRepo"), "some/model: gated; accept its terms"),
        (answering(404, b"{}", X_Error_Code="RevisionNotFound"), "some/model@v1: no such revision"),
        (answering(500, b""), r"some/model/revision/v1 from 127\.0\.0\.1: gave up after 5 attempts \(status 500\)"),
        (answering(200, b"<html>"), r"the answer of 127\.0\.0\.1 is no listing of a repository; check HF_ENDPOINT"),
        (answering(200, b"{}"), r"the answer of 127\.0\.0\.1 has no commit"),
        (answering(200, json.dumps({"id": "some/model", "siblings": []}).encode()), r"127\.0\.0\.1 has no commit"),
        (answering(200, json.dumps({"id": "x", "sha": "main", "siblings": []}).encode()), "has no commit"),
        (answering(200, json.dumps({"id": "x", "sha": "a" * 40}).encode()), r"no config\.json"),
    ],
    ids=["private", "unknown", "gated", "revision", "broken", "page", "empty", "no-commit", "odd-commit", "no-files"],
)
def test_a_hub_that_does_not_answer_as_a_hub_is_named(tiny_dir, hub, range_server, monkeypatch, build, answer, message):
    monkeypatch.setattr(range_server.Handler, "_api", answer)
    hub(tiny_dir)
    with pytest.raises((NetworkError, NotFound), match=message):
        build("some/model@v1")


def test_a_hub_that_is_not_there_is_named_soon(monkeypatch, build):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(NetworkError, match=r"some/model from 127\.0\.0\.1: no answer in 2 .*refused.*HF_ENDPOINT"):
        build("some/model")


@pytest.mark.parametrize(
    "endpoint",
    [
        "huggingface.co",
        "ftp://localhost",
        "file:///x",
        "http://",
        "http://[",
        "http://x:99999",
        "http://x:y",
        "https:///x",
    ],
)
def test_an_endpoint_that_is_no_address_is_a_bad_request(monkeypatch, build, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(BadRequest, match="HF_ENDPOINT must be an address like"):
        build("some/model")


@pytest.mark.parametrize("spelling", ["{}/", "{}//", "HTTP://LOCALHOST:{port}", "Http://LocalHost:{port}/"])
def test_an_endpoint_may_be_spelled_in_any_way(tiny_dir, hub, build, monkeypatch, spelling):
    server = hub(tiny_dir, "redirect_cross_host_expiring", life=60)
    monkeypatch.setenv("HF_TOKEN", "hf_dummy")
    monkeypatch.setenv("HF_ENDPOINT", spelling.format(server.url, port=server.hub.server_port))
    assert build("some/model").totals.experts == 128
    assert server.stats()["auth_seen_on_hub"]
    assert not server.stats()["auth_seen_on_cdn"]


def test_an_endpoint_may_lie_below_a_path(tiny_dir, hub, build, range_server, monkeypatch):
    class Below(range_server.Handler):
        def _route(self, head):
            assert self.path.startswith("/mirrors/hf/"), self.path
            self.path = self.path.removeprefix("/mirrors/hf")
            super()._route(head)

    monkeypatch.setattr(range_server, "Handler", Below)
    server = hub(tiny_dir)
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/mirrors/hf/")
    catalog = build("some/model")
    assert catalog.totals.experts == 128
    assert len(server.state.log) == 14


def test_a_mirror_that_says_nothing_of_its_files_is_enough_for_a_catalog(tiny_dir, hub, build):
    """Content-Range tells the size; without digests every span stays unproven until a manifest confirms it."""
    hub(tiny_dir, "mirror_bare")
    catalog = build("some/model")
    assert {(s.sha256, s.etag) for s in catalog.shards} == {(None, None)}
    assert catalog.location.commit == "a" * 40
    assert catalog.layout_sha256 == build(tiny_dir, "local").layout_sha256


def test_a_mirror_that_does_not_even_say_how_large_a_file_is_is_not(tiny_dir, hub, behave, build):
    def silent(h, req):
        if not req.ranged:
            return h.reply(200, {}, req.body(), req.head)
        return h.reply(206, {"Content-Range": f"bytes {req.start}-{req.end}/*"}, req.body(), req.head)

    behave("silent", silent)
    hub(tiny_dir, "silent")
    with pytest.raises(BadCheckpoint, match=r"model-\d{5}-of-000012.safetensors: the server does not say how large"):
        build("some/model")


# ---- repositories that misbehave ------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        "ignore_range", "truncate", "reset_midway", "wrong_length", "short_206", "503_burst", "gzip_range",
        "gzip_forced", "416", "no_content_range", "wrong_content_range", "429_retry_after", "slow_drip", "stall",
        "redirect_cross_host_expiring",
    ],
)  # fmt: skip
def test_a_catalog_is_the_same_through_every_fault_that_passes(tiny_dir, hub, build, impatient, mode):
    wanted = build(tiny_dir, "local").layout_sha256
    server = hub(tiny_dir, mode, path="*.safetensors", times=4, seconds=0.1, hold=3, every=0.01, life=60)
    assert build("some/model", policy=impatient(mode)).layout_sha256 == wanted
    assert server.stats()["triggered"] == 4


@pytest.mark.parametrize("mode", ["corrupt_byte", "zero_tail"])
@pytest.mark.parametrize("at", [3, 8, 40, 3000])
def test_wrong_bytes_in_a_header_are_never_published(tiny_dir, hub, build, tmp_path, mode, at):
    """A range has no digest of its own, so its content has to contradict itself."""
    hub(tiny_dir, mode, at=at, keep=at / (64 << 10), path="*.safetensors")
    with pytest.raises(BadCheckpoint, match=r"^model-\d{5}-of-000012\.safetensors: "):
        build("some/model")
    assert not list(tmp_path.rglob("*.catalog"))


@pytest.mark.parametrize("mode", ["ignore_range", "truncate", "wrong_length", "503_burst", "gzip_forced", "gone_404"])
def test_a_shard_that_never_comes_is_an_error_that_names_it(tiny_dir, hub, build, tmp_path, mode):
    hub(tiny_dir, mode, times=10_000, path=SHARD_5)
    with pytest.raises(NetworkError, match=rf"^{SHARD_5} from 127\.0\.0\.1: "):
        build("some/model")
    assert not list(tmp_path.rglob("*.catalog"))


@pytest.mark.parametrize("after", range(13))
def test_a_repository_that_moves_during_the_work_is_noticed_at_every_request(tiny_dir, hub, build, tmp_path, after):
    hub(tiny_dir, "etag_change", after=after)
    with pytest.raises(Refused, match=r"the file changed on the server .*; rebuild the catalog"):
        build("some/model")
    assert not list(tmp_path.rglob("*.catalog"))


def test_a_repository_that_has_moved_since_is_not_taken_for_the_indexed_one(tiny_dir, hub, listing, build, quick):
    hub(tiny_dir)
    catalog = build("some/model")
    listing(lambda answer: answer.update(sha="b" * 40))
    with pytest.raises(Refused, match=f"some/model: asked for commit {'a' * 40}, the hub has {'b' * 40}"):
        source_of(catalog.location, quick)
