"""Memory that processes of one machine share.

It has no name: only processes that have its descriptor can map it, and the kernel frees it when the
last of them has ended, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

from slipstream.errors import LaunchError


class SharedMemory:
    """Mapped memory; other processes map it by its ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        nbytes = os.fstat(descriptor).st_size
        try:
            self.memory = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot map {nbytes} bytes of shared memory: {error}") from error

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Create memory of zeros, of a size that cannot change, so that mappings stay valid."""
        if sys.platform != "linux":
            raise LaunchError("learners that share memory need Linux; use async_sgd elsewhere")
        try:
            descriptor = os.memfd_create("slipstream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, nbytes)
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise LaunchError(
                f"the system gives no {nbytes} bytes of shared memory: {error.strerror}"
            ) from error
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        return cls(descriptor)

    def view(self, at: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes from ``at`` on."""
        return memoryview(self.memory)[at : at + nbytes]

    def close(self) -> None:
        """Close the mapping; existing views stay valid as long as they are referenced."""
        os.close(self.descriptor)
