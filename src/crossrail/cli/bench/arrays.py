"""The array types that the loops of `crossrail._core.bench` take. Times are nanoseconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
