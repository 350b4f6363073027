"""The audit of code that people run: diffusers' and transformers' own varlen preparation, and this library's.

Their functions are imported as they are; the lines that must be found are looked up in their source.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audit_helpers import attend, attend_exact, input_sets, line_of, lines, operations
from torch import Tensor, nn

from varlen_prep import VarlenMetadata, _checks, audit, pack, prepare_varlen, unpack, varlen_attention
from varlen_prep.testing import assert_clean


def _of_diffusers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    from diffusers.models.attention_dispatch import _prepare_for_flash_attn_or_sage_varlen as prepare

    return prepare(q.shape[0], q.shape[1], k.shape[1], mask, q.device)


def _of_transformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    from transformers.modeling_flash_attention_utils import _unpad_input, _upad_input

    return _upad_input(k, k, v, mask, k.shape[1], _unpad_input)


def test_diffusers_reads_the_longest_length_in_every_call() -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    item = line_of(dispatch._prepare_for_flash_attn_or_sage_varlen_with_mask, ".item()")
    report = audit(_of_diffusers, input_sets())
    assert operations(report) == {item: "item"}
    assert lines(report.breaks) == {item}
    assert report.graphs == 2
    assert len(report.syncs) == 1
    assert report.syncs[0].caller.function == "_of_diffusers"
    full = audit(_of_diffusers, input_sets(), fullgraph=True)
    assert (full.graphs, full.breaks, len(full.syncs)) == (1, (), 1)
    assert lines(full.syncs) == {item}


def test_transformers_searches_and_reads_in_every_layer() -> None:
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    item = line_of(utils._get_unpad_data, ".max().item()")
    search = line_of(utils._get_unpad_data, "torch.nonzero(")
    report = audit(_of_transformers, input_sets())
    assert operations(report) == {item: "item", search: "nonzero"}
    assert lines(report.breaks) == {item, search}
    assert report.graphs >= 3
    with pytest.raises(AssertionError) as caught:
        report.assert_clean()
    for text in ("nonzero at modeling_flash_attention_utils.py:", "host reads, at most 0 allowed", "graph break at"):
        assert text in str(caught.value)


def _packed_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, max_seqlen_k=k.shape[1])
    rows = [pack(x, meta, side) for x, side in ((q, "q"), (k, "k"), (v, "k"))]
    return unpack(varlen_attention(*rows, meta), meta, "q")


def _in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, layout="in_place")
    return varlen_attention(q, k, v, meta)


def _documents(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    meta = VarlenMetadata.from_document_ids(mask.flatten().cumsum(0), capacity=mask.shape[0] * mask.shape[1])
    rows = [x.flatten(0, 1) for x in (k, k, v)]
    return varlen_attention(*rows, meta)


@pytest.mark.parametrize(("function", "kind"), [
    (attend, "holes"), (_packed_by_hand, "holes"), (_in_place, "right"), (_documents, "holes"),
])  # fmt: skip
def test_the_same_job_on_this_library_is_clean_with_gradients(function: Any, kind: str) -> None:
    report = assert_clean(function, input_sets(kind=kind), backward=True)
    assert (report.graphs, report.syncs, report.breaks, report.recompiles) == (1, (), (), ())
    assert report.gradient_difference is not None
    assert report.gradient_difference < 1e-5


def test_the_one_documented_read_is_found_where_it_is() -> None:
    report = assert_clean(attend_exact, input_sets(), max_syncs=1, fullgraph=True)
    assert lines(report.syncs) == {line_of(_checks.read_ints, "values.tolist()")}
    assert report.syncs[0].caller.function == "attend_exact"
    with pytest.raises(AssertionError, match=r"1 host reads, at most 0 allowed: item at _checks\.py"):
        assert_clean(attend_exact, input_sets(), fullgraph=True)


class _Layer(nn.Module):
    """A masked block of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
        return attend(self.project(q), k, v, mask)


def test_a_module_is_audited_with_keywords_and_with_the_gradients_of_its_parameters() -> None:
    layer = _Layer()
    inputs = [dict(q=q.detach(), k=k.detach(), v=v.detach(), mask=mask) for q, k, v, mask in input_sets()]
    report = assert_clean(layer, inputs, backward=True)
    assert (report.name, report.graphs) == ("_Layer", 1)
    assert all(one.grad is None for one in layer.parameters())


def test_inductor_is_compared_with_eager() -> None:
    report = assert_clean(attend, input_sets()[:1], backward=True, compile_backend="inductor")
    assert 0 <= report.difference <= torch.finfo(torch.float32).eps ** 0.5
    assert 0 <= report.gradient_difference <= torch.finfo(torch.float32).eps ** 0.5
