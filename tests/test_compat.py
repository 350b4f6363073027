"""flash-attn's signatures: `varlen_prep.compat` gives what flash-attn's own functions give."""

import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from varlen_prep import compat

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def padding_reference(hidden, mask):
    """What flash-attn's helpers return, from the obvious operators."""
    flat = mask.flatten().bool()
    lengths = mask.bool().sum(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return hidden.flatten(0, 1)[flat], flat.nonzero().flatten(), cu_seqlens, int(lengths.max())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_input_matches_the_obvious_operators(dtype):
    hidden = torch.randn(3, 5, 2, 4)
    rows, indices, cu_seqlens, longest, used = compat.unpad_input(hidden, MASK.to(dtype))
    expected = padding_reference(hidden, MASK)
    for got, want in zip((rows, indices, cu_seqlens), expected[:3], strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert longest == expected[3]
    assert isinstance(longest, int)
    assert used.tolist() == [3, 2, 0]
    assert used.dtype == torch.int32


def test_an_unused_row_keeps_its_place_and_is_not_counted_as_used():
    unused = torch.zeros_like(MASK)
    unused[1, 4] = 1
    rows, indices, cu_seqlens, longest, used = compat.unpad_input(torch.randn(3, 5, 2), MASK, unused)
    assert indices.tolist() == [1, 2, 4, 5, 6, 9]
    assert cu_seqlens.tolist() == [0, 3, 6, 6]
    assert (longest, used.tolist(), rows.shape) == (3, [3, 2, 0], (6, 2))


@pytest.mark.parametrize("fixed_size", [False, True])
def test_pad_input_undoes_unpad_input_forward_and_backward(fixed_size):
    hidden = torch.randn(3, 5, 4, requires_grad=True)
    rows, indices, cu_seqlens, *_ = compat.unpad_input(hidden, MASK, fixed_size=fixed_size)
    # What a model leaves in rows past the end must not come back.
    past = torch.arange(rows.shape[0]) >= cu_seqlens[-1]
    out = compat.pad_input(torch.where(past[:, None], torch.nan, rows * 2), indices, 3, 5)
    expected = torch.where(MASK.bool()[..., None], hidden * 2, 0)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    assert torch.equal(grad, torch.where(MASK.bool()[..., None], 2.0, 0.0).expand_as(hidden))


def test_the_fixed_size_form_has_one_shape_and_zero_rows_past_the_end():
    rows, indices, cu_seqlens, longest, _ = compat.unpad_input(torch.randn(3, 5, 4), MASK, fixed_size=True)
    assert rows.shape == (15, 4)
    assert longest == 5
    assert (rows[int(cu_seqlens[-1]) :] == 0).all()
    assert (indices[int(cu_seqlens[-1]) :] == 15).all()


def test_the_fixed_size_form_reads_nothing_when_compiled():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(
        lambda x, mask: compat.unpad_input(x, mask, fixed_size=True)[0], fullgraph=True, dynamic=True, backend=keep
    )
    for batch, seq in ((3, 5), (4, 7), (6, 9)):
        hidden, mask = torch.randn(batch, seq, 4), torch.rand(batch, seq) > 0.5
        assert torch.equal(run(hidden, mask), compat.unpad_input(hidden, mask, fixed_size=True)[0])
    assert len(graphs) == 1
    assert not [node for node in graphs[0].graph.nodes if str(node.target) in ("item", "tolist", "nonzero")]


def test_the_drop_in_with_its_defaults_is_one_graph_and_equals_eager():
    def block(hidden, mask):
        rows, indices, cu_seqlens, longest, _ = compat.unpad_input(hidden, mask)
        out = compat.flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return compat.pad_input(out, indices, *mask.shape)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch, seq in ((3, 5), (4, 7), (6, 9)):
        hidden, mask = torch.randn(batch, seq, 2, 8), torch.rand(batch, seq) > 0.3
        torch.testing.assert_close(compiled(hidden, mask), block(hidden, mask))
    assert counter.frame_count == 1


def test_empty_input_round_trips():
    rows, indices, cu_seqlens, longest, _ = compat.unpad_input(torch.randn(2, 0, 4), torch.zeros(2, 0))
    assert (rows.shape, longest, cu_seqlens.tolist()) == ((0, 4), 0, [0, 0, 0])
    assert compat.pad_input(rows, indices, 2, 0).shape == (2, 0, 4)


def test_index_first_axis_gradient_is_a_scatter():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compat.index_first_axis(x, torch.tensor([4, 0, 2])), (x,))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: expected \(3, 5\).*got \(3, 4\)"):
        compat.unpad_input(torch.randn(3, 5, 2), torch.ones(3, 4))


def test_flash_attn_varlen_func_matches_a_loop_over_sequences():
    q, k, v = torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 4, 4, 9], [0, 3, 6, 11]))
    out, lse, probs = compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 5, return_attn_probs=True)
    for q0, q1, k0, k1 in ((0, 4, 0, 3), (4, 9, 6, 11)):
        rows = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        expected = torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[q0:q1], expected)
    assert lse.shape == (4, 9)
    assert probs is None


def test_rows_past_the_last_offset_are_zero():
    x = torch.randn(6, 2, 8)
    x[4:] = torch.nan
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    out = compat.flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 4, 4)
    assert out[:4].isfinite().all()
    assert (out[4:] == 0).all()


def test_positional_order_and_defaults_are_flash_attns():
    expected = {
        "q": ..., "k": ..., "v": ..., "cu_seqlens_q": ..., "cu_seqlens_k": ..., "max_seqlen_q": ...,
        "max_seqlen_k": ..., "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "block_table": None,
    }  # fmt: skip
    parameters = inspect.signature(compat.flash_attn_varlen_func).parameters
    names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == list(expected)
    for name, default in expected.items():
        assert parameters[name].default == (inspect.Parameter.empty if default is ... else default)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p: not supported"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes: not supported"),
        ({"block_table": torch.zeros(1, 1)}, ValueError, "block_table: not supported"),
        ({"max_seqlen_k": torch.tensor(3)}, TypeError, "max_seqlen_k: expected a host int, got Tensor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keywords, error, text):
    x, cu_seqlens = torch.randn(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    call = {"max_seqlen_q": 3, "max_seqlen_k": 3, **keywords}
    with pytest.raises(error, match=text):
        compat.flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, **call)
