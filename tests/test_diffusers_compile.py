"""Compiled, exported and captured diffusers models: one graph with one preparation, which follows the routes."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.modeling_utils import ModelMixin
from diffusers_helpers import (
    Layers,
    flux_inputs,
    flux_sdpa,
    mask_of,
    qkv,
    routed,
    sdpa,
    tiny_flux,
    untouched,  # noqa: F401  (an autouse fixture)
)
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from varlen_prep.integrations.diffusers import route


def compiler(graphs):
    """Compiles nothing; counts the operators of each forward graph after AOTAutograd."""

    def forward(module, inputs):
        graphs.append(Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        return make_boxed_func(module)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda module, inputs: make_boxed_func(module),
        partition_fn=min_cut_rematerialization_partition,
    )


SHAPES = [(2, 5, 4, 6), (5, 7, 6, 8), (4, 9, 2, 8), (3, 11, 6, 10), (6, 13, 2, 2), (7, 5, 5, 7)]


@pytest.mark.parametrize(("training", "masked"), [(False, True), (False, False), (True, True)])
def test_flux_compiles_once_with_one_preparation(training, masked):
    model, graphs = tiny_flux().requires_grad_(training), []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler(graphs))
    with route("native"), torch.set_grad_enabled(training):
        for shape in SHAPES:
            inputs = flux_inputs(*shape, masked=masked)
            with attention_backend("flash_varlen"):
                out = compiled(**inputs)[0]
            torch.testing.assert_close(out, flux_sdpa(model, inputs))
    assert len(graphs) == 1
    assert graphs[0]["varlen_prep.native_varlen.default"] == 2
    assert graphs[0]["varlen_prep.pack_order.default"] == (1 if masked else 0)
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in graphs[0])  # nothing is read


def count_preparations(call, *inputs):
    """Layers compiled by `call(model, backend)`: preparations in each graph."""
    graphs = []
    call(Layers(), compiler(graphs))(*inputs)
    return [graph["varlen_prep.pack_order.default"] for graph in graphs]


@torch.no_grad()
def test_every_way_to_compile_a_model_shares():
    q, k, v = qkv()
    mask = mask_of("hole")

    def in_place(model, backend):
        model.compile(fullgraph=True, dynamic=True, backend=backend)
        return model

    def caller(model, backend):
        return torch.compile(lambda *args: model(*args), fullgraph=True, dynamic=True, backend=backend)

    model, graphs = Layers(), []
    early = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler(graphs))
    with route("native"):
        assert count_preparations(in_place, q, k, v, mask) == [1]
        assert count_preparations(caller, q, k, v, mask) == [1]
        early(q, k, v, mask)
    assert [graph["varlen_prep.pack_order.default"] for graph in graphs] == [1]


@torch.no_grad()
def test_block_compiled_inside_an_eager_forward_prepares_for_itself():
    q, k, v = qkv()
    graphs = []
    block = torch.compile(
        lambda q, k, v, mask: routed(q, k, v, attn_mask=mask), fullgraph=True, dynamic=True, backend=compiler(graphs)
    )

    class Regional(ModelMixin):
        def forward(self, q, k, v, mask):
            return routed(q, k, v, attn_mask=mask), block(q, k, v, mask)

    with route("native"):
        for mask in (mask_of("hole"), mask_of("right"), mask_of("empty row")):
            expected = sdpa(q, k, v, mask)
            torch.testing.assert_close(Regional()(q, k, v, mask), (expected, expected))
    assert [graph["varlen_prep.pack_order.default"] for graph in graphs] == [1]


@torch.no_grad()
def test_compiled_model_follows_the_scopes():
    q, k, v = qkv()
    mask, graphs = mask_of("right"), []
    compiled = torch.compile(Layers(), fullgraph=True, dynamic=True, backend=compiler(graphs))
    with route("native"):
        compiled(q, k, v, mask)
    with route("native"):
        compiled(q, k, v, mask)
    assert len(graphs) == 1  # the same routes again
    with route("native", layout="in_place"):
        torch.testing.assert_close(compiled(q, k, v, mask)[0], sdpa(q, k, v, mask))
    assert [graph["varlen_prep.pack_order.default"] for graph in graphs] == [1, 0]


@torch.no_grad()
def test_compiled_model_is_not_stuck_to_routes():
    class Active(ModelMixin):
        def forward(self, q, k, v):
            return dispatch_attention_fn(q, k, v)

    (q, k, v), graphs = qkv(), []
    compiled = torch.compile(Active(), fullgraph=True, dynamic=True, backend=compiler(graphs))
    with route("native"), attention_backend("flash_varlen"):
        ours = compiled(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), ours)
    assert [graph["varlen_prep.native_varlen.default"] for graph in graphs] == [1, 0]


@torch.no_grad()
def test_compiled_model_in_another_thread():
    q, k, v = qkv()
    mask, graphs, outs = mask_of("hole"), [], []
    compiled = torch.compile(Layers(), fullgraph=True, dynamic=True, backend=compiler(graphs))
    with route("native"):
        compiled(q, k, v, mask)
        thread = threading.Thread(target=torch.no_grad()(lambda: outs.append(compiled(q, k, v, mask)[1])))
        thread.start()
        thread.join()
    torch.testing.assert_close(outs[0], sdpa(q, k, v, mask))
    assert len(graphs) == 1


@torch.no_grad()
def test_sizes_that_meet_later_add_no_graph():
    """Layers of different query length: comparing sizes while tracing must not guard on them."""

    class Cross(ModelMixin):
        def forward(self, q, other, k, v, mask):
            return routed(q, k, v, attn_mask=mask), routed(other, k, v, attn_mask=mask)

    graphs = []
    compiled = torch.compile(Cross(), fullgraph=True, dynamic=True, backend=compiler(graphs))
    mask = mask_of("hole")
    with route("native"):
        for seq in (4, 5, 6, 7, 9):
            (q, k, v), other = qkv(seq_q=seq), qkv(seq_q=5)[0]
            expected = sdpa(q, k, v, mask), sdpa(other, k, v, mask)
            torch.testing.assert_close(compiled(q, other, k, v, mask), expected)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # the memo, which ends empty
def test_export():
    q, k, v = qkv()
    mask = mask_of("hole")
    with route("native"):
        for strict in (False, True):
            exported = torch.export.export(Layers().eval(), (q, k, v, mask), strict=strict)
            other = mask_of("right")
            torch.testing.assert_close(exported.module()(q, k, v, other)[1], sdpa(q, k, v, other))


@pytest.mark.gpu
@torch.no_grad()
def test_capture_replays_with_a_mask_rewritten_in_place():
    q, k, v = (x.cuda().half() for x in qkv())
    mask, model = mask_of("hole").cuda(), Layers()
    with route("native"):
        model(q, k, v, mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(q, k, v, mask)
    for kind in ("empty row", "left", "hole", "right"):
        mask.copy_(mask_of(kind))
        graph.replay()
        torch.testing.assert_close(out[1], sdpa(q, k, v, mask), atol=2e-3, rtol=2e-3)
