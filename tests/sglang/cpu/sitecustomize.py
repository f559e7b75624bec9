"""Python runs this at its start in SGLang's processes of the tests: what SGLang for CUDA needs to be imported on a CPU.

PyPI's torchvision is built for CUDA and cannot load its operators beside torch for CPU; importing it then fails because
it describes two of them to torch. They are declared here, without code: text models call none.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees that torchvision is about to be imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is not None:  # then torchvision brings its own
            return
        self.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declare = DeclareOperators()  # kept: the library's end would take them back
sys.meta_path.insert(0, _declare)
