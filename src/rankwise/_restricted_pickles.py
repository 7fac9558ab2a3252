"""Pickles that may refer to listed definitions alone: reading them imports and calls nothing else."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from typing import Any, Final

# By the code of an extension, a pickle refers to a definition without its name.
_EXTENSIONS: Final = frozenset({"EXT1", "EXT2", "EXT4"})


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that refuses each definition which `allowed` does not return."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        return self.allowed(module, name)

    def allowed(self, module: str, name: str) -> Any:  # noqa: ANN401 - any definition
        """Return a definition.

        Raises:
            pickle.UnpicklingError: It is not allowed.
        """
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this pickle")


def plain_loads(data: bytes) -> Any:  # noqa: ANN401 - builtin values
    """Return a value of builtin types.

    Raises:
        pickle.UnpicklingError: The pickle has something else.
    """
    refuse_extensions(data)
    return RestrictedUnpickler(io.BytesIO(data)).load()


def refuse_extensions(pickled: bytes | memoryview) -> None:
    """Refuse a pickle with codes of extensions, of which Python keeps the definitions, past every unpickler.

    Raises:
        pickle.UnpicklingError: The pickle has a code, and this process has registered codes.
    """
    # Opcodes are read one by one, which takes long, only where a code could be valid.
    registered = vars(copyreg)["_inverted_registry"]
    if registered and any(opcode.name in _EXTENSIONS for opcode, _, _ in pickletools.genops(bytes(pickled))):
        raise pickle.UnpicklingError("codes of extensions are not allowed in this pickle")
