"""Start `dynamo.vllm` in vLLM's environment for CPUs (run by the worker in `dynamo.py`, not imported).

Run with `-P`: modules beside it are called as packages that it needs.

Dynamo 1.6.1 imports two functions that are not there, and which a text model on one engine never calls: one
of transformers that needs torchvision, and one of vLLM 0.31 that 0.32 no longer has.
"""

import sys
import types

import vllm.v1.engine.utils

PICTURES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def _not_there(*_: object) -> None:
    raise NotImplementedError


def _fill_in() -> None:
    pictures = types.ModuleType(PICTURES)
    pictures.smart_resize = _not_there
    sys.modules[PICTURES] = pictures
    if not hasattr(vllm.v1.engine.utils, "get_engine_zmq_addresses"):
        vllm.v1.engine.utils.get_engine_zmq_addresses = _not_there


if __name__ == "__main__":
    _fill_in()
    from dynamo.vllm.main import main

    main()
