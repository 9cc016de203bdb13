"""df-fetch all --idle beside a run."""

from __future__ import annotations

import threading

import pytest

from deltafin.store import BusyLine

REPO = "org/tiny"


@pytest.fixture(autouse=True)
def not_us(monkeypatch) -> None:
    """The command runs in the tests' own process, which must not go last from then on."""
    monkeypatch.setattr("deltafin.store.lower_priority", lambda: None)


def test_an_idle_fetch_waits_for_a_run_says_so_once_and_then_fetches_everything(
    df, hub, tiny_dir, index_only, tmp_path
):
    server = hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    busy, over = BusyLine(tmp_path / "cache"), threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            busy.mark()
            assert not server.state.log

    busy.mark()
    runner = threading.Thread(target=run)
    runner.start()
    threading.Timer(0.8, over.set).start()
    done = df("df-fetch", "all", REPO, "--idle")
    runner.join()
    assert done.status == 0, done.err
    assert done.err == "df-fetch: a run is using the line; going on whenever it leaves it free\n"
    assert "0 spans, 0 B were here already" in done.out


def test_without_a_run_nothing_is_said(df, hub, tiny_dir, index_only, tmp_path):
    hub(tiny_dir)
    index_only(tmp_path / "cache", REPO)
    assert df("df-fetch", "all", REPO, "--idle").err == ""


def test_idle_has_no_effect_where_nothing_is_fetched_and_says_so(df):
    done = df("df-fetch", "all", "demo", "--idle")
    assert done.status == 2 and "--idle has no effect for demo" in done.err
