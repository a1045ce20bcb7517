"""Federated class-incremental learning: one protocol, every method one readable file.

import fcil
result = fcil.run("joint", benchmark="digits", seed=0)
print(result["final"], result["forgetting"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "run"]

if TYPE_CHECKING:
    from fcil.experiment import run


def __getattr__(name: str) -> Any:
    if name == "run":  # imported when first used: `fcil --help` must not wait for torch
        from fcil.experiment import run

        return run
    raise AttributeError(f"module 'fcil' has no attribute {name!r}")
