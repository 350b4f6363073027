"""The mask function against transformers' own dense masks, and everything that is refused with its reason.

B rows, S_q and S_kv padded lengths, W window.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
import transformers
from transformers import masking_utils as masking
from transformers_helpers import (
    DECODERS,
    GROUPED,
    Architecture,
    before,
    build,
    packed_positions,
    padding,
    registered,
    tokens,
)

from varlen_prep import VarlenMetadata
from varlen_prep.integrations.transformers import VarlenMask, register
from varlen_prep.integrations.transformers._mask import mask_function

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")
OURS = mask_function("packed", None)


def both(q_length: int, kv_length: int, q_offset, kv_offset: int, **arguments):
    """Our mask and transformers' dense one, (B, S_q, S_kv), for the same arguments."""
    place = {"q_length": q_length, "q_offset": q_offset}
    if before("5.4"):
        place = {"cache_position": torch.arange(q_length) + q_offset}
    arguments |= {**place, "kv_length": kv_length, "kv_offset": kv_offset}
    dense = masking.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    return OURS(**arguments), dense


def seen(mask: VarlenMask) -> torch.Tensor:
    return mask.meta.materialize(causal=mask.causal, window_size=mask.window_size)


@st.composite
def calls(draw):
    """What a model with a dynamic, sliding or static cache asks for, with padding on one side or without."""
    batch, past, seq_q = draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 6))
    window = draw(st.sampled_from([None, 1, 2, 4]))
    kind = draw(st.sampled_from(["dynamic", "static", "sliding"]))
    kv_offset = max(past - window + 1, 0) if kind == "sliding" and window else 0
    kv_length = past + seq_q - kv_offset + (draw(st.integers(0, 3)) if kind == "static" else 0)
    q_offset = torch.tensor(past) if kind == "static" else past
    side = draw(st.sampled_from([None, "left", "right", *(["holes"] if window is None else [])]))
    mask = None
    if side == "holes":  # a window counts tokens that take part here, and places there
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=past + seq_q, max_size=past + seq_q)))
        mask = mask.expand(batch, -1)
    elif side is not None:
        length = torch.tensor([draw(st.integers(0, past + seq_q)) for _ in range(batch)])[:, None]
        index = torch.arange(past + seq_q)
        mask = index < length if side == "right" else index >= past + seq_q - length
    if mask is not None and kind == "static":  # may be as long as the buffer, whose end is not written yet
        mask = torch.nn.functional.pad(mask, (0, kv_length - past - seq_q), value=draw(st.booleans()))
    pattern = masking.causal_mask_function
    if window is not None:
        pattern = masking.sliding_window_causal_mask_function(window)
    arguments = {"batch_size": batch, "mask_function": pattern, "attention_mask": mask, "local_size": window}
    return (seq_q, kv_length, q_offset, kv_offset), arguments


@settings(deadline=None, max_examples=200)
@given(calls())
def test_causal_masks_with_caches_padding_and_windows(call):
    (seq_q, kv_length, q_offset, kv_offset), arguments = call
    mask, dense = both(seq_q, kv_length, q_offset, kv_offset, **arguments)
    part = torch.ones(arguments["batch_size"], seq_q, dtype=torch.bool)
    if arguments["attention_mask"] is not None:
        part = arguments["attention_mask"][:, int(q_offset) : int(q_offset) + seq_q]
    assert mask.shape == (arguments["batch_size"], 1, seq_q, kv_length)
    got = seen(mask)
    assert torch.equal(got[part], dense[part])
    assert not got[~part].any()


def test_both_sides_share_the_offsets_of_a_padded_batch():
    arguments = {"batch_size": 3, "mask_function": masking.causal_mask_function, "attention_mask": padding("left") > 0}
    assert OURS(**arguments, q_length=11, kv_length=11, kv_offset=0).meta.same_lengths
    assert not OURS(**arguments, q_length=4, kv_length=11, q_offset=7, kv_offset=0).meta.same_lengths


