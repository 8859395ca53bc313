"""What an agent notices of its host, from the kernel's files, and how hosts are compared before a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.launch import host_health
from paceline.launch.engines.preflight_run import FIGURES, LONGEST, Preflight, slow_ones
from paceline.launch.host_health import HostHealth, counters

CORRECTED, THROTTLED = "edac/mc/mc0/ce_count", "cpu/cpu1/thermal_throttle/core_throttle_count"
FILES = {
    f"sys/devices/system/{CORRECTED}": "2",
    "sys/devices/system/edac/mc/mc0/ue_count": "0",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "5",
    f"sys/devices/system/{THROTTLED}": "6",
    "sys/block/sda/device/ioerr_cnt": "0x1f",
    "sys/fs/ext4/sda1/errors_count": "0",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


def seen(health: HostHealth) -> list[tuple[str, str]]:
    return [(trouble.kind, trouble.text) for trouble in health.look()]


def test_counters_of_the_kernel_are_read(root: Path, tmp_path: Path) -> None:
    assert [(one.kind, one.what, one.errors, one.fatal) for one in counters(root)] == [
        ("memory", "corrected memory errors of mc0", 2, False),
        ("memory", "uncorrected memory errors of mc0", 0, True),
        ("processor", "slowdowns of the processor because of heat", 11, False),
        ("disk", "I/O errors of sda", 31, False),
        ("disk", "errors of the file system on sda1", 0, True),
    ]
    assert [*counters(tmp_path / "nothing")] == []


def test_new_errors_are_reported_once_a_minute(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With how many there are since the last report; errors before the run are no news."""
    health, now = HostHealth(root, root=root), [100.0]
    monkeypatch.setattr(host_health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(host_health.time, "time", lambda: 5000.0 + now[0])
    health._ahead = 5000.0
    assert seen(health) == []
    path = root / "sys/devices/system" / CORRECTED
    path.write_text("5\n")
    (root / "sys/block/sda/device/ioerr_cnt").write_text("0x21\n")
    assert seen(health) == [("memory", "corrected memory errors of mc0: 3 more"), ("disk", "I/O errors of sda: 2 more")]
    path.write_text("6\n")
    assert seen(health) == []
    now[0] += 61.0
    path.write_text("9\n")
    assert seen(health) == [("memory", "corrected memory errors of mc0: 4 more")]


def test_clock_and_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set, one that is apart from the coordinator's by more than the error, and a full disk."""
    offset = [(0.9, 0.0)]
    health = HostHealth(root, lambda: offset[0], root)
    assert seen(health) == []
    health._ahead += 7.2  # as if the clock were set back since
    assert seen(health) == [("clock", "the clock was set 7.2 s back")]
    offset[0] = (3.0, 2.5)
    assert seen(health) == []
    offset[0] = (-3.0, 0.5)
    assert seen(health) == [("clock", "the clock is 3.0 s ahead of the coordinator's")]
    monkeypatch.setattr(host_health, "PART", 1.1)
    monkeypatch.setattr(host_health, "LEAST", 1 << 60)
    (trouble,) = seen(health)
    assert trouble[0] == "disk"
    assert trouble[1].endswith(" are free where the run writes")


def test_slow_hosts_are_named_beside_the_others() -> None:
    speeds = {"a": 650.0, "b": 210.0, "c": 648.0}
    assert [*slow_ones(speeds, FIGURES["products"])] == [
        ("b", "matrix products: 210 GFLOP/s; the others 648 to 650 GFLOP/s")
    ]
    flushes = {"a": 2.0, "b": 3.0, "c": 90.0}
    assert [*slow_ones(flushes, FIGURES["flush"], least=20.0)] == [
        ("c", "a flush to disk: 90 ms; the others 2 to 3 ms")
    ]
    assert [*slow_ones({"a": 2.0, "b": 9.0}, FIGURES["flush"], least=20.0)] == []
    assert [*slow_ones({"a": 1.0}, FIGURES["memory"])] == []


def test_run_begins_without_a_host_that_does_not_measure() -> None:
    """Hosts and links that answered are reported; nothing waits longer than that."""
    asked, said = list[tuple[str, object]](), list[str]()
    check = Preflight(["a", "b", "c"], lambda name, target: asked.append((name, target)), said.append)
    now = time.monotonic()
    assert not check.is_over(["a", "b", "c"], now)
    for name, speed in (("a", 10.0), ("b", 1.0)):
        check.take(name, {"at": [name, 1, "secret"], "clock": time.time(), "free": 50.0, "memory": speed})
    assert not check.is_over(["a", "b", "c"], now)
    assert not check.is_over(["a", "b"], now)
    assert asked == [("a", ["b", 1, "secret"])]
    assert not check.is_over(["a", "b"], now)
    check.take_link("a", {"refused": "No route to host"})
    assert check.is_over(["a", "b"], now + 0.5)
    assert said == [
        "checking 3 hosts: memory, processors, disks, clocks and links",
        "checked 2 hosts in 0.5 s: memory bandwidth 1 to 10 GB/s",
        "b is slow: memory bandwidth: 1 GB/s; the others 10 GB/s",
        "a cannot reach b (No route to host)",
    ]
    assert check.slow == {"b": ["memory bandwidth: 1 GB/s; the others 10 GB/s"]}
    late = Preflight(["a", "b"], lambda *_: None, said.append)
    assert not late.is_over(["a", "b"], now)
    assert late.is_over(["a", "b"], now + LONGEST + 0.1)
    assert said[-1] == "no host has sent figures in 5.1 s"
