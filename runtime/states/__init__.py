"""What survives a restart: the state of a sequence in a file, and beginnings that are kept on disk by themselves.

`save_state` and `load_state` are for a file that somebody names; `PrefixStore` keeps states in the cache, finds the
longest that a list of ids begins with, and throws the least recently used away. Both promise that a restored sequence
goes on with the same bytes as one that never stopped, and that what is damaged, cut short or of another model, spine
or arithmetic is never used. Formats: docs/state.md. States are the native kernels'; torch has none. The room does not
know when a state is worth keeping.
"""

from deltafin.runtime.states.identifying import Identity, identity, identity_of
from deltafin.runtime.states.layout import state_nbytes
from deltafin.runtime.states.prefixes import PrefixStats, PrefixStore, PrefixWriter
from deltafin.runtime.states.saving import Saved, check_place, load_state, save_state

__all__ = [
    "Identity",
    "PrefixStats",
    "PrefixStore",
    "PrefixWriter",
    "Saved",
    "check_place",
    "identity",
    "identity_of",
    "load_state",
    "save_state",
    "state_nbytes",
]
