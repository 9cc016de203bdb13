"""What makes a checkpoint complete: everything that is missing, unknown, doubled or misplaced is refused by name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from deltafin.errors import BadCheckpoint, NotFound
from deltafin.indexer import EXPERT_PARTS, GLOBALS, Catalog

LAYERS = "language_model.model.layers."
KDA_MOE, MLA_MOE, GLOBAL_SHARD = 3, 4, 10  # numbers of shards of the tiny checkpoint


def expert_name(layer: int, expert: int, part: str) -> str:
    return f"{LAYERS}{layer}.block_sparse_moe.experts.{expert}.{part}"


def is_expert(tensor) -> bool:
    return ".experts." in tensor.name


@pytest.fixture
def refused(build, tmp_path):
    """`refused(folder, text, ..)`: indexing fails, its message has all texts in it, and nothing is left behind."""

    def check(folder: Path, *texts: str) -> str:
        with pytest.raises((BadCheckpoint, NotFound)) as refusal:
            build(folder)
        message = str(refusal.value)
        for text in texts:
            assert text in message
        assert "\n" not in message
        assert len(message) < 1500
        left = [p.name for p in (tmp_path / "catalogs").iterdir()] if (tmp_path / "catalogs").exists() else []
        assert [name for name in left if not name.endswith(".lock")] == []
        return message

    return check


# ---- what a catalog says of a sound checkpoint ----------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", "demo", "spine-first", "no-dense"])
def sound(request, tiny_dir, demo_dir, make_checkpoint, tmp_path_factory, checkpoint):
    """Checkpoints that differ in size and in how tensors lie in their shards."""
    if request.param == "tiny":
        return checkpoint(tiny_dir)
    if request.param == "demo":
        return checkpoint(demo_dir)
    out = tmp_path_factory.mktemp("made") / "ckpt"
    if request.param == "spine-first":
        make_checkpoint.generate(out, "tiny", order=make_checkpoint.Order.SPINE_FIRST)
    else:
        make_checkpoint.generate(out, "tiny", overrides={"first_k_dense": 0, "layers": 5}, vision=False)
    return checkpoint(out)


def shard_numbers(checkpoint) -> range:
    return range(1, len(list(checkpoint.folder.glob("*.safetensors"))) + 1)


def test_totals_are_those_of_the_index_that_came_with_the_checkpoint(sound, build):
    index = json.loads((sound.folder / "model.safetensors.index.json").read_bytes())
    names = list(index["weight_map"])
    text = json.loads((sound.folder / "config.json").read_bytes())["text_config"]
    totals = build(sound.folder).totals
    assert totals.tensors == len(names)
    assert totals.tensor_nbytes == index["metadata"]["total_size"]
    assert totals.experts == sum(name.endswith("w1.weight_packed") for name in names)
    assert totals.layers == text["num_hidden_layers"]
    assert totals.ignored_tensors == sum(n.startswith(("vision_tower.", "mm_projector.")) for n in names)
    assert totals.shards == len(set(index["weight_map"].values()))
    assert totals.file_nbytes == sum(p.stat().st_size for p in sound.folder.glob("*.safetensors"))
    assert totals.tensor_nbytes == (totals.spine_nbytes + totals.experts * totals.expert_nbytes + totals.ignored_nbytes)


def test_every_expert_span_holds_its_six_tensors_in_order(sound, build):
    catalog = build(sound.folder)
    for number in shard_numbers(sound):
        blob = sound.path(number).read_bytes()
        tensors = {t.name: t.data for t in sound.tensors(number)}
        layers = sorted({int(n.removeprefix(LAYERS).split(".")[0]) for n in tensors if ".experts." in n})
        for layer in layers:
            everyone = range(catalog.config.num_experts)
            spans = catalog.expert_spans(layer, reversed(everyone))
            for expert, span in zip(reversed(everyone), spans, strict=True):
                want = b"".join(tensors[expert_name(layer, expert, part)] for part in EXPERT_PARTS)
                assert catalog.shards[span.shard].name == sound.path(number).name
                assert blob[span.offset : span.offset + span.nbytes] == want
    dense = [layer for layer in range(catalog.config.num_layers) if not catalog.config.is_moe(layer)]
    for layer in [*dense, catalog.config.num_layers, 65_536, -1]:
        with pytest.raises(NotFound, match=f"expert 0 in layer {layer}"):
            catalog.expert_spans(layer, [0])
    for expert in (catalog.config.num_experts, 65_536, -1):
        with pytest.raises(NotFound, match=f"no expert {expert} "):
            catalog.expert_spans(catalog.config.num_layers - 1, [expert])


def places_by_name(catalog: Catalog) -> dict[str, object]:
    places = {}
    for layer in range(catalog.config.num_layers):
        places |= {f"{LAYERS}{layer}.{t.name}": t for t in catalog.spine(layer).tensors}
    tables = [catalog.embedding().tensor, catalog.head().tensor]
    return places | {t.name: t for t in [*catalog.spine(GLOBALS).tensors, *tables]}


def test_every_other_tensor_of_the_text_model_is_where_its_header_says(sound, build):
    catalog = build(sound.folder)
    places = places_by_name(catalog)
    for number in shard_numbers(sound):
        start, header = sound.header(number)
        for name, entry in header.items():
            if ".experts." in name or name.startswith(("vision_tower.", "mm_projector.")):
                assert name not in places
                continue
            place = places.pop(name)
            begin, end = entry["data_offsets"]
            assert catalog.shards[place.shard].name == sound.path(number).name
            assert (place.dtype, list(place.shape)) == (entry["dtype"], entry["shape"])
            assert (place.offset, place.nbytes) == (start + begin, end - begin)
    assert places == {}


def runs(places) -> list[list[int]]:
    """Shard, begin and end of each stretch of touching places."""
    found: list[list[int]] = []
    for p in places:
        if found and found[-1][0] == p.shard and found[-1][2] == p.offset:
            found[-1][2] += p.nbytes
        else:
            found.append([p.shard, p.offset, p.offset + p.nbytes])
    return found


def test_the_spans_of_a_layer_cover_its_spine_to_the_byte(sound, build):
    catalog = build(sound.folder)
    for layer in [*range(catalog.config.num_layers), GLOBALS]:
        group = catalog.spine(layer)
        assert runs(group.spans) == runs(group.tensors)  # in file order, nothing twice, nothing else
        assert sum(s.nbytes for s in group.spans) == sum(t.nbytes for t in group.tensors)


def test_the_spans_of_a_vocabulary_table_are_whole_rows(sound, build):
    catalog = build(sound.folder)
    for table in (catalog.embedding(), catalog.head()):
        row = table.tensor.nbytes // catalog.config.vocab_size
        at = table.tensor.offset
        for span in table.spans:
            assert (span.shard, span.offset) == (table.tensor.shard, at)
            assert 0 < span.nbytes <= table.rows_per_span * row
            assert span.nbytes % row == 0
            at += span.nbytes
        assert at == table.tensor.offset + table.tensor.nbytes


def test_shards_are_recorded_with_their_size_and_the_digest_of_their_header(sound, build):
    catalog = build(sound.folder)
    assert [s.name for s in catalog.shards] == sorted(p.name for p in sound.folder.glob("*.safetensors"))
    for number, shard in zip(shard_numbers(sound), catalog.shards, strict=True):
        blob = sound.path(number).read_bytes()
        start, header = sound.header(number)
        assert (shard.nbytes, shard.header_nbytes, shard.tensors) == (len(blob), start - 8, len(header))
        assert shard.header_sha256 == hashlib.sha256(blob[8:start]).hexdigest()
        assert shard.data_nbytes == len(blob) - start


def test_the_small_files_are_kept_as_they_are(demo_dir, build):
    catalog = build(demo_dir)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model"):
        assert catalog.file(name) == (demo_dir / name).read_bytes()
    assert catalog.file("README.md") is None


# ---- shards ---------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(tiny_copy, refused):
    tiny_copy.path(5).unlink()
    refused(tiny_copy.folder, "1 of 12 shards are missing: model-00005-of-000012.safetensors")
    for number in (1, 7, 12):
        tiny_copy.path(number).unlink()
    refused(tiny_copy.folder, "4 of 12 shards are missing", "model-00001-of-000012", "and 1 more")


def test_a_shard_beyond_the_last_is_named(tiny_copy, refused):
    shutil.copy(tiny_copy.path(12), tiny_copy.folder / "model-00013-of-000012.safetensors")
    refused(tiny_copy.folder, "model-00013-of-000012.safetensors is no shard of 12")


def test_shards_of_two_checkpoints_in_one_folder_are_refused(tiny_copy, refused):
    shutil.copy(tiny_copy.path(1), tiny_copy.folder / "model-00001-of-000003.safetensors")
    refused(tiny_copy.folder, "several checkpoints", "of-000003", "of-000012")


def test_a_folder_without_shards_or_without_config_says_what_it_lacks(tiny_copy, refused):
    (tiny_copy.folder / "config.json").rename(tiny_copy.folder / "kept")
    refused(tiny_copy.folder, str(tiny_copy.folder), "no config.json")
    (tiny_copy.folder / "kept").rename(tiny_copy.folder / "config.json")
    for path in tiny_copy.folder.glob("*.safetensors"):
        path.unlink()
    refused(tiny_copy.folder, str(tiny_copy.folder), "model-00001-of-0000NN.safetensors")


def test_two_shards_that_have_changed_places_are_no_problem(tiny_copy, build):
    """A shard's number says nothing of what must be in it."""
    three, four, spare = tiny_copy.path(3), tiny_copy.path(4), tiny_copy.folder / "spare"
    three.rename(spare)
    four.rename(three)
    spare.rename(four)
    catalog = build(tiny_copy.folder)
    assert catalog.shards[catalog.expert_spans(2, [0])[0].shard].name == four.name


