"""Models compile as one graph, prepare once per forward and layer type, and read nothing per layer.

B rows, S padded length.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import Recorder
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
import transformers
from transformers_helpers import (
    DECODERS,
    ENCODERS,
    Architecture,
    before,
    build,
    packed_positions,
    padding,
    positions_of,
    registered,
    tokens,
)

import varlen_prep
from varlen_prep.integrations.transformers import BACKENDS, _attention, _mask

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning"),
]
NAMES = ("llama", "qwen2", "mistral", "gemma3", "gpt_neox")


@pytest.fixture(name="counts")
def counts_fixture(monkeypatch) -> Counter:
    """Preparations and attention calls since the last clear."""
    counts: Counter = Counter()

    def count(name, function):
        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    make = _mask.VarlenMetadata.from_position_ids
    monkeypatch.setattr(_mask, "prepare_varlen", count("prepared", _mask.prepare_varlen))
    monkeypatch.setattr(_mask.VarlenMetadata, "from_position_ids", count("prepared", make))
    monkeypatch.setattr(_attention, "prepare_varlen", count("in a layer", _attention.prepare_varlen))
    monkeypatch.setattr(_attention, "varlen_attention", count("attended", _attention.varlen_attention))
    return counts


def batches() -> dict[str, dict]:
    mask = padding("left")
    return {
        "plain": {"input_ids": tokens(3, 11)},
        "padded": {"input_ids": tokens(3, 11), "attention_mask": mask, "position_ids": positions_of(mask)},
        "packed": {"input_ids": tokens(2, 11), "position_ids": packed_positions(), "use_cache": False},
    }


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_one_preparation_per_forward_and_layer_type(name, kind, counts):
    model = build(DECODERS[name], "varlen_prep")
    for _ in range(2):
        counts.clear()
        model(**batches()[kind])
        assert counts == {"prepared": DECODERS[name].layer_types, "attended": 2}


def deep(layers: int) -> Architecture:
    config = DECODERS["llama"].config | {"num_hidden_layers": layers}
    return DECODERS["llama"]._replace(config=config)


class Reads(TorchDispatchMode):
    """Counts what waits for a value of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads(model, **inputs) -> int:
    with Reads() as mode, torch.no_grad():
        model(**inputs)
    return mode.count


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_reads_do_not_grow_with_the_layers(kind, monkeypatch):
    inputs = batches()[kind]
    few, many = (build(deep(layers), "varlen_prep") for layers in (1, 5))
    assert reads(few, **inputs) == reads(many, **inputs)
    attend = _attention.varlen_attention

    def reading(q, k, v, meta, **options):
        meta.cu_seqlens_q[-1].item()
        return attend(q, k, v, meta, **options)

    monkeypatch.setattr(_attention, "varlen_attention", reading)
    assert reads(many, **inputs) == reads(few, **inputs) + 4


@pytest.mark.parametrize(("name", "kind"), [("mistral", "padded"), ("gemma3", "packed"), ("bert", "packed")])
def test_one_graph_for_all_shapes_without_reads(name, kind):
    model = build((DECODERS | ENCODERS)[name], "varlen_prep")
    graphs, record = set(), Recorder()

    def compiler(module, inputs):
        graphs.add(torch._guards.CompileContext.current_compile_id())
        return record(module, inputs)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    with registered(capacity=24), torch.no_grad():
        for batch, seq in ((3, 13), (7, 17)):
            inputs = {"input_ids": tokens(batch, seq)}
            inputs |= {"use_cache": False} if name in DECODERS else {}
            if kind == "padded":
                length = torch.arange(batch)[:, None] % 3 + 4
                inputs["attention_mask"] = mask = (torch.arange(seq) >= seq - length).long()
                inputs["position_ids"] = positions_of(mask)
            else:
                cut = torch.arange(seq)
                inputs["position_ids"] = torch.where(cut < 5, cut, cut - 5).expand(batch, seq)
            torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1
    assert record.syncs == []
    assert sum("varlen_prep" in name for name in record.operators) >= 2


@torch.no_grad()
def test_the_number_of_documents_is_the_one_read_without_a_capacity():
    record = Recorder()
    compiled = torch.compile(build(deep(2), "varlen_prep"), fullgraph=True, dynamic=True, backend=record)
    compiled(input_ids=tokens(2, 11), position_ids=packed_positions(), use_cache=False)
    assert len(record.syncs) == 1


