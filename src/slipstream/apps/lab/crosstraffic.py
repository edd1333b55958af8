"""Competing traffic: UDP at a constant rate, whether or not the link has capacity for it.

Run as a script on two hosts of a lab (it imports the standard library only):

    crosstraffic.py receive ADDRESS PORT
    crosstraffic.py send ADDRESS PORT BITS_PER_SECOND SECONDS

Datagrams span several frames, so that a Python loop can fill a fast link. The sender stops after
its time, and both with their lab.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

PORT = 7999
DATAGRAM_NBYTES = 8 * 1024
HEADERS_NBYTES = 14 * 6 + 20 * 6 + 8  # Ethernet and IP of six frames, UDP of one
SHORTEST_PAUSE_S = 0.001


def receive(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sink.bind((address, port))
        print("ready", flush=True)
        buffer = bytearray(DATAGRAM_NBYTES)
        while True:
            sink.recv_into(buffer)


def send(address: str, port: int, bits_per_second: float, seconds: float) -> None:
    payload = bytes(DATAGRAM_NBYTES)
    interval_s = (DATAGRAM_NBYTES + HEADERS_NBYTES) * 8 / bits_per_second
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        start = time.monotonic()
        sent = 0
        while (now := time.monotonic() - start) < seconds:
            due = int(now / interval_s)
            # After a pause of the machine, do not send the missed packets in one burst.
            sent = max(sent, due - max(1, int(0.1 / interval_s)))
            while sent < due:
                source.sendto(payload, (address, port))
                sent += 1
            time.sleep(max(SHORTEST_PAUSE_S, interval_s / 2))


if __name__ == "__main__":
    # Ctrl-C is handled by the process that started this one, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    what, address, port, *rest = sys.argv[1:]
    if what == "receive":
        receive(address, int(port))
    else:
        bits_per_second, seconds = rest
        send(address, int(port), float(bits_per_second), float(seconds))