# ---- missing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, KDA_MOE, MLA_MOE, GLOBAL_SHARD])
def test_any_missing_tensor_of_the_spine_is_named(tiny_copy, refused, number):
    tensors = tiny_copy.tensors(number)
    spine = [t for t in tensors if not is_expert(t)]
    assert len(spine) >= 5
    for gone in spine:
        tiny_copy.write(number, [t for t in tensors if t is not gone])
        refused(tiny_copy.folder, "128 of 128 experts are whole", f"missing: {gone.name}")


@pytest.mark.parametrize("part", EXPERT_PARTS)
def test_an_expert_without_one_of_its_tensors_is_named_and_the_whole_ones_are_counted(tiny_copy, refused, part):
    tiny_copy.edit(5, lambda tensors: [t for t in tensors if t.name != expert_name(4, 11, part)])
    refused(tiny_copy.folder, "127 of 128 experts are whole", f"expert 11 of layer 4 ({part})")


def test_missing_experts_are_counted_over_all_layers(tiny_copy, refused):
    tiny_copy.edit(2, lambda tensors: [t for t in tensors if not is_expert(t)])
    tiny_copy.edit(9, lambda tensors: [t for t in tensors if ".experts.7." not in t.name])
    refused(
        tiny_copy.folder, "111 of 128 experts are whole", "all experts of layer 1", "expert 7 of layer 8 (w1.weight_pa"
    )


