from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_energy.dvfs.bandwidth import share_bandwidth
from tvm_energy.dvfs.channel import Channel, FixedRate, RadioChannel
from tvm_energy.dvfs.clock_table import clock_table
from tvm_energy.dvfs.partition import PartitionTask, partition
from tvm_energy.errors import ConfigurationError, DeadlineImpossible


def random_task(
    rng: np.random.Generator, blocks: int, clocks: int, channel: Channel, stretch: float, **rest
) -> PartitionTask:
    """Blocks of milliseconds on the device, tenths of that on the server, tensors of 10 to 400 kbit."""
    table = clock_table(
        np.arange(1, clocks + 1) * 200.0,
        rng.uniform(1e-3, 2e-2, (blocks, clocks)),
        power_w=rng.uniform(2, 20, (blocks, clocks)),
    )
    return PartitionTask(
        table=table,
        cut_bits=rng.uniform(1e4, 4e5, blocks + 1),
        server_s=rng.uniform(1e-4, 2e-3, blocks),
        channel=channel,
        deadline_s=stretch * float(table.latency_s.min(axis=1).sum()),
        **rest,
    )


def radio(rng: np.random.Generator) -> RadioChannel:
    return RadioChannel(
        bandwidth_hz=rng.uniform(1e6, 2e7),
        gain=10 ** rng.uniform(-12, -9),
        max_power_w=rng.uniform(0.1, 1),
    )


def brute_force(task: PartitionTask, steps: int = 4000) -> float:
    """Least device energy over splits, clocks and a fine grid of powers, straight from the equations."""
    blocks, clocks = task.table.latency_s.shape
    best = math.inf
    for split, clock in itertools.product(range(blocks + 1), range(clocks)):
        local_s = sum(task.table.latency_s[b, clock] for b in range(split))
        local_j = sum(task.table.energy_j[b, clock] for b in range(split))
        server_s = sum(task.server_s[split:]) + (task.answer_s if split < blocks else 0)
        bits = task.cut_bits[split] if split < blocks else 0.0
        if split == 0 and task.input_on_server:
            bits = 0.0
        idle_j = task.idle_power_w * max(0, task.deadline_s - local_s)
        if bits == 0:
            pairs = [(0.0, 0.0)]
        elif isinstance(task.channel, FixedRate):
            rate = task.channel.rate_bps
            pairs = [(task.channel.power_w_sending, bits / rate)] if rate else []
        else:
            powers = np.geomspace(1e-9, 1, steps) * task.channel.max_power_w
            pairs = [(p, bits / r) for p in powers if (r := task.channel.rate_bps(p)) > 0]
        for power, seconds in pairs:
            if local_s + seconds + server_s <= task.deadline_s * (1 + 1e-12):
                best = min(best, local_j + power * seconds + idle_j)
    return best


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 4),
    clocks=st.integers(1, 3),
    stretch=st.floats(0.2, 2),
    kind=st.sampled_from(["radio", "fixed", "none"]),
    on_server=st.booleans(),
    idle=st.sampled_from([0.0, 1.0]),
)
def test_partition_equals_brute_force(seed, blocks, clocks, stretch, kind, on_server, idle) -> None:
    rng = np.random.default_rng(seed)
    channel: Channel = {
        "radio": radio(rng),
        "fixed": FixedRate(rate_bps=rng.uniform(1e6, 1e8), power_w_sending=0.5),
        "none": FixedRate(rate_bps=0, power_w_sending=0.5),
    }[kind]
    task = random_task(
        rng, blocks, clocks, channel, stretch,
        input_on_server=on_server, idle_power_w=idle, answer_s=1e-4,
    )  # fmt: skip
    best = brute_force(task)
    try:
        found = partition(task)
    except DeadlineImpossible as error:
        nearest_s = error.nearest_s
    else:
        nearest_s = 0.0
    if nearest_s:
        assert best == math.inf
        again = partition(replace(task, deadline_s=nearest_s))
        assert again.latency_s <= nearest_s * (1 + 1e-9)
        with pytest.raises(DeadlineImpossible):
            partition(replace(task, deadline_s=nearest_s * 0.999))
        return
    assert found.latency_s <= task.deadline_s * (1 + 1e-9)
    # A grid of powers can only be worse, by its step (0.5 % of the power of the transmission).
    assert found.energy_j <= best * (1 + 1e-9)
    if best < math.inf:
        sent_j = found.transmit_power_w * found.transmit_s
        assert found.energy_j >= best - 0.02 * sent_j - 1e-9 * best
    if kind == "radio" and found.sent_bits:
        rate = channel.rate_bps(found.transmit_power_w)
        assert rate * found.transmit_s == pytest.approx(found.sent_bits, rel=1e-6)


def make_shared(seed: int, devices: int, stretch: float = 1.2) -> list[PartitionTask]:
    rng = np.random.default_rng(seed)
    return [
        random_task(
            rng, 2, 2, replace(radio(rng), gain=10 ** rng.uniform(-11, -9)), stretch * rng.uniform(0.8, 1.2),
            name=f"device{number}",
        )
        for number in range(devices)
    ]  # fmt: skip


