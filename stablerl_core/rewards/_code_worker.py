"""Process of its own in which `code_check` runs what a model wrote. It closes every door first.

Reads a JSON object {code, function, calls, seconds, memory} from stdin and writes one JSON line a
call to stdout, a regular file: {"value": …}, or {"error": word}. It is never told what the results
should be, so nothing it runs can look them up. Imports nothing of stablerl_core.
"""

import ctypes
import json
import os
import platform
import resource
import sys

# Linux system calls that computing needs; files can be read, not written, made or removed.
# No socket, no process, no signal to others, no thread, no terminal, no io_uring. The first number
# is the architecture as the kernel's audit names it.
ALLOWED = {
    "x86_64": (
        0xC000003E,
        *(0, 1, 3, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 24, 25, 28, 32, 35, 39),
        *(60, 63, 72, 78, 79, 89, 96, 97, 98, 99, 102, 104, 107, 108, 110, 131, 158, 186, 201),
        *(202, 204, 217, 218, 228, 229, 230, 231, 257, 262, 267, 269, 273, 318, 332, 334, 439),
    ),
    "aarch64": (
        0xC00000B7,
        *(17, 23, 24, 25, 48, 56, 57, 61, 62, 63, 64, 65, 66, 67, 78, 79, 80, 93, 94, 96, 98, 99),
        *(101, 113, 114, 115, 123, 124, 132, 134, 135, 139, 160, 163, 165, 169, 172, 173, 174),
        *(175, 176, 177, 178, 179, 214, 215, 216, 222, 226, 233, 278, 291, 293, 439),
    ),
}
OPENAT = {"x86_64": 257, "aarch64": 56}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# fcntl may copy a descriptor and read or set its flags. Its other commands can have a signal, also
# SIGKILL, sent to any process of this user (F_NOTIFY with F_SETSIG and F_SETOWN), or hold files.
FCNTL = {"x86_64": 72, "aarch64": 25}
COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
DENY, ALLOW = 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte)]
    _fields_ += [("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """A seccomp filter in BPF: another architecture and every call not in `ALLOWED` is refused.

    Of openat the flags are read, of fcntl the command. Lines are (code, jump if true, if false, k).
    """
    load, equal, any_bit, back = 0x20, 0x15, 0x45, 0x06
    audit, *allowed = ALLOWED[machine]
    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (back, 0, 0, DENY), (load, 0, 0, 0)]
    lines += [(equal, 0, 3, OPENAT[machine]), (load, 0, 0, 32)]  # its third argument: the flags
    lines += [(any_bit, 0, 1, WRITING), (back, 0, 0, DENY), (load, 0, 0, 0)]
    n = len(COMMANDS)
    lines += [(equal, 0, n + 2, FCNTL[machine]), (load, 0, 0, 24)]  # its second argument
    lines += [(equal, n - i, 0, command) for i, command in enumerate(COMMANDS)]
    lines += [(back, 0, 0, DENY), (load, 0, 0, 0)]
    for call in allowed:
        lines += [(equal, 0, 1, call), (back, 0, 0, ALLOW)]
    return [*lines, (back, 0, 0, DENY)]


def part_from_others(libc: ctypes.CDLL) -> None:
    """No look into other processes: /proc shows the memory and environment of one's own user's.

    The expected values and every secret of the trainer are there. Three ways, since none is to be
    had everywhere: a user namespace of its own, no capabilities (where the trainer is root), a
    Landlock domain. Raises `OSError` if the parent stays readable after all of them.
    """
    libc.unshare(0x10000000)  # CLONE_NEWUSER
    capability_version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc.capset(capability_version_3, (ctypes.c_uint32 * 6)())
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: Landlock asks for it
    all_but_reading = ctypes.c_uint64(0x1FF3)
    ruleset = libc.syscall(444, ctypes.byref(all_but_reading), ctypes.c_size_t(8), 0)
    if ruleset >= 0:
        libc.syscall(446, ruleset, 0)
        os.close(ruleset)
    for name in ("environ", "mem"):
        try:
            os.close(os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY))
        except OSError:
            continue
        raise OSError(f"the code could read {name} of the process that checks it")


def close_doors(seconds: int, memory: int) -> None:
    """Limit what the process may use, see and call. Raises `OSError` where the system cannot."""
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds + 1))
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ALLOWED:
        raise OSError(f"no system call filter for {sys.platform} on {machine}")
    lines = [_Instruction(*line) for line in program(machine)]
    array = (_Instruction * len(lines))(*lines)
    filter_ = _Program(len(lines), array)
    libc = ctypes.CDLL(None, use_errno=True)
    part_from_others(libc)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses a system call filter")


def word(error: BaseException) -> str:
    """One word for what went wrong."""
    if isinstance(error, SyntaxError):
        return "syntax_error"
    return "memory" if isinstance(error, MemoryError) else "error"


def main() -> None:
    """Load the code, then answer call by call."""
    task = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)

    def say(**record) -> None:
        print(json.dumps(record, allow_nan=False), file=out, flush=True)

    try:
        close_doors(task["seconds"], task["memory"])
    except (OSError, ValueError) as error:
        return say(refused=str(error))
    say(ready=True)
    space = {"__name__": "solution"}
    try:
        exec(compile(task["code"], "solution", "exec"), space)
    except BaseException as error:
        return say(error=word(error))
    if not callable(function := space.get(task["function"])):
        return say(error="no_function")
    for arguments in task["calls"]:
        try:
            say(value=function(*arguments))
        except BaseException as error:
            say(error=word(error))


if __name__ == "__main__":
    main()