def test_a_long_list_of_missing_things_is_cut(tiny_copy, refused):
    tiny_copy.edit(2, lambda tensors: [t for t in tensors if not t.name.endswith("_scale")])
    tiny_copy.edit(GLOBAL_SHARD, lambda tensors: tensors[:1])
    refused(tiny_copy.folder, "112 of 128 experts are whole", "and 15 more")


# ---- unknown --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        LAYERS + "9.input_layernorm.weight",
        LAYERS + "2.self_attn.rotary.inv_freq",
        LAYERS + "2.self_attn.q_a_proj.weight",  # of an MLA layer, and this is a KDA layer
        LAYERS + "02.input_layernorm.weight",
        LAYERS + "2.mlp.up_proj.weight",  # of a dense layer
        LAYERS + "99999999999.x",
        LAYERS + "2.block_sparse_moe.experts.16.w1.weight_packed",
        LAYERS + "2.block_sparse_moe.experts.00.w1.weight_packed",
        LAYERS + "02.block_sparse_moe.experts.0.w1.weight_packed",
        LAYERS + "2.block_sparse_moe.experts.0.w4.weight_packed",
        LAYERS + "2.block_sparse_moe.experts.0.w1.weight",
        LAYERS + "0.block_sparse_moe.experts.0.w1.weight_packed",
        LAYERS + "65536.block_sparse_moe.experts.0.w1.weight_packed",
        LAYERS + "2.",
        "language_model.model.mtp.0.weight",
        "model.norm.weight",
        "vision_tower",
        "",
    ],
)
def test_an_unknown_tensor_is_named(tiny_copy, refused, name):

    def add(tensors):
        """Where an expert's tensor has that last name, with its type and shape, so that only the name is wrong."""
        alike = [t for t in tensors if is_expert(t) and t.name.endswith(".".join(name.split(".")[-2:]))]
        return [*tensors, (alike or tensors)[-1].called(name)]

    tiny_copy.edit(3, add)
    message = refused(tiny_copy.folder, "model-00003-of-000012.safetensors: tensor ", name)
    assert "is unknown in a checkpoint with" in message or "belongs to no layer or expert" in message


