"""What this machine is and can do: processor, memory, devices, compiler, and measured ceilings."""

from bluejay.machine.compiler import Compiler, cxx_compiler, how_to_install_compiler
from bluejay.machine.describe import Device, MachineReport, Missing, describe, devices
from bluejay.machine.measure import measure_gemm, measure_read_bandwidth
from bluejay.machine.processor import (
    Cpu,
    available_memory_bytes,
    cpu,
    cpu_features,
    default_cache_folder,
    give_back_freed_memory,
    peak_memory_bytes,
    total_memory_bytes,
)

__all__ = [
    "Compiler",
    "Cpu",
    "Device",
    "MachineReport",
    "Missing",
    "available_memory_bytes",
    "cpu",
    "cpu_features",
    "cxx_compiler",
    "default_cache_folder",
    "describe",
    "devices",
    "give_back_freed_memory",
    "how_to_install_compiler",
    "measure_gemm",
    "measure_read_bandwidth",
    "peak_memory_bytes",
    "total_memory_bytes",
]
