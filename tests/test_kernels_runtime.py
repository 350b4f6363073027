"""The real kernels on a real GPU: syncs, compiled code, CUDA graph replay, and torch's checks of an operator.

A kernel that is not installed skips with its reasons; what the kernels compute is tested in `test_kernels`.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import assert_bit_equal, make_inputs, make_mask, random
from kernels_helpers import MARKS, backend_fixture, trains_fixture  # noqa: F401  (fixtures)
from torch._dynamo.testing import CompileCounterWithBackend

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention
from varlen_prep.backends import REGISTRY

pytestmark = MARKS


def test_no_sync_with_a_bound_and_a_planted_one_is_caught(backend, trains):
    mask = make_mask("holes", 3, 200, device="cuda")
    inputs = make_inputs((3, 200), (3, 200), dim=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_(trains) for x in inputs[:3])

    def step(bound):
        for layout_mask, layout in ((mask, "packed"), (make_right, "in_place")):
            meta = prepare_varlen(3, 200, 200, layout_mask, max_seqlen_k=bound, layout=layout)
            out = varlen_attention(q, k, v, meta, backend=backend)
            if trains:
                out.backward(inputs.dout)

    make_right = make_mask("right", 3, 200, device="cuda")
    for _ in range(2):
        step(200)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(200)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            step(None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_a_compiled_block_is_one_graph_and_equals_eager(backend, trains, layout):
    weight = random(64, 64, dtype=torch.bfloat16, device="cuda").mul_(0.1).requires_grad_(trains)

    def block(q, k, v, mask):
        meta = prepare_varlen(
            q.shape[0], q.shape[1], k.shape[1], mask, mask_q=mask, max_seqlen_k=k.shape[1], layout=layout
        )
        return varlen_attention(q, k, v, meta, backend=backend) @ weight

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch, seq in ((3, 70), (5, 130), (6, 40), (7, 201), (9, 33)):
        mask = make_mask("right", batch, seq, device="cuda", seed=seq)
        inputs = make_inputs((batch, seq), (batch, seq), dim=64, dtype=torch.bfloat16, device="cuda")
        q, k, v = (x.requires_grad_(trains) for x in inputs[:3])
        with torch.set_grad_enabled(trains):
            got, expected = compiled(q, k, v, mask), block(q, k, v, mask)
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
        if trains:
            leaves = (q, k, v, weight)
            pairs = [torch.autograd.grad(out, leaves, inputs.dout) for out in (got, expected)]
            for name, a, b in zip("qkvw", *pairs, strict=True):
                torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2, msg=lambda m, n=name: f"d{n}: {m}")
    assert counter.frame_count == 1


def test_replay_follows_rewritten_lengths_down_and_up(backend):
    if not REGISTRY[backend].captures:
        pytest.skip("its record says that it cannot be captured")
    mask = torch.ones(3, 200, dtype=torch.bool, device="cuda")
    inputs = make_inputs((3, 200), (3, 200), dim=64, dtype=torch.bfloat16, device="cuda")

    def step(layout):
        meta = prepare_varlen(3, 200, 200, mask, mask_q=mask, max_seqlen_k=200, layout=layout)
        return varlen_attention(*inputs[:3], meta, backend=backend)

    with torch.no_grad():
        for layout in ("packed", "in_place"):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(layout)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step(layout)
            for lengths in ([200, 200, 200], [1, 100, 7], [0, 0, 0], [200, 3, 150]):
                mask.copy_(torch.arange(200, device="cuda") < torch.tensor(lengths, device="cuda")[:, None])
                graph.replay()
                assert_bit_equal(out, step(layout))


def test_capture_of_forward_and_backward(backend, trains):
    if not (trains and REGISTRY[backend].captures):
        pytest.skip("forward only, or not captured")
    lengths = torch.tensor([100, 50], device="cuda")
    inputs = make_inputs((150,), (150,), dim=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_() for x in inputs[:3])

    def step():
        meta = VarlenMetadata.from_lengths(lengths, max_seqlen_q=150)
        out = varlen_attention(q, k, v, meta, backend=backend, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for new in ([150, 0], [1, 7], [0, 0], [75, 75]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_opcheck(backend, trains):
    op = getattr(torch.ops.varlen_prep, REGISTRY[backend].op)
    cu_seqlens = torch.tensor([0, 30, 30, 80], dtype=torch.int32, device="cuda")
    inputs = make_inputs((80,), (80,), dim=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_(trains) for x in inputs[:3])
    arguments = (cu_seqlens, cu_seqlens, 50, 50, False, -1, -1)
    # The log-sum-exp of a kernel that has none is NaN, which never compares equal.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if REGISTRY[backend].lse:
        torch.library.opcheck(op.default, (q, k, v, *arguments), test_utils=tests, rtol=2e-2, atol=2e-2)
    else:
        torch.library.opcheck(op.default, (q, k, v, *arguments), test_utils=tests[:3])
    if trains:
        out, lse = op(q, k, v, *arguments)
        backward = getattr(torch.ops.varlen_prep, f"{REGISTRY[backend].op}_backward")
        saved = [x.detach() for x in (inputs.dout, q, k, v, out, lse)]
        torch.library.opcheck(backward.default, (*saved, *arguments), test_utils=tests, rtol=2e-2, atol=2e-2)


def test_ten_maxima_compile_once(backend, trains):
    def block(q, k, v, meta):
        return varlen_attention(q, k, v, meta, backend=backend)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for longest in range(5, 15):
            meta = VarlenMetadata.from_lengths([3, longest, 4], device="cuda")
            rows = (longest + 7,)
            inputs = make_inputs(rows, rows, dim=64, dtype=torch.bfloat16, device="cuda")
            torch.testing.assert_close(compiled(*inputs[:3], meta), block(*inputs[:3], meta))
    assert counter.frame_count <= 2


def test_flash4_compiles_its_kernels_once_for_ten_maxima(backend):
    if backend != "flash4":
        pytest.skip("it compiles nothing at its calls")
    interface = importlib.import_module("flash_attn.cute.interface")
    functions = (interface._flash_attn_fwd, interface._flash_attn_bwd)

    def kernels(maxima, causal):
        """How many the package compiled while it ran forward and backward with these maxima."""
        before = [len(function.compile_cache.cache) for function in functions]
        for longest in maxima:
            meta = VarlenMetadata.from_lengths([3, longest, 4], device="cuda")
            inputs = make_inputs((longest + 7,), (longest + 7,), dim=64, dtype=torch.float16, device="cuda")
            q, k, v = (x.requires_grad_() for x in inputs[:3])
            varlen_attention(q, k, v, meta, backend=backend, causal=causal).backward(inputs.dout)
        return [len(function.compile_cache.cache) - count for function, count in zip(functions, before, strict=True)]

    for function in functions:
        function.compile_cache.clear()
    assert kernels(range(200, 4200, 400), causal=False) == [1, 1]
    # The package has a kernel of its own for maxima that fit in one of its tiles.
    assert kernels(range(5, 55, 5), causal=False) == [1, 1]
    assert kernels((200,), causal=True) == [1, 1], "the kernel depends on causal, so the count must grow"
