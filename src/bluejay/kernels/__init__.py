"""Native code: four-bit matrix products, how they are built, and the plain reference that says what they are."""

from bluejay.kernels.int4 import int4_linear, reference
from bluejay.kernels.native import available_paths, check_path, ensure, unavailable_reason

__all__ = ["available_paths", "check_path", "ensure", "int4_linear", "reference", "unavailable_reason"]
