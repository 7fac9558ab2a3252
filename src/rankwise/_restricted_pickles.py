"""Pickles that may refer to listed definitions alone: reading them imports and calls nothing else."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

# By the code of an extension, a pickle refers to a definition without its name.
_EXTENSIONS: Final = frozenset({"EXT1", "EXT2", "EXT4"})


def plain_loads(data: bytes, definitions: Mapping[tuple[str, str], Any] = MappingProxyType({})) -> Any:  # noqa: ANN401 - any value
    """Return a value of builtin types, and of some definitions.

    Args:
        data: The pickle.
        definitions: What it may refer to, by module and name.

    Raises:
        pickle.UnpicklingError: The pickle refers to something else.
    """
    _refuse_extensions(data)
    return _RestrictedUnpickler(data, definitions).load()


def _refuse_extensions(pickled: bytes) -> None:
    """Refuse a pickle with codes of extensions, of which Python keeps the definitions, past every unpickler.

    Raises:
        pickle.UnpicklingError: The pickle has a code, and this process has registered codes.
    """
    # Opcodes are read one by one, which takes long, only where a code could be valid.
    registered = vars(copyreg)["_inverted_registry"]
    if registered and any(opcode.name in _EXTENSIONS for opcode, _, _ in pickletools.genops(pickled)):
        raise pickle.UnpicklingError("codes of extensions are not allowed in this pickle")


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, definitions: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._definitions = definitions

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        if (module, name) in self._definitions:
            return self._definitions[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this pickle")