def test_a_window_that_is_off_by_one_would_be_seen():
    pattern = masking.sliding_window_causal_mask_function(3)
    mask, dense = both(6, 6, 0, 0, batch_size=2, mask_function=pattern, attention_mask=None, local_size=3)
    assert torch.equal(seen(mask), dense)
    assert not torch.equal(seen(dataclasses.replace(mask, window_size=(3, 0))), dense)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_masks(window, masked):
    pattern, local = masking.bidirectional_mask_function, {}
    if window is not None:
        if before("5.2"):
            pytest.skip("no such mask yet")
        pattern = masking.sliding_window_bidirectional_mask_function(window)
        local = {"local_size": window}
    keys = padding("left").bool() if masked else None
    mask, dense = both(
        11, 11, 0, 0, batch_size=3, mask_function=pattern, attention_mask=keys, allow_is_bidirectional_skip=False,
        **local,
    )  # fmt: skip
    part = keys if masked and window is not None else torch.ones(3, 11, dtype=torch.bool)
    assert torch.equal(seen(mask)[part], dense[part])


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_documents_begin_where_the_pattern_says(kind, window):
    if kind == "bidirectional" and before("5.25"):
        pytest.skip("such masks were not told positions")
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="varlen_prep")
    config.sliding_window = window
    make = getattr(masking, f"create_{'' if window is None else 'sliding_window_'}causal_mask")
    arguments = {"attention_mask": None, "position_ids": packed_positions(), "past_key_values": None}
    if kind == "bidirectional":
        make = getattr(masking, f"create_bidirectional_{'' if window is None else 'sliding_window_'}mask")
        del arguments["past_key_values"]
    if before("5.4"):
        arguments |= {"input_embeds": torch.zeros(2, 11, 1), "cache_position": torch.arange(11)}
    else:
        arguments |= {"inputs_embeds": torch.zeros(2, 11, 1)}
    got = seen(make(config, **arguments))
    config._attn_implementation = "sdpa"
    assert torch.equal(got, make(config, **arguments)[:, 0])


def test_finished_masks_are_passed_on():
    meta = VarlenMetadata.from_position_ids(packed_positions())
    mask = VarlenMask(meta=meta, causal=True, window_size=(-1, -1))
    assert OURS(batch_size=2, kv_length=11, kv_offset=0, mask_function=None, attention_mask=mask) is mask


def call(name: str = "llama", **inputs):
    with torch.no_grad():
        return build(DECODERS[name], "varlen_prep")(input_ids=tokens(2, 8), **inputs)


def test_dense_masks_are_refused():
    with refuses(TypeError, "attention_mask: expected", "(2, 1, 8, 8)", "attn_implementation='sdpa'"):
        call(attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))


def test_patterns_of_images_and_blocks_are_refused():
    with refuses(ValueError, "mask_function: or_mask differs per query", "flex_attention"):
        OURS(
            batch_size=1, kv_length=4, kv_offset=0, q_length=4,
            mask_function=masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: k < 2),
        )  # fmt: skip
    with refuses(ValueError, "mask_function: and_mask differs per query"):
        OURS(
            batch_size=1, kv_length=4, kv_offset=0, q_length=4, use_vmap=True,
            mask_function=masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: k != 2),
        )  # fmt: skip
    with refuses(ValueError, "mask_function: and_mask differs per query"):  # neither a window nor documents
        OURS(
            batch_size=1, kv_length=4, kv_offset=0, q_length=4,
            mask_function=masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: k != 2),
        )  # fmt: skip
    with refuses(ValueError, "local_size: a bidirectional window of 3 queries over 5 keys"):
        OURS(
            batch_size=1, kv_length=5, kv_offset=0, q_length=3, local_size=2, allow_is_bidirectional_skip=True,
            mask_function=masking.and_masks(masking.bidirectional_mask_function),
        )  # fmt: skip


def test_blocks_that_see_ahead_among_documents_are_refused():
    ids, blocks = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[-1, 5, 5, -1, -1, -1]])

    def block(b, h, q, k):
        return (blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0)

    documents = masking.packed_sequence_mask_function(ids)
    arguments = {"batch_size": 1, "kv_length": 6, "kv_offset": 0, "q_length": 6, "allow_is_causal_skip": False}
    plain = masking.and_masks(masking.causal_mask_function, documents)
    assert OURS(**arguments, mask_function=plain).meta.cu_seqlens_q.tolist() == [0, 3, 6]
    ahead = masking.and_masks(masking.or_masks(masking.causal_mask_function, block), documents)
    with refuses((ValueError, RuntimeError), "a row sees a later one", "attn_implementation='sdpa'"):
        OURS(**arguments, mask_function=ahead)


