"""Real architectures of transformers give the same with `varlen_prep` as with their own attention.

B rows, S padded length.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers_helpers import (
    CROSS,
    DECODERS,
    ENCODERS,
    GROUPED,
    SEQ2SEQ,
    SIZES,
    Architecture,
    assert_equal_rows,
    before,
    build,
    packed_positions,
    padding,
    pair,
    positions_of,
    registered,
    tokens,
)

from varlen_prep import VarlenMetadata
from varlen_prep.integrations.transformers import BACKENDS, VarlenMask

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name):
    theirs, ours = pair(DECODERS[name])
    for side in ("left", "right"):
        mask = padding(side)
        positions = positions_of(mask)
        assert_equal_rows(ours, theirs, mask, input_ids=tokens(3, 11), attention_mask=mask, position_ids=positions)
    assert_equal_rows(ours, theirs, input_ids=tokens(3, 11))
    assert_equal_rows(ours, theirs, input_ids=tokens(2, 11), position_ids=packed_positions(), use_cache=False)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_left_padding(name, cache):
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    theirs, ours = (
        model.generate(tokens(3, 11), attention_mask=padding("left"), **options) for model in pair(DECODERS[name])
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_in_place_layout(name):
    theirs, ours = pair(DECODERS[name])
    with registered(layout="in_place"):
        for side in ("left", "right"):
            mask = padding(side)
            assert_equal_rows(ours, theirs, mask, input_ids=tokens(3, 11), attention_mask=mask)


@pytest.mark.parametrize("chunks", [(11,), (4, 7), (5, 1, 1, 4)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_chunked_prefill_and_single_queries(name, chunks):
    mask = padding("left")
    theirs, ours = pair(DECODERS[name])
    ids, positions = tokens(3, 11), positions_of(mask)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        cache, begin = transformers.DynamicCache(config=ours.config), 0
        for size in chunks:
            part = slice(begin, begin + size)
            begin += size
            out = ours(
                input_ids=ids[:, part],
                attention_mask=mask[:, :begin],
                position_ids=positions[:, part],
                past_key_values=cache,
            )
            kept = mask[:, part].bool()
            torch.testing.assert_close(out.logits[kept], expected[:, part][kept], atol=1e-4, rtol=1e-4)


def test_static_cache_without_a_mask():
    theirs, ours = pair(DECODERS["llama"])
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
        first = ours(input_ids=ids[:, :6], past_key_values=cache, **cache_position(0, 6)).logits
        rest = ours(input_ids=ids[:, 6:], past_key_values=cache, **cache_position(6, 9)).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), expected, atol=1e-4, rtol=1e-4)


def cache_position(begin: int, end: int) -> dict:
    """Versions before 5.4 want to be told where a static cache is; later ones know."""
    return {"cache_position": torch.arange(begin, end)} if before("5.4") else {}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_keep_the_queries_of_padding(name):
    if name == "modernbert" and before("5.4"):
        pytest.skip("ModernBERT had a table of attention functions of its own")
    theirs, ours = pair(ENCODERS[name])
    bidirectional = name == "modernbert"  # its windows align queries to keys, so rows of padding take no part
    for side in ("left", "right"):
        mask = padding(side)
        part = mask if bidirectional else None
        assert_equal_rows(ours, theirs, part, input_ids=tokens(3, 11), attention_mask=mask)
    assert_equal_rows(ours, theirs, input_ids=tokens(3, 11))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders_of_packed_documents(name):
    if before("5.25"):
        pytest.skip("the masks of encoders were not told positions")
    theirs, ours = pair(ENCODERS[name])
    packed = assert_equal_rows(ours, theirs, input_ids=tokens(2, 11), position_ids=packed_positions())
    one = assert_equal_rows(ours, theirs, input_ids=tokens(2, 11), position_ids=torch.arange(11).expand(2, 11))
    assert not torch.allclose(packed, one)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention(name, side):
    theirs, ours = pair(CROSS[name])
    source, target = padding(side, 3, 7), padding("right", 3, 11)
    if name == "bart":
        inputs = {"input_ids": tokens(3, 7), "attention_mask": source, "decoder_attention_mask": target}
        inputs["decoder_input_ids"] = tokens(3, 11, seed=1)
    else:
        states = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": tokens(3, 11), "attention_mask": target}
        inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": source}
    assert_equal_rows(ours, theirs, target, **inputs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_cross_attention_and_beams(cache):
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    theirs, ours = (
        model.generate(tokens(3, 7), attention_mask=padding("right", 3, 7), **options) for model in pair(CROSS["bart"])
    )
    assert torch.equal(ours, theirs)


def test_models_that_make_no_mask():
    image = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs, ours = pair(Architecture("ViTModel", image | {"image_size": 16, "patch_size": 4}))
    assert_equal_rows(ours, theirs, pixel_values=torch.ones(2, 3, 16, 16))
    audio = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
    theirs, ours = pair(Architecture("WhisperModel", audio))
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    assert_equal_rows(ours, theirs, input_features=features, decoder_input_ids=tokens(2, 5))


def test_rotary_positions_in_three_dimensions_follow_their_text_axis(monkeypatch):
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    monkeypatch.setattr(transformers, "Qwen2VLTextModel", modeling_qwen2_vl.Qwen2VLTextModel, raising=False)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    theirs, ours = pair(Architecture("Qwen2VLTextModel", GROUPED | {"rope_parameters": rope}))
    text = packed_positions()
    axes = torch.stack([text, text, text // 2, text // 3])
    embeddings = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"inputs_embeds": embeddings, "use_cache": False}
    packed = assert_equal_rows(ours, theirs, **inputs, position_ids=axes)
    alone = assert_equal_rows(ours, theirs, **inputs, position_ids=axes[1:])  # no text axis, so one document a row
    assert not torch.allclose(packed, alone)


@pytest.mark.parametrize("source", ["metadata", "collator"])
def test_offsets_given_to_the_model(source):
    theirs, ours = pair(DECODERS["mistral"])
    ids, positions = tokens(1, 11), packed_positions()[:1]
    if source == "metadata":
        kwargs = VarlenMetadata.from_position_ids(positions, capacity=6).transformers_kwargs()
        assert isinstance(kwargs["max_length_q"], int)
    else:
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
        rows = [{"input_ids": part.tolist()} for part in ids[0].split([4, 6, 1])]
        batch = collator(rows)
        kwargs = {name: value for name, value in batch.items() if name.startswith(("cu_seq", "max_length"))}
    with torch.no_grad():
        out = ours(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits
        expected = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits
        # They decide, not the positions: two documents as one.
        joined = ours(
            input_ids=ids, position_ids=positions, use_cache=False,
            **VarlenMetadata.from_lengths([10, 1]).transformers_kwargs(),
        ).logits  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(joined, expected, atol=1e-2)


def test_metadata_feeds_other_attention_functions_of_transformers():
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        """Takes what transformers' flash attention takes, and attends document by document."""
        seen.append({name: kwargs[name] for name in meta.transformers_kwargs()})
        bounds = kwargs["cu_seq_lens_q"].tolist()
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[:, :, begin:end] for x in (query, key, value)), is_causal=True, enable_gqa=True
            )
            for begin, end in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    transformers.AttentionInterface.register("stand_in", attend)
    positions = packed_positions()[:1]
    meta = VarlenMetadata.from_position_ids(positions, capacity=3)
    other, theirs = build(DECODERS["llama"], "stand_in"), build(DECODERS["llama"], "sdpa")
    inputs = {"input_ids": tokens(1, 11), "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        out = other(**inputs, **meta.transformers_kwargs()).logits
        torch.testing.assert_close(out, theirs(**inputs).logits, atol=1e-4, rtol=1e-4)
    assert [kwargs["max_length_q"] for kwargs in seen] == [meta.max_seqlen_q] * 2


def test_documents_do_not_see_each_other():
    ours = build(DECODERS["gemma3"], "varlen_prep")
    positions = packed_positions()
    ids = tokens(2, 11)
    changed = ids.clone()
    changed[0, 4:10] = changed[0, 4:10].flip(0) + 1  # the second document of the first row

    def logits(ids, **inputs):
        with torch.no_grad():
            return ours(input_ids=ids, use_cache=False, **inputs).logits

    before, after = (logits(x, position_ids=positions) for x in (ids, changed))
    same = (before == after).all(-1)
    assert same[1].all()
    assert same[0].tolist() == [True] * 4 + [False] * 6 + [True]
    # The planted leak: positions that do not restart make one document, and the last token sees the change.
    one = torch.arange(11).expand(2, 11)
    assert not torch.equal(logits(ids, position_ids=one)[0, 10], logits(changed, position_ids=one)[0, 10])


def test_a_window_of_the_wrong_size_would_be_seen():
    theirs, ours = pair(DECODERS["mistral"])
    wrong = copy.deepcopy(ours)
    wrong.config.sliding_window += 1
    assert_equal_rows(ours, theirs, input_ids=tokens(2, 11))
    with pytest.raises(AssertionError):
        assert_equal_rows(wrong, theirs, input_ids=tokens(2, 11))


def test_masks_that_were_made_before_the_call():
    ours = build(DECODERS["llama"], "varlen_prep")
    meta = VarlenMetadata.from_position_ids(packed_positions(), capacity=8)
    mask = VarlenMask(meta=meta, causal=True, window_size=(-1, -1))
    with torch.no_grad():
        inputs = {"input_ids": tokens(2, 11), "position_ids": packed_positions(), "use_cache": False}
        torch.testing.assert_close(ours(**inputs, attention_mask=mask).logits, ours(**inputs).logits)


@pytest.mark.parametrize(
    "name", [name for name, backend in BACKENDS.items() if backend in (None, "native", "reference")]
)
def test_names(name):
    config = transformers.LlamaConfig(**GROUPED)
    model = transformers.LlamaModel._from_config(config, attn_implementation="eager").eval()
    expected = model(input_ids=tokens(2, 5)).last_hidden_state
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    torch.testing.assert_close(model(input_ids=tokens(2, 5)).last_hidden_state, expected)


def test_every_backend_has_a_name_that_transformers_accepts():
    assert len(BACKENDS) == len(set(BACKENDS.values())) > 5
    for name in BACKENDS:
        build(Architecture("LlamaModel", SIZES), name)
