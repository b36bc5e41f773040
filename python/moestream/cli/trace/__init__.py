"""Record which experts a model takes for a text, and show how local that is.

A trace is what cache sizes and policies can be tried on without the model.

  moestream trace record -m MODEL.gguf -f text.txt -o text.trace
  moestream trace show text.trace
"""

from . import record, show

COMMANDS = {"record": record, "show": show}