def test_chunked_attention_runs_within_one_chunk():
    small = {"attention_chunk_size": 4, "num_local_experts": 1, "head_dim": 8, "intermediate_size_mlp": 32}
    architecture = Architecture("Llama4ForCausalLM", GROUPED | small | {"moe_layers": []})
    theirs, ours = (build(architecture, name) for name in ("sdpa", "varlen_prep"))
    with torch.no_grad():
        ids = tokens(2, 4)
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
        with refuses(ValueError, "attention_chunk_size: 5 keys are more than one chunk of 4"):
            ours(input_ids=tokens(2, 5))


def test_biases_are_refused():
    small = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model = build(Architecture("T5ForConditionalGeneration", small | {"decoder_start_token_id": 0}), "varlen_prep")
    fragments = ("position_bias", "differs per query") if not before("5.17") else ()
    with refuses((ValueError, TypeError, KeyError), *fragments):
        model(input_ids=tokens(2, 5), decoder_input_ids=tokens(2, 3))


def test_dropout_is_refused_in_training_only():
    model = build(Architecture("LlamaForCausalLM", GROUPED | {"attention_dropout": 0.1}), "varlen_prep")
    model(input_ids=tokens(2, 8))
    with refuses(ValueError, "dropout: expected 0, got 0.1", "model.eval()"):
        model.train()(input_ids=tokens(2, 8))


def test_softcap_is_refused_where_the_backend_has_none():
    with refuses(ValueError, "softcap", "Backends that can, by name", "reference"):
        call("gemma2")


def test_sinks_have_no_gradient():
    model = build(DECODERS["gpt_oss"], "varlen_prep")
    with refuses(ValueError, "s_aux", "torch.no_grad()"):
        model(input_ids=tokens(2, 8))


def test_a_layer_that_contradicts_its_mask_is_refused():
    model = build(DECODERS["llama"], "varlen_prep")
    model.model.layers[1].self_attn.is_causal = False
    with refuses(ValueError, "is_causal: the layer says False", "config.is_causal=False"):
        model(input_ids=tokens(2, 8))


@pytest.mark.skipif(before("5.2"), reason="is_causal=False in the config came with 5.2")
def test_decoders_made_bidirectional():
    def make(name):
        model = build(DECODERS["qwen2"], name)
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        return model

    theirs, ours = make("sdpa"), make("varlen_prep")
    mask = padding("left")
    with torch.no_grad():
        inputs = {"input_ids": tokens(3, 11), "attention_mask": mask, "use_cache": False}
        a, b = (model(**inputs).logits[mask.bool()] for model in (ours, theirs))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_offsets_beside_padding_or_a_tensor_as_maximum_are_refused():
    offsets = VarlenMetadata.from_lengths([8, 8]).transformers_kwargs()
    with refuses(ValueError, "cu_seq_lens_q", "either them or attention_mask"):
        call(attention_mask=torch.ones(2, 8), **offsets)
    with refuses(TypeError, "max_length_q: expected a host int, got Tensor"):
        call(**offsets | {"max_length_q": torch.tensor(8)}, use_cache=False)


def attend(**arguments):
    """The attention function alone: two queries, four keys."""
    q, k = torch.ones(1, 2, 2, 8), torch.ones(1, 2, 4, 8)
    function = transformers.AttentionInterface()["varlen_prep"]
    return function(torch.nn.Module(), q, k, k, None, **{"is_causal": False, **arguments})


def test_attention_without_a_mask():
    assert attend()[0].shape == (1, 2, 2, 8)
    with refuses(ValueError, "attention_mask", "2 queries among 4 keys is not known"):
        attend(is_causal=True)
    with refuses(ValueError, "sliding_window: 3 came without a mask"):
        attend(sliding_window=3)
    for name, value in (
        ("output_attentions", True),
        ("cache", object()),
        ("position_bias", torch.ones(2, 3)),
        ("indices", torch.ones(2, 3)),
        ("block_indices", torch.ones(2, 3)),
        ("sinks", torch.ones(2)),
    ):
        with refuses(ValueError, f"{name}: not supported, because"):
            attend(**{name: value})
    attend(output_attentions=False)


def test_more_documents_than_the_capacity_are_an_error():
    inputs = {"position_ids": packed_positions()[:, :8], "use_cache": False}
    with registered(capacity=5):
        call(**inputs)
    with registered(capacity=4), refuses(ValueError, "capacity: there are more documents"):
        call(**inputs)


def test_arguments_of_register():
    with refuses(ValueError, "layout: expected 'packed' or 'in_place', got 'uniform'"):
        register(layout="uniform")
