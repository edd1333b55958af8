"""A small process that outlives the launcher, to clean up what the launcher started.

The kernel kills a worker whose launcher dies, but not the worker's own children. The launcher sends
this script every process group and directory through the socket that is its stdin. If that closes
without ``done``, the launcher was killed, and the script kills and removes them. It is run by its
path and uses the standard library only, so that it costs almost nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Iterator

LINGER_S = 1.0
TO_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP, since Linux 6.9


class ChildGroup:
    """A process group that was started here, identified by a pidfd of its leader.

    The kernel reuses the number of a process once it is reaped and its group is empty. A signal
    sent by number could then reach an unrelated process. Without pidfds (Linux before 5.3, other
    systems) only the number is available.
    """

    def __init__(self, leader: int, pidfd: int | None) -> None:
        self.leader, self.pidfd = leader, pidfd
        self._closed = False

    @classmethod
    def led_by(cls, leader: int) -> ChildGroup:
        """Return the group of a child that is not reaped, so that its number is not reused."""
        try:
            return cls(leader, os.pidfd_open(leader))
        except (AttributeError, OSError):
            return cls(leader, None)

    def send(self, signum: int) -> bool:
        """Signal every process of the group; return False if there is none left."""
        if self._closed:
            return False
        try:
            self._signal_group(signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal_group(self, signum: int) -> None:
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd, signum, None, TO_GROUP)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            if self._number_reused():
                raise ProcessLookupError(errno.ESRCH, "the group is empty")
        os.killpg(self.leader, signum)

    def _number_reused(self) -> bool:
        """Return whether the leader's number was reused, which needs an empty group."""
        assert self.pidfd is not None
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return os.path.exists(f"/proc/{self.leader}")
        return False

    def kill_leader(self) -> None:
        """Kill the leader alone, if it still runs."""
        try:
            if self.pidfd is None:
                os.kill(self.leader, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def close(self) -> None:
        """Close the pidfd; signals then have no effect."""
        if self.pidfd is not None and not self._closed:
            os.close(self.pidfd)
        self._closed = True


def sweep(groups: Iterable[ChildGroup], linger_s: float = LINGER_S) -> None:
    """Kill what is left of process groups whose leader has ended.

    They get a moment to end first: for example, multiprocessing's resource tracker ends by itself
    after its parent, and removes leaked shared memory.
    """
    remaining = list(groups)
    deadline = time.monotonic() + linger_s
    while remaining := [group for group in remaining if group.send(0)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for group in remaining:
        group.send(signal.SIGKILL)


# ---- from the launcher to the guardian: one line each, with the pidfd of a group


def announce_group(guardian: socket.socket, group: ChildGroup) -> None:
    """Add a process group."""
    if group.pidfd is None:
        guardian.sendall(f"number {group.leader}\n".encode())
    else:
        socket.send_fds(guardian, [f"group {group.leader}\n".encode()], [group.pidfd])


def announce_directory(guardian: socket.socket, directory: str | os.PathLike[str]) -> None:
    """Add a directory to remove."""
    guardian.sendall(b"directory %s\n" % os.fsencode(directory))


def announce_end(guardian: socket.socket) -> None:
    """Announce that the launcher cleans up by itself."""
    guardian.sendall(b"done\n")


def announced(launcher: socket.socket) -> Iterator[tuple[str, bytes, int | None]]:
    """Yield every line until the launcher closes or dies, with the descriptor sent with it."""
    text, descriptors = b"", list[int]()
    while True:
        more, new, _, _ = socket.recv_fds(launcher, 1 << 16, 64)
        if not more:
            return
        text, descriptors = text + more, descriptors + new
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            word, _, rest = line.partition(b" ")
            yield word.decode(), rest, descriptors.pop(0) if word == b"group" else None


def main() -> None:
    """Wait for the launcher to end; if it was killed, kill and remove what it announced."""
    groups: list[ChildGroup] = []
    directories: list[bytes] = []
    with socket.socket(fileno=0) as launcher:
        for word, rest, pidfd in announced(launcher):
            if word == "done":
                return
            if word == "directory":
                directories.append(rest)
            else:
                groups.append(ChildGroup(int(rest), pidfd))
    for group in groups:
        group.kill_leader()
    sweep(groups)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
