"""Kernels through the `kernels` library: which one is asked for, who is trusted, when it is loaded.

A recording `kernels` module shows what would be asked of the Hub; the real library loads real local folders.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import sys
import textwrap
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, assert_near, make_inputs, oracle, refuses, run, run_python
from standins import flash2, flash3, flash4, sage

from varlen_prep import VarlenMetadata, backends, op, prepare_varlen, varlen_attention
from varlen_prep.backends import hub

HALF = (torch.float16, torch.bfloat16)
RECORDS = {record.name: record for record in (hub.FLASH_HUB, hub.FLASH3_HUB, hub.FLASH4_HUB, hub.SAGE_HUB)}
needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="needs the real loader: pip install kernels"
)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no kernel, with the backends allowed on the CPU."""
    monkeypatch.setattr(hub, "_loaded", {})
    for name, record in RECORDS.items():
        if not hasattr(torch.ops.varlen_prep, record.op):
            op.define(record)
        monkeypatch.setitem(op.REGISTRY, name, dataclasses.replace(record, dtypes={"cpu": HALF}, missing=list))


class Asked(list[Any]):
    """What was asked of `kernels`; every answer is the next of `modules`, or the same stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[Any] = []

    def answer(self, *call: Any) -> Any:
        self.append(call)
        return self.modules.pop(0) if self.modules else flash2.hub()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A module `kernels` with the signatures of 0.16."""
    record = Asked()

    def get_kernel(
        repo_id: str, revision: str | None = None, version: int | None = None, backend: str | None = None,
        user_agent: str | dict | None = None, trust_remote_code: bool | list[str] = False, check_arch: bool = True,
    ) -> Any:  # fmt: skip
        assert (revision is None) != (version is None), "Only one of `revision` or `version` must be specified."
        return record.answer(repo_id, version, revision, trust_remote_code)

    def get_local_kernel(repo_path: Path, backend: str | None = None) -> Any:
        assert isinstance(repo_path, Path)
        return record.answer(repo_path)

    install(monkeypatch, get_kernel=get_kernel, get_local_kernel=get_local_kernel)
    return record


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    module = ModuleType("kernels")
    module.__spec__ = ModuleSpec("kernels", None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "kernels", module)


def packed() -> tuple[Any, VarlenMetadata]:
    return make_inputs((8,), (8,), dtype=torch.float16), VarlenMetadata.from_lengths([6, 2])


def attend(backend: str = "flash_hub") -> Any:
    inputs, meta = packed()
    return varlen_attention(*inputs[:3], meta, backend=backend)


def test_defaults_are_these_repositories_and_versions() -> None:
    assert {name: (default.repo, default.version) for name, default in hub.DEFAULTS.items()} == {
        "flash_hub": ("kernels-community/flash-attn2", 3),
        "flash3_hub": ("kernels-community/flash-attn3", 1),
        "flash4_hub": ("kernels-community/flash-attn4", 0),
        "sage_hub": ("SageAttention/sage-attention", 3),
    }
    assert set(RECORDS) == set(hub.DEFAULTS)


@pytest.mark.parametrize(("options", "expected"), [
    ({}, ("kernels-community/flash-attn2", 3, None, False)),
    ({"version": 1}, ("kernels-community/flash-attn2", 1, None, False)),
    ({"version": 0}, ("kernels-community/flash-attn2", 0, None, False)),
    ({"revision": "abc"}, ("kernels-community/flash-attn2", None, "abc", False)),
    ({"repo": "me/mine", "version": 7}, ("me/mine", 7, None, False)),
    ({"repo": "me/mine", "revision": "main"}, ("me/mine", None, "main", False)),
    ({"repo": "kernels-community/flash-attn2"}, ("kernels-community/flash-attn2", 3, None, False)),
    ({"trust_remote_code": True}, ("kernels-community/flash-attn2", 3, None, True)),
    ({"trust_remote_code": ["key"]}, ("kernels-community/flash-attn2", 3, None, ["key"])),
    ({"path": "some/folder"}, (Path("some/folder"),)),
])  # fmt: skip
def test_what_the_user_says_wins_over_the_default(options: dict[str, Any], expected: Any, asked: Asked) -> None:
    hub.load_hub_kernel("flash_hub", **options)
    assert asked == [expected]
    attend()
    assert asked == [expected], "a call loads nothing more"


