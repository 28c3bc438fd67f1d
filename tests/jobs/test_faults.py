from __future__ import annotations

import gc
import traceback
import weakref

import pytest
import torch
from hypothesis import given, strategies as st

from underwatt.errors import JobError, OutOfMemoryError, StepError
from underwatt.jobs.faults import call_job, does_not_fit, kernel_oom_kills, says_out_of_memory


def fail_with(error: BaseException) -> None:
    def users_code() -> None:
        raise error

    call_job(16, users_code)


def test_what_goes_well_passes() -> None:
    assert call_job(16, lambda: 3) == 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 1 bytes"),
    ],
)
def test_out_of_memory_is_an_answer(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match="Batch size 16 does not fit") as caught:
        fail_with(error)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x784 and 112x10)"), "do not fit together"),
        (ValueError("Expected input batch_size (8) to match target batch_size (4)."), "do not fit together"),
        (ValueError("Tried to step 201 times. The specified number of total steps is 200"), "Give it more steps."),
        (KeyError("image"), ""),
    ],
)
def test_what_often_fails_in_a_job_comes_with_a_remedy(error: Exception, remedy: str) -> None:
    with pytest.raises(StepError) as caught:
        fail_with(error)
    assert remedy in caught.value.hint
    assert bool(remedy) == bool(caught.value.hint)


def test_the_full_memory_is_let_go_of() -> None:
    class Large:
        pass

    held: list[weakref.ref[Large]] = []

    def step() -> None:
        activations = Large()
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfMemoryError) as caught:
        call_job(16, step)
    gc.collect()
    assert held[0]() is None
    assert caught.value is not None, "the error itself is kept by whoever handles it"


def test_a_failure_is_one_sentence_with_its_cause() -> None:
    with pytest.raises(StepError) as caught:
        fail_with(ValueError("shapes differ:\n(3,) and (4,)."))
    message = caught.value.message
    assert message.startswith("The job failed in a step at batch size 16: ValueError: shapes differ: (")
    assert f"{__file__}, line " in message
    assert message.endswith(": raise error).")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "users_code" in "".join(traceback.format_tb(caught.value.__cause__.__traceback__))


def test_errors_of_ours_and_the_end_of_the_process_pass() -> None:
    for error in (JobError("No such data."), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            fail_with(error)
        assert caught.value is error


@given(st.text(max_size=60))
def test_whatever_it_says_there_is_a_sentence(text: str) -> None:
    with pytest.raises((StepError, OutOfMemoryError)) as caught:
        fail_with(RuntimeError(text))
    assert "batch size 16" in caught.value.message.lower()
    assert "\n" not in caught.value.message


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


class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int("no number")


def test_an_error_in_a_loaders_worker_shows_the_line_too() -> None:
    batches = iter(torch.utils.data.DataLoader(Broken(), num_workers=1))
    with pytest.raises(StepError, match="ValueError: invalid literal") as caught:
        call_job(16, lambda: next(batches))
    batches._shutdown_workers()  # which the error keeps alive
    assert 'return int("no number")' in caught.value.message
