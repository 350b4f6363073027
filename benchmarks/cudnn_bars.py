"""What cuDNN's attention costs: `python benchmarks/cudnn_bars.py`, under a minute on an H200.

Against SDPA with a key mask, forward and backward, in one run of interleaved medians: eight calls queued, as in a
model whose host is ahead of the GPU, and one alone on an idle GPU, which also shows the host's part; the first call, a
new shape, and 200 shapes in a row with the plans that they build; what an eager call costs the host at small sizes; and
whether NaN in rows of no sequence reaches the others.  B rows, S padded length, H heads, D head size; bf16,
microseconds.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from measure import captured, device_work, times
from torch import Tensor

from varlen_prep import VarlenMetadata, pack, prepare_varlen, varlen_attention
from varlen_prep.backends import REGISTRY, Arguments, _cudnn_plans, cudnn
from varlen_prep.backends._cudnn_sequences import describe

B, S, H, D = 4, 4608, 24, 128
LENGTHS = {"light padding": [4608, 4400, 4250, 4180], "heavy padding": [4608, 1000, 300, 77]}
BARS = {"light padding": 0.67, "heavy padding": 0.24}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def first_calls(record: _cudnn_plans.Device) -> None:
    print("\nFirst calls, forward + backward, milliseconds")
    shapes = {"first of all": (2, 300), "the same again": (2, 300), "new length, same plans": (2, 290),
              "new length, new plans": (2, 1300), "new number of rows": (20, 300)}  # fmt: skip
    for title, (batch, length) in shapes.items():
        q, k, v = (random(batch * length, 8, D).requires_grad_() for _ in "qkv")
        meta = VarlenMetadata.from_lengths([length] * batch, device="cuda")
        torch.cuda.synchronize()
        builds, begin = record.builds, time.perf_counter()
        varlen_attention(q, k, v, meta, backend="cudnn").sum().backward()
        torch.cuda.synchronize()
        print(f"  {title}: {(time.perf_counter() - begin) * 1e3:.1f}, plans built {record.builds - builds}")


def stream_of_shapes(record: _cudnn_plans.Device, count: int = 200) -> None:
    print(f"\n{count} different (batch, length) shapes in a row, H8 D{D}")
    pairs = list(itertools.product(range(1, 33), range(64, 2049, 31)))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:count].tolist()
    for backward in (False, True):
        builds, seconds, begin = record.builds, record.build_seconds, time.perf_counter()
        for index in order:
            batch, length = pairs[index]
            x = random(batch * length, 8, D).requires_grad_(backward)
            offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
            cudnn.warm_up(x, x, x, offsets, offsets, length, length, backward=backward)
        torch.cuda.synchronize()
        found = f"{record.builds - builds} plans built in {record.build_seconds - seconds:.2f} s"
        what = "backward, after forward" if backward else "forward"
        print(f"  {what}: {found}, {time.perf_counter() - begin:.2f} s in all, at most {_cudnn_plans.LIMIT} kept")


def bars(title: str) -> None:
    lengths = torch.tensor(LENGTHS[title], device="cuda")
    mask = torch.arange(S, device="cuda") < lengths[:, None]
    q, k, v, dout = (random(B, S, H, D) for _ in range(4))
    dense = [x.transpose(1, 2) for x in (q, k, v)]

    def sdpa(rows: list[Tensor]) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask[:, None, None])

    metas = {one: prepare_varlen(B, S, S, mask, max_seqlen_k=S, layout=one) for one in ("in_place", "packed")}
    packed = [pack(q, metas["packed"], "q"), *(pack(x, metas["packed"], "k") for x in (k, v))]
    op = torch.ops.varlen_prep.cudnn_varlen
    given = {one: (*meta.flash_kwargs().values(), False, -1, -1) for one, meta in metas.items()}
    expected = sdpa(dense).transpose(1, 2)
    calls: dict[str, Callable[[], object]] = {"sdpa with mask": lambda: sdpa(dense)}
    rows = {"in_place": [x.flatten(0, 1) for x in (q, k, v)], "packed": packed}
    for one, meta in metas.items():
        calls[f"operator, {one} rows"] = lambda one=one: op(*rows[one], *given[one])[0].view(q.shape)
        calls[f"varlen_attention, {one}"] = lambda meta=meta: varlen_attention(q, k, v, meta, backend="cudnn")
    print(f"\n{title} {LENGTHS[title]}, B{B} S{S} H{H} D{D}, forward (bar {BARS[title]})")
    with torch.no_grad():
        for name, call in calls.items():
            error = (call().float() - expected.float()).abs().max().item() if name != "sdpa with mask" else 0.0
            assert error < 2e-2, f"{name} differs by {error}"
        report(calls)
        print("  replayed from a CUDA graph")
        report({name: captured(call) for name, call in calls.items()})
    leaves = [x.detach().requires_grad_() for x in dense]
    plain = [x.detach().requires_grad_() for x in (q, k, v)]
    outs = {"sdpa with mask": (sdpa(leaves), leaves, dout.transpose(1, 2))}
    for one, meta in metas.items():
        outs[f"varlen_attention, {one}"] = (varlen_attention(*plain, meta, backend="cudnn"), plain, dout)
        inner = [x.detach().requires_grad_() for x in rows[one]]
        outs[f"operator, {one} rows"] = (op(*inner, *given[one])[0], inner, dout.flatten(0, 1))
    print(f"{title}, backward")
    report(
        {
            name: lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout, retain_graph=True)
            for name, (out, leaves, dout) in outs.items()
        }
    )


def report(calls: dict[str, Callable[[], object]]) -> None:
    measured = [times(calls, "cuda", runs=15, queued=queued, ahead=queued > 1) for queued in (8, 1)]
    medians, alone = ({name: statistics.median(values) for name, values in found.items()} for found in measured)
    for name, value in medians.items():
        print(f"  {name}: {value:.0f} us, {value / medians['sdpa with mask']:.3f} of SDPA; alone {alone[name]:.0f} us")
    for name, call in calls.items():
        if name != "sdpa with mask":
            print(f"    {name}: {device_work(call)[0]} kernels, {device_work(call)[1]:.0f} us in them")


def host_cost(record: _cudnn_plans.Device, lengths: list[int], heads: int, dim: int) -> None:
    print(f"\nAn eager call at {lengths} H{heads} D{dim}: microseconds of the host, and of the kernels")
    q, k, v = (random(sum(lengths), heads, dim) for _ in "qkv")
    meta = VarlenMetadata.from_lengths(lengths, device="cuda")
    given = (*meta.flash_kwargs().values(), False, -1, -1)
    for name in ("native", "flash3", "flash4", "cudnn"):
        if not REGISTRY[name].missing():
            op = getattr(torch.ops.varlen_prep, REGISTRY[name].op)
            spent = host(lambda op=op: op(q, k, v, *given))
            count, busy = device_work(lambda op=op: op(q, k, v, *given))
            print(f"  {name}: {spent:.1f}, {count} kernels {busy:.1f}")
    args = Arguments(*given, dim**-0.5, 0.0, False)
    plan = record.plan(cudnn._key([q, k, v], args))
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": q.new_empty(q.shape[:2], dtype=torch.float32)}
    tensors |= describe(args, plan.key, tensors["out"], tensors["lse"])
    buffers = {plan.uids[name]: x for name, x in tensors.items() if name in plan.uids}
    workspace = torch.empty(plan.workspace + 1, dtype=torch.uint8, device="cuda")
    rest = {"workspace": workspace, "handle": record._handle}
    parts: dict[str, Callable[[], object]] = {
        "finding the plan": lambda: record.plan(cudnn._key([q, k, v], args)),
        "lengths and offsets": lambda: describe(args, plan.key, tensors["out"], tensors["lse"]),
        "running the plan": lambda: record.run(plan, tensors),
        "of which execute": lambda: plan.graph.execute(buffers, **rest),
    }
    if "tensor_uids" in inspect.signature(plan.graph.execute).parameters:
        uids, values = tuple(buffers), list(buffers.values())
        parts["execute by tensor_uids"] = lambda: plan.graph.execute(values, **rest, tensor_uids=uids)
    for name, call in parts.items():
        print(f"    {name}: {host(call):.1f}")


def host(call: Callable[[], object], count: int = 300) -> float:
    """Microseconds per call until it returns, the device not waited for."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    value = (time.perf_counter() - begin) / count * 1e6
    torch.cuda.synchronize()
    return value