@pytest.mark.parametrize(("options", "fragments"), [
    ({"version": 1, "revision": "abc"}, ["version=1", "revision='abc'", "one of them"]),
    ({"repo": "me/mine"}, ["version", "revision", "'me/mine'", "kernels-community/flash-attn2"]),
    ({"path": "x", "repo": "me/mine"}, ["path", "repo"]),
    ({"path": "x", "version": 0, "trust_remote_code": True}, ["path", "version, trust_remote_code"]),
])  # fmt: skip
def test_pins_that_contradict_each_other_are_refused(options: Any, fragments: list[str], asked: Asked) -> None:
    with refuses(ValueError, *fragments):
        hub.load_hub_kernel("flash_hub", **options)
    assert asked == []


def test_unknown_names_are_refused_with_the_known_ones(asked: Asked) -> None:
    with refuses(ValueError, "flash_hub, flash3_hub, flash4_hub, sage_hub", "'flash'"):
        hub.load_hub_kernel("flash")


@pytest.mark.parametrize("name", ["flash_hub", "flash3_hub", "flash4_hub"])
def test_the_first_eager_call_loads_the_default_once(name: str, asked: Asked) -> None:
    make = {"flash_hub": flash2.hub, "flash3_hub": lambda: flash3.module(style="hub"), "flash4_hub": flash4.module}
    asked.modules = [make[name]()]
    inputs, meta = packed()
    for _ in range(2):
        assert_near(run(inputs, meta, backend=name), oracle(inputs, meta.materialize()), torch.float16)
    default = hub.DEFAULTS[name]
    assert asked == [(default.repo, default.version, None, False)]


