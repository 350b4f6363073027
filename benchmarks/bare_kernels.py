"""What the bare kernel packages do beside this library, in one run on the GPU: `python benchmarks/bare_kernels.py`.

Every row is measured, nothing is assumed: whether a call traces as a full graph, host syncs per call, the largest error
against float64 with and without NaN in rows that take no part, and whether the caller's K is left alone. Prints a
Markdown table; packages that are not installed are listed as such.  T packed rows, H heads, D head size.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import platform
from collections.abc import Callable
from importlib import metadata

import torch
from measure import count_syncs
from torch import Tensor

import varlen_prep
from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention

LENGTHS = [100, 33, 1, 257, 65]
Call = Callable[..., Tensor]
"""(q, k, v, metadata, causal=False) -> out."""


def bare_flash(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, causal: bool = False) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, *_lengths(meta), causal=causal)


def bare_flash3(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, causal: bool = False) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(q, k, v, *_lengths(meta), causal=causal)
    return out[0] if isinstance(out, tuple) else out


def bare_flash4(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, causal: bool = False) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, **meta.flash_kwargs(), causal=causal)[0]


def bare_sage(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, causal: bool = False) -> Tensor:
    from sageattention import sageattn_varlen

    return sageattn_varlen(q, k, v, *_lengths(meta), is_causal=causal)


def bare_torch(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, causal: bool = False) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, *_lengths(meta), window_size=(-1, 0 if causal else -1), **_grouped_heads())


@functools.cache
def _grouped_heads() -> dict[str, bool]:
    """Newer releases of torch want to be told of grouped heads; the older ones take them as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _lengths(meta: VarlenMetadata) -> tuple[Tensor, Tensor, int, int]:
    return meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k


BARE: dict[str, Call] = {
    "native": bare_torch,
    "flash": bare_flash,
    "flash3": bare_flash3,
    "flash4": bare_flash4,
    "sage": bare_sage,
}


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """One sequence at a time in float64."""
    parts = []
    for q_, k_, v_ in zip(*(x[: sum(lengths)].double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * q.shape[-1] ** -0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_))
    return torch.cat(parts)


def describe(call: Call, tail: int) -> list[str]:
    """The cells of one row: traces, syncs, error, error with a NaN tail, tail of the output, caller's K."""
    device = "cuda"
    rows, total = sum(LENGTHS) + tail, sum(LENGTHS)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(rows, 8, 64, device=device, dtype=torch.bfloat16, generator=generator) for _ in "qkv")
    meta = VarlenMetadata.from_lengths(torch.tensor(LENGTHS, device=device), max_seqlen_q=max(LENGTHS))
    want = expected(q, k, v, LENGTHS)
    before = k.clone()
    out = call(q, k, v, meta)
    kept = "kept" if torch.equal(before, k) else f"changed by {(k - before).abs().max().item():.2g}"
    k.copy_(before)
    error = (out[:total].double() - want).abs().max().item()
    syncs = count_syncs(lambda: call(q, k, v, meta))
    k.copy_(before)
    for x in (q, k, v):
        x[total:] = torch.nan
    # Freed memory that the next output may get: rows that a kernel does not write show as NaN.
    del out
    torch.full((8, rows, 8, 64), torch.nan, device=device, dtype=torch.bfloat16)
    poisoned = call(q, k, v, meta)
    bad = (poisoned[:total].double() - want).abs().max().item()
    tail_state = "0" if (poisoned[total:] == 0).all() else "unwritten"
    k.copy_(before)
    return [traces(call, q, before, v, meta), str(syncs), f"{error:.3f}", f"{bad:.3f}", tail_state, kept]


def traces(call: Call, q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata) -> str:
    torch._dynamo.reset()
    try:
        torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(q, k, v, meta)
    except Exception as error:
        text = " ".join(str(error).split())
        return f"no: {type(error).__name__}: {text[:70].replace('|', '/')}"
    return "yes"


def diffusers_rows() -> list[list[str]]:
    """diffusers' own varlen route over flash-attn: a mask with a hole, and no mask."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    theirs = _AttentionBackendRegistry._backends[AttentionBackendName.FLASH_VARLEN]
    batch, seq = 4, 512
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, seq, 8, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in "qkv")
    hole = torch.ones(batch, seq, dtype=torch.bool, device="cuda")
    hole[:, 100:200] = False
    rows = []
    for name, mask in (("no mask", None), ("mask with a hole", hole)):
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 64**-0.5
        scores = scores if mask is None else scores.masked_fill(~mask[:, None, None], -torch.inf)
        want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())

        def ours(mask: Tensor | None = mask) -> Tensor:
            meta = prepare_varlen(batch, seq, seq, mask, max_seqlen_k=seq, device="cuda")
            return varlen_attention(q, k, v, meta, backend="flash")

        def route(mask: Tensor | None = mask) -> Tensor:
            return theirs(q, k, v, attn_mask=mask)

        for who, call in ((f"diffusers {metadata.version('diffusers')} flash_varlen", route), ("varlen_prep", ours)):
            error = (call().double() - want).abs().max().item()
            rows.append([f"{who}, {name}", str(count_syncs(call)), f"{error:.3f}"])
    return rows


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tail", type=int, default=70, help="rows past the last offset")
    tail = parser.parse_args().tail
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "sageattention", "diffusers"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    print(f"{torch.cuda.get_device_name()}; {', '.join(versions)}; lengths {LENGTHS}, {tail} rows past the end\n")
    rows, states = [], {state.name: state for state in varlen_prep.backends()}
    for name, bare in BARE.items():
        if not states[name].usable:
            print(f"{name}: not run: {'; '.join(states[name].reasons)}\n")
            continue

        def ours(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, name: str = name) -> Tensor:
            return varlen_attention(q, k, v, meta, backend=name)

        with torch.no_grad():
            rows += [[f"{name}: bare", *describe(bare, tail)], [f"{name}: varlen_prep", *describe(ours, tail)]]
    header = ["kernel", "full graph", "syncs", "error", "error, NaN tail", "output tail", "caller's K"]
    print(table(header, rows))
    if states["flash"].usable:
        with torch.no_grad():
            print("\n" + table(["route over flash-attn 2", "syncs", "error"], diffusers_rows()))


if __name__ == "__main__":
    main()
