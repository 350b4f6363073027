"""`import varlen_prep` loads torch and nothing of the kernels or of the GPU; checked in fresh processes."""

from __future__ import annotations

from helpers import run_python

OPTIONAL = (
    "flash_attn", "flash_attn_interface", "sageattention", "kernels", "diffusers", "transformers", "cudnn", "triton",
    "huggingface_hub", "safetensors", "cutlass", "torch._inductor", "torch._dynamo.eval_frame",
)  # fmt: skip
# What torch itself loads does not count: its FLOP counter imports triton where triton is installed.
CODE = """
import sys, torch, torch.utils.flop_counter
before = set(sys.modules)
{planted}
import varlen_prep
added = set(sys.modules) - before
print(sorted(name for name in {optional} if name in added or any(one.startswith(name + ".") for one in added)))
print(torch.cuda.is_initialized())
"""


def _loaded(planted: str = "") -> list[str]:
    ended = run_python(CODE.format(planted=planted, optional=OPTIONAL))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_import_loads_no_optional_package_and_initialises_no_gpu() -> None:
    assert _loaded() == ["[]", "False"]


def test_the_check_finds_a_planted_import_and_a_planted_initialisation() -> None:
    planted = "import types; sys.modules['sageattention'] = types.ModuleType('sageattention')"
    assert _loaded(f"{planted}; torch.cuda.is_initialized = lambda: True") == ["['sageattention']", "True"]


def test_listing_backends_and_a_cpu_call_load_no_kernel_package() -> None:
    code = (
        "import varlen_prep as p; p.backends(); x = torch.ones(1, 2, 1, 8); "
        "p.varlen_attention(x, x, x, p.prepare_varlen(1, 2, 2))"
    )
    kernels = ("flash_attn", "flash_attn_interface", "sageattention", "kernels", "cudnn", "cutlass")
    loaded, initialised = _loaded(code)
    assert not [name for name in kernels if f"'{name}'" in loaded]
    assert initialised == "False"


def test_every_public_name_exists() -> None:
    code = "from varlen_prep import *\nimport varlen_prep\nprint({*varlen_prep.__all__} - {*globals()})"
    ended = run_python(code)
    assert ended.stdout == "set()\n", ended.stderr
