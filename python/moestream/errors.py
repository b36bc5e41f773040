"""What moestream raises.

    MoestreamError
    ├── OptionError (ValueError)      an option is unknown, malformed or impossible here
    │   └── CacheTooSmallError        an expert cache under one token's experts
    ├── ModelError (ValueError)       a file that is no model, or a damaged or unsuitable one
    ├── OutputError (OSError)         a file cannot be written: it exists, or the disk is full
    ├── TraceError (ValueError)       a file that is no routing trace, or a damaged one
    ├── SidecarError (ValueError)     heads or a LoRA that are damaged, incomplete, or of another model
    ├── ConverterError (RuntimeError) llama.cpp's converter is not there, or failed
    ├── TrainingError (ValueError)    data, weights or a checkpoint that training cannot use
    ├── MeasurementError (RuntimeError) something that cannot be measured here
    └── ExpertReadError (OSError)     experts could not be read while computing

Every message names the file, tensor, offset or option, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "MoestreamError",
    "OptionError",
    "CacheTooSmallError",
    "ModelError",
    "OutputError",
    "TraceError",
    "SidecarError",
    "ConverterError",
    "TrainingError",
    "MeasurementError",
    "ExpertReadError",
]


class MoestreamError(Exception):
    """Base of everything moestream raises on purpose."""


class OptionError(MoestreamError, ValueError):
    """An option that is unknown, malformed or impossible on this machine."""


class CacheTooSmallError(OptionError):
    """An expert cache that cannot hold the experts of one token."""


class ModelError(MoestreamError, ValueError):
    """A file that is not a model moestream can stream."""


class OutputError(MoestreamError, OSError):
    """A file that cannot be written: it exists already, its folder does not, or the disk is full."""


class TraceError(MoestreamError, ValueError):
    """A file that is not a routing trace this version reads, or arrays that make none."""


class SidecarError(MoestreamError, ValueError):
    """Heads or a LoRA that are damaged, incomplete, of another model, or that cannot be applied as they are."""


class ConverterError(MoestreamError, RuntimeError):
    """llama.cpp's converter of Hugging Face models cannot be run, or failed on one."""


class TrainingError(MoestreamError, ValueError):
    """Captured data, weights or a checkpoint that training cannot use, and what to do instead."""


class MeasurementError(MoestreamError, RuntimeError):
    """Something that could not be measured here: what it lacked, and how to get it."""


class ExpertReadError(MoestreamError, OSError):
    """Experts could not be read in the middle of a computation.

    The call that raised it is lost; the model stays usable, and the next call
    works if the file does.
    """
