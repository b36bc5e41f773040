"""Record what a model does while it writes, or which experts it takes.

Without a command: a text is written as by `moestream generate`, and what
happened when (attention, experts, waits and reads of each layer and token) goes
to OUT: a page for the browser (.html), Chrome's trace format for Perfetto
(.json), or arrays (.npz). docs/timeline.md tells how to read it. The table has
means of a layer and token:
  attention  from the layer before to this one's router
  prefetch   from the first read ahead to the last that arrived
  bubble     what of prefetch attention does not hide
  experts    computing them; waits: for them
  hidden     experts read ahead and there before they were needed
The commands deal with routing traces, on which cache sizes and policies can be
tried without the model.

  moestream trace -m MODEL.gguf -p "The library is" -n 30 -o run.html
  moestream trace record -m MODEL.gguf -f text.txt -o text.trace
  moestream trace show text.trace
"""

from . import record, show, synthesise
from .timeline import add_arguments, run, trace

__all__ = ["COMMANDS", "add_arguments", "run", "trace"]

COMMANDS = {"record": record, "show": show, "synthesise": synthesise}
