"""Which backend the GPU tests run: hopper, or with JETRL_TEST_KERNELS=triton the portable one, forced.

`make test-gpu` runs both. A test that is of one backend says so by a marker of the file: `hopper_only` names what is
left out where the portable kernels are forced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from jetrl.kernels import dispatch, support

FORCED = os.environ.get("JETRL_TEST_KERNELS", "")
# files whose tests call hopper's own kernels or libraries, or compare with them
HOPPER_ONLY = (
    "test_attention_hopper", "test_coded_rows_hopper", "test_compile_ahead_hopper", "test_decode_hopper",
    "test_digests_hopper", "test_doctor_hopper", "test_draft_hopper", "test_few_rows_hopper", "test_gemm_hopper",
    "test_logprob_hopper", "test_moe_hopper", "test_study_hopper", "test_vllm_hopper",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FORCED != "triton":
        return
    for item in items:
        if item.path.stem in HOPPER_ONLY:
            item.add_marker(pytest.mark.skip(reason="of the hopper backend; the portable kernels are forced"))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` takes the backend that is asked for, in this process."""
    held = dict(dispatch._serving)
    if FORCED == "triton":
        monkeypatch.setattr("jetrl.config.load.HOPPER", (0, 0))  # no GPU has it
        monkeypatch.setattr(support, "CAPABILITY", (0, 0))
        monkeypatch.setattr(dispatch, "CAPABILITY", (0, 0))
        dispatch.select("triton")
    yield
    dispatch._serving.update(held)
