"""Every error that Underwatt raises on purpose.

    UnderwattError
    ├── MissingExtraError       an optional package is not installed
    ├── InputError              a value, file or option from outside makes no sense
    ├── DeviceError
    │   ├── NoDeviceError       nothing here can be read or set
    │   ├── SensorError         a sensor is missing, silent or returns garbage
    │   ├── ModeError           a power mode the device does not allow
    │   ├── NotPermittedError   the device allows it, this user may not
    │   ├── ApplyError          a write was refused, or did not take
    │   ├── DeviceBusyError     another session holds the device
    │   └── JournalError        the restore journal cannot be read or written
    ├── WorkloadError
    │   ├── JobError            a job file or factory is wrong
    │   ├── StepError           a step of the job failed
    │   └── OutOfMemoryError    the job does not fit the device at this batch size
    ├── StoreError              the store cannot be read or written
    ├── MeasureError            a measurement could not be made
    ├── PredictError            a predictor was given too little, or nonsense
    └── BudgetError             no setting keeps the budget

A message is one sentence that says what happened; ``hint`` is one that says what to do.
"""

from __future__ import annotations


class UnderwattError(Exception):
    """Root of all errors raised on purpose; ``hint`` says what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class MissingExtraError(UnderwattError):
    """An optional package is not installed."""


class InputError(UnderwattError):
    """A value, file or option from outside makes no sense."""


class DeviceError(UnderwattError):
    """Something about a device went wrong."""


class NoDeviceError(DeviceError):
    """Nothing here can be read or set, or a named device is not here."""


class SensorError(DeviceError):
    """A sensor is missing, silent or returns garbage: never taken as zero watts."""


class ModeError(DeviceError):
    """A power mode that the device does not allow."""


class NotPermittedError(DeviceError):
    """The device allows it, this user may not."""


class ApplyError(DeviceError):
    """A write was refused, or was accepted and did not take."""


class DeviceBusyError(DeviceError):
    """Another session holds the device."""


class JournalError(DeviceError):
    """The restore journal cannot be read or written."""


class WorkloadError(UnderwattError):
    """Something about the training job went wrong."""


class JobError(WorkloadError):
    """A job file or factory is wrong."""


class StepError(WorkloadError):
    """A step of the job failed, hung or never reported."""


class OutOfMemoryError(WorkloadError):
    """The job does not fit the device at this batch size."""


class StoreError(UnderwattError):
    """The store cannot be read or written."""


class MeasureError(UnderwattError):
    """A measurement could not be made."""


class PredictError(UnderwattError):
    """A predictor was given too little, or nonsense."""


class BudgetError(UnderwattError):
    """No setting keeps the budget; the message names the smallest budget that one would keep."""
