"""The pool computes the same with any number of threads, sleeps when it is idle, and survives forks and crowds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from deltafin.cext import _math


def _case(seed: int, n: int = 500, k: int = 640) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((3, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)


def _product(x: np.ndarray, w: np.ndarray) -> bytes:
    out = np.empty((x.shape[0], w.shape[0]), np.float32)
    _math.matmul_f32(out, x, w)
    return out.tobytes()


def _python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def test_threads_are_as_many_as_the_process_may_use():
    found = _python("from deltafin.cext import _math; print(_math.threads())")
    assert 1 <= int(found.stdout) <= len(os.sched_getaffinity(0))
    one = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    assert _python(one + "from deltafin.cext import _math; print(_math.threads())").stdout.strip() == "1"


def test_any_number_of_threads_gives_the_same_bytes(settings):
    x, w = _case(0)
    _math.set_threads(1)
    wanted = _product(x, w)
    for count in (2, 3, 5, 16, 1, 64, 2):
        _math.set_threads(count)
        assert _math.threads() == count
        for grain in (0, 1, 13):
            _math.set_grain(grain)
            assert _math.grain() == grain
            assert _product(x, w) == wanted


@pytest.mark.parametrize("wrong", [0, -1, 1025, 2**70])
def test_an_impossible_number_of_threads_is_refused(wrong):
    with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
        _math.set_threads(wrong)


@pytest.mark.parametrize("wrong", [None, 1.5, "2"])
def test_a_number_of_threads_is_an_int(wrong):
    with pytest.raises(TypeError, match="threads must be an int"):
        _math.set_threads(wrong)
    with pytest.raises(TypeError, match="grain must be an int"):
        _math.set_grain(wrong)


def test_callers_on_several_threads_get_their_own_results(settings):
    _math.set_threads(3)
    _math.set_grain(50)
    cases = [_case(seed, n=200 + seed) for seed in range(6)]
    wanted = [_product(*case) for case in cases]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(60):
            if _product(*cases[number]) != wanted[number]:
                wrong.append(number)

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in crowd:
        thread.start()
    for count in (2, 5, 1, 4, 3):  # and the pool changes under them
        _math.set_threads(count)
        time.sleep(0.005)
    for thread in crowd:
        thread.join()
    assert not wrong


def test_idle_workers_use_no_time(settings):
    _math.set_threads(5)
    _math.set_grain(5)
    _product(*_case(0))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_other_python_threads_run_during_a_product(settings):
    _math.set_threads(1)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 2000)).astype(np.float32), rng.standard_normal((2000, 2000)).astype(np.float32)
    out = np.empty((64, 2000), np.float32)
    _math.set_isa("scalar")
    started, spans = threading.Event(), []

    def work() -> None:
        started.set()
        begin = time.monotonic()
        _math.matmul_f32(out, x, w)
        spans.append((begin, time.monotonic()))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    seen = [time.monotonic() for _ in iter(thread.is_alive, False)]
    thread.join()
    ((begin, end),) = spans
    assert sum(begin + 0.2 * (end - begin) < t < end - 0.2 * (end - begin) for t in seen) > 10


FORK = """
import os, threading
import numpy as np
from deltafin.cext import _math

x = np.linspace(-1, 1, 3 * 640, dtype=np.float32).reshape(3, 640)
w = np.linspace(2, -2, 500 * 640, dtype=np.float32).reshape(500, 640)

def product():
    out = np.empty((3, 500), np.float32)
    _math.matmul_f32(out, x, w)
    return out.tobytes()

_math.set_threads(3)
_math.set_grain(20)
wanted = product()
stop = False

def busy():
    while not stop:
        assert product() == wanted

crowd = [threading.Thread(target=busy) for _ in range(BUSY)]
for thread in crowd:
    thread.start()
failed = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        right = product() == wanted and product() == wanted
        if os.fork() == 0:
            os._exit(0 if product() == wanted else 1)
        right = right and os.wait()[1] == 0
        os._exit(0 if right else 1)
    failed += os.waitpid(child, 0)[1] != 0
    failed += product() != wanted
stop = True
for thread in crowd:
    thread.join()
print("failed", failed)
"""


@pytest.mark.parametrize("busy", [0, 2])
def test_a_forked_child_computes_with_workers_of_its_own(busy):
    done = _python(FORK.replace("BUSY", str(busy)))
    assert done.stdout == "failed 0\n", done.stderr


# ---- what the environment may say ---------------------------------------------------------------------

SHOW = "from deltafin.cext import _math; print(_math.isa(), _math.grain())"


def test_the_best_instruction_set_is_chosen():
    assert _python(SHOW).stdout.split() == [_math.isas()[0], "0"]
    assert _math.isas()[-1] == "scalar"


@pytest.mark.parametrize("isa", _math.isas())
def test_an_instruction_set_can_be_forced(isa):
    assert _python(SHOW, DELTAFIN_ISA=isa, DELTAFIN_GRAIN="7").stdout.split() == [isa, "7"]


@pytest.mark.parametrize(
    ("isa", "why"),
    [("sse9", "is unknown: use scalar, avx2, avx512 or neon"), ("neon avx2", "is unknown"), ("SCALAR", "is unknown")],
)
def test_an_unknown_instruction_set_is_an_import_error_of_one_line(isa, why):
    done = _python(SHOW, DELTAFIN_ISA=isa)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: DELTAFIN_ISA={isa}")
    assert why in done.stderr.splitlines()[-1]


def test_an_instruction_set_that_cannot_run_here_is_an_import_error():
    foreign = next(isa for isa in ("neon", "avx2") if isa not in _math.isas())
    assert f"DELTAFIN_ISA={foreign}: this processor cannot run it" in _python(SHOW, DELTAFIN_ISA=foreign).stderr
    with pytest.raises(ValueError, match=f"{foreign} cannot run on this processor"):
        _math.set_isa(foreign)


def test_a_grain_that_is_no_number_is_an_import_error():
    for grain in ("few", "3x", "-1"):
        assert f"ImportError: DELTAFIN_GRAIN={grain}" in _python(SHOW, DELTAFIN_GRAIN=grain).stderr


# ---- limits of a container ----------------------------------------------------------------------------

LIMITS = [
    ({"cpu.max": "max 100000"}, None),
    ({"cpu.max": "100000 100000"}, 1),
    ({"cpu.max": "30000 100000"}, 1),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
]


@pytest.mark.parametrize(("files", "wanted"), LIMITS)
def test_threads_respect_the_limits_of_a_container(files, wanted):
    mount = "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu"
    inside = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace, which this system does not allow")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    kind = "" if "cpu.max" in files else "cpu"
    if not any(kind in line.split(":")[1].split(",") for line in lines):
        pytest.skip("this system has no control groups of that version")
    write = " && ".join(f"echo {text} > /sys/fs/cgroup/{name}" for name, text in files.items())
    program = "from deltafin.cext import _math; print(_math.threads())"
    done = subprocess.run(
        [*inside, f"{mount} && {write} && {sys.executable} -c '{program}'"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(wanted or _python(program).stdout.strip()), done.stderr
