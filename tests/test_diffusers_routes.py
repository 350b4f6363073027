"""Routes of diffusers' backend names: turning them on and off, restoring, and tables that name no usable kernel."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import attention_backend
from diffusers_helpers import (
    NAMES,
    qkv,
    routed,
    state,
    tiny_flux,
    untouched,  # noqa: F401  (an autouse fixture)
)

import varlen_prep
from varlen_prep.integrations.diffusers import BACKENDS, TESTED, _routes, install, route, uninstall


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no_such",), "expected one of native"),
        (({"flash_varlen": "no_such"},), "got 'no_such'"),
        (({"flash": "native"},), "got ['flash']"),
    ],
)
@pytest.mark.parametrize("turn_on", [install, lambda *arguments: route(*arguments).__enter__()])
def test_unknown_names(turn_on, arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        turn_on(*arguments)


def test_unknown_layout():
    with pytest.raises(ValueError, match="layout: expected 'packed' or 'in_place', got 'uniform'"):
        install("native", layout="uniform")


@pytest.mark.parametrize("name", NAMES)
def test_default_table_names_the_kernel_that_cannot_run(name, monkeypatch):
    gone = varlen_prep.backends()[0]._replace(name=BACKENDS[name], reasons=("it is not installed",), install="pip it")
    monkeypatch.setattr(_routes, "backends", lambda: [gone])
    with route(), pytest.raises(RuntimeError, match=f"'{BACKENDS[name]}' cannot run here: it is not installed"):
        tiny_flux().set_attention_backend(name)
    monkeypatch.setattr(_routes, "backends", lambda: [gone._replace(name="native")])
    with route(), pytest.raises(RuntimeError, match=f"'{BACKENDS[name]}' is not part of this version"):
        tiny_flux().set_attention_backend(name)


def test_default_table_does_not_fall_back():
    usable = {state.name for state in varlen_prep.backends() if state.usable}
    if "flash" in usable:
        pytest.skip("flash-attn is installed")
    with route(), pytest.raises(ValueError, match="flash"):
        routed(*qkv())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (attention_dispatch, "_check_attention_backend_requirements"),
        (attention_dispatch, "_maybe_download_kernel_for_backend"),
        (Registry, "_supported_arg_names"),
    ],
)
def test_missing_private_name_of_diffusers(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"diffusers \S+ has no .*{name}.* was run with diffusers {TESTED[0]}"):
        install("native")


def test_context_parallel_is_not_offered():
    assert Registry._is_context_parallel_available(attention_dispatch.AttentionBackendName.FLASH_VARLEN_HUB)
    with route("native"):
        assert not Registry._is_context_parallel_available(attention_dispatch.AttentionBackendName.FLASH_VARLEN_HUB)


def test_restores_after_an_exception():
    before = state()
    routes = contextlib.ExitStack()
    routes.enter_context(route("native"))
    routes.enter_context(attention_backend("flash_varlen"))
    assert state() != before
    with pytest.raises(KeyError), routes:
        raise KeyError
    assert state() == before


def test_active_backend_does_not_stay_on_a_routed_name():
    with route("native"):
        tiny_flux().set_attention_backend("sage_varlen")
        assert Registry._active_backend == "sage_varlen"
        with route("reference"):
            pass
        assert Registry._active_backend == "sage_varlen"
    assert Registry._active_backend == "native"
    with route("native"):
        Registry.set_active_backend("flex")  # a choice that does not depend on routes is the user's to keep
    assert Registry._active_backend == "flex"
    Registry.set_active_backend("native")


def backend_of(name="flash_varlen"):
    """The backend of this library that a name of diffusers runs now."""
    function = Registry._backends[name]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["backend"].cell_contents if "backend" in cells else None


def test_scopes_nest_and_a_mapping_routes_only_its_names():
    with route("native"):
        with route({"flash_varlen": "reference"}):
            assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("reference", "native")
        assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("native", "native")
    with route({"flash_varlen": "native"}):
        assert (backend_of("flash_varlen"), backend_of("sage_varlen")) == ("native", None)
        with pytest.raises(RuntimeError, match="sageattention"):  # diffusers' own check
            tiny_flux().set_attention_backend("sage_varlen")


def test_install_twice_and_uninstall_without_install():
    before = state()
    uninstall()
    install("native")
    install("reference")
    assert backend_of() == "reference"
    with route("native"):
        assert backend_of() == "native"
        uninstall()
        assert backend_of() == "native"
    assert state() == before
    install("native")
    with pytest.raises(ValueError, match="no_such"):
        install("no_such")
    assert backend_of() == "native"
    uninstall()
    assert state() == before


def test_failure_while_turning_on_leaves_nothing(monkeypatch):
    def fail(*_):
        raise KeyError

    before = state()
    monkeypatch.setattr(_routes, "attention", fail)
    for turn_on in (install, lambda backend: route(backend).__enter__()):
        with pytest.raises(KeyError):
            turn_on("native")
        assert state() == before


def test_nothing_is_imported_or_patched_until_asked_for():
    code = (
        "import sys, varlen_prep; assert not any(m.split('.')[0] == 'diffusers' for m in sys.modules);"
        "import varlen_prep.integrations.diffusers; assert 'diffusers.models' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
