"""transformers' models on this library's attention, prepared once per forward and layer type.

    from varlen_prep.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="varlen_prep")

The mask function turns what the model knows (padding, positions, cache) into `VarlenMetadata`, which the attention
function of every layer uses.
"""

from ._mask import VarlenMask as VarlenMask
from ._register import BACKENDS as BACKENDS
from ._register import TESTED as TESTED
from ._register import register as register

__all__ = ["BACKENDS", "TESTED", "VarlenMask", "register"]
