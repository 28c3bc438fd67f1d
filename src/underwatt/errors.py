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

A message is one sentence that says what happened; ``hint`` is one that says what to do. Errors of devices and the root
are defined in ``helper/``, which runs without the rest of the package.
"""

from __future__ import annotations

from underwatt.helper.errors import (
    ApplyError as ApplyError,
    DeviceBusyError as DeviceBusyError,
    DeviceError as DeviceError,
    InputError as InputError,
    JournalError as JournalError,
    ModeError as ModeError,
    NoDeviceError as NoDeviceError,
    NotPermittedError as NotPermittedError,
    SensorError as SensorError,
    UnderwattError as UnderwattError,
)


class MissingExtraError(UnderwattError):
    """An optional package is not installed."""


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
