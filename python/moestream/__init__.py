"""moestream: Mixture-of-Experts GGUF models larger than RAM, on top of llama-cpp-python."""

from importlib.metadata import version

from . import _native, memory  # noqa: F401  the ABI is verified here, before anything is built on it
from ._capture import record_routing
from ._locality import LayerRouting, LruHitRate, RoutingStatistics, routing_statistics
from ._timeline_summary import LayerTimes, TimelineSummary
from .errors import (
    CacheTooSmallError,
    ConverterError,
    ExpertReadError,
    MeasurementError,
    ModelError,
    MoestreamError,
    OptionError,
    OutputError,
    SidecarError,
    TraceError,
    TrainingError,
)
from .layout import Conversion, ConversionPlan, ExportResult, VerifyReport, convert, export, verify
from .llama import Llama
from .model import ExpertMatrix, ModelDescription, ModelFile, MoeLayer, describe
from .models import demo_model
from .options import ExpertStreaming
from .perplexity import PerplexityReport, evaluate
from .planner import Forecast, ModelShape, Plan, model_shape, plan
from .probing import KernelRate, Probe, ReadRate, cached_probe, probe, token_compute_s
from .sidecar import Sidecar
from .simulation import SimulatedRun, SimulationResult, simulate
from .stats import ExpertStats, Predictions
from .synthesis import synthesise_trace
from .timeline import Timeline
from .trace import RoutingTrace

__version__ = version("moestream")

__all__ = [
    "CacheTooSmallError",
    "ConverterError",
    "Conversion",
    "ConversionPlan",
    "ExpertMatrix",
    "ExpertReadError",
    "ExpertStats",
    "ExpertStreaming",
    "ExportResult",
    "KernelRate",
    "Forecast",
    "LayerRouting",
    "LayerTimes",
    "Llama",
    "LruHitRate",
    "MeasurementError",
    "ModelDescription",
    "ModelError",
    "ModelFile",
    "ModelShape",
    "MoeLayer",
    "MoestreamError",
    "OptionError",
    "OutputError",
    "PerplexityReport",
    "Plan",
    "Predictions",
    "Probe",
    "ReadRate",
    "RoutingStatistics",
    "RoutingTrace",
    "Sidecar",
    "SidecarError",
    "SimulatedRun",
    "SimulationResult",
    "Timeline",
    "TimelineSummary",
    "TraceError",
    "TrainingError",
    "VerifyReport",
    "__version__",
    "cached_probe",
    "convert",
    "demo_model",
    "describe",
    "evaluate",
    "export",
    "probe",
    "model_shape",
    "plan",
    "record_routing",
    "routing_statistics",
    "simulate",
    "synthesise_trace",
    "token_compute_s",
    "verify",
]
