"""Proof that a function is safe to compile: graphs, breaks, host reads, recompiles, capture; the report of one call.

`audit` runs the function, `AuditReport` says what was seen. Nothing here knows attention: it takes any callable.
"""

from ._audit import audit as audit
from ._report import AuditReport as AuditReport
from ._report import Capture as Capture
from ._report import GraphBreak as GraphBreak
from ._report import HostRead as HostRead
from ._report import Place as Place
from ._report import Recompile as Recompile

__all__ = ["AuditReport", "Capture", "GraphBreak", "HostRead", "Place", "Recompile", "audit"]
