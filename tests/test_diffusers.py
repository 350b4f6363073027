"""diffusers' varlen backends through this library: values, masks, refusals, restoring, sharing, compiling.

The oracle is diffusers' own "native" backend (SDPA with a mask), run by the same dispatch function or the same model.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.modeling_utils import ModelMixin
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import varlen_prep
from varlen_prep.integrations.diffusers import BACKENDS, TESTED, _memo, _routes, install, route, uninstall

NAMES = list(BACKENDS)
MASKS = {
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]],
    "hole": [[1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]],
    "empty row": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
}


def mask_of(kind: str) -> torch.Tensor:
    return torch.tensor(MASKS[kind], dtype=torch.bool)


def qkv(seq_q=5, seq_kv=7, heads=6, heads_kv=6, batch=3, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((batch, seq_q, heads, 8), (batch, seq_kv, heads_kv, 8), (batch, seq_kv, heads_kv, 8))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


def sdpa(q, k, v, mask=None, **kwargs):
    """diffusers' dense backend; rows without keys, where SDPA may write anything, are 0."""
    mask = None if mask is None else mask.expand(q.shape[0], k.shape[1])
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native", **kwargs)
    return out if mask is None else out.masked_fill(~mask.any(1)[:, None, None, None], 0)


def routed(q, k, v, name="flash_varlen", **kwargs):
    return dispatch_attention_fn(q, k, v, backend=name, **kwargs)


def tiny_flux(layers=1) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4, num_layers=layers, num_single_layers=layers, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip


def flux_inputs(batch=2, text=5, height=4, width=6, masked=True):
    """A joint mask with a hole in every row: text | pad | image."""
    generator = torch.Generator().manual_seed(batch * 100 + text)
    image = height * width
    inputs = {
        "hidden_states": torch.randn(batch, image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=generator),
        "pooled_projections": torch.randn(batch, 10, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.randn(image, 3, generator=generator),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    if masked:
        mask = torch.ones(batch, text + image, dtype=torch.bool)
        for row in range(batch):
            mask[row, 1 + row % (text - 1) : text] = False
        inputs["joint_attention_kwargs"] = {"attention_mask": mask}
    return inputs


def flux_sdpa(model, inputs):
    inputs = dict(inputs)
    if kwargs := inputs.get("joint_attention_kwargs"):
        inputs["joint_attention_kwargs"] = {"attention_mask": kwargs["attention_mask"][:, None, None, :]}
    with attention_backend("native"):
        return model(**inputs)[0]


class Layers(ModelMixin):
    """Attends twice with the same mask; `between` runs in the middle of the forward."""

    def __init__(self, between=lambda mask: None):
        super().__init__()
        self.between = between

    def forward(self, q, k, v, mask=None):
        first = routed(q, k, v, attn_mask=mask)
        self.between(mask)
        return first, routed(q, k, v, attn_mask=mask)


@pytest.fixture
def prepared(monkeypatch):
    """The calls of prepare_varlen that the integration makes."""
    calls, real = [], _memo.prepare_varlen

    def counting(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(_memo, "prepare_varlen", counting)
    return calls


@pytest.fixture(autouse=True)
def untouched():
    """No test may leave anything behind in diffusers, nor start from something that another one left."""
    before = state()
    torch._dynamo.reset()
    yield
    assert state() == before
    assert (_routes._scopes, _routes._installed) == ([], None)
    assert (_memo._scope.eager, _memo._scope.traced) == (None, None)


def state():
    return (
        dict(Registry._backends), list(Registry._backends), dict(Registry._constraints),
        {name: set(names) for name, names in Registry._supported_arg_names.items()},
        set(Registry._supports_context_parallel), Registry._active_backend,
        attention_dispatch._check_attention_backend_requirements,
        attention_dispatch._maybe_download_kernel_for_backend, dict(vars(ModelMixin)),
    )  # fmt: skip


# Values


@pytest.mark.parametrize("kind", [None, *MASKS])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_what_sdpa_gives(name, kind):
    q, k, v = qkv()
    mask = None if kind is None else mask_of(kind)
    with route("native"):
        out = routed(q, k, v, name, attn_mask=mask)
    torch.testing.assert_close(out, sdpa(q, k, v, mask))


@pytest.mark.parametrize("kind", ["right", "left", "empty row"])
def test_in_place_layout(kind):
    mask = mask_of(kind)
    mask[1] = True
    q, k, v = qkv()
    with route("native", layout="in_place"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))
        with pytest.raises(ValueError, match="a hole"):
            routed(q, k, v, attn_mask=mask_of("hole"))


@pytest.mark.parametrize("name", NAMES)
def test_flux_model(name):
    model, inputs = tiny_flux(), flux_inputs()
    expected = flux_sdpa(model, inputs), flux_sdpa(model, flux_inputs(masked=False))
    with route("native"):
        with attention_backend(name):
            torch.testing.assert_close(model(**inputs)[0], expected[0])
        model.set_attention_backend(name)
        torch.testing.assert_close(model(**inputs)[0], expected[0])
        torch.testing.assert_close(model(**flux_inputs(masked=False))[0], expected[1])


def test_flux_gradients():
    expected, model = tiny_flux(), tiny_flux()
    flux_sdpa(expected, flux_inputs()).square().sum().backward()
    with route("native"), attention_backend("flash_varlen"):
        model(**flux_inputs())[0].square().sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, monkeypatch):
    monkeypatch.setattr(Registry, "_checks_enabled", True)  # diffusers' own checks would want CUDA and half
    q, k, v = qkv(dtype=dtype)
    mask = mask_of("hole")
    with route("native"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))


