"""Compute: what does the model say next?

`open` a model, make a `Sequence`, feed it with `Model.forward` or continue it with `Model.generate`. A pass walks
the layers once for any number of segments, asks the store for each layer's spine once and for each chosen expert
once, and either advances all its sequences or none. Also here: text to ids and back, and traces of the router.

The room does not know where weights come from (that is the store's) nor how output looks (that is the command
line's). Importing it imports no torch; opening a model does.
"""

from deltafin.runtime.clock import LayerTimes, PassTimes, RunTimes, typical
from deltafin.runtime.draft import Draft, NGram
from deltafin.runtime.gate import Gate, GateSummary
from deltafin.runtime.generation import DEPTH, Finish, Generation, Runner, Step
from deltafin.runtime.leaving import Leaving
from deltafin.runtime.memory import MemoryPlan, Want, default_budget
from deltafin.runtime.model import Model, load_tokenizer, open
from deltafin.runtime.observer import Observer, Point, RowSpan
from deltafin.runtime.sampling import Chosen, Sampler, Sampling, reserved_ids
from deltafin.runtime.segment import Checkpoint, Logits, Segment, StateSink
from deltafin.runtime.sequence import Sequence
from deltafin.runtime.stopping import StopStrings
from deltafin.runtime.tokenizer import StreamDecoder, Tokenizer, Utf8Stream
from deltafin.runtime.trace import Trace, TraceHeader, TraceLine, TraceWriter, expert_uses, read_trace
from deltafin.runtime.traffic import StateTraffic

__all__ = [
    "DEPTH",
    "Checkpoint",
    "Chosen",
    "Draft",
    "Finish",
    "Gate",
    "GateSummary",
    "Generation",
    "LayerTimes",
    "Leaving",
    "Logits",
    "MemoryPlan",
    "Model",
    "NGram",
    "Observer",
    "PassTimes",
    "Point",
    "RowSpan",
    "RunTimes",
    "Runner",
    "Sampler",
    "Sampling",
    "Segment",
    "Sequence",
    "StateSink",
    "StateTraffic",
    "Step",
    "StopStrings",
    "StreamDecoder",
    "Tokenizer",
    "Trace",
    "TraceHeader",
    "TraceLine",
    "TraceWriter",
    "Utf8Stream",
    "Want",
    "default_budget",
    "expert_uses",
    "load_tokenizer",
    "open",
    "read_trace",
    "reserved_ids",
    "typical",
]
