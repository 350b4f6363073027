"""Compiled packed documents: graphs per source and per argument, no hidden syncs, scopes that are obeyed.

Graphs are counted by `helpers.Recorder`, which runs them eagerly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import Recorder, assert_bit_equal, assert_near, operators_run, random
from torch import Tensor

from varlen_prep import VarlenMetadata, use_backend, varlen_attention

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _attend_documents(q: Tensor, meta: VarlenMetadata) -> Tensor:
    return varlen_attention(q, q, q, meta, causal=True)


def _document_ids(x: Tensor, documents: int) -> Tensor:
    return torch.arange(x.shape[0]) * documents // x.shape[0]


def _positions(x: Tensor, documents: int) -> Tensor:
    return torch.arange(x.shape[0]) % -(-x.shape[0] // documents)


def _lengths(x: Tensor, documents: int) -> Tensor:
    # Nine lengths, because the number of sequences is their size; it is varied where capacity is not needed.
    lengths = torch.zeros(documents, dtype=torch.int64)
    lengths[0] = x.shape[0]
    return lengths


# name: (ids of x and a number of documents, metadata of x and ids, compiles allowed, syncs allowed per compile)
SOURCES: dict[str, tuple[Callable[..., Tensor], Callable[..., VarlenMetadata], int, int]] = {
    "lengths_bound": (_lengths, lambda x, n: VarlenMetadata.from_lengths(n, max_seqlen_q=x.shape[0]), 2, 0),
    "lengths_capacity": (
        _lengths, lambda x, n: VarlenMetadata.from_lengths(n, max_seqlen_q=x.shape[0], capacity=12), 2, 0,
    ),
    "lengths_exact": (_lengths, lambda x, n: VarlenMetadata.from_lengths(n), 2, 1),
    "offsets_bound": (
        lambda x, n: torch.nn.functional.pad(_lengths(x, n).cumsum(0), (1, 0)),
        lambda x, n: VarlenMetadata.from_cu_seqlens(n, max_seqlen_q=x.shape[0]), 2, 0,
    ),
    "documents_capacity": (_document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9), 1, 0),
    "documents_capacity_bound": (
        _document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9, max_seqlen=x.shape[0]), 1, 0,
    ),
    "documents_packed": (
        _document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9, layout="packed"), 1, 0,
    ),
    "documents_exact": (_document_ids, lambda x, n: VarlenMetadata.from_document_ids(n), 2, 1),
    "positions_capacity": (_positions, lambda x, n: VarlenMetadata.from_position_ids(n, capacity=9), 1, 0),
    "positions_exact": (_positions, lambda x, n: VarlenMetadata.from_position_ids(n), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_source_keeps_its_graphs_over_nine_document_counts(name: str) -> None:
    ids_of, source, compiles, syncs = SOURCES[name]
    recorder = Recorder()

    def function(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        meta = source(x, ids)
        return _attend_documents(x, meta), meta.cu_seqlens_q

    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for documents in range(9, 0, -1):
        x = random(30 + documents, 4, 16, seed=documents)
        got, want = compiled(x, ids_of(x, documents)), function(x, ids_of(x, documents))
        assert_bit_equal(got[1], want[1])
        assert_near(got[0], want[0], torch.float64)
    assert recorder.compiles <= compiles
    assert len(recorder.syncs) <= syncs * recorder.compiles, recorder.syncs


@pytest.mark.parametrize(("bound", "compiles"), [(None, 2), (20, 1)])
def test_metadata_as_an_argument_compiles_once_with_a_bound_and_at_most_twice_without(
    bound: int | None, compiles: int
) -> None:
    recorder = Recorder()
    compiled = torch.compile(_attend_documents, backend=recorder, fullgraph=True, dynamic=True)
    for longest in range(5, 15):
        lengths = [longest, 3, 2]
        if bound is None:
            meta = VarlenMetadata.from_lengths(lengths)
        else:
            meta = VarlenMetadata.from_lengths(torch.tensor(lengths), max_seqlen_q=bound)
        q = random(sum(lengths), 4, 16, seed=longest)
        assert_near(compiled(q, meta), _attend_documents(q, meta), torch.float64)
    assert recorder.compiles <= compiles
    assert not recorder.syncs


def test_host_lengths_as_an_argument_of_compiled_code_are_one_graph() -> None:
    def function(q: Tensor, lengths: list[int]) -> Tensor:
        return varlen_attention(q, q, q, VarlenMetadata.from_lengths(lengths), causal=True)

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for lengths in ([3, 5, 2], [4, 6, 7], [9, 2, 6]):
        q = random(sum(lengths), 2, 8)
        assert_bit_equal(compiled(q, lengths), function(q, lengths))
    assert recorder.compiles == 1


def test_float_defaults_are_no_graph_inputs() -> None:
    """A float default of `softcap` was traced as a tensor input that `.item()` read: a sync and twice the compiles."""
    recorder = Recorder()
    compiled = torch.compile(_attend_documents, backend=recorder, fullgraph=True, dynamic=True)
    for rows in (5, 6, 7):
        compiled(random(rows, 4, 16, seed=rows), VarlenMetadata.from_lengths([rows - 2, 2]))
    scalars = [x for x in recorder.inputs if isinstance(x, Tensor) and x.ndim == 0]
    floats = [x for x in recorder.inputs if isinstance(x, (float, torch.SymFloat))]
    assert (scalars, floats, recorder.syncs) == ([], [], [])


def test_backend_scope_around_compiled_code_is_obeyed_on_every_call() -> None:
    """Class-level defaults of `threading.local` are not guarded: the first choice would stay for ever."""
    compiled = torch.compile(_attend_documents, backend=Recorder(), fullgraph=True, dynamic=True)
    q, meta = random(5, 4, 16), VarlenMetadata.from_lengths([3, 2])
    for _ in range(2):
        assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]
        with use_backend("reference"):
            assert operators_run(lambda: compiled(q, meta)) == ["reference_varlen"]
            with use_backend("native"):
                assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]
            assert operators_run(lambda: compiled(q, meta)) == ["reference_varlen"]
    assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]


def test_backend_scope_inside_compiled_code_ends_with_its_block() -> None:
    def function(q: Tensor, meta: VarlenMetadata) -> Tensor:
        with use_backend("reference"):
            first = varlen_attention(q, q, q, meta)
        return first + varlen_attention(q, q, q, meta) + varlen_attention(q, q, q, meta, backend="reference")

    compiled = torch.compile(function, backend=Recorder(), fullgraph=True, dynamic=True)
    q, meta = random(5, 4, 16), VarlenMetadata.from_lengths([3, 2])
    for _ in range(2):
        names = operators_run(lambda: compiled(q, meta))
        assert names == ["reference_varlen", "native_varlen", "reference_varlen"]
    assert operators_run(lambda: varlen_attention(q, q, q, meta)) == ["native_varlen"]
