import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, PlatformError


class BuildKernels(build_ext):
    def run(self) -> None:
        try:
            super().run()
        except (CompileError, ExecError, PlatformError) as e:
            sys.exit(
                f"deltafin could not build its C kernels ({e}): it needs a C11 compiler, gcc or clang, "
                "and Python's headers (on Debian: apt install gcc python3-dev)"
            )


# Reading (io_*.c) and the arithmetic (all others) are two modules; both check their arguments at door.c.
IO_SOURCES = sorted(glob("cext/io_*.c"))
MATH_SOURCES = sorted(set(glob("cext/*.c")) - set(IO_SOURCES))


def extension(name: str, sources: list[str]) -> Extension:
    return Extension(
        f"deltafin.cext.{name}",
        sources=sources,
        depends=sorted(glob("cext/*.h")),
        extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread"],
        libraries=["m"],
    )


setup(
    script_name="setup.py",
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        extension("_math", MATH_SOURCES),
        extension("_io", [*IO_SOURCES, "cext/door.c", "cext/pool.c"]),
    ],
)
