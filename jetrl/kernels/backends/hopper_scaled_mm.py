"""The hopper backend with torch's own `scaled_mm` (cuBLASLt) for the FP8 GEMMs: `kernels = "hopper_scaled_mm"`.

For comparison, and if DeepGEMM's kernels are in doubt. It is slower, and cuBLASLt may choose another order of
sums for another number of rows, so parity is not promised: the run reports its gap.
"""

from __future__ import annotations

from jetrl.kernels.backends.hopper import *  # noqa: F403
from jetrl.kernels.gemm.scaled_mm import fp8_gemm as fp8_gemm
from jetrl.kernels.gemm.scaled_mm import wgrad_gemm as wgrad_gemm
from jetrl.kernels.gemm.scaled_mm import wgrad_into as wgrad_into
from jetrl.kernels.gemm.scaled_mm import wgrad_rounded as wgrad_rounded
