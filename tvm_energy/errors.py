"""The errors that tvm_energy raises on purpose.

::

    TvmEnergyError
    ├── ConfigurationError         an argument, option or file name is wrong       (exit code 2)
    ├── IncompatibleVersions       a TVM / tvm-ffi pair that would crash the process; xgboost missing or too old
    ├── MeterUnavailable           no meter for the wanted device, or no permission
    ├── ClockUnavailable           the clock cannot be locked or released: no permission, no support
    ├── MeasurementError           one measurement failed; the search goes on
    │   └── MeasurementTooShort    less energy than the sensor can resolve; says the length needed
    ├── DeadlineImpossible         no clock, split or power meets a deadline; says the nearest
    ├── RecordFormatError          a log line is torn or wrong; names file and line
    └── WorkDirError               the work directory is in use, not writable, or another device's

Ordinary misuse of a function stays ``ValueError`` or ``TypeError``. Every message says what was wrong,
the value, and what to do.
"""

from __future__ import annotations


class TvmEnergyError(Exception):
    """Root of all errors of this package."""


class ConfigurationError(TvmEnergyError, ValueError):
    """An option, name or value that the user gave cannot be used."""


class IncompatibleVersions(TvmEnergyError, ImportError):
    """The installed TVM, tvm-ffi or xgboost cannot be used: missing, too old, or it would crash the process."""


class MeterUnavailable(TvmEnergyError):
    """Energy cannot be measured here: no sensor, no permission, or the GPU is gone."""


class ClockUnavailable(TvmEnergyError):
    """The clock of a GPU cannot be locked or released: no permission, or the GPU does not support it."""


class MeasurementError(TvmEnergyError):
    """One measurement failed (the kernel crashed, hung, or the reading is not plausible)."""


class MeasurementTooShort(MeasurementError):
    """The sensor did not move enough in the time allowed.

    Attributes:
        needed_s: how long a window would have to be, in seconds.
    """

    def __init__(self, message: str, needed_s: float) -> None:
        super().__init__(message)
        self.needed_s = needed_s


class DeadlineImpossible(TvmEnergyError):
    """Nothing that could be chosen meets the deadline.

    Attributes:
        nearest_s: the shortest deadline that can be met, in seconds; infinite where there is none.
    """

    def __init__(self, message: str, nearest_s: float) -> None:
        super().__init__(message)
        self.nearest_s = nearest_s


class RecordFormatError(TvmEnergyError):
    """A record file holds something that is not a valid record."""


class WorkDirError(TvmEnergyError):
    """The work directory cannot be used for this run."""
