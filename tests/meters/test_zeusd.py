from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_zeusd import FakeZeusd, serving

from tvm_energy.meters.zeusd import Zeusd, ZeusdError, find_zeusd


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z") / "s"  # paths of sockets must be short


@pytest.fixture
def daemon(path: Path) -> Iterator[FakeZeusd]:
    with serving(path) as started:
        yield started


def test_clocks_are_set_as_its_interface_says(path: Path, daemon: FakeZeusd) -> None:
    client = Zeusd(path)
    client.lock(1, 1200)
    client.reset(1)
    client.lock_memory(0, 2619)
    client.reset_memory(0)
    assert daemon.requests == [
        "/gpu/set_gpu_locked_clocks?gpu_ids=1&min_clock_mhz=1200&max_clock_mhz=1200&block=true",
        "/gpu/reset_gpu_locked_clocks?gpu_ids=1&block=true",
        "/gpu/set_mem_locked_clocks?gpu_ids=0&min_clock_mhz=2619&max_clock_mhz=2619&block=true",
        "/gpu/reset_mem_locked_clocks?gpu_ids=0&block=true",
    ]
    assert daemon.tokens == [None] * 4


def test_a_token_is_sent(path: Path, daemon: FakeZeusd) -> None:
    client = find_zeusd({"ZEUSD_SOCK_PATH": str(path), "ZEUSD_TOKEN": "abc"})
    assert client is not None
    client.reset(0)
    assert daemon.tokens == ["Bearer abc"]


def test_a_gpu_is_found_by_its_pci_address(path: Path, daemon: FakeZeusd) -> None:
    client = Zeusd(path)
    assert client.gpu_id(0, "00000000:09:00.0") == 0
    assert client.gpu_id(0, "00000000:00:00.0") == 1
    with pytest.raises(ZeusdError, match="does not know the GPU at 00000000:77"):
        client.gpu_id(0, "00000000:77:00.0")
    daemon.discovery = {"gpu_ids": [0, 1]}  # before 0.5
    assert client.gpu_id(1, "00000000:09:00.0") == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "ZEUSD_TOKEN"), (403, "no permission"), (404, "gpu-control"), (500, "NVML error: no")],
)
def test_refusals_say_what_to_do(path: Path, daemon: FakeZeusd, status: int, text: str) -> None:
    daemon.status = status
    with pytest.raises(ZeusdError, match=text) as caught:
        Zeusd(path).lock(0, 1200)
    assert caught.value.status == status


def test_a_daemon_without_control_is_known(path: Path, daemon: FakeZeusd) -> None:
    assert Zeusd(path).controls_clocks()
    daemon.discovery = {"enabled_api_groups": ["gpu-read"], "gpus": []}
    assert not Zeusd(path).controls_clocks()
    daemon.discovery = ["something else"]
    with pytest.raises(ZeusdError, match="does not answer as zeusd does"):
        Zeusd(path).controls_clocks()


def test_only_a_socket_counts(path: Path) -> None:
    assert find_zeusd({"ZEUSD_SOCK_PATH": str(path)}) is None
    path.write_text("")
    assert find_zeusd({"ZEUSD_SOCK_PATH": str(path)}) is None


def test_a_socket_that_nobody_serves(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        client = find_zeusd({"ZEUSD_SOCK_PATH": str(path)})
        assert client is not None
        with pytest.raises(ZeusdError, match="does not answer"):
            client.discover()
