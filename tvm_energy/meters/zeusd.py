"""The part of the HTTP interface of ``zeusd`` that sets clocks, over its Unix domain socket.

``zeusd`` (https://ml.energy/zeus/zeusd/, API reference docs/zeusd/api.md of ml-energy/zeus) runs as root once on a
machine and changes clocks on behalf of users who may not. Requests are

::

    GET  /discover
    POST /gpu/set_gpu_locked_clocks?gpu_ids=0&min_clock_mhz=1200&max_clock_mhz=1200&block=true
    POST /gpu/reset_gpu_locked_clocks?gpu_ids=0&block=true

GPUs are numbered as NVML numbers them for the daemon. In a container that may differ from what NVML says
here, so they are matched by PCI address where the daemon tells it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tvm_energy.errors import ClockUnavailable

#: Zeus's own variables: path of the socket, and token where the daemon asks for one.
SOCKET_VARIABLE = "ZEUSD_SOCK_PATH"
TOKEN_VARIABLE = "ZEUSD_TOKEN"

_SOCKETS = ("/run/zeusd/zeusd.sock", "/var/run/zeusd.sock")
_TIMEOUT_S = 10.0
_LONGEST_REPLY = 1 << 20


class ZeusdError(ClockUnavailable):
    """The daemon refused or could not be reached; ``status`` is its HTTP status, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def find_zeusd(environ: Mapping[str, str] | None = None) -> Zeusd | None:
    """The daemon whose socket is present, at $ZEUSD_SOCK_PATH or a usual place; None without one."""
    environ = os.environ if environ is None else environ
    configured = environ.get(SOCKET_VARIABLE)
    for path in (configured,) if configured else _SOCKETS:
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                return Zeusd(Path(path), environ.get(TOKEN_VARIABLE))
        except OSError:
            continue
    return None


class Zeusd:
    """One daemon.

    Args:
        path: its socket.
        token: bearer token, where the daemon asks for one.
    """

    def __init__(self, path: Path, token: str | None = None) -> None:
        self.path = path
        self._token = token

    def discover(self) -> dict[str, Any]:
        """What the daemon serves: ``gpus``, ``enabled_api_groups``, ``auth_required``.

        Raises:
            ZeusdError: it does not answer, or not as zeusd does.
        """
        reply = self._ask("GET", "/discover")
        try:
            values = json.loads(reply)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ZeusdError(f"{self.path} does not answer as zeusd does; update zeusd")
        return values

    def controls_clocks(self) -> bool:
        """Whether the daemon was started with its group ``gpu-control``."""
        groups = self.discover().get("enabled_api_groups")
        return groups is None or (isinstance(groups, list) and "gpu-control" in groups)

    def gpu_id(self, index: int, pci_address: str | None) -> int:
        """The daemon's number of a GPU.

        Args:
            index: NVML's number of the GPU in this process.
            pci_address: as NVML gives it.

        Raises:
            ZeusdError: the daemon does not have this GPU.
        """
        gpus = self.discover().get("gpus")
        known = [gpu for gpu in gpus or () if isinstance(gpu, dict)]
        if pci_address is None or not any("pci_address" in gpu for gpu in known):
            return index  # before 0.5 the daemon did not tell
        for gpu in known:
            if _same_address(str(gpu.get("pci_address")), pci_address):
                return int(gpu["id"])
        raise ZeusdError(f"zeusd at {self.path} does not know the GPU at {pci_address}")

    def lock(self, gpu_id: int, clock_mhz: int) -> None:
        """Lock the core clock.

        Raises:
            ZeusdError: see ``status``.
        """
        self._write("set_gpu_locked_clocks", gpu_id, clock_mhz)

    def reset(self, gpu_id: int) -> None:
        """Release the core clock; raises as `lock`."""
        self._write("reset_gpu_locked_clocks", gpu_id)

    def lock_memory(self, gpu_id: int, clock_mhz: int) -> None:
        """Lock the memory clock; raises as `lock`."""
        self._write("set_mem_locked_clocks", gpu_id, clock_mhz)

    def reset_memory(self, gpu_id: int) -> None:
        """Release the memory clock; raises as `lock`."""
        self._write("reset_mem_locked_clocks", gpu_id)

    def _write(self, name: str, gpu_id: int, clock_mhz: int | None = None) -> None:
        query: dict[str, Any] = {"gpu_ids": gpu_id}
        if clock_mhz is not None:
            query |= {"min_clock_mhz": clock_mhz, "max_clock_mhz": clock_mhz}
        self._ask("POST", f"/gpu/{name}?{urlencode(query | {'block': 'true'})}")

    def _ask(self, method: str, target: str) -> str:
        connection = _UnixConnection(self.path)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.request(method, target, headers=headers)
            response = connection.getresponse()
            text = response.read(_LONGEST_REPLY).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as exc:
            raise ZeusdError(
                f"{self.path} does not answer ({exc}); check that zeusd runs and that you may write "
                "to its socket"
            ) from exc
        finally:
            connection.close()
        if response.status != 200:
            raise ZeusdError(_explain(response.status, text), response.status)
        return text


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix domain socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(str(self._path))


def _same_address(one: str, other: str) -> bool:
    """PCI addresses come with a domain of four or eight digits, in upper or lower case."""

    def short(address: str) -> str:
        domain, _, rest = address.strip().lower().partition(":")
        return f"{domain[-4:]}:{rest}"

    return short(one) == short(other)


def _explain(status: int, text: str) -> str:
    said = " ".join(text.split())[:200]
    reasons = {
        401: f"it asks for a token; set {TOKEN_VARIABLE}",
        403: "it has no permission, or the token does not allow gpu-control",
        404: "it was started without gpu-control, or is too old (0.4 or newer is needed)",
    }
    return f"{reasons.get(status, 'it refused')} (HTTP {status}{f': {said}' if said else ''})"
