"""How values become bytes: by reference where a class or function can be imported, by value otherwise.

For packages that send values with other semantics than those of rankwise's collectives, by classes of their own.
"""

from __future__ import annotations

from rankwise._pickling import Definitions, Pickler, Unpickler, dumps, loads

__all__ = ["Definitions", "Pickler", "Unpickler", "dumps", "loads"]