def test_an_unknown_name_that_would_spoil_a_terminal_is_shown_escaped_and_short(tiny_copy, refused):
    tiny_copy.edit(3, lambda tensors: [*tensors, tensors[-1].called("\x1b[2J" + "x" * 5000)])
    assert refused(tiny_copy.folder, "model-00003-of-000012.safetensors", "xxx...").isprintable()


def test_vision_tensors_of_any_kind_are_counted_and_ignored(tiny_copy, build):
    before = build(tiny_copy.folder, "before").totals
    added = [("vision_tower.new", "F64", (3,), bytes(24)), ("mm_projector.new", "I8", (0,), b"")]
    tiny_copy.edit(2, lambda tensors: [*tensors, *(type(tensors[0])(*t) for t in added)])
    after = build(tiny_copy.folder, "after").totals
    assert before.ignored_tensors > 0
    assert after.ignored_tensors - before.ignored_tensors == 2
    assert after.ignored_nbytes - before.ignored_nbytes == 24
    assert (after.spine_nbytes, after.experts) == (before.spine_nbytes, before.experts)


# ---- wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, KDA_MOE, MLA_MOE, GLOBAL_SHARD])
def test_any_tensor_of_another_dtype_is_named(tiny_copy, refused, number):
    """The other dtype has the same width, so that only its name is wrong."""
    other = {"BF16": "F16", "F32": "I32", "U8": "F8_E8M0"}
    tensors = tiny_copy.tensors(number)
    chosen = [i for i, t in enumerate(tensors) if not is_expert(t) or ".experts.3.w2" in t.name]
    for i in chosen:
        t = tensors[i]
        wrong = type(t)(t.name, other[t.dtype], t.shape, t.data)
        tiny_copy.write(number, [*tensors[:i], wrong, *tensors[i + 1 :]])
        refused(
            tiny_copy.folder, tiny_copy.path(number).name, f"tensor {t.name} is {wrong.dtype} ", f"expected {t.dtype} "
        )


@pytest.mark.parametrize("number", [1, KDA_MOE, MLA_MOE, GLOBAL_SHARD])
def test_any_tensor_of_another_shape_is_named(tiny_copy, refused, number):
    """The other shape has as many elements."""
    tensors = tiny_copy.tensors(number)
    chosen = [i for i, t in enumerate(tensors) if not is_expert(t) or ".experts.3.w2" in t.name]
    for i in chosen:
        t = tensors[i]
        wrong = type(t)(t.name, t.dtype, (1, *t.shape), t.data)
        tiny_copy.write(number, [*tensors[:i], wrong, *tensors[i + 1 :]])
        refused(
            tiny_copy.folder, tiny_copy.path(number).name, f"{t.name} is {t.dtype} {[1, *t.shape]}", str([*t.shape])
        )


def test_a_gate_table_of_one_value_per_channel_or_without_padding_is_refused(tiny_copy, refused):
    """Three heads are stored as 32 values; a table of another length belongs to another formula."""
    for length in (3, 96):

        def cut(tensors, length=length):
            return [
                type(t)(t.name, t.dtype, (length,), bytes(4 * length)) if t.name.endswith("A_log") else t
                for t in tensors
            ]

        tiny_copy.edit(1, cut)
        refused(tiny_copy.folder, "self_attn.A_log is F32 ", f"[{length}], expected F32 [32]")


def test_a_tensor_in_two_shards_is_named(tiny_copy, refused):
    (norm,) = [t for t in tiny_copy.tensors(4) if t.name.endswith("3.input_layernorm.weight")]
    tiny_copy.edit(7, lambda tensors: [*tensors, norm])
    refused(tiny_copy.folder, f"tensor {norm.name} is in another shard too")


def test_an_expert_tensor_in_two_shards_is_named(tiny_copy, refused):
    (scale,) = [t for t in tiny_copy.tensors(4) if t.name == expert_name(3, 5, "w3.weight_scale")]
    tiny_copy.edit(8, lambda tensors: [*tensors, scale])
    refused(tiny_copy.folder, f"tensor {scale.name} is in another shard too")


