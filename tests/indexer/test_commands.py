"""df-index as a user meets it: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAYERS = "language_model.model.layers."


@pytest.fixture
def built(tiny_copy, df_index):
    """The tiny checkpoint under the name of "it"."""
    assert df_index("build", tiny_copy.folder, "--name", "it").status == 0
    return tiny_copy


# ---- build, show, list ----------------------------------------------------------------------------


def test_build_prints_one_line_of_totals(df_index, tiny_dir):
    result = df_index("build", tiny_dir, "--name", "it")
    assert (result.status, result.stderr) == (0, "")
    assert re.fullmatch(
        r"it: 9 layers, 128 experts, \d,\d{3} tensors, 2\.\d+ MB in 12 shards \(it@[0-9a-f]{12}\)\n", result.stdout
    )


def test_show_prints_every_fact_as_json(df_index, demo_dir, tmp_path):
    df_index("build", "demo")
    result = df_index("show", "demo", "--json")
    assert (result.status, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    index = json.loads((demo_dir / "model.safetensors.index.json").read_bytes())
    config = json.loads((demo_dir / "config.json").read_bytes())["text_config"]
    assert facts["name"] == "demo"
    assert facts["source"] == str(demo_dir)
    assert facts["identity"] == f"demo@{facts['layout_sha256'][:12]}"
    assert (facts["layers"], facts["shards"]) == (13, 14)
    assert facts["experts"] == 12 * 32
    assert facts["tensors"] == len(index["weight_map"])
    assert facts["tensor_nbytes"] == index["metadata"]["total_size"]
    assert facts["file_nbytes"] == sum(p.stat().st_size for p in demo_dir.glob("*.safetensors"))
    assert facts["spine_nbytes"] + facts["experts"] * facts["expert_nbytes"] == facts["tensor_nbytes"]
    assert (facts["ignored_tensors"], facts["ignored_nbytes"]) == (0, 0)
    assert (facts["hidden_size"], facts["vocab_size"]) == (config["hidden_size"], config["vocab_size"])
    assert (facts["kda_layers"], facts["mla_layers"]) == (9, 4)
    assert (facts["experts_per_layer"], facts["experts_per_token"]) == (32, config["num_experts_per_token"])
    assert facts["shards_with_published_sha256"] == 0
    assert facts["catalog"] == str(tmp_path / "cache" / "catalogs" / "demo.catalog")
    assert facts["catalog_nbytes"] == Path(facts["catalog"]).stat().st_size
    text = df_index("show", "demo").stdout
    for fact in (facts["identity"], facts["source"], facts["layout_sha256"], facts["catalog"], "384", "14,688"):
        assert fact in text


def test_a_model_is_shown_by_its_path_and_by_its_name(built, df_index):
    by_name = df_index("show", "it", "--json")
    assert df_index("show", built.folder).status == 2  # built under another name than the folder's own
    df_index("build", built.folder)
    by_path = json.loads(df_index("show", built.folder, "--json").stdout)
    assert re.fullmatch(r"tiny-[0-9a-f]{8}", by_path["name"])
    assert {**by_path, "name": "it"} == {
        **json.loads(by_name.stdout), "catalog": by_path["catalog"], "catalog_nbytes": by_path["catalog_nbytes"],
        "identity": by_path["identity"],
    }  # fmt: skip


def test_folders_of_the_same_name_have_catalogs_of_their_own(df_index, tiny_dir, tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(tiny_dir, tmp_path / parent / "ckpt")
        assert df_index("build", tmp_path / parent / "ckpt").status == 0
    assert len(list((tmp_path / "cache" / "catalogs").glob("*.catalog"))) == 2


@pytest.mark.parametrize("name", ["a folder", "-rf", "é", "...", "a" * 200])
def test_a_folder_of_any_name_can_be_indexed(df_index, tiny_dir, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(tiny_dir, folder)
    assert df_index("build", folder).status == 0
    assert json.loads(df_index("show", folder, "--json").stdout)["source"] == str(folder)


def test_list_shows_all_catalogs_and_what_is_wrong_with_the_others(built, df_index, tmp_path):
    assert df_index("list", "--cache-dir", tmp_path / "empty").stdout == ""
    df_index("build", "demo")
    catalogs = tmp_path / "cache" / "catalogs"
    (catalogs / "bad.catalog").write_bytes((catalogs / "it.catalog").read_bytes()[:-1])
    (catalogs / "note.txt").write_text("not a catalog")
    result = df_index("list")
    assert result.status == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["demo", "it"]
    assert result.stderr.startswith("bad: ")
    assert "rebuild it with df-index build" in result.stderr
    assert result.stderr.count("\n") == 1
    facts = json.loads(df_index("list", "--json").stdout)
    assert [f["name"] for f in facts] == ["bad", "demo", "it"]
    assert "rebuild" in facts[0]["error"]
    assert facts[1] == json.loads(df_index("show", "demo", "--json").stdout)


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_damaged_catalog_is_one_line_that_says_what_to_do(built, df_index, tmp_path, command):
    path = tmp_path / "cache" / "catalogs" / "it.catalog"
    path.write_bytes(path.read_bytes()[:4096])
    result = df_index(command, "it")
    assert result.status == 1
    assert result.line.startswith(f"df-index: {path}: ")
    assert "rebuild it with df-index build" in result.line
    assert df_index("build", built.folder, "--name", "it").status == 0
    assert df_index(command, "it").status == 0


def test_the_cache_directory_is_the_option_else_the_variable(df_index, tiny_dir, tmp_path):
    df_index("build", tiny_dir, "--name", "it", "--cache-dir", tmp_path / "given")
    df_index("build", tiny_dir, "--name", "it")
    assert (tmp_path / "given" / "catalogs" / "it.catalog").exists()
    assert (tmp_path / "cache" / "catalogs" / "it.catalog").exists()


# ---- check ----------------------------------------------------------------------------------------


def test_check_finds_nothing_where_nothing_changed(built, df_index):
    for options in ([], ["--index"]):
        result = df_index("check", "it", *options)
        assert (result.status, result.stdout, result.stderr) == (0, "it: as indexed\n", "")
    assert json.loads(df_index("check", "it", "--json", "--index").stdout) == {
        "name": "it", "ok": True, "problems": [],
    }  # fmt: skip


def problems(df_index, *options: str) -> list[str]:
    """What check finds, which it says in the same words as lines and as JSON."""
    lines = df_index("check", "it", *options)
    assert (lines.status, lines.stderr) == (1, "")
    answer = df_index("check", "it", "--json", *options)
    assert answer.status == 1
    found = json.loads(answer.stdout)
    assert (found["name"], found["ok"]) == ("it", False)
    assert found["problems"] == lines.stdout.splitlines()
    return found["problems"]


def test_check_finds_a_shard_whose_tensors_have_moved(built, df_index):
    path = built.edit(3, lambda tensors: tensors)
    size = path.stat().st_size
    df_index("build", built.folder, "--name", "it")
    swapped = [".self_attn.k_proj.weight", ".self_attn.q_proj.weight"]

    def swap(tensors):
        """Two of equal length: only the header shows it, and its length and the file's stay the same."""
        first, second = (next(i for i, t in enumerate(tensors) if t.name.endswith(name)) for name in swapped)
        tensors[first], tensors[second] = tensors[second], tensors[first]
        return tensors

    built.edit(3, swap)
    assert path.stat().st_size == size
    assert problems(df_index) == [f"{path.name}: header or size differs from the one that was indexed"]


