"""The laid file of docs/layout.md: one record per expert. Making it, giving the stock file back, checking it."""

from .convert import Conversion, ConversionPlan, PartKind, convert
from .export import ExportResult, export
from .verify import Damage, VerifyReport, verify

__all__ = [
    "Conversion",
    "ConversionPlan",
    "Damage",
    "ExportResult",
    "PartKind",
    "VerifyReport",
    "convert",
    "export",
    "verify",
]