def test_a_global_tensor_in_two_shards_is_named(tiny_copy, refused):
    head = next(t for t in tiny_copy.tensors(10) if t.name == "language_model.lm_head.weight")
    tiny_copy.edit(1, lambda tensors: [head, *tensors])
    refused(tiny_copy.folder, "tensor language_model.lm_head.weight is in another shard too")


# ---- misplaced ------------------------------------------------------------------------------------


def test_the_tensors_of_an_expert_in_another_order_are_refused(tiny_copy, refused):
    """Both have the same length, so a reader that trusts sizes alone would swap gate and up projection."""

    def swap(tensors):
        names = {expert_name(2, 9, f"{a}.{part}"): expert_name(2, 9, f"{b}.{part}")
                 for a, b in (("w1", "w3"), ("w3", "w1")) for part in ("weight_packed", "weight_scale")}  # fmt: skip
        return [t.called(names.get(t.name, t.name)) for t in tensors]

    tiny_copy.edit(3, swap)
    refused(tiny_copy.folder, tiny_copy.path(3).name, expert_name(2, 9, ""), "starts at byte")


def test_something_between_two_tensors_of_an_expert_is_refused(tiny_copy, refused):
    def insert(tensors):
        (at,) = [i for i, t in enumerate(tensors) if t.name == expert_name(2, 9, "w2.weight_scale")]
        (norm,) = [t for t in tensors if t.name == f"{LAYERS}2.input_layernorm.weight"]
        rest = [t for t in tensors if t is not norm]
        at = rest.index(tensors[at])
        return [*rest[:at], norm, *rest[at:]]

    tiny_copy.edit(3, insert)
    refused(tiny_copy.folder, tiny_copy.path(3).name, expert_name(2, 9, "w2.weight_scale"), "right behind")


def test_something_between_two_experts_is_refused(tiny_copy, refused):
    def insert(tensors):
        (norm,) = [t for t in tensors if t.name == f"{LAYERS}2.input_layernorm.weight"]
        rest = [t for t in tensors if t is not norm]
        at = next(i for i, t in enumerate(rest) if ".experts.12." in t.name)
        return [*rest[:at], norm, *rest[at:]]

    tiny_copy.edit(3, insert)
    refused(tiny_copy.folder, tiny_copy.path(3).name, "expert 12 of layer 2", "right behind expert 11")


@pytest.mark.parametrize("order", ["numeric", "two-swapped", "reversed"])
def test_experts_in_another_order_than_that_of_their_numbers_as_text_are_refused(tiny_copy, refused, order):
    def arrange(tensors):
        run = sorted(range(16), key=str)
        if order == "numeric":
            run = list(range(16))
        elif order == "reversed":
            run.reverse()
        else:
            run[3], run[4] = run[4], run[3]
        experts = {e: [t for t in tensors if f".experts.{e}." in t.name] for e in run}
        return [t for t in tensors if not is_expert(t)] + [t for e in run for t in experts[e]]

    tiny_copy.edit(6, arrange)
    refused(tiny_copy.folder, tiny_copy.path(6).name, "of layer 5", "text order")


def test_an_expert_run_at_the_start_of_its_shard_is_fine(tiny_copy, build):
    tiny_copy.edit(6, lambda tensors: sorted(tensors, key=lambda t: not is_expert(t)))
    start, _ = tiny_copy.header(6)
    assert build(tiny_copy.folder).expert_spans(5, [0])[0].offset == start


def test_an_expert_in_two_shards_is_refused(tiny_copy, refused):
    moved = [t for t in tiny_copy.tensors(6) if t.name == expert_name(5, 9, "w3.weight_scale")]
    tiny_copy.edit(6, lambda tensors: [t for t in tensors if t.name != moved[0].name])
    tiny_copy.edit(10, lambda tensors: [*tensors, *moved])
    refused(tiny_copy.folder, "model-00010-of-000012.safetensors", moved[0].name)


def test_an_expert_in_two_shards_is_refused_even_where_the_offsets_fit(tiny_copy, refused):
    last = expert_name(5, 9, "w3.weight_scale")
    (moved,) = [t for t in tiny_copy.tensors(6) if t.name == last]
    tiny_copy.edit(6, lambda tensors: [t for t in tensors if t.name != last])
    start, header = tiny_copy.header(6)
    behind = start + header[expert_name(5, 9, "w3.weight_packed")]["data_offsets"][1]
    tiny_copy.write(10, [moved, *tiny_copy.tensors(10)], data_start=behind)
    refused(tiny_copy.folder, "model-00010-of-000012.safetensors: tensor ", last)


