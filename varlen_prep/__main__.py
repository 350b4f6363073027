"""`python -m varlen_prep`: what is usable on this machine, why the rest is not, and what would be chosen.

`--json` prints the same as JSON; `--check` also runs every usable backend against the reference, forward and
backward, and exits with 1 if one differs. `python -m varlen_prep audit module:function` audits what the function
returns, a callable and its input sets, and exits with 1 if it is not clean.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable
from typing import Any

import torch

from . import VarlenMetadata, __version__, audit, backends, selection, varlen_attention
from .backends import REGISTRY, Request, _machine

PACKAGES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "sageattention",
    "kernels",
    "triton",
    "diffusers",
    "transformers",
)
TASKS = {
    "cpu": [(torch.float32, 64, "training"), (torch.bfloat16, 128, "inference")],
    "cuda": [
        (torch.bfloat16, 128, "inference"),
        (torch.bfloat16, 128, "training"),
        (torch.float16, 64, "inference"),
        (torch.float32, 64, "training"),
    ],
}
"""Common calls, for which the automatic choice is shown: dtype, head size, task."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
QUANTISED = 1.5e-1
"""For forward-only kernels, which quantise the scores."""
LENGTHS = [5, 0, 33, 17]


def report() -> dict[str, Any]:
    """Versions, GPUs, every backend with its reasons, and the automatic choice for common calls."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "varlen_prep": __version__}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    versions |= {name: found for name in PACKAGES if (found := _machine.version(name)) is not None}
    gpus = [
        {"name": torch.cuda.get_device_name(i), "capability": "{}.{}".format(*torch.cuda.get_device_capability(i))}
        for i in range(torch.cuda.device_count())
    ]
    devices = ["cpu", *(["cuda"] if gpus else [])]
    return {
        "versions": versions,
        "gpus": gpus,
        "backends": [state._asdict() for state in backends()],
        "automatic": [_choice(device, *task) for device in devices for task in TASKS[device]],
    }


def _choice(device: str, dtype: torch.dtype, head_dim: int, task: str) -> dict[str, Any]:
    request = Request(
        device=torch.device(device),
        dtype=dtype,
        heads=8,
        heads_kv=8,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=False,
        window_size=(-1, -1),
        softcap=0,
        deterministic=False,
        backward=task == "training",
        lse=False,
        equal_lengths=True,
    )
    chosen = selection.select(None, request).name
    return {
        "call": f"{device} {str(dtype).removeprefix('torch.')} head size {head_dim} {task}",
        "backend": chosen,
        "why": _why(chosen, device, request),
    }


def _why(chosen: str, device: str, request: Request) -> list[str]:
    """What comes before the chosen backend in the automatic order and why each of them is passed over."""
    order = selection.automatic_order(device)
    if chosen not in order:
        return ["the scope of use_backend"]
    missing = {state.name: state.reasons for state in backends()}
    passed = order[: order.index(chosen)]
    why = "the only one that is tried here" if len(order) == 1 else f"the first of {', '.join(order)} that can"
    return [why, *(f"{name}: {'; '.join((*missing[name], *REGISTRY[name].reasons(request)))}" for name in passed)]


def check() -> list[dict[str, Any]]:
    """The largest difference of each usable backend to the reference in float64, forward and backward."""
    rows = []
    for state in backends():
        if state.usable and not state.name.endswith("_hub"):  # a hub kernel would be downloaded
            for device, dtypes in REGISTRY[state.name].dtypes.items():
                if device == "cpu" or torch.cuda.is_available():
                    rows += [_check(state.name, device, dtype) for dtype in dtypes if dtype in TOLERANCE]
    return rows


def _check(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    trains = REGISTRY[name].backward is not None
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]
    meta = VarlenMetadata.from_lengths(LENGTHS, device=device)
    found = _run(name, inputs, meta, trains)
    expected = _run("reference", [x.double() for x in inputs], meta, trains)
    difference = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    limit = TOLERANCE[dtype] if trains else QUANTISED
    return {
        "backend": name,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "difference": difference,
        "ok": difference <= limit,
    }


def _run(backend: str, inputs: list[torch.Tensor], meta: VarlenMetadata, trains: bool) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_(trains) for x in inputs[:3])
    out = varlen_attention(q, k, v, meta, backend=backend)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])] if trains else [out]


def _print(found: dict[str, Any]) -> None:
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for gpu in found["gpus"] or [{"name": "no CUDA GPU", "capability": "-"}]:
        print(f"{gpu['name']} (compute capability {gpu['capability']})")
    print("\nBackends")
    for state in found["backends"]:
        print(f"  {state['name']:<12}{'usable' if state['usable'] else 'not usable':<12}{state['summary']}")
        for reason in state["reasons"]:
            print(f"  {'':<24}- {reason}")
        if state["install"] and any("not installed" in reason for reason in state["reasons"]):
            print(f"  {'':<24}> {state['install']}")
    print("\nChosen without backend=")
    for row in found["automatic"]:
        why, *passed = row["why"]
        print(f"  {row['call']:<44}{row['backend']}, {why}")
        for reason in passed:
            print(f"  {'':<44}- not {reason}")
    if "check" in found:
        print("\nChecked against the reference in float64")
    for row in found.get("check", []):
        mark = "ok" if row["ok"] else "WRONG"
        print(f"  {row['backend']:<12}{row['device']} {row['dtype']:<10}differs by {row['difference']:.1e}  {mark}")


def _load(name: str) -> tuple[Callable[..., Any], Any]:
    """What `module:function` returns; a `ValueError` that says what is wrong with the name or with the result."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"audit: expected module:function, got {name!r}.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"audit: cannot find {name}: {error}.") from error
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise ValueError(
            f"audit: expected {name} to return (callable, inputs), inputs as for varlen_prep.audit, got {made!r}."
        )
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m varlen_prep", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="run every usable backend against the reference")
    command = parser.add_subparsers(dest="command").add_parser("audit", help="audit a function of yours")
    command.add_argument("target", metavar="module:function", help="a function that returns (callable, inputs)")
    command.add_argument("--backward", action="store_true", help="also gradients")
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "audit":
        try:
            fn, inputs = _load(options.target)
        except ValueError as error:
            parser.error(str(error))
        audited = audit(fn, inputs, backward=options.backward)
        print(json.dumps(audited.to_dict(), indent=2) if options.json else audited)
        return 1 if audited.problems() else 0
    found = report()
    if options.check:
        found["check"] = check()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if all(row["ok"] for row in found.get("check", [])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
