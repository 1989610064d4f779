"""The hash of sections that are keys of caches."""

import functools


class HashedOnce:
    """The hash of a frozen dataclass that is a key of many caches, computed once.

    Pickles leave it out, since hashes of strings differ between processes. A subclass assigns
    `__hash__ = HashedOnce.__hash__`, since a dataclass would otherwise define its own.
    """

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each) for each in self.__dataclass_fields__))  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}