def test_the_experts_of_a_layer_in_two_shards_are_refused(tiny_copy, refused):
    moved = [t for t in tiny_copy.tensors(6) if ".experts.9." in t.name]
    tiny_copy.edit(6, lambda tensors: [t for t in tensors if ".experts.9." not in t.name])
    tiny_copy.edit(10, lambda tensors: [*tensors, *moved])
    refused(tiny_copy.folder, "the experts of layer 5 lie in several shards", "model-00006-of-000012.safetensors")


def test_the_spine_of_a_layer_may_lie_in_two_shards(tiny_copy, build):
    moved = [t for t in tiny_copy.tensors(6) if t.name.startswith(f"{LAYERS}5.self_attn.")]
    tiny_copy.edit(6, lambda tensors: [t for t in tensors if not t.name.startswith(f"{LAYERS}5.self_attn.")])
    tiny_copy.edit(10, lambda tensors: [*moved, *tensors])
    group = build(tiny_copy.folder).spine(5)
    assert {s.shard for s in group.spans} == {5, 9}
    assert len(group.tensors) == len([t for t in [*moved, *tiny_copy.tensors(6)] if not is_expert(t)])


# ---- config.json and the tensors ------------------------------------------------------------------

SIZES = [
    ("vocab_size", 544, "embed_tokens|lm_head"),
    ("hidden_size", 160, "tensor"),
    ("num_attention_heads", 4, "self_attn"),
    ("q_lora_rank", 64, "q_a_|q_b_"),
    ("kv_lora_rank", 64, "kv_"),
    ("qk_nope_head_dim", 64, "q_b_proj|kv_b_proj"),
    ("qk_rope_head_dim", 32, "q_b_proj|kv_a_proj"),
    ("v_head_dim", 64, "kv_b_proj|g_proj|o_proj"),
    ("intermediate_size", 224, "layers.0.mlp"),
    ("moe_intermediate_size", 64, "experts"),
    ("routed_expert_hidden_size", 32, "experts|routed_expert"),
    ("num_shared_experts", 1, "shared_experts"),
    ("num_experts", 8, "block_sparse_moe"),
    ("num_experts", 32, "block_sparse_moe"),
    ("first_k_dense_replace", 0, "layers.0.mlp"),
    ("first_k_dense_replace", 2, "layers.1.block_sparse_moe"),
    ("linear_attn_config.num_heads", 4, "self_attn"),
    ("linear_attn_config.head_dim", 64, "self_attn"),
    ("linear_attn_config.short_conv_kernel_size", 3, "conv1d"),
]


@pytest.mark.parametrize(("field", "value", "tensor"), SIZES, ids=lambda x: str(x).replace("|", "-or-"))
def test_a_size_in_the_config_that_the_tensors_do_not_have_is_refused(tiny_copy, refused, field, value, tensor):
    def change(config):
        place = config["text_config"]
        *sections, name = field.split(".")
        for section in sections:
            place = place[section]
        assert place[name] != value
        place[name] = value
        if name == "num_attention_heads":
            place["num_key_value_heads"] = value

    tiny_copy.edit_config(change)
    message = refused(tiny_copy.folder, ".safetensors: tensor ")
    assert re.search(tensor, message)


def test_a_layer_of_the_other_kind_of_attention_is_refused(tiny_copy, refused):
    def change(config):
        linear = config["text_config"]["linear_attn_config"]
        linear["kda_layers"], linear["full_attn_layers"] = [1, 2, 4, 5, 6, 7], [3, 8, 9]

    tiny_copy.edit_config(change)
    refused(tiny_copy.folder, ".safetensors: tensor ", ".self_attn.")


# ---- what a failure leaves ------------------------------------------------------------------------


def test_after_a_failed_rebuild_the_older_catalog_is_still_there_and_works(tiny_copy, build):
    old = build(tiny_copy.folder)
    before = old.path.read_bytes()
    tiny_copy.path(5).write_bytes(tiny_copy.path(5).read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match="model-00005-of-000012"):
        build(tiny_copy.folder)
    assert old.path.read_bytes() == before
    assert sorted(p.name for p in old.path.parent.iterdir() if p.suffix != ".lock") == [old.path.name]
    with Catalog(old.path) as again:
        assert again.expert_spans(8, [15]) == old.expert_spans(8, [15])
