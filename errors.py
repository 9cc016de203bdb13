"""Every error that Deltafin raises for a cause outside the program.

    DeltafinError
    ├── BadRequest          what the user asked for makes no sense; the message says what would
    ├── NotFound            no such model, catalog, file or tensor
    ├── BadCheckpoint       a shard or config contradicts itself or K3's layout
    ├── BadCatalog          a catalog is damaged, foreign or does not fit its source
    │   └── OldCatalog      it was written by another version
    ├── Corrupt             bytes contradict a known digest, or cannot be weights
    ├── Missing             bytes that are nowhere within reach (offline, or no source has them)
    ├── NetworkError        the network gave up within its budget of retries
    │   └── Refused         the server answered, and the answer is no (401, 403, 404, moved)
    ├── NoSpace             a disk is full, or a limit of file size or quota was hit
    ├── NoMemory            more memory is needed than was promised or can be had
    ├── DiskError           a read or write failed: errno, file and offset in the message
    └── NotANumber          NaN or infinity in the computation; the message names layer and row

A message is one line: what, where, what was expected and found, and what to do next.
"""


class DeltafinError(Exception):
    """Base of everything above; `cli` prints it as one line and exits with `exit_status`."""

    exit_status = 1


class BadRequest(DeltafinError):
    exit_status = 2


class NotFound(DeltafinError):
    pass


class BadCheckpoint(DeltafinError):
    pass


class BadCatalog(DeltafinError):
    pass


class OldCatalog(BadCatalog):
    pass


class Corrupt(DeltafinError):
    pass


class Missing(DeltafinError):
    pass


class NetworkError(DeltafinError):
    pass


class Refused(NetworkError):
    pass


class NoSpace(DeltafinError):
    pass


class NoMemory(DeltafinError):
    pass


class DiskError(DeltafinError):
    errno: int | None = None  # of the system, where it gave one


class NotANumber(DeltafinError):
    pass
