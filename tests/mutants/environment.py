"""What runs the code of a worktree: packages, native module, variables."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Protocol


class CommandFailed(RuntimeError):
    """A command ended with an error; the message has its output."""


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints.

    Raises:
        CommandFailed: If it ends with an error.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


class Environment(Protocol):
    """What runs a worktree's code."""

    @property
    def python(self) -> Path: ...

    def variables(self) -> dict[str, str]: ...

    def build(self, root: Path) -> None:
        """Bring the native module up to date; called before tests run."""


class WorktreeEnvironment:
    """Python with this environment's packages, and slipstream as it is in the worktree.

    Made when it is first needed, and kept. This environment's packages come as a plain path, so
    ``.pth`` files in it are not read: its editable installation leads to another tree.

    Args:
        folder: Where the environment and the native build are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._native = folder / "env", folder / "native"

    @property
    def python(self) -> Path:
        return self._folder / "bin/python"

    def variables(self) -> dict[str, str]:
        left = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return left | {"PATH": f"{self.python.parent}:{left.get('PATH', '')}"}

    def build(self, root: Path) -> None:
        """Compile what has changed, in the environment made for this.

        Raises:
            CommandFailed: If the native module does not compile.
        """
        if not (self._folder / "complete").exists():
            self._install(root)
        if not (self._native / "build.ninja").exists():
            self._configure(root)
        run(self.python.with_name("cmake"), "--build", self._native, cwd=root)
        for library in self._native.glob("_native*.so"):
            link = root / "src/slipstream" / library.name
            link.unlink(missing_ok=True)
            link.symlink_to(library)

    def _install(self, root: Path) -> None:
        here = Path(sys.executable)
        run(here, "-m", "venv", "--clear", "--without-pip", self._folder, cwd=root)
        pip = (here, "-m", "pip", "--python", self.python, "install", "--quiet")
        tools = ("nanobind", "cmake", "ninja")
        run(*pip, "--constraint", "constraints.txt", *tools, cwd=root)
        site = sysconfig.get_path("purelib", vars={"base": str(self._folder)})
        paths = f"{root / 'src'}\n{sysconfig.get_path('purelib')}\n"
        Path(site, "slipstream-worktree.pth").write_text(paths)
        script = here.with_name("slipstream").read_text().partition("\n")[2]
        command = self.python.with_name("slipstream")
        command.write_text(f"#!{self.python}\n{script}")
        command.chmod(0o755)
        (self._folder / "complete").touch()

    def _configure(self, root: Path) -> None:
        nanobind = run(self.python, "-m", "nanobind", "--cmake_dir", cwd=root)
        cmake, ninja = (self.python.with_name(tool) for tool in ("cmake", "ninja"))
        chosen = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": self.python,
            "nanobind_DIR": nanobind,
        }
        options = [f"-D{key}={value}" for key, value in chosen.items()]
        run(cmake, "-S", root, "-B", self._native, "-G", "Ninja", *options, cwd=root)