def poison(dim: int, causal: bool) -> None:
    """Sequences alternate with 50 keys that no query belongs to, and rows follow the last offset."""
    lengths = torch.tensor([70, 33, 257, 1, 100], device="cuda")
    sizes = [torch.zeros(10, dtype=torch.int64, device="cuda") for _ in "qk"]
    for side in sizes:
        side[::2] = lengths
    sizes[1][1::2] = 50
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in sizes]
    rows = {"q": random(700, 4, dim), "k": random(900, 4, dim), "v": random(900, 4, dim), "dout": random(700, 4, dim)}
    part = {
        "q": torch.arange(700, device="cuda") < offsets[0][-1],
        "k": torch.zeros(900, dtype=torch.bool, device="cuda"),
    }
    for begin, size in zip(offsets[1][:-1:2].tolist(), lengths.tolist(), strict=True):
        part["k"][begin : begin + size] = True
    part |= {"v": part["k"], "dout": part["q"]}
    args = Arguments(*offsets, 257, 257, causal, -1, -1, dim**-0.5, 0.0, False)
    clean, lse = (x.contiguous() for x in cudnn.forward(rows["q"], rows["k"], rows["v"], args))
    for names in (["k"], ["v"], ["q"], ["dout"], ["q", "k", "v", "dout"]):
        bad = {n: x.masked_fill(~part[n][:, None, None], torch.nan) if n in names else x for n, x in rows.items()}
        out = cudnn.forward(bad["q"], bad["k"], bad["v"], args)[0]
        grads = cudnn.backward(bad["dout"], bad["q"], bad["k"], bad["v"], clean, lse, args)
        results = {"out": (out, "q"), "dq": (grads[0], "q"), "dk": (grads[1], "k"), "dv": (grads[2], "k")}
        reached = [name for name, (x, side) in results.items() if not x[part[side]].isfinite().all()]
        print(f"  D{dim} causal {causal}, NaN in {' '.join(names)}: reaches {' '.join(reached) or 'nothing'}")


def main() -> None:
    if not torch.cuda.is_available() or (reasons := cudnn.CUDNN.missing()):
        raise SystemExit(f"this benchmark needs a CUDA GPU and cuDNN: {reasons if torch.cuda.is_available() else ''}")
    record = _cudnn_plans.on(torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    first_calls(record)
    for title in LENGTHS:
        bars(title)
    host_cost(record, [32, 17], 4, 64)
    host_cost(record, [256] * 4, 8, 64)
    print("\nNaN in rows of no sequence")
    for dim, causal in itertools.product((64, 128), (False, True)):
        poison(dim, causal)
    stream_of_shapes(record)


if __name__ == "__main__":
    main()
