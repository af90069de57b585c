"""From a module and fixed shapes to an executable, and the store that keeps executables."""

from bluejay.compile.archive import Difference, ImportReport, export_programs, import_programs
from bluejay.compile.driver import compile
from bluejay.compile.executable import Bound, Executable
from bluejay.compile.fingerprinting import (
    Environment,
    Fingerprint,
    environment,
    fingerprint,
    room_digests,
    source_digests,
)
from bluejay.compile.host import HostFunction, HostFunctions, on_host
from bluejay.compile.signature import Signature, SignatureError, TensorSpec
from bluejay.compile.store import EntryInfo, Store, StoreError
from bluejay.compile.workers import Job, compile_all

__all__ = [
    "Bound",
    "Difference",
    "EntryInfo",
    "Environment",
    "Executable",
    "Fingerprint",
    "HostFunction",
    "HostFunctions",
    "ImportReport",
    "Job",
    "Signature",
    "SignatureError",
    "Store",
    "StoreError",
    "TensorSpec",
    "compile",
    "compile_all",
    "environment",
    "export_programs",
    "fingerprint",
    "import_programs",
    "on_host",
    "room_digests",
    "source_digests",
]
