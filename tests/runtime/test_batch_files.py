"""The files of a batch: what is read of them, and what is made of torn, damaged, foreign and unusable ones."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import struct
import subprocess
import sys

import pytest

from deltafin.errors import BadRequest, DeltafinError, DiskError, NoSpace
from deltafin.runtime.batch import Journal, Requests, Results, journal_path
from deltafin.runtime.batch.journal import pack_record, read_records
from deltafin.runtime.batch.keys import Keys, digest
from deltafin.runtime.openai import BadBody, Serving
from deltafin.runtime.sampling import Chosen


def key(number: int) -> bytes:
    return digest(str(number).encode())


# ---- keys ---------------------------------------------------------------------------------------------


def test_a_key_is_found_where_it_was_added_and_others_are_not():
    keys = Keys()
    for number in range(5000):
        keys.add(key(number))
    keys.seal()
    assert len(keys) == 5000 and keys.repeated() is None
    assert all(keys.find(key(n)) == n and keys[n] == key(n) for n in range(0, 5000, 7))
    assert all(keys.find(key(n)) == -1 for n in range(5000, 5300))


def test_keys_that_agree_in_one_half_are_told_apart():
    keys = Keys()
    halves = [bytes([n]) * 8 for n in (0, 1, 255)]
    added = [a + b for a in halves for b in halves]
    for k in added:
        keys.add(k)
    keys.seal()
    assert [keys.find(k) for k in added] == list(range(9)) and keys.repeated() is None
    assert keys.find(halves[0] + b"\x02" * 8) == -1


def test_the_first_repetition_is_named_with_the_line_before_it():
    keys = Keys()
    for number in [*range(100), 77, 50, 77]:
        keys.add(key(number))
    keys.seal()
    assert keys.repeated() == (100, 77)


def test_no_keys_are_no_trouble():
    keys = Keys()
    keys.seal()
    assert (len(keys), keys.find(key(1)), keys.repeated()) == (0, -1, None)


def test_a_digest_tells_where_its_parts_end():
    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4


# ---- the journal --------------------------------------------------------------------------------------

PLAIN = [Chosen(n * 37 % 2048, None, ()) for n in range(5)]
LOUD = [Chosen(3, -0.25, ()), Chosen(0, -1.5, ())]
TOP = [Chosen(n, -0.5 - n, ((n, -0.5 - n), (163839, -float(n + 10)))) for n in range(4)]


@pytest.fixture
def journal(tmp_path):
    """`journal()` opens the journal anew, as another run would."""
    opened = []

    def open_(wanted=lambda key: True):
        for before in opened:
            before.close()
        opened.append(Journal(tmp_path / "out.jsonl.journal", wanted))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def test_records_of_all_shapes_come_back_to_the_bit():
    records = [(key(1), 0, PLAIN), (key(2), 7, LOUD), (key(3), 2**32 - 1, TOP), (key(1), 5, PLAIN[:1])]
    raw = b"".join(pack_record(*record) for record in records)
    assert list(read_records(io.BytesIO(raw))) == records


def test_what_passes_brought_is_there_for_the_next_run(journal):
    one = journal()
    one.append([(key(1), 0, PLAIN[:2]), (key(2), 0, TOP[:1])])
    one.append([(key(1), 2, PLAIN[2:]), (key(2), 1, TOP[1:])])
    two = journal()
    assert two.pending == {key(1): PLAIN, key(2): TOP}
    assert two.take(key(1)) == PLAIN and two.take(key(9)) == []
    assert journal().pending == {key(1): PLAIN, key(2): TOP}, "taking is no forgetting until it is rewritten"


def test_answers_that_are_written_are_dropped(journal):
    journal().append([(key(1), 0, PLAIN), (key(2), 0, LOUD)])
    assert journal(lambda k: k == key(2)).pending == {key(2): LOUD}
    assert journal().pending == {key(2): LOUD}


def test_a_journal_cut_at_any_byte_gives_whole_records_and_goes_on(journal, tmp_path):
    path = tmp_path / "out.jsonl.journal"
    journal().append([(key(1), 0, PLAIN), (key(2), 0, TOP), (key(1), 5, PLAIN[:1])])
    raw = path.read_bytes()
    ends = [len(pack_record(key(1), 0, PLAIN)), 0, len(raw)]
    ends[1] = ends[0] + len(pack_record(key(2), 0, TOP))
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        found = list(read_records(io.BytesIO(raw[:cut])))
        assert len(found) == sum(end <= cut for end in ends)
    path.write_bytes(raw[: len(raw) - 1])
    again = journal()
    again.append([(key(1), 5, PLAIN[:2])])
    assert journal().pending == {key(1): PLAIN + PLAIN[:2], key(2): TOP}


def test_a_flipped_bit_is_never_believed():
    rng = random.Random(4)
    records = [(key(1), 0, PLAIN), (key(2), 0, TOP), (key(3), 0, LOUD)]
    raw = b"".join(pack_record(*record) for record in records)
    for _ in range(2000):
        at = rng.randrange(len(raw) * 8)
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        found = list(read_records(io.BytesIO(damaged)))
        assert found == records[: len(found)] and len(found) < 3


def test_a_record_that_does_not_follow_on_is_passed_over(journal):
    one = journal()
    one.append([(key(1), 0, PLAIN), (key(1), 9, PLAIN), (key(1), 0, PLAIN), (key(1), 5, PLAIN[:1])])
    assert journal().pending == {key(1): PLAIN + PLAIN[:1]}


def test_noise_is_no_journal(journal, tmp_path):
    rng = random.Random(1)
    for nbytes in (0, 3, 44, 10_000):
        (tmp_path / "out.jsonl.journal").write_bytes(rng.randbytes(nbytes))
        assert journal().pending == {}


def test_a_journal_of_any_size_is_read_record_by_record(journal, tmp_path):
    path = tmp_path / "out.jsonl.journal"
    journal().append([(key(1), 0, PLAIN)])
    os.truncate(path, 1 << 40)  # zeros, which take no room
    assert journal().pending == {key(1): PLAIN}
    claims = struct.pack("<4s16sIII", b"DfJ1", key(1), 5, 1 << 24, 1 << 20)  # 128 TiB in one record
    path.write_bytes(pack_record(key(1), 0, PLAIN) + claims)
    os.truncate(path, 1 << 40)
    assert journal().pending == {key(1): PLAIN} and path.stat().st_size < 1000


def test_a_long_answer_in_many_records_is_put_together_in_place(journal, monkeypatch):
    records = [(key(1), first, PLAIN[:1]) for first in range(1000)]
    journal().append(records)
    again = journal()
    ids = []
    take_in = Journal._take_in

    def watched(self, file, wanted):
        take_in(self, file, lambda k: ids.append(id(self.pending.get(k))) or wanted(k))

    monkeypatch.setattr(Journal, "_take_in", watched)
    again.append([(key(1), 1000 + n, PLAIN[:1]) for n in range(1000)])
    assert len(journal().pending[key(1)]) == 2000
    assert len(set(ids[1:])) == 1, "a new list for every record would take quadratic time"


def test_rewriting_keeps_what_is_under_way_and_nothing_else(journal, tmp_path):
    path = tmp_path / "out.jsonl.journal"
    journal().append([(key(1), 0, PLAIN), (key(2), 0, LOUD)])
    again = journal()
    again.take(key(1))
    again.append([(key(3), 0, TOP)])
    again.rewrite({key(1): PLAIN})
    again.append([(key(1), 5, PLAIN[:1])])
    assert journal().pending == {key(2): LOUD, key(1): PLAIN + PLAIN[:1]}
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and path.stat().st_mode & 0o777 == 0o600


def test_an_answer_that_steps_back_outlives_rewriting(journal):
    one = journal()
    one.append([(key(1), 0, PLAIN), (key(2), 0, LOUD)])
    one.put_back(key(1), PLAIN)
    one.put_back(key(3), [])
    one.rewrite({})
    assert one.take(key(1)) == PLAIN and one.take(key(3)) == []
    assert journal().pending == {key(1): PLAIN}


def test_a_long_journal_of_finished_answers_asks_to_be_rewritten(journal, monkeypatch):
    monkeypatch.setattr("deltafin.runtime.batch.journal.REWRITE_ABOVE_NBYTES", 1000)
    one = journal()
    assert not one.is_long
    for number in range(20):
        one.append([(key(number), 0, PLAIN)])
    assert one.is_long
    one.rewrite({key(19): PLAIN})
    assert not one.is_long and journal().pending == {key(19): PLAIN}


def test_a_full_disk_is_one_line_and_takes_half_a_record_back(journal, tmp_path, monkeypatch):
    one = journal()
    one.append([(key(1), 0, PLAIN)])
    path, write = tmp_path / "out.jsonl.journal", os.write
    before = path.read_bytes()

    def full(fd, data):
        if len(data) < 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data[:40]))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpace, match="cannot write the journal"):
        one.append([(key(2), 0, TOP)])
    assert path.read_bytes() == before


def test_removing_leaves_nothing(journal, tmp_path):
    one = journal()
    one.append([(key(1), 0, PLAIN)])
    one.remove()
    assert list(tmp_path.iterdir()) == []


# ---- the output ---------------------------------------------------------------------------------------

BODY = {"status_code": 200, "request_id": "req_x", "body": {"text": "ü\u2028", "n": 1.5}}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def write_some(output, numbers):
    with Results(output) as results:
        for number in numbers:
            results.append(key(number), f"name {number}", BODY)


def test_answers_are_whole_lines_that_a_later_run_finds(output):
    write_some(output, [1, 2])
    write_some(output, [3])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["name 1", "name 2", "name 3"]
    assert all(line["response"] == BODY and line["error"] is None for line in lines)
    with Results(output) as results:
        assert len(results) == 3 and results.keys.find(key(3)) == 2 and results.keys.find(key(4)) == -1


def test_an_output_cut_at_any_byte_has_whole_lines_and_goes_on(output):
    write_some(output, [1, 2])
    raw = output.read_bytes()
    first = raw.index(b"\n") + 1
    for cut in {
        *range(0, len(raw) + 1, 29),
        first - 2,
        first - 1,
        first,
        first + 1,
        len(raw) - 2,
        len(raw) - 1,
        len(raw),
    }:
        output.write_bytes(raw[:cut])
        with Results(output) as results:
            whole = (cut >= first - 1) + (cut >= len(raw) - 1)
            assert len(results) == whole, cut
            results.append(key(3), "name 3", BODY)
        assert output.read_bytes().startswith(raw[: [0, first, len(raw)][whole]])
        with Results(output) as results:
            assert len(results) == whole + 1


def test_zeros_after_a_power_cut_are_an_unfinished_line(output):
    write_some(output, [1])
    raw = output.read_bytes()
    for tail in (b"\0" * 100, raw[:50] + b"\0" * 4096):
        output.write_bytes(raw + tail)
        with Results(output) as results:
            assert len(results) == 1
        assert output.read_bytes() == raw


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"hello\n",
        b"{}\n",
        b'{"id": "x", "custom_id": "y"}\n',
        b"[]\n",
        b"\n",
        b"\xff\xfe\n",
        b"[" * 50_000 + b"\n",
        b'{"id":"batch_req_' + b"0" * 31 + b'","custom_id":"a"}\n',
        b'{"id":"batch_req_' + b"0" * 32 + b'","custom_id":1}\n',
        b'{"id":"batch_req_' + b"0" * 32 + b'","custom_id":"\\ud800"}\n',
    ],
    ids=lambda c: str(c[:20]),
)
def test_what_is_no_output_is_refused_and_left_as_it_is(output, content):
    output.write_bytes(content)
    with pytest.raises(BadRequest, match="line 1 is no answer of this command") as caught:
        Results(output)
    assert output.read_bytes() == content and "\n" not in str(caught.value)


def test_a_damaged_line_in_the_middle_is_named(output):
    write_some(output, [1, 2, 3])
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2] + lines[2])
    with pytest.raises(BadRequest, match="line 2 is no answer"):
        Results(output)


def test_an_empty_line_is_named_as_one(output):
    write_some(output, [1])
    with output.open("ab") as file:
        file.write(b"\r\n")
    with pytest.raises(BadRequest, match=r"line 2 is no answer of this command \(it is empty\); remove the line"):
        Results(output)


def test_an_answer_that_is_there_twice_is_refused(output):
    write_some(output, [1, 2])
    output.write_bytes(output.read_bytes() * 2)
    with pytest.raises(BadRequest, match="lines 1 and 3 answer the same custom_id"):
        Results(output)


def test_a_second_process_is_refused_until_the_first_one_ends(output):
    program = (
        "import sys, pathlib; from deltafin.runtime.batch import Results\n"
        f"r = Results(pathlib.Path({str(output)!r})); print('open', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"open\n"
    try:
        with pytest.raises(DeltafinError, match="another process is writing to it"):
            Results(output)
    finally:
        first.kill()
        first.communicate()
    write_some(output, [1])


def test_a_file_made_in_vain_goes_and_one_that_was_there_stays(output):
    Results(output).close()
    assert not output.exists()
    output.touch()
    Results(output).close()
    assert output.exists()


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", BadRequest), (".", DiskError), ("none/out", DiskError)):
        with pytest.raises(error):
            Results(tmp_path / name)


def test_an_output_that_was_taken_away_is_noticed(output, tmp_path):
    with Results(output) as results:
        results.append(key(1), "a", BODY)
        output.rename(tmp_path / "elsewhere")
        with pytest.raises(DiskError, match="was moved or removed"):
            results.append(key(2), "b", BODY)


def test_a_full_disk_leaves_whole_lines(small_disk, output):
    disk = small_disk(64 << 10, "disk")
    body = {**BODY, "body": "x" * 3000}
    with Results(disk / "out.jsonl") as results:
        with pytest.raises(NoSpace, match="free some space"):
            for number in range(1000):
                results.append(key(number), str(number), body)
        assert number > 5
    with Results(disk / "out.jsonl") as results:
        assert len(results) == number


# ---- the input ----------------------------------------------------------------------------------------


def line(custom_id="a", url="/v1/completions", method="POST", body=None, **more):
    body = {"prompt": "one two", "max_tokens": 5} if body is None else body
    return {"custom_id": custom_id, "method": method, "url": url, "body": body, **more}


@pytest.fixture(scope="module")
def serving(demo):
    config = demo.config
    return Serving("demo", "fp_test", demo.tokenizer, config.vocab_size, config.max_positions, max_new=50)


@pytest.fixture
def scan(tmp_path, serving, output):
    """`scan(*lines)` writes an input and scans it beside the output."""

    def go(*lines, serving=serving):
        source = tmp_path / "in.jsonl"
        source.write_bytes(b"".join(n if isinstance(n, bytes) else json.dumps(n).encode() + b"\n" for n in lines))
        requests = Requests(source, serving)
        with requests, Results(output) as results:
            requests.scan(results)
            for index in range(len(requests)):
                assert requests.read(index).index == index
        return requests

    return go


def test_all_requests_are_found_with_their_lengths(scan, serving):
    requests = scan(line("a"), b"\n", line("b", body={"prompt": [1] * 7}), b"  \r\n", line("ü" * 300))
    prompt = len(serving.tokenizer.encode("one two"))
    assert list(requests.lengths) == [prompt + 5, 7 + 50, prompt + 5]
    assert (len(requests), requests.open, list(requests.refused)) == (3, True, [])


def test_a_last_line_without_its_newline_counts(scan):
    assert len(scan(line("a"), json.dumps(line("b")).encode())) == 2


BAD_FILES = {
    "nothing": [b""],
    "blank lines": [b"\n\n  \n"],
    "text": [b"hello\n"],
    "a list": [b"[1]\n"],
    "one array of all": [json.dumps([line("a"), line("b")]).encode() + b"\n"],
    "half a line": [line("a"), b'{"custom_id": "b", "me'],
    "no custom_id": [line("a"), {**line(), "custom_id": None}],
    "a number": [line("a"), line(7)],
    "an empty name": [line("")],
    "no text": [line("\ud800")],
    "the same name": [line("x"), line("a"), line("b"), line("a", body={"prompt": "other"})],
    "NaN": [b'{"custom_id": "a", "body": NaN}\n'],
    "not UTF-8": [b'{"custom_id": "\xff"}\n'],
    "nested": [b"[" * 100_000 + b"\n"],
}


def test_a_byte_order_mark_is_called_by_its_name(scan):
    with pytest.raises(BadRequest, match=r"line 1: a byte order mark stands before it; save the file as UTF-8 without"):
        scan(b"\xef\xbb\xbf" + json.dumps(line()).encode())


@pytest.mark.parametrize("lines", BAD_FILES.values(), ids=BAD_FILES)
def test_an_unusable_file_is_refused_in_one_line_that_says_where(scan, lines, output):
    with pytest.raises(BadRequest) as caught:
        scan(*lines)
    message = str(caught.value)
    assert "in.jsonl" in message and "\n" not in message and len(message) < 400
    assert any(word in message for word in ("line 1", "line 2", "lines 2 and 4", "no requests"))
    assert not output.exists()


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (line("b", method="GET"), "method"),
        (line("b", method=None), "method"),
        (line("b", url="/v1/embeddings"), "url"),
        (line("b", url=3), "url"),
        (line("b", priority=1), "priority"),
        (line("b", body=[]), None),
        (line("b", body={"prompt": "x", "n": 2}), "n"),
        (line("b", body={"prompt": "x", "stream": True}), "stream"),
        ({"custom_id": "b"}, "method"),
    ],
    ids=lambda v: str(v)[:50],
)
def test_a_bad_request_is_refused_alone_and_names_its_field(scan, bad, param, serving, tmp_path):
    requests = scan(line("a"), bad, line("c"))
    assert (list(requests.refused), requests.open) == ([1], True)
    assert requests.lengths[1] == 0 and requests.lengths[2] > 0
    with Requests(tmp_path / "in.jsonl", serving) as again, Results(tmp_path / "out.jsonl") as results:
        again.scan(results)
        error = again.complaint(again.read(1))
    assert isinstance(error, BadBody) and error.param == param


def test_a_seed_that_is_not_given_belongs_to_the_name_alone(scan, tmp_path, serving):
    def seeds(*lines):
        scan(*lines)
        with Requests(tmp_path / "in.jsonl", serving) as requests:
            found = [requests.task(requests._request(json.dumps(n).encode(), 0, 1)) for n in lines]
        return [task.sampling.seed for task in found]

    drawn = {"prompt": "x", "temperature": 1}
    one, two = seeds(line("a", body=drawn), line("b", body=drawn))
    assert one != two and seeds(line("b", body={"prompt": "y", "temperature": 2}), line("a", body=drawn)) == [two, one]
    assert seeds(line("c", body={**drawn, "seed": 5})) == [5]


def answer(output, requests, index):
    with Results(output) as results:
        results.append(requests._keys[index], requests_name(requests, index), BODY)


def requests_name(requests, index):
    return "abc"[index]


def test_answered_requests_are_left_out_also_when_the_input_has_grown(scan, output):
    requests = scan(line("a"), line("b"))
    answer(output, requests, 1)
    again = scan(line("c"), line("b"), line("a"))
    assert (again.answered, again.open) == (1, True) and list(map(bool, again.lengths)) == [True, False, True]


def test_an_output_of_another_input_is_refused_in_one_line(scan, output):
    answer(output, scan(line("a"), line("b")), 1)
    for lines, why in (
        ([line("a")], "answers a request that is not in"),
        ([line("a"), line("b", body={"prompt": "changed"})], "answers another version of a request"),
    ):
        with pytest.raises(BadRequest, match=f"line 1 {why}") as caught:
            scan(*lines)
        assert "\n" not in str(caught.value)


def test_an_output_of_another_model_or_limit_is_refused(scan, output, serving):
    from dataclasses import replace

    answer(output, scan(line("a")), 0)
    for other in (replace(serving, fingerprint="fp_other"), replace(serving, max_new=51)):
        with pytest.raises(BadRequest, match="another model or setting"):
            scan(line("a"), serving=other)
    scan(line("a"), serving=replace(serving, name="another path of it"))


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path, serving, output):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a")) + "\n")
    with Requests(source, serving) as requests, Results(output) as results:
        requests.scan(results)
        source.write_text(json.dumps(line("b")) + "\n")
        with pytest.raises(DiskError, match="line 1 has changed meanwhile"):
            requests.read(0)


def test_what_is_no_input_file_is_refused(tmp_path, serving):
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", BadRequest), (".", DeltafinError), ("none", DiskError)):
        with pytest.raises(error):
            Requests(tmp_path / name, serving)


def test_many_requests_stay_out_of_memory(tmp_path, serving, output):
    """2,000 requests of 10 KB take less than 1 MB: neither lines nor names are kept."""
    import tracemalloc

    source, filler = tmp_path / "in.jsonl", "x" * 10_000
    with open(source, "w") as f:
        for number in range(2000):
            f.write(json.dumps(line(f"name {number}", body={"prompt": [1], "user": filler})) + "\n")
    with Requests(source, serving) as requests, Results(output) as results:
        tracemalloc.start()
        try:
            requests.scan(results)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(requests) == 2000 and kept < 1_000_000, kept
        assert requests.read(1999).custom_id == "name 1999"


def test_the_journal_lies_beside_its_output(output):
    assert journal_path(output).name == "out.jsonl.journal" and journal_path(output).parent == output.parent