ROWS = [True, False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("shape", "batched"),
    [
        ((7,), False), ((1, 7), False), ((3, 7), True), ((1, 1, 7), False), ((3, 1, 7), True), ((1, 1, 1, 7), False),
        ((3, 1, 1, 7), True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("expanded", [False, True])
def test_mask_spellings(shape, batched, expanded):
    keys = mask_of("hole") if batched else torch.tensor([ROWS])
    mask = keys.view(shape)
    if expanded:
        mask = mask.expand({3: (-1, 5, -1), 4: (-1, 6, 5, -1)}.get(mask.ndim, mask.shape))
    q, k, v = qkv()
    with route("native"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, keys))


@pytest.mark.parametrize("name", NAMES)
def test_lse_is_batch_seq_heads(name):
    q, k, v = qkv()
    mask = mask_of("empty row")
    with route("native"):
        out, lse = routed(q, k, v, name, attn_mask=mask, attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * 8**-0.5
    expected = scores.masked_fill(~mask[:, None, None, :], -torch.inf).logsumexp(-1)
    assert lse.shape == (3, 5, 6)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(out, sdpa(q, k, v, mask))


def test_grouped_query_heads():
    q, k, v = qkv(heads=6, heads_kv=2)
    mask = mask_of("hole")
    with route("native"):
        out = routed(q, k, v, attn_mask=mask, enable_gqa=True)
        assert torch.equal(out, routed(q, k, v, attn_mask=mask))  # as diffusers' own flash backends
    torch.testing.assert_close(out, sdpa(q, k, v, mask, enable_gqa=True))


def test_causal_window_and_scale():
    q, k, v = qkv()
    distance = torch.arange(7) - torch.arange(5)[:, None] - (7 - 5)  # 0: the query's own place, bottom-right

    def dense(seen, scale=8**-0.5):
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, scale=scale)
        return out.transpose(1, 2)

    with route("native"):
        torch.testing.assert_close(routed(q, k, v, is_causal=True), dense(distance <= 0))
        window = routed(q, k, v, attention_kwargs={"window_size": (2, 1)})
        torch.testing.assert_close(window, dense((distance >= -2) & (distance <= 1)))
        torch.testing.assert_close(routed(q, k, v, scale=0.3), dense(distance < 99, scale=0.3))


# Refusals


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"attn_mask": torch.ones(3, 5, 7, dtype=torch.bool)}, ValueError, "differs per query or head"),
        ({"attn_mask": torch.ones(3, 6, 5, 7, dtype=torch.bool)}, ValueError, "differs per query or head"),
        ({"attn_mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError, "broadcasts to (batch, seq) = (3, 7)"),
        ({"attn_mask": torch.zeros(3, 7)}, TypeError, "expected torch.bool, got torch.float32"),
        ({"attn_mask": torch.ones(3, 7, dtype=torch.bool), "is_causal": True}, ValueError, "with is_causal=True"),
        (
            {"attn_mask": torch.ones(3, 7, dtype=torch.bool), "attention_kwargs": {"window_size": (1, 1)}},
            ValueError,
            "which queries take part",
        ),
        ({"dropout_p": 0.1}, ValueError, "dropout_p: expected 0, got 0.1"),
        ({"parallel_config": object()}, ValueError, "Context parallelism gives each rank a part of every row"),
    ],
)
def test_refusals(kwargs, error, text):
    with route("native"), pytest.raises(error, match=re.escape(text)):
        routed(*qkv(), **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_a_name_of_diffusers_lacks_are_not_dropped(name):
    q, k, v = qkv()
    with route("native"):
        with pytest.raises(ValueError, match="dropout_p: expected 0"):
            routed(q, k, v, name, dropout_p=0.1)
        window = {"attention_kwargs": {"window_size": (1, 0)}}
        assert torch.equal(routed(q, k, v, name, **window), routed(q, k, v, "flash_varlen", **window))
        assert not torch.equal(routed(q, k, v, name, **window), routed(q, k, v, name))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no_such",), "expected one of native"),
        (({"flash_varlen": "no_such"},), "got 'no_such'"),
        (({"flash": "native"},), "got ['flash']"),
    ],
)
@pytest.mark.parametrize("turn_on", [install, lambda *arguments: route(*arguments).__enter__()])
def test_unknown_names(turn_on, arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        turn_on(*arguments)


def test_unknown_layout():
    with pytest.raises(ValueError, match="layout: expected 'packed' or 'in_place', got 'uniform'"):
        install("native", layout="uniform")


@pytest.mark.parametrize("name", NAMES)
def test_default_table_names_the_kernel_that_cannot_run(name, monkeypatch):
    gone = varlen_prep.backends()[0]._replace(name=BACKENDS[name], reasons=("it is not installed",), install="pip it")
    monkeypatch.setattr(_routes, "backends", lambda: [gone])
    with route(), pytest.raises(RuntimeError, match=f"'{BACKENDS[name]}' cannot run here: it is not installed"):
        tiny_flux().set_attention_backend(name)
    monkeypatch.setattr(_routes, "backends", lambda: [gone._replace(name="native")])
    with route(), pytest.raises(RuntimeError, match=f"'{BACKENDS[name]}' is not part of this version"):
        tiny_flux().set_attention_backend(name)


def test_default_table_does_not_fall_back():
    usable = {state.name for state in varlen_prep.backends() if state.usable}
    if "flash" in usable:
        pytest.skip("flash-attn is installed")
    with route(), pytest.raises(ValueError, match="flash"):
        routed(*qkv())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (attention_dispatch, "_check_attention_backend_requirements"),
        (attention_dispatch, "_maybe_download_kernel_for_backend"),
        (Registry, "_supported_arg_names"),
    ],
)
def test_missing_private_name_of_diffusers(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"diffusers \S+ has no .*{name}.* was run with diffusers {TESTED[0]}"):
        install("native")


