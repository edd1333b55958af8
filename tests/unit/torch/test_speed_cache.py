from pathlib import Path

import pytest

from slipstream.torch.channels.speed_cache import OwnSpeeds, cache_file, cached, read, this_machine
from slipstream.torch.channels.speeds import measure_machine

FAST, SLOW = OwnSpeeds(2e11, 2e10), OwnSpeeds(1e9, 1e9)


def never() -> OwnSpeeds:
    raise AssertionError("measured again")


def test_speeds_are_measured_once_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "speeds.json"
    assert cached(file, "a", lambda: FAST) == FAST
    assert cached(file, "b", lambda: SLOW) == SLOW
    assert cached(file, "a", never) == FAST
    assert cached(file, "b", never) == SLOW
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": {"gemm_flops": "x", "summing_bytes": 1}}']
)
def test_a_file_that_makes_no_sense_is_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "speeds.json"
    file.write_bytes(content)
    assert cached(file, "a", lambda: FAST) == FAST
    assert read(file) == {"a": FAST}


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf")])
def test_speeds_that_cannot_be_are_measured_anew(tmp_path: Path, wrong: float) -> None:
    file = tmp_path / "speeds.json"
    cached(file, "a", lambda: OwnSpeeds(wrong, 1e9))
    assert cached(file, "a", lambda: FAST) == FAST


def test_without_a_place_to_keep_them_they_are_measured_every_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "speeds.json"
    for speeds in (FAST, SLOW):
        assert cached(blocked, "a", lambda speeds=speeds: speeds) == speeds  # type: ignore[misc]


def test_the_place_follows_the_convention(tmp_path: Path) -> None:
    assert cache_file({"XDG_CACHE_HOME": "/x"}) == Path("/x/slipstream/speeds.json")
    assert cache_file({}) == Path.home() / ".cache/slipstream/speeds.json"


def test_a_user_without_a_home_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory is everybody's: another user could have put speeds there."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_file({}) is None
    for speeds in (FAST, SLOW):
        assert cached(None, "a", lambda speeds=speeds: speeds) == speeds  # type: ignore[misc]


def test_this_machine_can_be_measured_and_named() -> None:
    assert measure_machine().sane
    assert "threads" in this_machine()
