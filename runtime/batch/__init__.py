"""Many requests through the same passes: a file of them in, a file of answers out, whatever happens in between.

`Requests` reads and checks the input, `Results` is the output, `Journal` keeps what is half done, and `Batch` lets
answers join and leave between two passes. Killed at any moment, the same command goes on where it was, and the file it
leaves in the end has the same answers: they depend on their request alone, not on the company or on interruptions.
"""

from deltafin.runtime.batch.batch import UNKNOWN_MODEL, Batch, Counts, answer_refused
from deltafin.runtime.batch.checking import Checked, LineError, check_input
from deltafin.runtime.batch.journal import Journal, journal_path
from deltafin.runtime.batch.opening import open_model
from deltafin.runtime.batch.requests import Request, Requests
from deltafin.runtime.batch.results import Results, is_error
from deltafin.runtime.batch.room import Room
from deltafin.runtime.batch.sharing import Beginnings, Sharing, StoredBeginnings, worth_sharing
from deltafin.runtime.batch.sizing import Size, choose_size

__all__ = [
    "UNKNOWN_MODEL",
    "Batch",
    "Beginnings",
    "Checked",
    "Counts",
    "Journal",
    "LineError",
    "Request",
    "Requests",
    "Results",
    "Room",
    "Sharing",
    "Size",
    "StoredBeginnings",
    "answer_refused",
    "check_input",
    "choose_size",
    "is_error",
    "journal_path",
    "open_model",
    "worth_sharing",
]