def test_context_parallel_is_not_offered():
    assert Registry._is_context_parallel_available(attention_dispatch.AttentionBackendName.FLASH_VARLEN_HUB)
    with route("native"):
        assert not Registry._is_context_parallel_available(attention_dispatch.AttentionBackendName.FLASH_VARLEN_HUB)


# Turning on and off


def test_restores_after_an_exception():
    before = state()
    routes = contextlib.ExitStack()
    routes.enter_context(route("native"))
    routes.enter_context(attention_backend("flash_varlen"))
    assert state() != before
    with pytest.raises(KeyError), routes:
        raise KeyError
    assert state() == before


def test_active_backend_does_not_stay_on_a_routed_name():
    with route("native"):
        tiny_flux().set_attention_backend("sage_varlen")
        assert Registry._active_backend == "sage_varlen"
        with route("reference"):
            pass
        assert Registry._active_backend == "sage_varlen"
    assert Registry._active_backend == "native"
    with route("native"):
        Registry.set_active_backend("flex")  # a choice that does not depend on routes is the user's to keep
    assert Registry._active_backend == "flex"
    Registry.set_active_backend("native")


def backend_of(name="flash_varlen"):
    """The backend of this library that a name of diffusers runs now."""
    function = Registry._backends[name]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["backend"].cell_contents if "backend" in cells else None


