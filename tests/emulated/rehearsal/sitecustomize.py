"""Makes `cuda` the test device in each Python process that has this folder in its PYTHONPATH.

Python imports a module of this name when it starts, before any other may import torch.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from emulated import cuda_device  # found by the path above

cuda_device.activate()
cuda_device.use_driver()
