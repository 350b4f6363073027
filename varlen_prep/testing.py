"""For tests: a function must compile as one graph, read nothing from the device, and leak nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .auditing import AuditReport, audit


def assert_clean(
    fn: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...] | dict[str, Any]],
    *,
    max_graphs: int = 1,
    max_syncs: int = 0,
    **options: Any,
) -> AuditReport:
    """Audits a function and fails with everything that was found, unless it is clean.

    Args:
        fn: as for `varlen_prep.audit`.
        inputs: as for `varlen_prep.audit`; give several shapes.
        max_graphs: graphs over all input sets; more than 1 also allows graph breaks.
        max_syncs: lines that may read the device.
        options: of `varlen_prep.audit`: `backward`, `capture`, `compile_backend`, `dynamic`, `fullgraph`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: with every problem and its line.

    Example:
        >>> import torch
        >>> from varlen_prep import prepare_varlen
        >>> from varlen_prep.testing import assert_clean
        >>> def offsets(mask):
        ...     batch, seq = mask.shape
        ...     return prepare_varlen(batch, 1, seq, mask, max_seqlen_k=seq).cu_seqlens_k
        >>> report = assert_clean(offsets, [(torch.ones(2, 3, dtype=torch.bool),), (torch.ones(4, 5) > 0,)])
        >>> report.graphs
        1
    """
    report = audit(fn, inputs, **options)
    report.assert_clean(max_graphs=max_graphs, max_syncs=max_syncs)
    return report
