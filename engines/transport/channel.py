"""The control channel: small pickled messages over TCP, with a secret at the door and a time-out on everything."""

from __future__ import annotations

import logging
import pickle
import secrets
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from engines.transport.base import Address, TransportError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")
_KNOCK_S = 10.0  # at the door answers need no thought: a process that hangs there must not hold up the others
REMEDY = "see its log, or raise checkpoint_engine.engine_kwargs.timeout_s"


class Channel:
    """One connection. `who` names the other end in errors; `timeout_s` bounds every wait."""

    def __init__(self, sock: socket.socket, who: str, timeout_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each message is awaited: nothing to collect
        self._sock, self.who = sock, who
        self.wait_at_most(timeout_s)

    def wait_at_most(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def send(self, message: tuple, where: str = "") -> None:
        """`where` says in an error how far the update had come."""
        try:
            self.send_bytes(pickle.dumps(message))
        except TimeoutError:
            raise self._silent(where) from None
        except OSError:
            raise self._closed(where) from None

    def receive(self, where: str = "") -> tuple:
        try:
            return pickle.loads(self.recv_bytes())
        except TimeoutError:
            raise self._silent(where) from None
        except (OSError, EOFError):
            raise self._closed(where) from None

    def _silent(self, where: str) -> TransportError:
        return TransportError(
            f"got nothing from {self.who} for {self._timeout_s} s while moving weights{where}; expected the next "
            f"message; {REMEDY}"
        )

    def _closed(self, where: str) -> TransportError:
        return TransportError(
            f"{self.who} closed the weight channel{where}; expected it to stay until the update is complete; "
            "its process probably died: see its log"
        )

    # The two names that multiprocessing's challenge functions call.
    def send_bytes(self, data: bytes) -> None:
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def recv_bytes(self, limit: int | None = None) -> bytes:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if limit is not None and size > limit:
            raise OSError(f"message of {size} bytes, at most {limit} are allowed")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def close(self) -> None:
        self._sock.close()


class Door:
    """Where receivers arrive. `reachable` opens it to other machines, else this machine only."""

    def __init__(self, transport: str, reachable: bool) -> None:
        self._socket = socket.create_server(("" if reachable else "127.0.0.1", 0), backlog=128)
        host = host_ip() if reachable else "127.0.0.1"
        self.address = Address(transport, host, self._socket.getsockname()[1], secrets.token_bytes(32))

    def accept(self, deadline: float) -> Channel | None:
        """The next one that knows the secret; None after `deadline` (time.monotonic). One that connected to an
        earlier update and has died since, or a stranger, is passed over. Its first message must follow at once:
        the caller sets the time-out of the others."""
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                sock, place = self._socket.accept()
            except TimeoutError:
                return None
            channel = Channel(sock, f"the rollout worker at {place[0]}:{place[1]}", min(left, _KNOCK_S))
            try:
                deliver_challenge(channel, self.address.key)
                answer_challenge(channel, self.address.key)
            except (AuthenticationError, OSError, EOFError) as error:
                log.warning("%s did not pass the door of the weight channel: %r", channel.who, error)
                channel.close()
                continue
            return channel
        return None

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, timeout_s: float) -> Channel:
    """Knock at the sender's door; it is open from the sender's construction to its close."""
    who = f"the training rank at {address.host}:{address.port}"
    try:
        sock = socket.create_connection((address.host, address.port), timeout_s)
    except OSError as error:
        raise TransportError(
            f"got {error!r} from {who}; expected its weight channel; its process probably died: see its log"
        ) from None
    channel = Channel(sock, who, timeout_s)
    try:
        answer_challenge(channel, address.key)
        deliver_challenge(channel, address.key)
    except TimeoutError:
        channel.close()
        raise TransportError(
            f"got no answer from {who} within {timeout_s} s; expected it to begin an update; {REMEDY}"
        ) from None
    except (AuthenticationError, OSError, EOFError) as error:
        channel.close()
        raise TransportError(
            f"got {error!r} from {who} at the door of the weight channel; expected an update to begin; {REMEDY}"
        ) from None
    return channel


def host_ip() -> str:
    """The address of the interface that leads out of this machine; 127.0.0.1 when none does. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def heard(channel: Channel, where: str = "") -> tuple[Any, ...]:
    """The next message of a receiver; what it refused is raised with its own words."""
    message = channel.receive(where)
    if message[0] == "error":
        raise TransportError(f"{channel.who} refused the weights{where}: {message[1]}")
    return message
