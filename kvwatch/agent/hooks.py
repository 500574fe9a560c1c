"""How to be called when a module is imported, without importing it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec

Then = Callable[[types.ModuleType], None]


def when_imported(name: str, then: Then) -> None:
    """Call `then` with the module once it has been imported: now if it has, else right after.

    `then` must not raise (see `guard`): it runs inside the importing program.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        then(module)
        return
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting[name] = then


class _Finder:
    """Lets the other finders find, and adds the call to the loader they found.

    No `importlib.abc.MetaPathFinder`: that module brings in thirty others.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Then] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module somebody waits for; None for every other."""
        then = self.waiting.get(fullname)
        if then is None:
            return None
        for finder in sys.meta_path:
            look = getattr(finder, "find_spec", None)
            spec = None if finder is self or look is None else look(fullname, path, target)
            if spec is not None:
                del self.waiting[fullname]
                _add(spec, then)
                return spec  # type: ignore[no-any-return]
        return None


def _add(spec: ModuleSpec, then: Then) -> None:
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: types.ModuleType) -> None:
        execute(module)
        then(module)

    # A loader that takes no attributes leaves the module as it is: nobody is called.
    if hasattr(loader, "__dict__"):
        loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
