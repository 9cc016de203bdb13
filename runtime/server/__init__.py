"""A server that behaves over hours: requests of OpenAI's API, answered by one engine.

`Engine` is the one thread that computes: requests wait in its queue, join the passes and leave them; it knows nothing
of HTTP. The application over it parses, answers and streams; it never touches a tensor.
"""

from deltafin.runtime.server.company import Company
from deltafin.runtime.server.counts import Counts
from deltafin.runtime.server.engine import Engine
from deltafin.runtime.server.jobs import Began, Ended, Failed, Job, Listener, News, Update
from deltafin.runtime.server.opening import open_model
from deltafin.runtime.server.pace import Progress
from deltafin.runtime.server.queueing import Place
from deltafin.runtime.server.refusing import Full, Stopped
from deltafin.runtime.server.room import Room
from deltafin.runtime.server.sizing import ServerSize, server_size
from deltafin.runtime.server.starting import Starts

__all__ = [
    "Began",
    "Company",
    "Counts",
    "Ended",
    "Engine",
    "Failed",
    "Full",
    "Job",
    "Listener",
    "News",
    "Place",
    "Progress",
    "Room",
    "ServerSize",
    "Starts",
    "Stopped",
    "Update",
    "open_model",
    "server_size",
]