def test_scopes_nest_and_a_mapping_routes_only_its_names():
    with route("native"):
        with route({"flash_varlen": "reference"}):
            assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("reference", "native")
        assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("native", "native")
    with route({"flash_varlen": "native"}):
        assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("native", None)
        with pytest.raises(RuntimeError, match="sageattention"):  # diffusers' own check
            tiny_flux().set_attention_backend("sage_varlen")


def test_install_twice_and_uninstall_without_install():
    before = state()
    uninstall()
    install("native")
    install("reference")
    assert backend_of() == "reference"
    with route("native"):
        assert backend_of() == "native"
        uninstall()
        assert backend_of() == "native"
    assert state() == before
    install("native")
    with pytest.raises(ValueError, match="no_such"):
        install("no_such")
    assert backend_of() == "native"
    uninstall()
    assert state() == before


def test_failure_while_turning_on_leaves_nothing(monkeypatch):
    def fail(*_):
        raise KeyError

    before = state()
    monkeypatch.setattr(_routes, "attention", fail)
    for turn_on in (install, lambda backend: route(backend).__enter__()):
        with pytest.raises(KeyError):
            turn_on("native")
        assert state() == before


def test_nothing_is_imported_or_patched_until_asked_for():
    code = (
        "import sys, varlen_prep; assert not any(m.split('.')[0] == 'diffusers' for m in sys.modules);"
        "import varlen_prep.integrations.diffusers; assert 'diffusers.models' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# One preparation per forward


def test_layers_of_a_forward_share_one_preparation(prepared):
    model = tiny_flux(layers=2)
    for masked in (True, False):
        with route("native"), attention_backend("flash_varlen"):
            for _ in range(3):
                model(**flux_inputs(masked=masked))
        assert len(prepared) == 3
        assert all(kwargs["max_seqlen_k"] == args[2] for args, kwargs in prepared)  # the bound: nothing is read
        prepared.clear()


def test_nothing_is_kept_outside_of_a_model(prepared):
    q, k, v = qkv()
    mask = mask_of("hole")
    with route("native"):
        routed(q, k, v, attn_mask=mask)
        mask.data.logical_not_()  # not even the version counter shows it
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))
    assert len(prepared) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_different_masks_and_shapes_do_not_share(compiled, prepared):
    class Mixed(ModelMixin):
        def forward(self, q, k, v, masks):
            return [routed(q[:, :n], k, v, attn_mask=mask) for n in (5, 4) for mask in masks]

    q, k, v = qkv()
    masks = [mask_of("hole"), mask_of("right"), None, mask_of("hole")]
    call = torch.compile(Mixed(), fullgraph=True, dynamic=True, backend="eager") if compiled else Mixed()
    with route("native"):
        outs = call(q, k, v, masks)
    expected = [sdpa(q[:, :n], k, v, mask) for n in (5, 4) for mask in masks]
    torch.testing.assert_close(outs, expected)
    assert compiled or len(prepared) == 8


def test_kept_preparations_are_bounded():
    kept = []

    class Many(ModelMixin):
        def forward(self, q, k, v):
            for _ in range(20):
                routed(q, k, v, attn_mask=mask_of("hole"))
                kept.append(len(_memo._scope.eager.entries))

    with route("native"):
        Many()(*qkv())
    assert max(kept) == _memo._MOST


@pytest.mark.parametrize("compiled", [False, True])
def test_mask_changed_in_place_between_layers(compiled):
    q, k, v = qkv()
    mask, after = mask_of("hole"), ~mask_of("hole")
    expected = sdpa(q, k, v, mask), sdpa(q, k, v, after)
    model = Layers(between=lambda mask: mask.logical_not_())
    call = torch.compile(model, fullgraph=True, dynamic=True, backend="eager") if compiled else model
    with route("native"):
        torch.testing.assert_close(call(q, k, v, mask), expected)
        torch.testing.assert_close(call(q, k, v, mask), expected[::-1])


