"""Planning with t = w / (g f) against planning with a fitted model, on simulated Jetson boards.

The two cases of arXiv:2502.06295, local and cooperative inference. The exact objective and parameters
of the paper are not known to us. Ours:

local         one clock for the network. Goals: least energy with T <= stretch x (least T), and
              least E + P T, P the mean power at the highest clock.
cooperative   split, clock and transmit power for least device energy within stretch x (least local T);
              server sim:a100, 10 MHz, gain -100 dB, -174 dBm/Hz, 0.2 W.

Every planner sees the same five clocks and decides on the whole table; the simulator then says what its
decision costs. ``cpu`` is the CPU-DVFS model, t = w / (g f), e = kappa f^3 t, w the FLOPs of a block, with g and
kappa of the network calibrated at the highest clock (kind to it); ``cpu_peak`` takes g from the data sheet.
``fitted`` is the form that cross-validation chooses for each block (`tvm_energy.dvfs.fitting`). ``best`` plans with
the truth. Blocks are real, of networks in the onnx package with TVM's default GPU schedules. Every number
is simulated. The last line of stdout is one JSON object: for each device and network lists ``local`` and
``cooperative`` with the goal and, for each planner, ``latency_s``, ``energy_j``, ``missed`` (the deadline, by
more than 1 %);
and ``block_sum_error``, the largest difference between the sum of blocks and the whole network.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np

from tvm_energy.dvfs.channel import RadioChannel
from tvm_energy.dvfs.clock_table import ClockTable, clock_table
from tvm_energy.dvfs.fitting import fit_latencies, fit_powers
from tvm_energy.dvfs.partition import PartitionTask, options, partition
from tvm_energy.dvfs.plan import Deadline, PricedTime, plan
from tvm_energy.errors import DeadlineImpossible
from tvm_energy.meta_schedule.blocks import simulated_network, time_blocks
from tvm_energy.meta_schedule.networks import load_onnx, onnx_model_zoo_path
from tvm_energy.simulation.devices import DeviceSpec, find_device

NETWORKS = ("alexnet", "vgg19", "resnet50", "densenet121")
QUICK = ("alexnet", "resnet50")
#: A deadline counts as missed when it is exceeded by more than this. A transmission is planned to end exactly at
#: the deadline, so the smallest error of a model exceeds it.
LATE = 0.01
CHANNEL = RadioChannel(bandwidth_hz=10e6, gain=1e-10, noise_w_per_hz=10**-20.4, max_power_w=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two networks")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--devices", default="sim:orin-nano,sim:xavier-nx")
    parser.add_argument("--networks", default=None, help="names, comma-separated")
    options_ = parser.parse_args()
    names = (
        options_.networks.split(",") if options_.networks else QUICK if options_.quick else NETWORKS
    )
    result: dict[str, Any] = {"simulated": True}
    for device in options_.devices.split(","):
        spec = find_device(device)
        result[device] = {}
        for name in names:
            result[device][name] = compare(spec, name)
            if not options_.json:
                show(device, name, result[device][name])
    result["summary"] = summarize(result)
    print(json.dumps(result, allow_nan=False))


def compare(spec: DeviceSpec, name: str) -> dict[str, Any]:
    blocks, works, times = simulated_network(load_onnx(onnx_model_zoo_path(name)), spec)
    truth = clock_table(times.clocks_mhz, times.latency_s, energy_j=times.energy_j)
    flop = np.array([block.flop for block in blocks])
    planners = {
        "cpu": cpu_model(
            truth, flop, flop.sum() / truth.latency_s[:, -1].sum() / spec.max_clock_mhz
        ),
        "cpu_peak": cpu_model(truth, flop, 2e6 * spec.sms * spec.fp32_lanes),
        "fitted": fitted_model(truth),
        "best": truth,
    }
    fastest = float(truth.latency_s.sum(axis=0).min())
    price = float(truth.energy_j[:, -1].sum() / truth.latency_s[:, -1].sum())
    local: list[dict[str, Any]] = [
        {"goal": f"deadline x {s:g}", **local_case(planners, truth, Deadline(s * fastest))}
        for s in (1.1, 1.25, 1.5, 2.0)
    ]
    local.append({"goal": "E + P T", **local_case(planners, truth, PricedTime(price))})
    cuts = 8.0 * np.array([blocks[0].input_bytes, *(block.output_bytes for block in blocks)])
    server_s = time_blocks(works, find_device("a100")).latency_s[:, -1]
    task = PartitionTask(
        table=truth, cut_bits=cuts, server_s=server_s, channel=CHANNEL, deadline_s=fastest
    )
    cooperative = [
        {
            "goal": f"deadline x {s:g}",
            **cooperative_case(planners, replace(task, deadline_s=s * fastest)),
        }
        for s in (1.0, 1.25, 1.5, 2.0)
    ]
    sums = (
        truth.latency_s.sum(axis=0) / times.whole_latency_s - 1,
        truth.energy_j.sum(axis=0) / times.whole_energy_j - 1,
    )
    return {
        "blocks": len(blocks),
        "block_sum_error": float(np.abs(sums).max()),
        "local": local,
        "cooperative": cooperative,
    }


def cpu_model(truth: ClockTable, flop: np.ndarray, flop_per_mhz: float) -> ClockTable:
    clocks = truth.clocks_mhz
    kappa = truth.energy_j[:, -1].sum() / truth.latency_s[:, -1].sum() / clocks[-1] ** 3
    # A block without arithmetic would take no time at all in this model.
    latency = np.maximum(flop, 1.0)[:, None] / (flop_per_mhz * clocks)
    return clock_table(clocks, latency, energy_j=kappa * clocks**3 * latency)


def fitted_model(truth: ClockTable) -> ClockTable:
    """The package's own fit of each block, from five clocks."""
    clocks = truth.clocks_mhz
    seen = np.unique(np.linspace(0, len(clocks) - 1, 5).round().astype(int))
    power_w = (truth.energy_j / truth.latency_s)[:, seen]
    latencies = fit_latencies(clocks[seen], truth.latency_s[:, seen])
    powers = fit_powers(clocks[seen], power_w)
    return clock_table(
        clocks,
        np.stack([curve.predict(clocks) for curve in latencies]),
        power_w=np.stack([curve.predict(clocks) for curve in powers]),
    )


