"""The arrays that the loops of `crossrail._core.bench` take. Their times are nanoseconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]
