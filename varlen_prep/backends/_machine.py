"""What this machine has: packages (found, not imported) and GPUs."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import torch


def has_module(name: str) -> bool:
    """Whether a top-level module can be imported; nothing is imported to find out."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def has_file(package: str, relative: str) -> bool:
    """Whether a package holds a file or folder; flash-attn 2 and 4 share the package name `flash_attn`."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / relative).exists() for folder in folders or ())


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# The mark of torch.compiler.assume_constant_result, see `selection`: after a graph break this may be traced by itself.
version._dynamo_marked_constant = True  # type: ignore[attr-defined]


def gpu_reasons(lowest: tuple[int, int], highest: tuple[int, int] | None = None) -> list[str]:
    """Reasons why the current GPU cannot run kernels built for CUDA compute capabilities in [lowest, highest]."""
    if torch.version.hip is not None:
        return ["ROCm build of torch (it needs an NVIDIA GPU)"]
    if not torch.cuda.is_available():
        return ["no CUDA GPU is available"]
    found = torch.cuda.get_device_capability()
    if found < lowest or (highest is not None and found > highest):
        most = "" if highest == lowest else f" to {highest[0]}.{highest[1]}" if highest else " or newer"
        wanted = f"{lowest[0]}.{lowest[1]}{most}"
        return [f"GPU compute capability {found[0]}.{found[1]} (it needs {wanted})"]
    return []