@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)  # of the package kernels, since 0.19
def test_compiled_training_steps_with_checkpointing():
    model = build(deep(1), "varlen_prep").train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    graphs = set()

    def compiler(module, inputs):
        graphs.add(torch._guards.CompileContext.current_compile_id())
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    with registered(capacity=24):
        for batch, seq in ((3, 13), (2, 9)):
            cut = torch.arange(seq)
            inputs = {"input_ids": tokens(batch, seq), "labels": tokens(batch, seq), "use_cache": False}
            inputs["position_ids"] = torch.where(cut < 5, cut, cut - 5).expand(batch, seq)
            gradients = []
            for run in (compiled, model):
                run(**inputs).loss.backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
                model.zero_grad()
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_training_gradients_equal_those_of_sdpa(name):
    gradients = []
    mask = padding("right")
    labels = tokens(3, 11, seed=1).masked_fill(mask == 0, -100)
    for implementation in ("sdpa", "varlen_prep"):
        model = build(DECODERS[name], implementation).train()
        model(input_ids=tokens(3, 11), attention_mask=mask, labels=labels).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_compiled_decoding_with_a_static_cache():
    graphs = []

    def compiler(module, inputs):
        graphs.append(torch._guards.CompileContext.current_compile_id())
        return module.forward

    config = transformers.CompileConfig(backend=compiler, fullgraph=True, mode=None)
    config._compile_all_devices = True  # generate() compiles by itself on a GPU only
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "compile_config": config}
    theirs, ours = (build(DECODERS["llama"], name) for name in ("sdpa", "varlen_prep"))
    inputs = {"inputs": tokens(3, 11), "attention_mask": padding("left")}
    got = ours.generate(**inputs, **options)
    assert len(set(graphs)) == 1
    assert torch.equal(got, theirs.generate(**inputs, **options | {"compile_config": None}))


@pytest.mark.skipif(before("5.4"), reason="generate() leaves masks to the model")
def test_generate_prepares_once_per_token(counts):
    ours = build(DECODERS["gemma3"], "varlen_prep")
    for cache in (None, "static"):
        counts.clear()
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        ours.generate(tokens(3, 11), attention_mask=padding("left"), **options)
        assert counts == {"prepared": 4 * 2, "attended": 4 * 2}


# On a GPU, against the float32 model as far as the arithmetic of the dtype goes.
GPU = {name: DECODERS[name] for name in ("llama", "qwen3", "mistral", "gemma3")}
WIDE = {"hidden_size": 128, "head_dim": 64}


def wide(architecture: Architecture) -> Architecture:
    """Head sizes that every kernel takes."""
    return architecture._replace(config=architecture.config | WIDE)


@pytest.fixture(name="kernel", params=["native", "flash3"])
def kernel_fixture(request) -> str:
    state = next(state for state in varlen_prep.backends() if state.name == request.param)
    if not state.usable:
        pytest.skip("; ".join(state.reasons))
    return next(name for name, backend in BACKENDS.items() if backend == request.param)


def on_gpu(inputs: dict) -> dict:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", GPU)
@torch.no_grad()
def test_kernels_are_as_near_to_float32_as_sdpa(name, kind, kernel):
    inputs = on_gpu(batches()[kind])
    part = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    exact = build(wide(GPU[name]), "sdpa", "cuda")(**inputs).logits[part]
    error = {}
    for implementation in ("sdpa", kernel):
        model = build(wide(GPU[name]), implementation, "cuda", torch.bfloat16)
        error[implementation] = (model(**inputs).logits[part].float() - exact).abs().mean() / exact.abs().mean()
    assert error["sdpa"] < 0.2  # else the comparison says nothing
    assert error[kernel] < 1.5 * error["sdpa"] + 2e-3


@pytest.mark.gpu
@torch.no_grad()
def test_generate_on_a_gpu(kernel):
    mask = padding("left").cuda()
    for cache in (None, "static"):
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        theirs, ours = (
            build(wide(GPU["gemma3"]), name, "cuda", torch.bfloat16).generate(
                tokens(3, 11, device="cuda"), attention_mask=mask, **options
            )
            for name in ("sdpa", kernel)
        )
        first = (ours.logits[0] - theirs.logits[0]).abs().mean() / theirs.logits[0].abs().mean()
        assert first < 0.1


@pytest.fixture(name="sync_is_an_error")
def sync_fixture() -> Iterator[Callable[[], contextlib.AbstractContextManager]]:
    @contextlib.contextmanager
    def scope():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return scope


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_padded_forwards_and_decoding_wait_for_nothing(name, kernel, sync_is_an_error):
    model = build(wide(GPU[name]), kernel, "cuda", torch.bfloat16)
    inputs = on_gpu(batches()["padded"])
    longer = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    one, place = inputs["input_ids"][:, -1:], inputs["position_ids"][:, -1:] + 1

    def step():
        if name == "gemma3":  # transformers' cache of a sliding window waits itself when it is first used
            return model(**inputs, use_cache=False).logits
        cache = transformers.DynamicCache(config=model.config)
        model(**inputs, past_key_values=cache)
        return model(input_ids=one, attention_mask=longer, position_ids=place, past_key_values=cache).logits

    for _ in range(2):
        step()
    with sync_is_an_error():
        logits = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            logits.sum().item()


@pytest.mark.gpu
@torch.no_grad()
def test_packed_forwards_wait_for_nothing_with_a_capacity(kernel, sync_is_an_error):
    model = build(wide(GPU["gemma3"]), kernel, "cuda", torch.bfloat16)
    inputs = on_gpu(batches()["packed"])
    for capacity in (8, None):
        torch._dynamo.reset()
        with registered(capacity=capacity):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                compiled(**inputs)
            with sync_is_an_error():
                if capacity is not None:
                    compiled(**inputs)
                else:  # the planted twin: the number of documents is read
                    with pytest.raises(RuntimeError, match="synchroniz"):
                        compiled(**inputs)
