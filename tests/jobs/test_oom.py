from __future__ import annotations

import pytest

from underwatt.jobs.faults import does_not_fit, kernel_oom_kills, says_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes",
        "NvMapMemAllocInternalTagged: 1075072515 error 12",
        "Traceback\nMemoryError\n",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB",
    ],
)
def test_the_words_of_several_frameworks(text):
    assert says_out_of_memory(text)


@pytest.mark.parametrize("text", ["", "ValueError: out of range", "loading into memory", "MyMemoryErrorHandler ready"])
def test_other_words(text):
    assert not says_out_of_memory(text)


def test_the_kernels_count_never_goes_back():
    first = kernel_oom_kills()
    assert 0 <= first <= kernel_oom_kills()


def test_the_error_names_the_batch_size_and_what_to_do():
    assert "128" in does_not_fit(128).message
    assert "smaller" in does_not_fit(128).hint
