"""Python runs this first in every process below `python -m kvwatch.agent run`: starts the agent with torch.

It finds kvwatch beside itself, without putting that folder on the path, and gives way to the
sitecustomize that it hides. Python itself reports a fault in here in one line, and starts the program.
"""


def _package() -> None:
    """Import kvwatch where the program's own environment lacks it."""
    import importlib.util
    import os
    import sys

    if "kvwatch" in sys.modules or importlib.util.find_spec("kvwatch") is not None:
        return
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location(
        "kvwatch", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvwatch"] = module
    spec.loader.exec_module(module)


def _started(_module: object) -> None:
    import kvwatch.agent

    kvwatch.agent.start()


def _next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    import importlib.machinery
    import importlib.util
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _package()
    from kvwatch.agent.hooks import when_imported

    when_imported("torch", _started)
finally:
    _next()
