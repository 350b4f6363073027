"""The kernels: one small module per family, and the registry of their capability records.

A kernel's package is imported when its backend is first used, never before.
"""

from __future__ import annotations

from ._record import Arguments as Arguments
from ._record import Backend as Backend
from ._record import Request as Request
from ._record import lse_dtype as lse_dtype
from .cudnn import CUDNN
from .flash import FLASH
from .flash3 import FLASH3
from .flash4 import FLASH4
from .hub import FLASH3_HUB, FLASH4_HUB, FLASH_HUB, SAGE_HUB
from .native import NATIVE
from .reference import REFERENCE
from .sage import SAGE

_BACKENDS = (NATIVE, FLASH, FLASH3, FLASH4, CUDNN, SAGE, FLASH_HUB, FLASH3_HUB, FLASH4_HUB, SAGE_HUB, REFERENCE)
REGISTRY: dict[str, Backend] = {backend.name: backend for backend in _BACKENDS}

AUTOMATIC: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("flash3", "flash4", "cudnn", "native")}
"""The order in which `backend=None` tries them, by CUDA compute capability, as measured (`benchmarks/results/`).

Where nothing was measured, on CPU too, only `native` is tried. Hub kernels are never tried: they may be downloaded.
"""