def exhaustive(tasks: list[PartitionTask], bandwidth_hz: float, steps: int) -> float:
    """Least energy over all divisions of the bandwidth on a grid, each device solved by `partition`."""
    best_of: list[dict[int, float]] = []
    for task in tasks:
        costs = {}
        for part in range(steps + 1):
            channel = replace(task.channel, bandwidth_hz=bandwidth_hz * part / steps)
            try:
                costs[part] = partition(replace(task, channel=channel)).energy_j
            except DeadlineImpossible:
                costs[part] = math.inf
        best_of.append(costs)
    total = {steps: 0.0}  # bandwidth left -> least energy of the devices before
    for costs in best_of:
        following: dict[int, float] = {}
        for left, energy in total.items():
            for part in range(left + 1):
                value = energy + costs[part]
                if value < following.get(left - part, math.inf):
                    following[left - part] = value
        total = following
    return min(total.values(), default=math.inf)


@pytest.mark.parametrize(("devices", "steps"), [(1, 100), (2, 300), (3, 100), (4, 60)])
@pytest.mark.parametrize("seed", range(4))
def test_sharing_is_as_good_as_exhaustive_search(devices: int, steps: int, seed: int) -> None:
    tasks, bandwidth = make_shared(seed, devices), 2e6 * devices
    grid = exhaustive(tasks, bandwidth, steps)
    if grid == math.inf:
        with pytest.raises(DeadlineImpossible):
            share_bandwidth(tasks, bandwidth * 0.99)
        return
    found = share_bandwidth(tasks, bandwidth)
    assert sum(split.bandwidth_hz for split in found.splits) <= bandwidth * (1 + 1e-9)
    assert found.lower_bound_j <= found.energy_j
    assert found.lower_bound_j <= grid * (1 + 1e-9)
    # A grid is no better than the continuum; ours may miss the best combination of options by little.
    assert found.energy_j <= grid * 1.005


def test_each_device_of_a_shared_plan_keeps_its_deadline_and_power() -> None:
    tasks, bandwidth = make_shared(7, 6), 8e6
    found = share_bandwidth(tasks, bandwidth)
    assert any(split.sent_bits for split in found.splits)
    for task, split in zip(tasks, found.splits, strict=True):
        assert split.latency_s <= task.deadline_s * (1 + 1e-9)
        assert split.transmit_power_w <= task.channel.max_power_w
        if split.sent_bits:
            own = replace(task.channel, bandwidth_hz=split.bandwidth_hz)
            assert own.rate_bps(split.transmit_power_w) == pytest.approx(split.rate_bps, rel=1e-6)
            alone = partition(replace(task, channel=own))
            assert alone.energy_j <= split.energy_j * (1 + 1e-9)


def test_many_devices_come_close_to_the_lower_bound() -> None:
    found = share_bandwidth(make_shared(3, 200), 2e8)
    assert found.gap < 2e-3


def test_no_bandwidth_means_local_inference() -> None:
    tasks = make_shared(5, 3, stretch=3.0)
    assert all(split.local_blocks == 2 for split in share_bandwidth(tasks, 0).splits)


def test_impossible_shares_name_the_stretch() -> None:
    tasks = [replace(task, deadline_s=task.deadline_s / 4) for task in make_shared(5, 4)]
    with pytest.raises(DeadlineImpossible, match="times as long") as caught:
        share_bandwidth(tasks, 1e5)
    factor = caught.value.nearest_s / max(task.deadline_s for task in tasks)
    stretched = [replace(task, deadline_s=task.deadline_s * factor) for task in tasks]
    assert share_bandwidth(stretched, 1e5).energy_j > 0


def test_full_offload_when_the_server_has_the_input() -> None:
    rng = np.random.default_rng(0)
    task = random_task(rng, 3, 2, FixedRate(rate_bps=0, power_w_sending=1), 1, input_on_server=True)
    found = partition(task)
    assert (found.local_blocks, found.clock_mhz, found.energy_j) == (0, None, 0)


@pytest.mark.parametrize("zero", [{"gain": 0.0}, {"max_power_w": 0.0}, {"bandwidth_hz": 0.0}])
def test_a_channel_of_zero_rate_leaves_local_inference(zero: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    task = random_task(rng, 3, 2, replace(radio(rng), **zero), 5)
    assert partition(task).local_blocks == 3
    with pytest.raises(DeadlineImpossible, match="rate of zero"):
        partition(replace(task, deadline_s=1e-4))


def test_a_block_that_the_server_cannot_run_stays_local() -> None:
    rng = np.random.default_rng(0)
    task = random_task(rng, 3, 2, FixedRate(rate_bps=1e9, power_w_sending=0.1), 5)
    with_gap = replace(task, server_s=np.array([1e-4, np.inf, 1e-4]))
    assert partition(task).local_blocks == 0
    assert partition(with_gap).local_blocks == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cut_bits": np.ones(3)}, "4 cut sizes"),
        ({"cut_bits": np.array([1, -1, 1, 1.0])}, "0 bits or more"),
        ({"server_s": np.array([1, -1, 1.0])}, "0 s or more"),
        ({"deadline_s": 0.0}, "deadline must be positive"),
        ({"idle_power_w": -1.0}, "idle_power_w"),
    ],
)
def test_bad_tasks_are_refused(change, message: str) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match=message):
        replace(random_task(rng, 3, 2, radio(rng), 1), **change)


def test_bad_channels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="gain-db"):
        RadioChannel(bandwidth_hz=1, gain=80, max_power_w=1)
    with pytest.raises(ConfigurationError, match="rate_bps"):
        FixedRate(rate_bps=-1, power_w_sending=1)
    rng = np.random.default_rng(0)
    fixed = random_task(rng, 2, 2, FixedRate(rate_bps=1, power_w_sending=1), 1)
    with pytest.raises(ConfigurationError, match="no bandwidth to share"):
        share_bandwidth([fixed], 1e6)
    with pytest.raises(ConfigurationError, match="no device"):
        share_bandwidth([], 1e6)
