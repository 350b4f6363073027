"""The shapes of the attention benchmark, and the tensors, metadata and check of each.

B rows, S padded length, H heads, D head size.
"""

from __future__ import annotations

import dataclasses

import torch
from measure import attention_error
from torch import Tensor

from varlen_prep import VarlenMetadata, prepare_varlen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Key lengths of each row; queries are all of them, unless causal documents in one packed row."""

    name: str
    seq_q: int
    seq_kv: int
    lengths: tuple[int, ...]
    heads: int
    heads_kv: int
    dim: int
    kind: str = "right"
    """Where the padding is: "none", "right", "hole" (every seventh key), or "documents": causal, packed."""


def cases(device: str) -> list[Case]:
    if device == "cpu":
        flux = dict(seq_q=32, seq_kv=32, heads=2, heads_kv=2, dim=8)
        return [
            Case(name="no mask", lengths=(32, 32), kind="none", **flux),
            Case(name="right", lengths=(32, 20), **flux),
            Case(name="hole", lengths=(32, 20), kind="hole", **flux),
            Case(name="documents", lengths=(20, 12), kind="documents", **{**flux, "heads": 4}),
        ]
    flux = dict(seq_q=4608, seq_kv=4608, heads=24, heads_kv=24, dim=128)
    light = (4608, 4400, 4250, 4180)
    return [
        Case(name="Flux B4 S4608, no mask", lengths=(4608,) * 4, kind="none", **flux),
        Case(name="Flux B4 S4608, 4608/4400/4250/4180", lengths=light, **flux),
        Case(name="Flux B4 S4608, 4608/1000/300/77", lengths=(4608, 1000, 300, 77), **flux),
        Case(name="Flux B4 S4608, holes", lengths=light, kind="hole", **flux),
        Case(
            name="small B4 S128, no mask", seq_q=128, seq_kv=128, lengths=(128,) * 4, heads=8, heads_kv=8, dim=64,
            kind="none",
        ),
        Case(name="small B4 S128", seq_q=128, seq_kv=128, lengths=(128, 100, 64, 7), heads=8, heads_kv=8, dim=64),
        Case(name="Flux B1 S4608, 4200", lengths=(4200,), **flux),
        Case(name="Flux B8 S4608, text 40..512", lengths=tuple(4136 + 67 * i for i in range(8)), **flux),
        Case(
            name="video B1 S32768, 30000", seq_q=32768, seq_kv=32768, lengths=(30000,), heads=24, heads_kv=24, dim=128,
        ),
        Case(
            name="cross B4 Sq4096 Sk512, 512/300/150/40", seq_q=4096, seq_kv=512, lengths=(512, 300, 150, 40),
            heads=24, heads_kv=24, dim=128,
        ),
        Case(
            name="encoder B64 S512, half full", seq_q=512, seq_kv=512, lengths=tuple(8 * (i + 1) for i in range(64)),
            heads=16, heads_kv=16, dim=64,
        ),
        *(
            Case(
                name=f"LLM 32k tokens, {count} documents", seq_q=32768, seq_kv=32768, lengths=(32768 // count,) * count,
                heads=32, heads_kv=8, dim=128, kind="documents",
            )
            for count in (8, 64)
        ),
    ]  # fmt: skip


class Problem:
    """The tensors of a case, its metadata, and its check."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.causal = case.kind == "documents"
        batch = 1 if self.causal else len(case.lengths)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(seq: int, heads: int) -> Tensor:
            shape = (batch, seq, heads, case.dim)
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        self.q, self.dout = random(case.seq_q, case.heads), random(case.seq_q, case.heads)
        self.k, self.v = random(case.seq_kv, case.heads_kv), random(case.seq_kv, case.heads_kv)
        lengths = torch.tensor(case.lengths, device=device)
        index = torch.arange(case.seq_kv, device=device)
        self.mask: Tensor | None = None
        if self.causal:
            self.ids = torch.arange(len(case.lengths), device=device).repeat_interleave(lengths)[None]
        elif case.kind != "none":
            self.mask = index < lengths[:, None]
            if case.kind == "hole":
                self.mask = self.mask & (index % 7 != 3)

    def metas(self) -> dict[str, VarlenMetadata]:
        """Metadata by layout."""
        case, batch = self.case, self.q.shape[0]
        if self.causal:
            # Ids may say that rows are padding, anywhere; positions cannot, so nothing has to be moved.
            count, longest = len(case.lengths), max(case.lengths)
            index = torch.arange(case.seq_q, device=self.device)
            positions = index - index.new_tensor([0, *case.lengths]).cumsum(0)[self.ids[0]]
            return {
                "document ids": VarlenMetadata.from_document_ids(self.ids, capacity=count, max_seqlen=longest),
                "position ids": VarlenMetadata.from_position_ids(positions[None], capacity=count, max_seqlen=longest),
            }
        if self.mask is None:
            return {"uniform": prepare_varlen(batch, case.seq_q, case.seq_kv, device=self.device)}
        layouts = ("packed",) if case.kind == "hole" else ("packed", "in_place")
        return {
            layout: prepare_varlen(
                batch, case.seq_q, case.seq_kv, self.mask, layout=layout,
                max_seqlen_k=case.seq_kv if layout == "packed" else None,
            )
            for layout in layouts
        }  # fmt: skip

    def error(self, out: Tensor) -> float:
        """Of an output, at places spread over the queries; it has all of them, or those that the mask keeps."""
        batch, seq = self.q.shape[:2]
        samples = [(b, i) for b in range(batch) for i in torch.linspace(0, seq - 1, 9).long().tolist()]
        if out.numel() < self.q.numel():  # queries without their padding
            assert self.mask is not None
            samples = [place for place in samples if self.mask[place]]
            out = torch.zeros_like(self.q).masked_scatter(self.mask[..., None, None], out)
        out = out.reshape(self.q.shape)
        row, query = (torch.tensor(side, device=self.device) for side in zip(*samples, strict=True))
        index = torch.arange(self.case.seq_kv, device=self.device)
        if self.causal:
            allowed = (self.ids[0] == self.ids[0, query][:, None]) & (index <= query[:, None])
        elif self.mask is None:
            allowed = torch.ones(len(samples), self.case.seq_kv, dtype=torch.bool, device=self.device)
        else:
            allowed = self.mask[row]
        return attention_error(out, self.q, self.k, self.v, allowed, samples)
