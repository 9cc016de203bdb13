"""Types of the C module; cext/io_*_door.c document what its functions do."""

import os

import numpy as np
import numpy.typing as npt

PAGE: int

def open(path: str | os.PathLike[str], direct: bool) -> tuple[int, bool]: ...
def read(fd: int, offset: int, nbytes: int, slot: npt.NDArray[np.uint8], direct: bool) -> int: ...
def bf12_measure(base: npt.NDArray[np.uint8], starts: npt.NDArray[np.uint32], bits: npt.NDArray[np.uint16]) -> int: ...
def bf12_pack(
    codes: npt.NDArray[np.uint8],
    columns: npt.NDArray[np.uint16],
    values: npt.NDArray[np.uint16],
    bits: npt.NDArray[np.uint16],
    base: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.uint32],
) -> None: ...
def bf12_unpack(
    bits: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
    base: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.uint32],
    columns: npt.NDArray[np.uint16],
    values: npt.NDArray[np.uint16],
) -> None: ...
def int8_pack(q: npt.NDArray[np.int8], scale: npt.NDArray[np.float32], bits: npt.NDArray[np.uint16]) -> int: ...
