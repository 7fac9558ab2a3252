"""Values as trees: containers taken apart into leaves, in an order that is the same on all ranks, and put together.

optree does the work. What it would order by insertion (OrderedDict), show with addresses (defaultdict) or not open at
all (dataclasses) goes through it as a `_Node`.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import optree
import torch

from rankwise.errors import PayloadTypeError, shown

_NAMESPACE: Final = "rankwise"
_PLAIN_KEYS: Final = frozenset({str, int, bool})
# Looked at first, since every leaf is asked.
_OFTEN: Final = frozenset({dict, list, tuple, type(None), bool, int, float, complex, torch.Tensor})


@dataclass(frozen=True, slots=True)
class Tree:
    """A value taken apart.

    Attributes:
        leaves: What is no container; None counts.
        spec: The containers.
    """

    leaves: list[Any]
    spec: optree.PyTreeSpec

    @classmethod
    def of(cls, value: object) -> Tree:
        """Take a value apart.

        Raises:
            PayloadTypeError: A key is not a str, an int, a bool, an Enum or a tuple of these; a dataclass has no value
                in a field; or the value contains itself, or others in too many levels.
        """
        try:
            leaves, spec = _flatten(value, is_leaf=_is_ours)
            if any(map(_is_ours, leaves)) or not _check_keys(spec.paths()):
                leaves, spec = _flatten(_opened(value))
        except RecursionError:
            raise _too_deep() from None
        return cls(leaves, spec)

    def rebuild(self, leaves: Iterable[object]) -> Any:  # noqa: ANN401 - whatever the value was
        """Return the value with other leaves: the same containers, new."""
        return optree.tree_unflatten(self.spec, leaves)

    def paths(self) -> list[str]:
        """Return where each leaf is: "['loss'][0]"."""
        return [
            "".join(entry if isinstance(entry, _Attribute) else f"[{entry!r}]" for entry in path)
            for path in self.spec.paths()
        ]

    def text(self) -> str:
        """Return a description of the containers that is the same on all ranks if they are."""
        try:
            return repr(self.spec)
        except RecursionError:
            raise _too_deep() from None


def describe(value: object) -> str:
    """Return what has to be the same of a leaf on all ranks: "float32[3, 4] on cpu"."""
    if isinstance(value, torch.Tensor):
        try:
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"
        except Exception:  # noqa: BLE001 - of tensors without a shape: lazy and nested ones, and whatever a class has
            return f"a {type(value).__qualname__} without a shape"
    if isinstance(value, numbers.Number):
        return "a number"
    return "None" if value is None else f"a {type(value).__qualname__}"


class _Attribute(str):
    """The path of a dataclass's field."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a node was.

    Attributes:
        label: What has to be the same on all ranks.
        entries: The children's keys.
        rebuild: Makes the container of new children.
    """

    label: str
    entries: tuple[Hashable, ...]
    rebuild: Callable[[Sequence[Any]], Any]

    def __repr__(self) -> str:
        return f"{self.label}{self.entries!r}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A container that is opened here and not by optree."""

    kind: _Kind
    children: tuple[Any, ...]


optree.register_pytree_node(
    _Node,  # type: ignore[arg-type]  # optree's type asks for a collection, its documentation for any class
    lambda node: (node.children, node.kind, node.kind.entries),  # type: ignore[attr-defined]
    lambda kind, children: kind.rebuild(children),  # type: ignore[union-attr]
    namespace=_NAMESPACE,
)


def _flatten(value: object, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)  # type: ignore[arg-type]


def _is_ours(value: object) -> bool:
    kind = type(value)
    if kind in _OFTEN:
        return False
    return issubclass(kind, dict) or kind is torch.Size or dataclasses.is_dataclass(kind)


def _opened(value: Any) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value with nodes of ours in the place of dicts and dataclasses."""
    if isinstance(value, dict):
        _check_keys([(key,) for key in value])
        keys = sorted(value, key=lambda key: (type(_plain(key)).__qualname__, repr(_plain(key))))
        return _Node(_dict_kind(value, keys), tuple(_opened(value[key]) for key in keys))
    if isinstance(value, torch.Size):
        return tuple(value)  # means are no sizes
    if _is_ours(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return _Node(_dataclass_kind(value, fields), tuple(_opened(_field(value, name)) for name in fields))
    try:
        children, metadata, _, rebuild = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=_NAMESPACE)
    except ValueError:  # a leaf
        return value
    return rebuild(metadata, [_opened(child) for child in children])


def _dict_kind(value: dict[Any, Any], keys: list[Any]) -> _Kind:
    def rebuild(children: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever the value was
        found = dict(zip(keys, children, strict=True))
        new = copy.copy(value)
        for key in value:
            new[key] = found[key]
        return new

    return _Kind("dict", tuple(map(_plain, keys)), rebuild)


def _dataclass_kind(value: Any, fields: list[str]) -> _Kind:  # noqa: ANN401 - the user's dataclass
    def rebuild(children: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever the value was
        new = copy.copy(value)
        for name, child in zip(fields, children, strict=True):
            object.__setattr__(new, name, child)  # frozen ones too
        return new

    return _Kind(type(value).__qualname__, tuple(_Attribute(f".{name}") for name in fields), rebuild)


def _too_deep() -> PayloadTypeError:
    return PayloadTypeError("a value that is reduced contains itself, or has too many levels of containers")


def _field(value: object, name: str) -> Any:  # noqa: ANN401 - any value of the user's
    try:
        return getattr(value, name)
    except AttributeError as error:
        raise PayloadTypeError(f"a {type(value).__qualname__} that is reduced has no value in {name!r}") from error


def _check_keys(paths: Iterable[tuple[Any, ...]]) -> bool:
    """Check the keys of dicts; False if there are any that optree may order differently on another rank."""
    kinds = {type(key) for path in paths for key in path}
    if kinds <= _PLAIN_KEYS:
        return True
    for path in paths:
        for key in path:
            if not _is_key(key):
                raise PayloadTypeError(
                    f"a dict that is reduced has the key {shown(key)}; keys are str, int, bool, Enum or tuples of "
                    "these, for all ranks must put them in the same order"
                )
    return False


def _is_key(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return isinstance(key, (str, numbers.Integral, Enum))


def _plain(key: Any) -> Any:  # noqa: ANN401 - any key of the user's
    """Return a key as all ranks know it, whose own may be of numpy's types."""
    if isinstance(key, (Enum, bool)):
        return key
    if isinstance(key, numbers.Integral):
        return int(key)
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    return str.__str__(key)