def test_check_finds_every_changed_shard(built, df_index):
    paths = [built.edit(n, lambda tensors: sorted(tensors, key=lambda t: ".experts." in t.name)) for n in (2, 7)]
    assert problems(df_index) == [f"{p.name}: header or size differs from the one that was indexed" for p in paths]


def test_check_finds_a_shard_that_is_damaged_or_gone(built, df_index):
    raw = built.path(4).read_bytes()
    built.path(4).write_bytes(raw[:-1])
    (line,) = problems(df_index)
    assert line.startswith(f"{built.path(4).name}: tensor ") and line.endswith("it is cut short")
    built.path(4).unlink()
    (line,) = problems(df_index)
    assert "model-00004-of-000012.safetensors" in line


def test_check_finds_a_changed_config(built, df_index):
    built.edit_config(lambda config: config["text_config"].update(rms_norm_eps=1e-6))
    assert problems(df_index) == ["config.json differs from the one that was indexed"]


def test_check_finds_small_files_that_came_or_went(built, df_index):
    (built.folder / "tokenizer_config.json").write_text("{}")
    assert problems(df_index) == ["tokenizer_config.json differs from the one that was indexed"]
    df_index("build", built.folder, "--name", "it")
    (built.folder / "tokenizer_config.json").unlink()
    assert problems(df_index) == ["tokenizer_config.json differs from the one that was indexed"]


def test_check_finds_another_number_of_shards(built, df_index):
    """The vision stubs are no part of the text model, so the checkpoint is whole without them."""
    for number in (11, 12):
        built.path(number).unlink()
    for path in sorted(built.folder.glob("*.safetensors")):
        path.rename(path.with_name(path.name.replace("of-000012", "of-000010")))
    found = problems(df_index)
    assert "model-00001-of-000010.safetensors is not in the catalog" in found
    assert "model-00012-of-000012.safetensors is in the catalog, but not at its source any more" in found
    assert len(found) == 22


