import json
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest


def test_the_hub_stand_in_sends_every_file_through_a_signed_link(demo_tool: ModuleType) -> None:
    name = "model-00014-of-000014.safetensors"
    with demo_tool.loopback_hub(demo_tool.MODEL_FOLDER) as hub:
        with urllib.request.urlopen(f"{hub.url}/{demo_tool.REPO}/resolve/main/{name}") as answer:
            assert "Signature=" in answer.geturl()
            assert answer.read() == (demo_tool.MODEL_FOLDER / name).read_bytes()
        assert [(row["host"], row["status"]) for row in hub.state.log] == [("hub", 302), ("cdn", 200)]


def test_nothing_in_the_environment_can_lead_elsewhere(
    demo_tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "secret")
    environment = demo_tool.clean_environment("http://127.0.0.1:1", tmp_path)
    assert "secret" not in environment.values()
    assert environment["HF_ENDPOINT"] == "http://127.0.0.1:1"
    assert "PATH" in environment


def test_the_expected_answer_is_the_golden_one(demo_tool: ModuleType, golden: Path) -> None:
    cases = json.loads((golden / "demo.json").read_text())["cases"]
    assert demo_tool.expected_answer() == next(c["text"] for c in cases if c["name"] == "raw capital")


def test_a_range_counts_as_asked_twice_only_when_its_bytes_came_twice(demo_tool: ModuleType) -> None:
    def row(host: str, status: int, span: str) -> dict[str, str | int]:
        return {"host": host, "status": status, "path": "/a/shard", "range": span}

    once = [row("hub", 302, "bytes=0-9"), row("cdn", 206, "bytes=0-9"), row("cdn", 206, "bytes=10-19")]
    assert demo_tool.ranges_asked_twice(once) == []
    assert demo_tool.ranges_asked_twice([*once, row("cdn", 206, "bytes=0-9")]) == ["shard bytes=0-9"]


def test_the_demo_does_what_it_says(demo_tool: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of `make demo` but the installation: index, fetch, run, and run again without a request."""
    with demo_tool.loopback_hub(demo_tool.MODEL_FOLDER) as hub:
        demo_tool.show(hub, tmp_path)
    out = capfd.readouterr().out
    assert "Both answers are equal and as expected." in out
