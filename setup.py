"""Copies the test-vector corpus into the built package; everything else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithCorpus(build_py):
    """Builds the packages, then puts ``vectors/`` beside the module that reads it."""

    def run(self) -> None:
        """Build; an editable install reads the folder in place."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "kvhash" / "vectors" / "data"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(HERE / "vectors", target)


setup(cmdclass={"build_py": BuildWithCorpus})