def test_check_of_a_folder_that_is_gone_is_one_line(built, df_index):
    shutil.rmtree(built.folder)
    result = df_index("check", "it")
    assert (result.status, result.stdout) == (1, "")
    assert result.line == f"df-index: {built.folder}: no such directory"


@pytest.fixture
def edit_index(built):
    path = built.folder / "model.safetensors.index.json"

    def edit(change):
        index = json.loads(path.read_bytes())
        change(index)
        path.write_text(json.dumps(index))

    return edit


def test_check_finds_every_wrong_entry_of_the_index(edit_index, df_index):
    norm = LAYERS + "4.input_layernorm.weight"
    scale = LAYERS + "4.block_sparse_moe.experts.3.w2.weight_scale"

    def change(index):
        index["weight_map"][norm] = "model-00001-of-000012.safetensors"
        del index["weight_map"][scale]
        index["weight_map"][LAYERS + "4.new"] = "model-00005-of-000012.safetensors"
        index["metadata"]["total_size"] += 1

    edit_index(change)
    assert df_index("check", "it").status == 0  # without --index nobody looks
    total = problems(df_index, "--index")
    assert sorted(line for line in total if "total" not in line and "tensor bytes" not in line) == sorted([
        f"model.safetensors.index.json does not place tensor {norm} in model-00005-of-000012.safetensors",
        f"model.safetensors.index.json does not place tensor {scale} in model-00005-of-000012.safetensors",
        f"model.safetensors.index.json names tensor {LAYERS}4.new, which no shard holds",
    ])  # fmt: skip
    assert len(total) == 4
    assert "tensor bytes, the shards hold" in total[0]


def test_an_index_with_names_that_no_terminal_can_show_is_shown_escaped(edit_index, df_index):
    edit_index(lambda index: index["weight_map"].update({"\ud800\x1b[2J": "x", "y" * 5000: "x"}))
    found = problems(df_index, "--index")
    assert len(found) == 2
    assert all(line.isprintable() and line.isascii() and len(line) < 300 for line in found)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b'{"weight_map":[],"metadata":{"total_size":1}}', b"\xff", b"[" * 99_999, b'{"metadata":1}'],
)
def test_a_damaged_index_is_a_problem_of_its_own(built, df_index, raw):
    (built.folder / "model.safetensors.index.json").write_bytes(raw)
    assert problems(df_index, "--index") == [
        "model.safetensors.index.json is damaged: no weight_map and metadata.total_size can be read"
    ]


def test_a_check_against_an_index_that_is_not_there_says_so(built, df_index):
    (built.folder / "model.safetensors.index.json").unlink()
    result = df_index("check", "it", "--index")
    assert result.status == 1
    assert "no index file to check against" in result.line


def test_check_of_a_repository_asks_for_the_indexed_commit(tiny_copy, hub, listing, df_index):
    server = hub(tiny_copy.folder)
    listing()
    df_index("build", "some/model", "--name", "it")
    server.set_mode("ok")
    assert df_index("check", "it", "--index").stdout == "it: as indexed\n"
    assert [r["path"] for r in server.state.log if r["kind"] == "api"] == [
        f"/api/models/some/model/revision/{'a' * 40}"
    ]
    # The same header, other weights: only the published digest tells.
    raw = bytearray(tiny_copy.path(6).read_bytes())
    raw[-1] ^= 1
    tiny_copy.path(6).write_bytes(raw)
    assert problems(df_index) == [
        f"{tiny_copy.path(6).name}: the published SHA-256 differs from the one that was indexed"
    ]


# ---- models and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        "nonsense",
        "./nowhere",
        "/no/such/folder",
        "a/b/c",
        "~/x",
        "a b",
        "a" * 5000,
        "/" + "a" * 5000,
        "..",
        "@x",
        "x@y",
    ],
)
def test_a_model_that_is_nothing_is_one_line_that_says_what_it_could_be(df_index, tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    result = df_index("build", model)
    assert result.status == 1
    assert result.stdout == ""
    if model != "..":
        assert "no such directory or catalog" in result.line
        assert "moonshotai/Kimi-K3" in result.line
        assert "demo" in result.line


def test_an_unknown_model_is_answered_with_the_catalogs_there_are(built, df_index):
    assert "(catalogs here: it;" in df_index("build", "nonsense").line


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize("model", ["demo", "some/model", "some/model@v1"])
def test_a_model_that_is_not_indexed_is_answered_with_what_to_run(df_index, command, model):
    result = df_index(command, model)
    assert result.status == 2
    assert result.line == f"df-index: {model} is not indexed on this machine; run: df-index build {model}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "a b", "é", "-x", "@x", "a\n", "x" * 129]
)
def test_a_name_that_could_be_no_file_is_refused(df_index, tiny_dir, tmp_path, name):
    result = df_index("build", tiny_dir, f"--name={name}")
    assert result.status == 2
    assert "--name" in result.line
    assert not list(tmp_path.rglob("*.catalog"))


