"""Before models are read, the command line tests whether the hub can be reached, also behind a proxy."""

import os
import socket
from collections.abc import Iterator

import pytest

from stillhouse.cli.hub import settle_offline

HUB = "HF_HUB_OFFLINE"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HUB, "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for variable in (name, name.lower()):
            monkeypatch.setenv(variable, "")  # so that what `settle_offline` sets is undone
            monkeypatch.delenv(variable)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_hub_that_answers_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listening: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening}")
    settle_offline(["a/b"])
    assert HUB not in os.environ
    assert not capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    settle_offline([None, "/"])
    assert HUB not in os.environ
    settle_offline(["a/b"])
    assert os.environ[HUB] == "1"
    assert capsys.readouterr().err.startswith(
        "warning: 127.0.0.1 cannot be reached (Connection refused): only models"
    )


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["http://", "socks5h://", ""])
def test_behind_a_proxy_the_proxy_is_asked(
    monkeypatch: pytest.MonkeyPatch, listening: int, closed: int, variable: str, scheme: str
) -> None:
    """Of any kind, and also one for all schemes: the hub itself has no address here."""
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{listening}")
    settle_offline(["a/b"])
    assert HUB not in os.environ
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{closed}")
    settle_offline(["a/b"])
    assert os.environ[HUB] == "1"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HF_ENDPOINT", "http://hub:port"),
        ("HF_ENDPOINT", "http://[::1"),
        ("HF_ENDPOINT", "http://a..b"),
        ("HTTPS_PROXY", "http://proxy:port"),
    ],
)
def test_an_address_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"^{variable}: the hub's address is not readable"):
        settle_offline(["a/b"])
