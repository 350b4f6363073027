"""diffusers' variable-length attention backends, run by this library on any device.

    from varlen_prep.integrations.diffusers import route

    model.set_attention_backend("flash_varlen")     # inside the scope, or with install() before it
    with route("native"): ...

`route` is a scope; `install` and `uninstall` are the same without one.
"""

from ._routes import BACKENDS as BACKENDS
from ._routes import TESTED as TESTED
from ._routes import install as install
from ._routes import route as route
from ._routes import uninstall as uninstall

__all__ = ["BACKENDS", "TESTED", "install", "route", "uninstall"]
