"""On a Hopper GPU with the extra `hopper`, the doctor finds nothing missing and certifies on the GPU."""

from __future__ import annotations

import pytest

from jetrl.doctor import diagnosis, gpu
from jetrl.kernels import support

pytestmark = pytest.mark.gpu


def test_the_doctor_finds_a_gpu_that_trains() -> None:
    assert support.refusals() == ()
    found = diagnosis.examine(lambda text: None)
    wrong = [f for f in found.findings if f.section == gpu.SECTION and f.level == "bad"]
    assert not wrong and [(t.asked, t.device, t.failure) for t in found.trials] == [("auto", "cuda", None)]
    assert found.devices == ("cuda",) and {"driver", "cuda:0", "triton", "nvcc"} <= {f.what for f in found.findings}
