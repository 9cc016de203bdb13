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


setup(
    script_name="setup.py",
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "deltafin.cext._math",
            sources=sorted(glob("cext/*.c")),
            depends=sorted(glob("cext/*.h")),
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
        )
    ],
)
