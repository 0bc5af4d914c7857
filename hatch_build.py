"""Compiles the executor's CPU kernels when the package is installed or built.

Without a compiler it only warns: the executor then runs its models in torch, which is slower. The libraries know no Python
version, so the wheel is for any Python 3 of this platform.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "executor/tokenmill_executor/cpu"


class KernelBuildHook(BuildHookInterface[Any]):
    """Of wheels, editable ones too; a source distribution has the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        kernels = self._kernels()
        try:
            kernels.build()
        except (kernels.BuildFailed, OSError) as error:
            self.app.display_warning(f"tokenmill: no C++ kernels for the CPU, models will run in torch: {error}")
            return
        build_data["artifacts"].append(f"{FOLDER}/*.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _kernels(self) -> ModuleType:
        """The package's own build module, by its path: the package is not installed yet."""
        path = Path(self.root, FOLDER, "build.py")
        spec = importlib.util.spec_from_file_location("tokenmill_kernel_build", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
