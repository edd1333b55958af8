"""The first process of a pid namespace: what happens to one that gets the number of a dead worker.

Starts the launcher that its arguments name, whose rank 1 ends at once and whose rank 0 stays until
there is a file ``go``. A process gets rank 1's number, in a session of its own. Then END: the
launcher is killed, or the job ends by itself. Says whether the newcomer lives when all others are
gone: ``lives`` or ``killed``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def main(folder: Path, end: str, command: list[str]) -> str:
    launcher = subprocess.Popen(command)
    for name in ("rank0.pid", "rank1.pid"):
        while not (folder / name).exists():
            time.sleep(0.01)
    number = int((folder / "rank1.pid").read_text())
    while Path(f"/proc/{number}").exists():  # until it is reaped
        time.sleep(0.01)
    newcomer = take_number(number)
    if end == "killed":
        launcher.kill()
    else:
        (folder / "go").touch()
    others_end(newcomer)
    lives = newcomer.poll() is None
    newcomer.kill()
    newcomer.wait()
    return "lives" if lives else "killed"


def take_number(number: int) -> subprocess.Popen[bytes]:
    while True:
        LAST_PID.write_text(str(number - 1))
        newcomer = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if newcomer.pid == number:
            return newcomer
        newcomer.kill()  # somebody else was faster
        newcomer.wait()


def others_end(newcomer: subprocess.Popen[bytes]) -> None:
    """The kernel makes this process the parent of all that lose theirs."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return
        if ended is not None:
            if ended.si_pid == newcomer.pid:
                return
            os.waitpid(ended.si_pid, 0)
        elif others() == {newcomer.pid}:
            return
        else:
            time.sleep(0.01)


def others() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
