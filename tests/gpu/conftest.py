"""Which backend the GPU tests run: hopper, or with JETRL_TEST_KERNELS=triton the portable one, forced.

`make test-gpu` runs both. `HOPPER_ONLY` names what is left out where the portable kernels are forced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from jetrl.kernels import dispatch, support

FORCED = os.environ.get("JETRL_TEST_KERNELS", "")
# files, and single tests of others, that call hopper's own kernels or libraries, or compare with them
HOPPER_ONLY = (
    "test_attention_hopper", "test_coded_rows_hopper", "test_compile_ahead_hopper", "test_decode_hopper",
    "test_digests_hopper", "test_doctor_hopper", "test_draft_hopper", "test_few_rows_hopper", "test_gemm_hopper",
    "test_logprob_hopper", "test_moe_hopper", "test_study_hopper", "test_vllm_hopper",
    "test_fused_kernels_equal_the_layers_of_ops", "test_sampled_logprobs_are_the_learners_and_batches_change_no_token",
    "test_merged_prefixes_change_no_token", "test_merged_prefixes_change_no_bit_of_a_run",
    "test_the_second_gemm_backend_trains", "test_sizes_that_do_not_fit_are_refused_before_a_run",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FORCED != "triton":
        return
    for item in items:
        if {item.path.stem, getattr(item, "originalname", "")} & set(HOPPER_ONLY):
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
