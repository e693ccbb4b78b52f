"""The radio link of a device: rate, power needed, energy.

    R(p) = B log2(1 + p h / (N0 B))                    Shannon's capacity, bit/s
    p(d, t) = (N0 B / h) (2^(d / (B t)) - 1)            power that sends d bits in t seconds
    E(d, t) = p t                                       falls with t: sending slowly is cheapest

B is the bandwidth (Hz), p the transmit power (W), h the power gain of the channel (received over
transmitted power, no unit), N0 the noise power density (W/Hz). This is the usual model of offloading
studies; arXiv:2502.06295 does not print its channel in the parts that we could read, so the choice is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError

__all__ = ["Channel", "FixedRate", "RadioChannel"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioChannel:
    """A channel whose power can be chosen.

    Attributes:
        bandwidth_hz: B.
        gain: h; 0 means no connection.
        noise_w_per_hz: N0; thermal noise at 290 K is 4.0e-21 W/Hz (-174 dBm/Hz).
        max_power_w: highest transmit power; 0 means that the radio is off.
    """

    bandwidth_hz: float
    gain: float
    noise_w_per_hz: float = 4.0e-21
    max_power_w: float

    def __post_init__(self) -> None:
        _check("bandwidth_hz", self.bandwidth_hz)
        _check("gain", self.gain)
        _check("max_power_w", self.max_power_w)
        if not (math.isfinite(self.noise_w_per_hz) and self.noise_w_per_hz > 0):
            raise ConfigurationError(f"noise_w_per_hz must be positive, got {self.noise_w_per_hz}")
        if self.gain > 1:
            raise ConfigurationError(
                f"a power gain of {self.gain:g} would receive more than is sent; give h as a ratio "
                "(1e-9, say), or in dB with --gain-db"
            )

    @property
    def strength_hz(self) -> float:
        """H p_max / N0: the bandwidth at which the signal is as strong as the noise."""
        return self.gain * self.max_power_w / self.noise_w_per_hz

    def rate_bps(self, power_w: float) -> float:
        """R(p) in bit/s."""
        if self.bandwidth_hz == 0:
            return 0.0
        signal = power_w * self.gain / (self.noise_w_per_hz * self.bandwidth_hz)
        return self.bandwidth_hz * math.log1p(signal) / math.log(2)

    @property
    def max_rate_bps(self) -> float:
        """Rate at the highest power."""
        return self.rate_bps(self.max_power_w)

    def power_w(self, bits: Floats, seconds: Floats) -> Floats:
        """Power that sends ``bits`` in exactly ``seconds``; infinite above ``max_power_w``."""
        if self.max_rate_bps == 0:
            return np.where(bits > 0, np.inf, 0.0)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            exponent = np.where(bits > 0, bits / (self.bandwidth_hz * seconds), 0.0)
            power = (
                self.noise_w_per_hz
                * self.bandwidth_hz
                / self.gain
                * np.expm1(exponent * math.log(2))
            )
        # The fastest transmission comes back from its own duration with a rounding error.
        possible = (seconds > 0) & (power <= self.max_power_w * (1 + 1e-9))
        return np.where(
            bits > 0, np.where(possible, np.minimum(power, self.max_power_w), np.inf), 0
        )

    def sending_s(self, bits: Floats, seconds: Floats) -> Floats:
        """How long the radio sends when it may take ``seconds``: all of it, if there is anything."""
        return np.where(bits > 0, seconds, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRate:
    """A link with one rate and one power (Ethernet, or Wi-Fi as the driver sets it).

    Attributes:
        rate_bps: bit/s; 0 means no connection.
        power_w: what the device draws for sending.
    """

    rate_bps: float
    power_w_sending: float

    def __post_init__(self) -> None:
        _check("rate_bps", self.rate_bps)
        _check("power_w_sending", self.power_w_sending)

    @property
    def max_rate_bps(self) -> float:
        """The rate."""
        return self.rate_bps

    def sending_s(self, bits: Floats, seconds: Floats) -> Floats:
        """``bits`` over the rate, whatever time there is."""
        if self.rate_bps == 0:
            return np.where(bits > 0, np.inf, 0.0)
        return bits / self.rate_bps

    def power_w(self, bits: Floats, seconds: Floats) -> Floats:
        """The power, where the rate suffices; else infinite."""
        possible = self.sending_s(bits, seconds) <= seconds * (1 + 1e-12)
        return np.where(bits > 0, np.where(possible, self.power_w_sending, np.inf), 0.0)


Channel = RadioChannel | FixedRate


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{name} must be 0 or more, got {value}")
