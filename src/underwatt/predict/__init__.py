"""Time and power of every setting, predicted from a few measured ones."""

from underwatt.predict.base import FittedPredictor, Predictor
from underwatt.predict.design import first_settings, fits_memory, next_settings
from underwatt.predict.fewshot import FewShot, FittedFewShot
from underwatt.predict.lookup import LookupTable
from underwatt.predict.powertrain import PowerTrain
from underwatt.predict.settings import SettingArray
from underwatt.predict.validate import ValidationReport, cross_validate

__all__ = [
    "FewShot",
    "FittedFewShot",
    "FittedPredictor",
    "LookupTable",
    "PowerTrain",
    "Predictor",
    "SettingArray",
    "ValidationReport",
    "cross_validate",
    "first_settings",
    "fits_memory",
    "next_settings",
]