@pytest.mark.parametrize("name", ["x", "7", "a.b", "a@b", "A-b_c", "x" * 128])
def test_any_other_name_is_that_of_the_file(df_index, tiny_dir, tmp_path, name):
    assert df_index("build", tiny_dir, f"--name={name}").status == 0
    assert [p.name for p in tmp_path.rglob("*.catalog")] == [f"{name}.catalog"]
    assert df_index("show", name).status == 0


@pytest.mark.parametrize("model", ["demo", "folder", "it"])
def test_only_a_repository_has_revisions(built, df_index, model):
    result = df_index("build", built.folder if model == "folder" else model, "--revision", "main")
    assert result.status == 2
    assert "--revision has no effect" in result.line


def test_two_different_revisions_are_refused_and_two_equal_ones_are_one(tiny_dir, hub, df_index):
    hub(tiny_dir)
    result = df_index("build", "some/model@v1", "--revision", "v2")
    assert result.status == 2
    assert "two revisions: v1 " in result.line and "--revision v2" in result.line
    assert df_index("build", "some/model@v1", "--revision", "v1").status == 0


def test_catalogs_of_two_revisions_lie_side_by_side(tiny_dir, hub, df_index, tmp_path):
    hub(tiny_dir)
    for words in (["some/model"], ["some/model@v1"], ["some/model", "--revision", "refs/pr/1"]):
        assert df_index("build", *words).status == 0
    names = sorted(p.name for p in tmp_path.rglob("*.catalog"))
    assert names == ["some--model.catalog", "some--model@refs-pr-1.catalog", "some--model@v1.catalog"]
    shown = json.loads(df_index("show", "some/model@v1", "--json").stdout)
    assert shown["source"] == f"some/model@{'a' * 40}"
    assert shown["identity"] == f"some/model@{'a' * 12}"
    assert shown["shards_with_published_sha256"] == 12


def test_a_catalog_cannot_be_built_from_its_own_name(built, df_index):
    result = df_index("build", "it")
    assert result.status == 2
    assert str(built.folder) in result.line


def test_a_folder_wins_over_a_repository_of_the_same_name(df_index, tiny_dir, tmp_path, monkeypatch):
    shutil.copytree(tiny_dir, tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert df_index("build", "some/model", "--name", "it").status == 0
    assert json.loads(df_index("show", "it", "--json").stdout)["source"] == str(tmp_path / "some" / "model")


# ---- offline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "ON", "yes", "True"])
def test_offline_means_that_no_server_is_asked(built, hub, df_index, monkeypatch, tiny_dir, value):
    server = hub(tiny_dir)
    df_index("build", "some/model")
    server.set_mode("ok")
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    for words in (["build", "some/model"], ["build", "moonshotai/Kimi-K3"], ["check", "some/model"]):
        result = df_index(*words)
        assert result.status == 2
        assert "HF_HUB_OFFLINE is set" in result.line and words[1] in result.line
    for words in (["show", "some/model"], ["list"], ["build", "demo"], ["build", built.folder], ["check", "it"]):
        assert df_index(*words).status == 0
    assert server.state.log == []


# ---- the command itself ---------------------------------------------------------------------------


def test_help_answers_at_once_and_shows_an_example(command):
    times = []
    for _ in range(4):
        start = time.monotonic()
        done = command("df-index", "build", "--help")
        times.append(time.monotonic() - start)
        assert done.returncode == 0
        assert "Example: df-index build" in done.stdout
    assert min(times) < 0.5


def test_indexing_and_fetching_never_import_torch(tiny_dir, tmp_path):
    script = f"""
import sys
import deltafin.store
from deltafin.cli import index_main
sys.argv = ["df-index", "build", {str(tiny_dir)!r}, "--cache-dir", {str(tmp_path)!r}]
try:
    index_main()
except SystemExit as e:
    assert e.code == 0
heavy = {{"torch", "tiktoken", "transformers", "safetensors", "deltafin.runtime"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_wrong_option_is_wrong_usage(df_index):
    assert df_index("build", "demo", "--no-such-option").status == 2
    assert df_index("build").status == 2
    assert df_index("no-such-command").status == 2


def test_a_reader_that_leaves_early_is_no_error(command, tmp_path, df_index):
    df_index("build", "demo")
    program = Path(sys.executable).with_name("df-index")
    words = f"{program} show demo --cache-dir {tmp_path / 'cache'} | head -c 1"
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("d", "")