@pytest.mark.parametrize("dynamic", [True, False])
def test_mask_changed_in_place_between_broken_graphs(dynamic):
    @torch.compiler.disable
    def between(mask):
        mask.logical_not_()

    q, k, v = qkv()
    mask, after = mask_of("hole"), ~mask_of("hole")
    expected = sdpa(q, k, v, mask), sdpa(q, k, v, after)
    with route("native"):
        call = torch.compile(Layers(between), dynamic=dynamic, backend="eager")
        torch.testing.assert_close(call(q, k, v, mask), expected)
        torch.testing.assert_close(call(q, k, v, mask), expected[::-1])


@pytest.mark.parametrize("mask_mode", [False, True])
def test_inference_then_training(mask_mode, prepared):
    with torch.inference_mode(mask_mode):
        mask = mask_of("hole")
    q, k, v = qkv(requires_grad=True)
    model = Layers()
    with route("native"):
        with torch.inference_mode():
            model(q, k, v, mask)
        assert len(prepared) == (2 if mask_mode else 1)  # an inference tensor does not show changes in place
        out = model(q, k, v, mask)[1]
        out.square().sum().backward()
    ours = [x.grad for x in (q, k, v)]
    q, k, v = qkv(requires_grad=True)
    sdpa(q, k, v, mask.clone()).square().sum().backward()
    torch.testing.assert_close(ours, [x.grad for x in (q, k, v)])


def test_inference_mode_inside_a_forward(prepared):
    class Mixed(ModelMixin):
        def forward(self, q, k, v, mask):
            with torch.inference_mode():
                routed(q, k, v, attn_mask=mask)
            return routed(q, k, v, attn_mask=mask)

    q, k, v = qkv(requires_grad=True)
    with route("native"):
        Mixed()(q, k, v, mask_of("hole")).sum().backward()
    assert len(prepared) == 2
    assert v.grad.isfinite().all()


def test_forward_ends_its_memo_after_an_exception(prepared):
    def fail(mask):
        raise KeyError

    q, k, v = qkv()
    with route("native"):
        with pytest.raises(KeyError):
            Layers(fail)(q, k, v, mask_of("hole"))
        assert _memo._scope.eager is None


def test_inner_models_share_with_the_outer_one(prepared):
    class Outer(ModelMixin):
        def __init__(self):
            super().__init__()
            self.inner = Layers()

        def forward(self, q, k, v, mask):
            return self.inner(q, k, v, mask), routed(q, k, v, attn_mask=mask)

    with route("native"):
        Outer()(*qkv(), mask_of("hole"))
    assert len(prepared) == 1


def test_capture_that_starts_inside_a_forward_prepares_for_itself(prepared, monkeypatch):
    capturing = [False]
    monkeypatch.setattr(_memo, "_capturing", lambda: capturing[0])

    def start(mask):
        capturing[0] = True

    with route("native"):
        Layers(start)(*qkv(), mask_of("hole"))
        assert len(prepared) == 2
        Layers()(*qkv(), mask_of("hole"))  # all of it inside one capture
        assert len(prepared) == 3


def test_threads_do_not_share(prepared):
    barrier = threading.Barrier(2, timeout=60)
    q, k, v = qkv()
    masks = [mask_of("hole"), mask_of("right")]
    outs = [None, None]
    with route("native"):

        def work(i):
            outs[i] = Layers(lambda mask: barrier.wait())(q, k, v, masks[i])[1]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    torch.testing.assert_close(outs, [sdpa(q, k, v, mask) for mask in masks])
    assert len(prepared) == 2


def test_gradient_checkpointing():
    expected, model = tiny_flux(layers=2).train(), tiny_flux(layers=2).train()
    flux_sdpa(expected, flux_inputs()).square().sum().backward()
    model.enable_gradient_checkpointing()
    with route("native"), attention_backend("flash_varlen"):
        model(**flux_inputs())[0].square().sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# Compiling


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
    assert graphs[0]["aten.cumsum.default"] == (1 if masked else 0)
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in graphs[0])  # nothing is read


def count_preparations(call, *inputs):
    """Layers compiled by `call(model, backend)`: preparations in each graph."""
    graphs = []
    call(Layers(), compiler(graphs))(*inputs)
    return [graph["aten.cumsum.default"] for graph in graphs]


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
    assert [graph["aten.cumsum.default"] for graph in graphs] == [1]


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
    assert [graph["aten.cumsum.default"] for graph in graphs] == [1]


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
    assert [graph["aten.cumsum.default"] for graph in graphs] == [1, 0]


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
