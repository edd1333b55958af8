"""Servers that are forked from the process that forks ranks, and so need not import torch.

``start_servers_by_fork()`` is for a rank of ``fork_server``. What the rank starts then is this file
as a program. It has a server forked on its own standard streams, with its own environment, and ends
as that server ends; the server ends when this program does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORKS = "SLIPSTREAM_TEST_FORKS"  # the abstract socket at which servers are asked for
MOST_BYTES = 1 << 17


def start_servers_by_fork() -> None:
    """Only for ranks whose servers' own processes a test does not look at. That a server starts
    as the product starts it is shown by others: of faults, attacks and kept checkpoints.

    Nothing changes in a rank that ``fork_server`` has not forked.
    """
    if FORKS not in os.environ:
        return
    from slipstream.runtime.launch import processes

    *_, module = processes.SERVER_COMMAND
    # -I -S: it needs nothing that is installed, and starts at once.
    command = (sys.executable, "-I", "-S", __file__, module)
    assert processes.start_server.__kwdefaults__["command"] == processes.SERVER_COMMAND
    processes.start_server.__kwdefaults__["command"] = command


def main() -> None:
    request = {"module": sys.argv[1], "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect("\0" + os.environ[FORKS])
        socket.send_fds(link, [json.dumps(request).encode()], [0, 1, 2])
        code = int(link.recv(MOST_BYTES) or 1)  # nothing: the process that forks is gone
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
