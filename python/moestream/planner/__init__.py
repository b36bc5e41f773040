"""Will a model run well on a machine? Told from headers, a probe and a routing, before anything is downloaded."""

from .forecast import Forecast
from .named import model_shape
from .planning import ContextForecast, MemoryNeed, Plan, plan
from .shape import ModelShape

__all__ = ["ContextForecast", "Forecast", "MemoryNeed", "ModelShape", "Plan", "model_shape", "plan"]
