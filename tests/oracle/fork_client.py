"""python fork_client.py SOCKET <words behind `python`>: run a program as a fork of fork_server.py.

For whoever started it this process is the program: it has its streams, ends with its exit code or by its signal, and
takes it along where it is killed itself. Standard library only, so that it starts in no time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    """The program's exit code."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    said = json.dumps({"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [len(said).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(said)
    status = server.recv(16)
    if not status:
        print(f"the fork server could not run {sys.argv[2:]}; see its log beside {sys.argv[1]}", file=sys.stderr)
        return 70
    code = os.waitstatus_to_exitcode(int(status))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
