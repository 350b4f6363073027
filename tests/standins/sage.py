"""A package `sageattention` that runs on the CPU: the real names, signatures and traps of 1.0.6, 2.0.1 and 2.2.0.

T packed rows, N sequences, H heads, D head size.  It computes what the Triton kernels compute, block by block: int8
quantisation, logits of 0 for the lanes past the last key (up to 2.0.1), scales read past those of a sequence by the
causal kernel, rows that nobody writes (NaN here, old memory there), the mean of K over the whole buffer.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LOG2E = 1.44269504
_MODULES = {
    "quant_per_block_varlen": "quant_per_block_int8_kernel = make.quantizer()\n",
    "attn_qk_int8_block_varlen": "forward = make.attention(masks={masks}, causal=False)\n",
    "attn_qk_int8_per_block_causal_varlen": "forward = make.attention(masks={masks}, causal=True)\n",
}
# The line of the real kernel that hides the lanes past the last key; the versions before do not have it.
_MASK_LINE = "# qk += tl.where(k_mask, 0, float('-inf'))\n"


def install(folder: Path, version: str = "1.0.6", *, masks: bool | None = None, without: str = "") -> None:
    """Writes the package and its metadata into a folder that the caller puts on `sys.path`."""
    masks = version.startswith("2.2") if masks is None else masks
    package = folder / "sageattention"
    home = package if version.startswith("1.") else package / "triton"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    name = "sageattention" if version.startswith("1.") else "sageattention.triton"
    (package / "__init__.py").write_text(
        "from standins import sage as make\n"
        f"sageattn_varlen = make.public(__name__, {name!r}, in_place={version.startswith('1.')})\n"
    )
    for module, text in _MODULES.items():
        if module != without:
            head = "from standins import sage as make\n" + (_MASK_LINE if masks else "")
            (home / f"{module}.py").write_text(head + text.format(masks=masks))
    metadata = folder / f"sageattention-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sageattention\nVersion: {version}\n")


def quantizer() -> Any:
    """`quant_per_block_int8_kernel`, launched as `kernel[grid](...)`."""

    def launch(grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        _quantize(grid, *args, **options)

    def fn(
        Input, Output, Scale, cu_seqlens_input, cu_seqlens_scale, stride_ih, stride_in, stride_oh, stride_on,  # noqa: N803
        sm_scale, H, C, BLK,  # noqa: N803
    ): ...  # fmt: skip

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *args, **options: launch(grid, *args, **options)

    kernel = Kernel()
    kernel.fn = fn  # type: ignore[attr-defined]
    return kernel


def _quantize(
    grid: tuple[int, int, int], x: Tensor, out: Tensor, scale: Tensor, cu: Tensor, cu_scale: Tensor, stride_ih: int,
    stride_in: int, stride_oh: int, stride_on: int, sm_scale: float, H: int, C: int, BLK: int,  # noqa: N803
) -> None:  # fmt: skip
    assert (stride_in, stride_ih, x.stride(2)) == (*x.stride()[:2], 1), "strides of the input"
    assert (stride_on, stride_oh, out.stride(2)) == (*out.stride()[:2], 1), "strides of the output"
    assert x.shape[-1] == C
    assert C in (64, 128), "head size"
    assert (grid[1], grid[2]) == (H, cu.shape[0] - 1)
    for z, (begin, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        for block in range(min(grid[0], -(-(end - begin) // BLK))):
            rows = slice(begin + block * BLK, min(begin + (block + 1) * BLK, end))
            wide = x[rows].float() * sm_scale
            step = wide.abs().amax((0, 2), keepdim=True) / 127
            ratio = wide / step
            # The GPU's conversion of NaN (0 / 0, where a whole block is 0) to an int gives 0.
            out[rows] = (ratio + ratio.sign() * 0.5).nan_to_num(0).trunc().to(torch.int8)
            scale.view(-1, H)[int(cu_scale[z]) + block] = step[0, :, 0]


def attention(*, masks: bool, causal: bool) -> Any:
    """`forward` of the attention modules."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, q_scale: Tensor,
        k_scale: Tensor, cu_seqlens_q_scale: Tensor, cu_seqlens_k_scale: Tensor, output_dtype: Any = torch.float16,
    ) -> Tensor:  # fmt: skip
        assert isinstance(max_seqlen_q, int), "max_seqlen_q must be an int"
        assert (q.dtype, k.dtype, v.dtype) == (torch.int8, torch.int8, torch.float16)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] in (64, 128), "head size"
        assert q.stride(-1) == v.stride(-1) == 1
        out = torch.full(q.shape, torch.nan, dtype=output_dtype)
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        # What lies past the end of the buffer is anything: NaN here.
        past = torch.full((4, k_scale.shape[1]), torch.nan)
        steps = torch.cat([k_scale.view(k_scale.shape[0], -1), past]).repeat_interleave(groups, 1)
        launched = -(-max_seqlen_q // 128) * 128
        spans = zip(*(cu.tolist()[i:] for cu in (cu_seqlens_q, cu_seqlens_k) for i in (0, 1)), strict=False)
        for z, (q_begin, q_end, k_begin, k_end) in enumerate(spans):
            for first in range(0, min(q_end - q_begin, launched), 128):
                rows = slice(q_begin + first, min(q_begin + first + 128, q_end))
                q_step = q_scale.view(q_scale.shape[0], -1)[int(cu_seqlens_q_scale[z]) + first // 128]
                keys = slice(k_begin, max(k_end, k_begin))
                k_steps = steps[int(cu_seqlens_k_scale[z]) :]
                out[rows] = _block(q[rows], k[keys], v[keys], q_step, k_steps, first, masks, causal).to(output_dtype)
        return out

    return forward


def _block(
    q: Tensor, k: Tensor, v: Tensor, q_step: Tensor, k_steps: Tensor, first: int, masks: bool, causal: bool
) -> Tensor:
    """One block of 128 queries, the first of which has position `first`, against the keys of its sequence."""
    lanes = first + 128 if causal else -(-k.shape[0] // 64) * 64
    if lanes == 0:
        return torch.zeros(q.shape)
    lane, keys = torch.arange(lanes), k.shape[0]
    k, v = (torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, max(lanes - x.shape[0], 0)))[:lanes] for x in (k, v))
    steps = k_steps[: lanes // 64].repeat_interleave(64, 0)
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * q_step[:, None, None] * steps.T[:, None]
    if masks:
        logits = logits + torch.where(lane < keys, 0, -torch.inf)
    if causal:
        hidden = lane > first + torch.arange(q.shape[0])[:, None]
        logits = logits + torch.where(hidden & (lane >= first), -torch.inf if masks else -1e6, 0)
    weights = torch.exp2(logits - logits.amax(-1, keepdim=True))
    total = weights.sum(-1).T[..., None]
    return torch.einsum("hqk,khd->qhd", weights.half().float(), v) / total


def public(package: str, home: str, *, in_place: bool) -> Any:
    """`sageattn_varlen` itself, which users call without this library."""

    def sageattn_varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, is_causal: bool = False, sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        import importlib

        quantize, full, diagonal = (importlib.import_module(f"{home}.{module}") for module in _MODULES)
        assert q.shape[-1] in (64, 128), "varlen only support head_dim [64, 128]."
        if smooth_k:
            mean = k.mean(0, keepdim=True)
            k = k.sub_(mean) if in_place else k - mean
        sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        sides = SimpleNamespace(int8=[], scale=[], cu=[])
        for x, cu, longest, block, factor in (
            (q, cu_seqlens_q, max_seqlen_q, 128, sm_scale * LOG2E), (k, cu_seqlens_k, max_seqlen_k, 64, 1.0),
        ):  # fmt: skip
            blocks = torch.nn.functional.pad(((cu.diff() + block - 1) // block).cumsum(0), (1, 0))
            int8, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(int(blocks[-1]), x.shape[1])
            grid = -(-longest // block), x.shape[1], cu.shape[0] - 1
            strides = x.stride(1), x.stride(0), int8.stride(1), int8.stride(0)
            quantize.quant_per_block_int8_kernel[grid](
                x, int8, scale, cu, blocks, *strides, sm_scale=factor, H=x.shape[1], C=x.shape[2], BLK=block
            )
            for name, value in (("int8", int8), ("scale", scale), ("cu", blocks)):
                getattr(sides, name).append(value)
        forward = (diagonal if is_causal else full).forward
        return forward(
            *sides.int8, v.half(), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, *sides.scale, *sides.cu,
            output_dtype=q.dtype,
        )  # fmt: skip

    return sageattn_varlen
