"""Errors of devices, and their root: the part of the tree in ``underwatt.errors`` that the helper raises by itself."""


class UnderwattError(Exception):
    """Root of all errors raised on purpose; ``hint`` says what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


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


class LeaseError(DeviceError):
    """A hold on the device is over, or was never given: what it had set was put back."""
