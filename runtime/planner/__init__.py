"""The truth before the download: what will a token of this model cost on this machine?

`probe` measures the machine in a few seconds, `model_shape` says what a token of a model meets, `pass_time` and its
kin put both together, and `make_plan` says all of it for a user. Runs note how far such predictions were off
(`compare`), and `examine` looks for whatever is wrong with an installation. Nothing here needs the model's bytes.
"""

from deltafin.runtime.planner.comparing import compare, predict_tokens
from deltafin.runtime.planner.doctor import Fact, Finding, Report, examine
from deltafin.runtime.planner.machine import Figures, Kernels, Overheads, spread, together
from deltafin.runtime.planner.planning import BF12_LEVER, Install, Lever, Plan, PromptPlan, Streaming, make_plan
from deltafin.runtime.planner.probing import probe
from deltafin.runtime.planner.remembered import (
    Outcome,
    load_figures,
    load_outcomes,
    median_error,
    save_figures,
)
from deltafin.runtime.planner.shape import ModelShape, model_shape
from deltafin.runtime.planner.subject import DEFAULT_MODEL, Present, Subject, open_subject, present
from deltafin.runtime.planner.timing import PassTime, Rates, cold_token_time, pass_time, prompt_time, token_time
from deltafin.runtime.planner.whatif import Changes, parse_changes, parse_rate

__all__ = [
    "BF12_LEVER",
    "DEFAULT_MODEL",
    "Changes",
    "Fact",
    "Figures",
    "Finding",
    "Install",
    "Kernels",
    "Lever",
    "ModelShape",
    "Outcome",
    "Overheads",
    "PassTime",
    "Plan",
    "Present",
    "PromptPlan",
    "Rates",
    "Report",
    "Streaming",
    "Subject",
    "cold_token_time",
    "compare",
    "examine",
    "load_figures",
    "load_outcomes",
    "make_plan",
    "median_error",
    "model_shape",
    "open_subject",
    "parse_changes",
    "parse_rate",
    "pass_time",
    "predict_tokens",
    "present",
    "probe",
    "prompt_time",
    "save_figures",
    "spread",
    "together",
    "token_time",
]
