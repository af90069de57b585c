"""What we say about the machine: fakes where a machine cannot be had, bounds where it can only be measured."""

from __future__ import annotations

import ctypes
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bluejay import machine
from bluejay.machine import compiler as compiler_file
from bluejay.machine import processor

CPUINFO_X86 = """processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu vme tsc sse sse4_2 avx2 avx512_bf16 amx_tile hypervisor arat rdtscp fma bmi1
"""
CPUINFO_ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n"


def fake_command(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files stand for those of /proc."""
    real = processor._proc_field
    monkeypatch.setattr(processor, "_proc_field", lambda file, name: real(tmp_path / Path(file).name, name))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_features_are_instruction_sets_only(proc: Path) -> None:
    """Catches flags such as `hypervisor`, by which two machines that run the same program would look different."""
    (proc / "cpuinfo").write_text(CPUINFO_X86)
    assert machine.cpu_features() == ("amx_tile", "avx2", "avx512_bf16", "bmi1", "fma", "sse", "sse4_2")
    assert machine.cpu().model == "Some CPU @ 2 GHz"
    (proc / "cpuinfo").write_text(CPUINFO_ARM)
    assert machine.cpu_features() == ("asimd", "asimddp", "bf16", "fp", "i8mm", "sve")


def test_peak_memory_sees_a_large_buffer_and_stays() -> None:
    """Catches kilobytes taken for bytes, the present use taken for the peak, and a peak inherited from the parent."""
    code = (
        "from bluejay.machine import peak_memory_bytes as peak\n"
        "before = peak(); b = b'x' * 300_000_000; after = peak(); del b; print(before, after, peak())"
    )
    held_by_parent = bytearray(os.urandom(1)) * 1_500_000_000
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    del held_by_parent
    before, after, at_end = map(int, output.split())
    assert 300_000_000 <= after - before < 330_000_000
    assert at_end > 0.98 * after  # the kernel counts pages in batches
    assert before < 1_500_000_000


def test_memory_of_a_container_is_its_limit(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a report of the host's memory inside a container that is killed at a fraction of it."""
    monkeypatch.setattr(processor, "_CGROUP", proc)
    host = machine.total_memory_bytes()
    (proc / "memory.max").write_text("max\n")
    assert machine.total_memory_bytes() == host
    (proc / "memory.max").write_text("1000000\n")
    (proc / "memory.current").write_text("700000\n")
    (proc / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 900000 kB\n")
    assert machine.total_memory_bytes() == 1_000_000
    assert machine.available_memory_bytes() == 500_000


def test_compiler_that_does_not_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stub on the path taken for a compiler, and a wish that is silently replaced by another compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.cxx_compiler() is None
    fake_command(tmp_path, "g++", "exit 1")
    assert machine.cxx_compiler() is None
    works = fake_command(tmp_path, "c++", "echo 'c++ 12.2.0'; echo more")
    assert machine.cxx_compiler() == machine.Compiler(path=str(works), version="c++ 12.2.0")
    assert machine.cxx_compiler("no-such-compiler") is None


@pytest.mark.parametrize(("manager", "command"), list(compiler_file._INSTALL.items()))
def test_missing_compiler_names_the_package(
    manager: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a report that says what is missing and not how to get it on this system."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_command(tmp_path, manager, "")
    (missing,) = machine.describe(tmp_path, measure=False).missing
    assert "C++ compiler" in missing.what
    assert missing.how == command
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compiler_file.how_to_install_compiler() == "xcode-select --install"


def test_gpu_without_a_cuda_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GPU machine that runs on its CPU because of the wrong torch build, without a word."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    fake_command(tmp_path, "g++", "echo g++ 12")
    assert machine.describe(tmp_path, measure=False).missing == ()
    fake_command(tmp_path, "nvidia-smi", "")
    assert ["CUDA" in m.what for m in machine.describe(tmp_path, measure=False).missing] == [True]


def test_report_is_plain_data_and_makes_no_folder(tmp_path: Path) -> None:
    """Catches a report that JSON cannot hold, and a cache folder made by merely looking."""
    report = machine.describe(tmp_path / "not" / "there", measure=False)
    assert json.loads(json.dumps(report.as_dict()))["versions"]["torch"] == torch.__version__
    assert report.read_bytes_per_second is None
    assert report.gemm_flops == {}
    assert report.free_disk_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_measured_rates_follow_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rate off by the element size or by the two FLOPs of a multiply-add; the clock is a fake."""
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))  # every pass takes one second
    assert machine.measure_read_bandwidth(num_bytes=8_000, passes=3) == 8_000
    assert machine.measure_gemm(torch.bfloat16, size=16, passes=3) == 2 * 16**3


def test_measured_rates_are_possible() -> None:
    """Catches a measurement of the cache or of nothing: no machine reads a petabyte or multiplies at an exaflop."""
    assert 1e7 < machine.measure_read_bandwidth(num_bytes=2**22, passes=1) < 1e15
    assert 1e6 < machine.measure_gemm(torch.float32, size=128, passes=1) < 1e18


_FREED = """
import sys, torch
from bluejay.machine import give_back_freed_memory

def resident_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))

give_back_freed_memory()
large = torch.ones(5 * 2**20)
del large  # 20 MiB: from now on glibc would keep smaller ones
before = resident_bytes()
blocks = [(torch.ones(2**20), torch.ones(64)) for _ in range(50)]  # 4 MiB, and little that stays above each
kept = [small for _, small in blocks]
del blocks
print(resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc keeps what is freed")
def test_freed_memory_is_given_back() -> None:
    """200 MB of a prompt's tensors that a process keeps for ever."""
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40e6
