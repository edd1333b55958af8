"""Sends or receives a given number of bytes over TCP; the receiver prints when they came.

blaster.py receive PORT COUNT            prints "ready", then per sender "nbytes begun_s last_s"
blaster.py send ADDRESS PORT NBYTES
"""

from __future__ import annotations

import socket
import sys
import threading
import time

LIMIT_S = 60.0
PIECE = 1 << 20


def receive(port: int, count: int) -> None:
    with socket.create_server(("0.0.0.0", port), backlog=count) as server:
        server.settimeout(LIMIT_S)
        print("ready", flush=True)
        threads = [threading.Thread(target=drain, args=server.accept()) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drain(connection: socket.socket, _: object) -> None:
    buffer = bytearray(PIECE)
    nbytes = 0
    with connection:
        connection.settimeout(LIMIT_S)
        # Not the moment of the first byte: on a busy machine many may have come before it is read,
        # and the link would seem faster than it is.
        begun_s = time.monotonic()
        # A word to start on, so that all senders are there before the first byte moves.
        connection.sendall(b"g")
        while got := connection.recv_into(buffer):
            nbytes += got
    print(f"{nbytes} {begun_s} {time.monotonic()}\n", end="", flush=True)


def send(address: str, port: int, nbytes: int) -> None:
    piece = bytes(PIECE)
    with socket.create_connection((address, port), timeout=LIMIT_S) as connection:
        connection.recv(1)
        for sent in range(0, nbytes, PIECE):
            connection.sendall(memoryview(piece)[: nbytes - sent])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