def test_threads_load_it_once(asked: Asked) -> None:
    threads = [threading.Thread(target=attend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_nothing_is_loaded_to_list_the_backends(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, record in RECORDS.items():
        monkeypatch.setitem(op.REGISTRY, name, record)
    assert set(RECORDS) <= {state.name for state in backends()}
    assert asked == []


# Without fullgraph what fails to trace runs eagerly, and the operator's own code is then traced as any Python code is.
@pytest.mark.parametrize("fullgraph", [True, False])
def test_tracing_before_loading_is_an_error_that_says_what_to_call(
    fullgraph: bool, asked: Asked, fresh_compiler: None
) -> None:
    inputs, meta = packed()
    compiled = torch.compile(
        lambda q, k, v: varlen_attention(q, k, v, meta, backend="flash_hub"), fullgraph=fullgraph, backend="eager"
    )
    with refuses((ValueError, RuntimeError), "load_hub_kernel('flash_hub')", "before torch.compile"):
        compiled(*inputs[:3])
    assert asked == []
    hub.load_hub_kernel("flash_hub")
    assert_bit_equal(compiled(*inputs[:3]), attend())


def test_export_before_loading_is_an_error_that_says_what_to_call(asked: Asked, fresh_compiler: None) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return varlen_attention(q, q, q, prepare_varlen(2, 4, 4), backend="flash_hub")

    q = make_inputs((2, 4), (2, 4), dtype=torch.float16).q
    with pytest.raises(Exception, match=r"load_hub_kernel\('flash_hub'\)"):
        torch.export.export(Block(), (q,), strict=True)
    assert asked == []
    hub.load_hub_kernel("flash_hub")
    exported = torch.export.export(Block(), (q,), strict=True).module()
    assert_bit_equal(exported(q), Block()(q))


def test_capture_before_loading_is_an_error_that_says_what_to_call(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refuses(RuntimeError, "load_hub_kernel('flash_hub')", "before the CUDA graph capture"):
        attend()
    assert asked == []
    hub.load_hub_kernel("flash_hub")
    attend()


def test_a_second_load_replaces_the_kernel_also_in_compiled_code(asked: Asked, fresh_compiler: None) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    inputs, meta = packed()
    compiled = torch.compile(
        lambda q, k, v: varlen_attention(q, k, v, meta, backend="flash_hub"), fullgraph=True, backend=counter
    )
    hub.load_hub_kernel("flash_hub")
    assert (compiled(*inputs[:3]) != 0).any()
    zero = flash2.hub()
    real = zero.flash_attn_interface._flash_attn_varlen_forward
    zero.flash_attn_interface = SimpleNamespace(_flash_attn_varlen_forward=_zeroed(real))
    asked.modules = [zero]
    hub.load_hub_kernel("flash_hub", version=2)
    assert (compiled(*inputs[:3]) == 0).all()
    assert counter.frame_count == 1


def _zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def other(*args: Any, **kwargs: Any) -> Any:
        out, *rest = function(*args, **kwargs)
        return out * 0, *rest

    return other


def test_a_load_that_fails_says_what_was_asked_for_and_leaves_the_old_kernel(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.load_hub_kernel("flash_hub")
    before = hub._loaded["flash_hub"]

    def get_kernel(repo_id: str, version: int | None = None, trust_remote_code: bool = False) -> Any:
        raise ValueError(f"Kernel repository '{repo_id}' is not from a trusted publisher.")

    install(monkeypatch, get_kernel=get_kernel)
    with refuses(RuntimeError, "flash_hub", "me/mine", "version=2", "not from a trusted publisher"):
        hub.load_hub_kernel("flash_hub", repo="me/mine", version=2)
    assert hub._loaded["flash_hub"] is before


def test_old_releases_of_kernels_are_refused_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.12 has no check of publishers, and wants a package name for a folder."""

    def get_kernel(repo_id: str, revision: str | None = None, version: Any = None, user_agent: Any = None) -> Any:
        raise AssertionError("must not be called")

    def get_local_kernel(repo_path: Path, package_name: str) -> Any:
        raise AssertionError("must not be called")

    install(monkeypatch, get_kernel=get_kernel, get_local_kernel=get_local_kernel)
    for options in ({}, {"trust_remote_code": True}, {"revision": "main"}):
        with refuses(RuntimeError, "get_kernel", "trust_remote_code", "pip install -U 'kernels>=0.14'"):
            hub.load_hub_kernel("flash_hub", **options)
    with refuses(RuntimeError, "get_local_kernel", "package_name", "pip install -U 'kernels>=0.14'"):
        hub.load_hub_kernel("flash_hub", path="folder")

    def older(repo_id: str, revision: str | None = None) -> Any:
        raise AssertionError("must not be called")

    install(monkeypatch, get_kernel=older)
    with refuses(RuntimeError, "version", "pip install -U 'kernels>=0.14'"):
        hub.load_hub_kernel("flash_hub", version=1)


def test_without_kernels_the_reason_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "kernels" else real(name, *a))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    for record in RECORDS.values():
        assert record.missing() == ["package kernels is not installed: pip install kernels", "no CUDA GPU is available"]
        assert record.install == "pip install kernels"
    with refuses(RuntimeError, "flash_hub", "pip install -U kernels"):
        hub.load_hub_kernel("flash_hub")


@pytest.mark.parametrize(("capability", "usable"), [
    ((7, 5), set()), ((8, 0), {"flash_hub", "sage_hub"}), ((9, 0), set(RECORDS)),
    ((10, 0), {"flash_hub", "flash4_hub", "sage_hub"}),
])  # fmt: skip
def test_a_kernel_that_is_not_loaded_is_no_reason_but_the_gpu_is(
    capability: tuple[int, int], usable: set[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert {name for name, record in RECORDS.items() if not record.missing()} == usable
    assert asked == []


def write_kernel(root: Path, name: str, init: str, *, identity: str = "") -> Path:
    """A kernel folder as the Hub holds it: `NAME/build/torch-universal`."""
    variant = root / name / "build" / "torch-universal"
    variant.mkdir(parents=True)
    metadata = {
        "id": identity or f"_{name.replace('-', '_')}_0", "name": name, "version": 3, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    if torch.version.cuda is None:
        metadata["backend"] = {"type": "cpu"}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text(textwrap.dedent(init))
    return root / name


HUB_INIT = "from standins import flash2\nflash_attn_interface = flash2.module()\n"


@needs_kernels
def test_a_local_folder_is_loaded_by_the_real_loader(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path, "flash-attn2", HUB_INIT, identity=f"_flash_{tmp_path.name}")
    hub.load_hub_kernel("flash_hub", path=folder)
    inputs, meta = packed()
    got = run(inputs, meta, backend="flash_hub", causal=True)
    assert_near(got, oracle(inputs, meta.materialize(causal=True)), torch.float16)
    other = write_kernel(tmp_path, "other", "def flash_attn_func(): ...", identity=f"_other_{tmp_path.name}")
    hub.load_hub_kernel("flash_hub", path=str(other / "build" / "torch-universal"))
    with refuses(ImportError, "_other", "flash_attn_interface._flash_attn_varlen_forward"):
        attend()


@needs_kernels
@pytest.mark.parametrize("break_it", ["no folder", "no metadata", "unknown dependency"])
def test_a_folder_that_is_no_kernel_is_an_error_with_the_loaders_words(break_it: str, tmp_path: Path) -> None:
    folder = write_kernel(tmp_path, "flash-attn2", HUB_INIT)
    metadata = folder / "build" / "torch-universal" / "metadata.json"
    if break_it == "no folder":
        folder = tmp_path / "absent"
    elif break_it == "no metadata":
        metadata.unlink()
    else:
        metadata.write_text(metadata.read_text().replace('"python-depends": []', '"python-depends": ["unheard-of"]'))
    with refuses(RuntimeError, "flash_hub", str(folder), "Error"):
        hub.load_hub_kernel("flash_hub", path=folder)
    assert hub._loaded == {}


@needs_kernels
def test_an_override_of_the_repository_is_taken_by_the_real_loader(tmp_path: Path) -> None:
    """LOCAL_KERNELS redirects the default repository, offline, at the first eager call."""
    folder = write_kernel(tmp_path, "flash-attn2", HUB_INIT)
    done = run_python(f"""
import os
os.environ |= {{"LOCAL_KERNELS": "kernels-community/flash-attn2={folder}", "HF_HUB_OFFLINE": "1"}}
import dataclasses, torch
from varlen_prep import VarlenMetadata, op, varlen_attention
from varlen_prep.backends import hub
record = dataclasses.replace(hub.FLASH_HUB, dtypes={{"cpu": (torch.float16,)}}, missing=list)
if not hasattr(torch.ops.varlen_prep, record.op):
    op.define(record)
op.REGISTRY[record.name] = record
q = torch.randn(8, 4, 8, dtype=torch.float16)
meta = VarlenMetadata.from_lengths([6, 2])
out = varlen_attention(q, q, q, meta, backend="flash_hub")
torch.testing.assert_close(out, varlen_attention(q, q, q, meta, backend="reference"))
try:
    hub.load_hub_kernel("flash3_hub")
except RuntimeError as error:
    print(error)
""")
    assert done.returncode == 0, done.stderr
    assert "flash3_hub: could not load kernels-community/flash-attn3 version=1" in done.stdout


@needs_kernels
def test_the_real_loader_still_has_the_arguments_that_the_recording_one_has(asked: Asked) -> None:
    done = run_python("""
import inspect, kernels
print(*inspect.signature(kernels.get_kernel).parameters, "|", *inspect.signature(kernels.get_local_kernel).parameters)
""")
    real, local = done.stdout.split("|")
    assert {"repo_id", "revision", "version", "trust_remote_code"} <= set(real.split())
    assert local.split()[0] == "repo_path"


@needs_kernels
@pytest.mark.parametrize("version", ["1.0.6", "2.2.0"])
def test_sage_kernels_are_found_in_a_folder_laid_out_like_the_package(version: str, tmp_path: Path) -> None:
    sage.install(tmp_path / "site", version)
    name = f"sage_{tmp_path.name}"
    folder = write_kernel(tmp_path, "sage-attention", "", identity=name)
    variant = folder / "build" / "torch-universal"
    for source in (tmp_path / "site" / "sageattention").rglob("*.py"):
        target = variant / source.relative_to(tmp_path / "site" / "sageattention")
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.write_text(source.read_text())
    hub.load_hub_kernel("sage_hub", path=folder)
    inputs = make_inputs((103,), (103,), dim=64, dtype=torch.float16)
    meta = VarlenMetadata.from_lengths([100, 3])
    out = varlen_attention(*inputs[:3], meta, backend="sage_hub")
    error = (out.double() - oracle(inputs, meta.materialize()).out).abs()
    assert error.max() < 0.06
    with refuses(ValueError, "return_lse"):
        varlen_attention(*inputs[:3], meta, backend="sage_hub", return_lse=True)


@needs_kernels
def test_a_sage_build_without_varlen_kernels_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path, "sage-attention", "def sageattn(): ...", identity=f"_sage_{tmp_path.name}")
    with refuses(RuntimeError, "sage_hub", "no varlen kernels", "quant_per_block_varlen"):
        hub.load_hub_kernel("sage_hub", path=folder)
