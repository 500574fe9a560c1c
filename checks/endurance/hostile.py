"""A process that says nonsense to the agents' socket: `python -m checks.endurance.hostile SOCKET PID SEED`.

Random bytes, too long, too deep, other versions, other processes' pids (PID is one), replays, ranks of
others with the telltale figure POISON, and names of servers that do not exist. Ends when standard input does.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sys

from checks.endurance.process import die_with_parent
from checks.endurance.world import POISON, datagram

EVERY_S = 0.02


def nonsense(chance: random.Random, victim: int, seq: int) -> bytes:
    """One datagram that nobody should believe."""
    own = os.getpid()
    made = [
        chance.randbytes(chance.randrange(1, 3000)),
        b"[" * 5000,
        b'{"v":1,"server":' + b'"a"' * 6000,
        datagram(victim, 2**52, POISON),
        datagram(own, seq, POISON),
        datagram(own, 1, POISON),
        datagram(own, seq, POISON, v=2),
        datagram(own, seq, POISON, server="no-such-server", rank=chance.randrange(70)),
        datagram(own, seq, POISON, rank=-1),
        datagram(own, seq, POISON, mono_s=float("nan")),
        datagram(own, seq, POISON, allocator={"num_ooms": 10**400}),
        datagram(own, seq, POISON, allocator=None),
    ]
    return chance.choice(made)


def main(argv: list[str]) -> int:
    """Speak until standard input ends."""
    die_with_parent()
    path, victim, chance = argv[0], int(argv[1]), random.Random(int(argv[2]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
        speaker.setblocking(False)
        seq = 1
        while not select.select([0], [], [], EVERY_S)[0]:
            seq += 1
            for _ in range(4):
                with contextlib.suppress(OSError):
                    speaker.sendto(nonsense(chance, victim, seq), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
