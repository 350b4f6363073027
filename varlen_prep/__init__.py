"""Variable-length attention metadata that compiles, never syncs, and survives CUDA graph replay."""

from . import tree as _tree  # noqa: F401  registers the pytree
from .attention import varlen_attention as varlen_attention
from .auditing import AuditReport as AuditReport
from .auditing import audit as audit
from .backends.hub import load_hub_kernel as load_hub_kernel
from .metadata import VarlenMetadata as VarlenMetadata
from .packing import pack as pack
from .packing import unpack as unpack
from .prepare import prepare_varlen as prepare_varlen
from .selection import backends as backends
from .selection import use_backend as use_backend

__all__ = [
    "AuditReport",
    "VarlenMetadata",
    "audit",
    "backends",
    "load_hub_kernel",
    "pack",
    "prepare_varlen",
    "unpack",
    "use_backend",
    "varlen_attention",
]
__version__ = "0.1.0"