def local_case(
    planners: dict[str, ClockTable], truth: ClockTable, goal: Deadline | PricedTime
) -> dict[str, Any]:
    outcome = {}
    for name, table in planners.items():
        try:
            clock = plan(table, goal).clocks_mhz[0]
        except DeadlineImpossible:
            clock = float(truth.clocks_mhz[-1])  # the best that it knows to do
        column = int(np.searchsorted(truth.clocks_mhz, clock))
        outcome[name] = cost(
            float(truth.latency_s[:, column].sum()), float(truth.energy_j[:, column].sum()), goal
        )
        outcome[name]["clock_mhz"] = clock
    return outcome


def cooperative_case(planners: dict[str, ClockTable], task: PartitionTask) -> dict[str, Any]:
    outcome = {}
    for name, table in planners.items():
        try:
            split = partition(replace(task, table=table))
        except DeadlineImpossible:
            outcome[name] = None
            continue
        choices = options(task)
        column = (
            -1
            if split.clock_mhz is None
            else int(np.searchsorted(task.table.clocks_mhz, split.clock_mhz))
        )
        true = int(
            np.flatnonzero((choices.split == split.local_blocks) & (choices.clock == column))[0]
        )
        # The radio sends as planned; only computing takes another time and energy than planned.
        outcome[name] = cost(
            float(choices.local_s[true] + choices.server_s[true]) + split.transmit_s,
            float(choices.energy_j[true]) + split.transmit_power_w * split.transmit_s,
            Deadline(task.deadline_s),
        )
        outcome[name] |= {"local_blocks": split.local_blocks, "clock_mhz": split.clock_mhz}
    return outcome


def cost(latency_s: float, energy_j: float, goal: Deadline | PricedTime) -> dict[str, Any]:
    late = isinstance(goal, Deadline) and latency_s > goal.seconds * (1 + LATE)
    return {"latency_s": latency_s, "energy_j": energy_j, "missed": late}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Over all devices, networks and goals: deadlines missed, and energy over the best, where kept."""
    summary: dict[str, Any] = {}
    for case in ("local", "cooperative"):
        rows = [
            row
            for device, networks in result.items()
            if device.startswith("sim:")
            for network in networks.values()
            for row in network[case]
        ]
        summary[case] = {
            name: {
                "cases": len(rows),
                "no_plan": sum(row[name] is None for row in rows),
                "missed": sum(row[name] is not None and row[name]["missed"] for row in rows),
                "mean_energy_over_best": mean_ratio(rows, name, "energy_j"),
                "mean_latency_over_best": mean_ratio(rows, name, "latency_s"),
            }
            for name in ("cpu", "cpu_peak", "fitted")
        }
    return summary


def mean_ratio(rows: list[dict[str, Any]], name: str, what: str) -> float | None:
    ratios = [
        row[name][what] / row["best"][what] for row in rows if row[name] is not None and row["best"]
    ]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else None


def show(device: str, name: str, found: dict[str, Any]) -> None:
    print(f"{device} {name}: {found['blocks']} blocks, sum of blocks within "
          f"{found['block_sum_error']:.1%} of the whole (simulated)")  # fmt: skip
    for case in ("local", "cooperative"):
        for row in found[case]:
            print(f"  {case}, {row['goal']}")
            for planner in ("cpu", "cpu_peak", "fitted", "best"):
                item = row[planner]
                if item is None:
                    print(f"    {planner:9} finds no plan")
                    continue
                where = f", {item['local_blocks']} blocks local" if "local_blocks" in item else ""
                late = "  MISSED" if item["missed"] else ""
                print(f"    {planner:9} {1e3 * item['latency_s']:8.2f} ms {1e3 * item['energy_j']:8.1f} mJ"
                      f"  {item['clock_mhz']} MHz{where}{late}")  # fmt: skip


if __name__ == "__main__":
    main()
